"""Swaps the batch-norm layers of a model for synchronised ones and back, by swapping the class of each layer.

The module object stays, with its parameters, buffers, hooks, attributes and training flag, and so do all references to
it: a model may hold one layer at several places.
"""

import contextlib
import sys
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from syncbn.call_stack import warn
from syncbn.layer import SyncBatchNorm
from syncbn.ranks.groups import ProcessGroupLike, to_spec, torch_group
from syncbn.ranks.reduction import make_groups
from syncbn.synchronised_classes import ADDED, class_of, make_class, synchronised_class
from syncbn.texts import printable
from syncbn.unsynchronised import CONVERT, description, first_names, unsynchronised

Model = TypeVar("Model", bound=nn.Module)
# A layer, its new class and its new attributes.
Change: TypeAlias = tuple[nn.Module, type[nn.Module], Mapping[str, object]]

BUILT = "these layers were built as syncbn layers and stay: build them as nn.BatchNorm1d, 2d or 3d"
HIDES = "a forward that was set on these layers hides their class's, and they stay: delete it and revert again"
# What a layer loses in a revert, by its option.
LOST = {
    "fuse_relu": "these layers have lost their relu: put an nn.ReLU behind each",
    "channel_last": "these layers take the channels in dim 1 again",
}


def convert_syncbn_model(model: Model, process_group: ProcessGroupLike = None, channel_last: bool = False) -> Model:
    """Make each batch-norm layer of `model` a synchronised layer, in place, and return `model`.

    The name is apex's. Only the class of a layer changes: nn.BatchNorm1d/2d/3d and nn.SyncBatchNorm become ours, a
    subclass becomes a class that keeps its behaviour and gains synchronisation (see synchronised_classes.py), a
    parametrization stays, a lazy layer is synchronised from its first forward.
    Each synchronised layer of `model`, also one that was built so, gets its dotted name in `model`: errors call it by
    this name, and ranks compare the names, so convert the same module on every rank. Converting again renews the names
    and sets the group, if one is given, of layers that are synchronised already, and changes nothing else.
    What cannot be converted is left alone and named in one warning, by class, with what to do: subclasses of
    nn.SyncBatchNorm, scripted and exported layers, layers that have an attribute of a name that ours need or a forward
    set on them (layer.forward = ...), other modules with running statistics of their own, modules whose class calls
    F.batch_norm, and those that keep layers in plain lists or dicts.

    Args:
        model: any module, also a single batch-norm layer. Convert before wrapping it:
            DistributedDataParallel(convert_syncbn_model(model)).
        process_group: as in `SyncBatchNorm`. With an int, and torch.distributed initialised, a collective of ALL ranks
            of the default group. None keeps the group that a layer already has, of nn.SyncBatchNorm or ours;
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
    local_layers, spec = unsynchronised(model), to_spec(process_group)
    others = [local for local in local_layers if local.remedy != CONVERT]
    changes: list[Change] = []
    for name, layer in [(local.name, local.layer) for local in local_layers if local.remedy == CONVERT]:
        _require_no_fsdp(name, layer, "convert_syncbn_model")
        if channel_last and isinstance(layer, LazyModuleMixin):
            raise ValueError(f"{name!r} is lazy and counts channels in dim 1; run a forward before channel_last=True")
        # An nn.SyncBatchNorm holds its group itself, which could be neither copied nor pickled.
        new_spec = to_spec(vars(layer).get("process_group")) if spec is None else spec
        original = class_of(layer)
        added = {"_original_class": original, "_process_group": new_spec, "channel_last": channel_last}
        changes.append((layer, synchronised_class(original), added))
    if others:  # before any change, as a warning may be made an error
        warn(f"syncbn did not convert these layers: {description(others)}")
    make_groups(spec)
    synchronised = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    _apply(changes)
    _set_names(model)
    if spec is not None:
        for layer in synchronised:
            vars(layer)["_process_group"] = spec
    return model


def revert_syncbn_model(model: Model, target: type[_BatchNorm] | None = None) -> Model:
    """Give every layer that `convert_syncbn_model` converted its original class back, in place, and return `model`.

    Statistics and parameters are those that training left. Layers that were built as syncbn layers have no original
    class and stay. One warning names the layers that compute something else then, as they had `fuse_relu=True` or
    `channel_last=True`, those that stay because a forward was set on them, and, with a `target`, others that stay.

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
    if target not in (None, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        raise ValueError(f"target must be nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or None, got {target!r}")
    changes: list[Change] = []
    noted: dict[str, list[str]] = {}  # what to warn of, and the layers
    for name, layer in model.named_modules():
        new_class = vars(layer).get("_original_class", class_of(layer))
        if new_class is nn.SyncBatchNorm and target is not None:
            new_class = target
        if new_class is class_of(layer):
            if target is not None and isinstance(layer, SyncBatchNorm):
                noted.setdefault(BUILT, []).append(name)
            continue
        if "forward" in vars(layer):
            noted.setdefault(HIDES, []).append(name)
            continue
        _require_no_fsdp(name, layer, "revert_syncbn_model")
        if issubclass(new_class, LazyModuleMixin) and not isinstance(layer, LazyModuleMixin):
            new_class = new_class.cls_to_become
        # An nn.SyncBatchNorm holds its group itself. Looking it up may raise, so it comes before any change.
        is_torchs = new_class is nn.SyncBatchNorm
        changes.append((layer, new_class, {"process_group": torch_group(layer._process_group)} if is_torchs else {}))
        for option, lost in LOST.items():
            if vars(layer).get(option):
                noted.setdefault(lost, []).append(name)
    if noted:
        warn(f"syncbn: {'; '.join(f'{what} ({first_names(names)})' for what, names in noted.items())}")
    _apply(changes)
    return model


def _set_names(model: nn.Module) -> None:
    """Note on each synchronised layer its dotted name in `model`, by which ranks compare their layers and errors call
    it. What DistributedDataParallel and torch.compile add to names is left out; a single layer keeps its name."""
    root = model
    while isinstance(root, nn.parallel.DistributedDataParallel) or "_orig_mod" in root._modules:
        root = next(root.children())
    for name, layer in root.named_modules():
        path = ".".join(part for part in name.split(".") if part not in ("", "_orig_mod"))
        if path and isinstance(layer, SyncBatchNorm):
            vars(layer)["_syncbn_name"] = type(root).__name__, printable(path)


def check_module(model: nn.Module) -> None:
    """**Raises** TypeError unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {model!r} of type {type(model).__name__}; pass the model")


def _apply(changes: list[Change]) -> None:
    """Replaces `class_of` each layer. A class that parametrize made above it is made again above the new class.
    After an error all is as it was.

    The layer's __setattr__ is not called, as it may refuse.
    """
    with contextlib.ExitStack() as undo:
        for layer, new_class, attributes in changes:
            undo.callback(_set, layer, type(layer), dict(vars(layer)))
            kept = {name: value for name, value in vars(layer).items() if name not in ADDED}
            if class_of(layer) is not type(layer):
                class_name = f"Parametrized{new_class.__name__}"
                new_class = make_class(type(new_class), class_name, (new_class,), dict(vars(type(layer))))
            _set(layer, new_class, {**kept, **attributes})
        undo.pop_all()


def _set(layer: nn.Module, new_class: type[nn.Module], attributes: dict[str, object]) -> None:
    object.__setattr__(layer, "__class__", new_class)
    vars(layer).clear()
    vars(layer).update(attributes)


def _require_no_fsdp(name: str, module: nn.Module, caller: str) -> None:
    """**Raises** RuntimeError if fully_shard has given the module a class of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and nobody can have wrapped a module without it
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        raise RuntimeError(f"{name!r} is already wrapped by fully_shard; call {caller} before fully_shard")
