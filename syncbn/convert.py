"""Swaps the batch-norm layers of a model for synchronised ones and back, by swapping the class of each layer.

The module object stays, and with it everything that others hold of it or that it holds: parameters, buffers, hooks,
    attributes, training flag, shared places in the model, references in an optimizer.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from syncbn import convertibility
from syncbn.convertibility import NotConverted
from syncbn.diagnosis import debug_mode
from syncbn.distributed import groups
from syncbn.distributed.group_spec import GroupSpec, ProcessGroupLike, to_spec
from syncbn.distributed.reduction import make_groups
from syncbn.layer import SyncBatchNorm
from syncbn.program import warn
from syncbn.synchronised_classes import ADDED, class_of, synchronised_class

AnyModule = TypeVar("AnyModule", bound=nn.Module)

TARGETS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # of `revert_syncbn_model`


def convert_syncbn_model(
    model: AnyModule, process_group: ProcessGroupLike = None, channel_last: bool = False
) -> AnyModule:
    """Make each batch-norm layer of `model` a synchronised layer, in place, and return `model`.

    The name is apex's. Only the class of a layer changes: nn.BatchNorm1d/2d/3d and nn.SyncBatchNorm become ours, a
    subclass becomes a class that keeps its behaviour and gains synchronisation (see synchronised_classes.py), a
    parametrization stays, a lazy layer is synchronised from its first forward. Converting again sets the group, if one
    is given, of layers that are synchronised already, and changes nothing else. What cannot be converted is left alone
    and named in one warning, by class, with what to do: subclasses of nn.SyncBatchNorm, scripted and exported layers,
    layers that have an attribute of a name that ours need, and other modules with running statistics of their own.

    Args:
        model: any module, also a single batch-norm layer. Convert before wrapping it:
            DistributedDataParallel(convert_syncbn_model(model)).
        process_group: as in `SyncBatchNorm`. With an int or "node", and torch.distributed initialised, a collective of
            ALL ranks of the default group. None keeps the group that a layer already has, of nn.SyncBatchNorm or ours;
            `layer.process_group = None` resets it.
        channel_last: the layers' inputs have the channels in the last dim.

    Raises:
        ValueError, TypeError: a bad `process_group`; not a module; `channel_last` with a lazy layer, which counts
            channels in dim 1.
        RuntimeError: a layer is wrapped by FSDP2.

    After an error the model is as it was.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> type(convert_syncbn_model(model)[1]).__name__
    'SyncBatchNorm2d'
    """
    check_module(model)
    layers, found = _select(model, channel_last)
    spec = to_spec(process_group)
    # An nn.SyncBatchNorm holds its group itself, which could be neither copied nor pickled.
    specs = [to_spec(vars(layer).get("process_group")) if spec is None else spec for layer in layers]
    for layer in layers:
        synchronised_class(class_of(layer))
    make_groups(spec)
    debug_mode.run_uncompiled_where_wanted()
    if spec is not None:
        for module in model.modules():
            if isinstance(module, SyncBatchNorm):
                module.process_group = spec
    for layer, own_spec in zip(layers, specs, strict=True):
        _convert(layer, own_spec, channel_last)
    if found:
        warn(f"syncbn did not convert these layers: {convertibility.described(found)}")
    return model


def revert_syncbn_model(model: AnyModule, target: type[_BatchNorm] | None = None) -> AnyModule:
    """Give every layer that `convert_syncbn_model` converted its original class back, in place, and return `model`.

    Statistics and parameters are those that training left. Layers that were built as syncbn layers have no original
    class and stay.

    Args:
        model: any module, also a single layer.
        target: what each nn.SyncBatchNorm becomes, one that `convert_syncbn_model` has converted or that torch's
            converter has made: nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d. It does not tell which it was, and
            they differ in the inputs that they take; where a model has several, revert its parts one by one. None
            leaves it an nn.SyncBatchNorm. Its subclasses stay.

    Raises:
        ValueError, TypeError: another `target`; not a module.
        RuntimeError: a layer is wrapped by FSDP2, or the process group of one that becomes an nn.SyncBatchNorm does not
            exist.

    After an error the model is as it was.

    >>> model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> type(revert_syncbn_model(model, nn.BatchNorm2d)[1]).__name__
    'BatchNorm2d'
    """
    check_module(model)
    if target is not None and target not in TARGETS:
        raise ValueError(f"target must be nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or None, got {target!r}")
    new_classes: dict[nn.Module, type[nn.Module]] = {}
    for name, layer in model.named_modules():
        original_class: Any = class_of(layer)
        if isinstance(layer, SyncBatchNorm):
            original_class = vars(layer).get("_original_class", original_class)
        if original_class is nn.SyncBatchNorm and target is not None:
            original_class = target
        if original_class is class_of(layer):
            continue
        _require_no_fsdp(name, layer, "revert_syncbn_model")
        if issubclass(original_class, LazyModuleMixin) and not isinstance(layer, LazyModuleMixin):
            original_class = original_class.cls_to_become
        new_classes[layer] = original_class
    # An nn.SyncBatchNorm holds its group itself. Looking it up may raise, so it comes before any change.
    own_groups = {
        layer: groups.of_torch(layer._process_group)
        for layer, new_class in new_classes.items()
        if new_class is nn.SyncBatchNorm and isinstance(layer, SyncBatchNorm)
    }
    for layer, new_class in new_classes.items():
        for name in (*ADDED, "process_group"):
            vars(layer).pop(name, None)
        _set_class(layer, new_class)
        if layer in own_groups:
            vars(layer)["process_group"] = own_groups[layer]
    return model


def check_module(model: nn.Module) -> None:
    """**Raises** TypeError unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {model!r} of type {type(model).__name__}; pass the model")


def _select(model: nn.Module, channel_last: bool) -> tuple[list[_BatchNorm], list[NotConverted]]:
    """The layers to convert, and those to leave alone."""
    layers: list[_BatchNorm] = []
    found: list[NotConverted] = []
    for name, module in model.named_modules():
        reason = convertibility.reason_not_convertible(module)
        if reason:
            found.append(NotConverted(name, convertibility.kind_of(module), reason))
        elif convertibility.is_convertible(module):
            assert isinstance(module, _BatchNorm)
            _require_no_fsdp(name, module, "convert_syncbn_model")
            if channel_last and isinstance(module, LazyModuleMixin):
                raise ValueError(
                    f"{name!r} is lazy and counts channels in dim 1; run a forward before channel_last=True"
                )
            layers.append(module)
    return layers, found


def _convert(layer: _BatchNorm, spec: GroupSpec, channel_last: bool) -> None:
    original_class = class_of(layer)
    vars(layer).pop("process_group", None)
    _set_class(layer, synchronised_class(original_class))
    assert isinstance(layer, SyncBatchNorm)
    vars(layer)["_original_class"] = original_class
    layer.process_group = spec
    layer.channel_last = channel_last


def _set_class(layer: nn.Module, new_class: type[nn.Module]) -> None:
    """Exchange `class_of(layer)`; the class on top of it is made again on top of the new one."""
    if is_parametrized(layer):
        namespace = {
            name: value for name, value in vars(type(layer)).items() if name not in ("__dict__", "__weakref__")
        }
        new_class = type(f"Parametrized{new_class.__name__}", (new_class,), namespace)
    layer.__class__ = new_class


def _require_no_fsdp(name: str, module: nn.Module, caller: str) -> None:
    """**Raises** RuntimeError when fully_shard has put a class of its own on the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and nobody can have wrapped a module without it
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        raise RuntimeError(f"{name!r} is already wrapped by fully_shard; call {caller} before fully_shard")
