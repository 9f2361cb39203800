"""Swaps the batch-norm layers of a model for synchronised ones and back, by swapping the class of each layer.

The module object stays, and with it everything that others hold of it or that it holds: parameters, buffers, hooks,
    attributes, training flag, shared places in the model, references in an optimizer.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from syncbn import groups
from syncbn.layer import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d

if TYPE_CHECKING:
    from syncbn.groups import ProcessGroupLike, Specification

AnyModule = TypeVar("AnyModule", bound=nn.Module)

SYNCHRONISED_CLASS: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}

# What a conversion adds to a layer's own attributes, and a revert takes away.
ADDED = ("_original_class", "_process_group", "channel_last", "fuse_relu", "_synchronised_ranks")


def convert_syncbn_model(
    model: AnyModule, process_group: ProcessGroupLike = None, channel_last: bool = False
) -> AnyModule:
    """Make each nn.BatchNorm1d/2d/3d and nn.SyncBatchNorm of `model` a synchronised layer, in place; return `model`.

    The name is apex's. Only the class of a layer changes, and only when it is exactly one of these four. Other
    subclasses of BatchNorm, parametrized layers and lazy layers that have not seen an input are left alone and named in
    one warning. Converting again changes nothing.

    Args:
        model: any module, also a single batch-norm layer. Convert before wrapping it:
            DistributedDataParallel(convert_syncbn_model(model)).
        process_group: as in `SyncBatchNorm`. With an int or "node", and torch.distributed initialised, a collective of
            ALL ranks of the default group. None keeps the group that an nn.SyncBatchNorm already has.
        channel_last: the layers' inputs have the channels in the last dim.

    Raises:
        ValueError, TypeError: a bad `process_group`.
        RuntimeError: a layer is wrapped by FSDP2.

    After an error the model is as it was.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> type(convert_syncbn_model(model)[1]).__name__
    'SyncBatchNorm2d'
    """
    layers, left_alone = _select(model)
    spec = groups.specification(process_group)
    # An nn.SyncBatchNorm holds its group itself, which could be neither copied nor pickled.
    specs = [groups.specification(vars(layer).get("process_group")) if spec is None else spec for layer in layers]
    groups.prepare(spec)
    for layer, own_spec in zip(layers, specs, strict=True):
        _convert(layer, own_spec, channel_last)
    if left_alone:
        warnings.warn("syncbn left these layers unsynchronised: " + "; ".join(left_alone), stacklevel=2)
    return model


def revert_syncbn_model(model: AnyModule) -> AnyModule:
    """Give every layer that `convert_syncbn_model` converted its original class back, in place, and return `model`.

    Statistics and parameters are those that training left. Layers that were built as syncbn layers have no original
    class and stay.
    """
    converted = [
        layer for layer in model.modules() if isinstance(layer, SyncBatchNorm) and "_original_class" in vars(layer)
    ]
    # An nn.SyncBatchNorm holds its group itself. Looking it up may raise, so it comes before any change.
    own_groups = {
        layer: None if layer.process_group is None else groups.existing(layer.process_group)
        for layer in converted
        if vars(layer)["_original_class"] is nn.SyncBatchNorm
    }
    for layer in converted:
        original_class = vars(layer)["_original_class"]
        for name in ADDED:
            vars(layer).pop(name, None)
        layer.__class__ = original_class
        if layer in own_groups:
            vars(layer)["process_group"] = own_groups[layer]
    return model


def _select(model: nn.Module) -> tuple[list[_BatchNorm], list[str]]:
    """The layers to convert, and for each batch norm that is left alone its name and the reason."""
    layers: list[_BatchNorm] = []
    left_alone: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
            continue
        if _is_fsdp(module):
            raise RuntimeError(
                f"{name!r} is already wrapped by fully_shard; call convert_syncbn_model before fully_shard"
            )
        label = f"{name or 'the model itself'} ({type(module).__name__})"
        if type(module) in SYNCHRONISED_CLASS:
            layers.append(module)
        elif any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
            left_alone.append(f"{label}: lazy, convert it after its first forward")
        elif is_parametrized(module):
            left_alone.append(f"{label}: parametrized, convert it before registering the parametrization")
        else:
            left_alone.append(f"{label}: a subclass whose own behaviour would be lost")
    return layers, left_alone


def _convert(layer: _BatchNorm, spec: Specification, channel_last: bool) -> None:
    original_class = type(layer)
    vars(layer).pop("process_group", None)
    layer.__class__ = SYNCHRONISED_CLASS[original_class]
    assert isinstance(layer, SyncBatchNorm)
    vars(layer)["_original_class"] = original_class
    layer.process_group = spec
    layer.channel_last = channel_last


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and nobody can have wrapped a module without it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)
