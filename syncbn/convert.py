"""Swaps the batch-norm layers of a model for synchronised ones and back, by swapping the class of each layer.

A layer keeps its identity, parameters, buffers, hooks, attributes and training flag, so all references to it stay
valid, also if a model holds one layer in several places.

nn.BatchNorm1d, 2d and 3d become SyncBatchNorm1d, 2d and 3d. For a subclass X a new class inherits from X and from one
of these, see subclasses.py. unconverted.py finds the layers that a conversion leaves.
"""

import contextlib
import sys
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from syncbn import unconverted
from syncbn.arguments import check_module
from syncbn.layer import SyncBatchNorm
from syncbn.ranks.groups import ProcessGroupLike, make_groups, to_spec, to_torch
from syncbn.subclasses import make_class, synchronised_class
from syncbn.texts import escape_surrogates, warn
from syncbn.torch_internals import set_attribute

Model = TypeVar("Model", bound=nn.Module)
# A layer, its new class and its new attributes.
Change: TypeAlias = tuple[nn.Module, type[nn.Module], Mapping[str, object]]

NEVER_CONVERTED = "these layers were not reverted: they were built as syncbn layers; build nn.BatchNorm1d, 2d or 3d"
FORWARD_REPLACED = "these layers were not reverted: layer.forward was replaced; delete layer.forward and revert again"
# Warnings about options that nn.BatchNorm does not have.
LOST_OPTIONS = {
    "fuse_relu": "these layers have lost their relu: put an nn.ReLU after each layer",
    "channel_last": "these layers take the channels in dim 1 again: permute their inputs and outputs",
}


def convert_syncbn_model(model: Model, process_group: ProcessGroupLike = None, channel_last: bool = False) -> Model:
    """Make each batch-norm layer of `model` a synchronised layer, in place, and return `model`. The name is apex's.

    Only the class of a layer changes. nn.BatchNorm1d, 2d and 3d become SyncBatchNorm1d, 2d and 3d, and nn.SyncBatchNorm
    becomes SyncBatchNorm. The new class of a subclass keeps all that the subclass defines (see subclasses.py).
    Parametrizations stay. A lazy layer synchronises from its first forward on.

    Each synchronised layer, including those that were built as SyncBatchNorm, stores its dotted name in `model`. Errors
    contain the name, and ranks compare names, so convert the same module on every rank. Converting again updates the
    names and, if `process_group` is not None, the groups of synchronised layers, and changes nothing else.

    One warning lists, by class and with a remedy, what was not converted: subclasses of nn.SyncBatchNorm; scripted and
    exported layers; layers with an attribute whose name syncbn uses, or whose forward was replaced (layer.forward =
    ...); other modules that have running statistics; modules that call F.batch_norm, or that keep batch-norm layers in
    plain lists or dicts.

    Args:
        model: any module, also a single batch-norm layer. Convert before wrapping:
            DistributedDataParallel(convert_syncbn_model(model)).
        process_group: as in `SyncBatchNorm`. If an int is given and torch.distributed is initialised, the call is a
            collective over ALL ranks of the default group. With None, an nn.SyncBatchNorm or SyncBatchNorm keeps its
            group; `layer.process_group = None` resets the group.
        channel_last: the inputs of the converted layers have the channels in the last dim.

    Raises:
        TypeError: `model` is not a module; `process_group` has a wrong type.
        ValueError: `process_group` is invalid; `channel_last` is given for a lazy layer, which infers C from dim 1.
        RuntimeError: a layer is wrapped by FSDP2's fully_shard.

    An error leaves the model unchanged.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> type(convert_syncbn_model(model)[1]).__name__
    'SyncBatchNorm2d'
    """
    check_module(model)
    local_layers, spec = unconverted.unsynchronised(model), to_spec(process_group)
    others = [local for local in local_layers if local.remedy != unconverted.CONVERTIBLE]
    changes: list[Change] = []
    for name, layer in [(local.name, local.layer) for local in local_layers if local.remedy == unconverted.CONVERTIBLE]:
        _require_no_fsdp(name, layer, "convert_syncbn_model")
        if channel_last and isinstance(layer, LazyModuleMixin):
            raise ValueError(f"{name!r} is lazy and counts channels in dim 1; run a forward before channel_last=True")
        # An nn.SyncBatchNorm holds a ProcessGroup, which can be neither copied nor pickled; a GroupSpec can be both.
        new_spec = to_spec(vars(layer).get("process_group")) if spec is None else spec
        original = unconverted.unparametrized_class(layer)
        added = {"_original_class": original, "_process_group": new_spec, "channel_last": channel_last}
        changes.append((layer, synchronised_class(original), added))
    if others:  # A warning may be turned into an error, so it comes before any change.
        warn(f"syncbn did not convert these layers: {unconverted.describe_layers(others)}")
    make_groups(spec)
    synchronised = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    _apply(changes)
    _set_names(model)
    if spec is not None:
        for layer in synchronised:
            vars(layer)["_process_group"] = spec
    return model


def revert_syncbn_model(model: Model, target: type[_BatchNorm] | None = None) -> Model:
    """Restore the original class of each layer that `convert_syncbn_model` converted, in place, and return `model`.

    Parameters and statistics stay. One warning lists the layers that were not reverted, because they were built as
    syncbn layers and have no original class, or because their forward was replaced (layer.forward = ...); and the
    layers that now compute something else, because they had `fuse_relu=True` or `channel_last=True`.

    Args:
        model: any module, also a single layer.
        target: nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d, the class for each nn.SyncBatchNorm, whether or not
            `convert_syncbn_model` has converted the layer. An nn.SyncBatchNorm does not record its original class, and
            the three classes accept different numbers of dims. If a model needs several classes, revert its parts one
            by one. With None, a converted nn.SyncBatchNorm becomes an nn.SyncBatchNorm again. Subclasses of
            nn.SyncBatchNorm stay.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `target` is another class.
        RuntimeError: a layer is wrapped by FSDP2's fully_shard; a layer becomes an nn.SyncBatchNorm, and its process
            group does not exist.

    An error leaves the model unchanged.

    >>> model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> type(revert_syncbn_model(model, nn.BatchNorm2d)[1]).__name__
    'BatchNorm2d'
    """
    check_module(model)
    if target not in (None, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        raise ValueError(f"target must be nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or None, got {target!r}")
    changes: list[Change] = []
    warnings: dict[str, list[str]] = {}  # For each text, the names of its layers.
    for name, layer in model.named_modules():
        new_class = vars(layer).get("_original_class", unconverted.unparametrized_class(layer))
        if new_class is nn.SyncBatchNorm and target is not None:
            new_class = target
        if new_class is unconverted.unparametrized_class(layer):
            if isinstance(layer, SyncBatchNorm):
                warnings.setdefault(NEVER_CONVERTED, []).append(name)
            continue
        if "forward" in vars(layer):
            warnings.setdefault(FORWARD_REPLACED, []).append(name)
            continue
        _require_no_fsdp(name, layer, "revert_syncbn_model")
        if issubclass(new_class, LazyModuleMixin) and not isinstance(layer, LazyModuleMixin):
            new_class = new_class.cls_to_become
        # An nn.SyncBatchNorm holds a ProcessGroup. `to_torch` may raise, so it is called before any change.
        needs_group = new_class is nn.SyncBatchNorm
        changes.append((layer, new_class, {"process_group": to_torch(layer._process_group)} if needs_group else {}))
        for option, lost in LOST_OPTIONS.items():
            if vars(layer).get(option):
                warnings.setdefault(lost, []).append(name)
    if warnings:
        warn(f"syncbn: {'; '.join(f'{what} ({unconverted.shorten_names(names)})' for what, names in warnings.items())}")
    _apply(changes)
    return model


def _set_names(model: nn.Module) -> None:
    """Store in each synchronised layer its dotted name in `model`, without the parts that DistributedDataParallel and
    torch.compile add. If `model` itself is a layer, it keeps its name."""
    root = model
    while isinstance(root, nn.parallel.DistributedDataParallel) or "_orig_mod" in root._modules:
        root = next(root.children())
    for name, layer in root.named_modules():
        path = ".".join(part for part in name.split(".") if part not in ("", "_orig_mod"))
        if path and isinstance(layer, SyncBatchNorm):
            vars(layer).update(_syncbn_name=(type(root).__name__, escape_surrogates(path)), _syncbn_site=None)


def _apply(changes: list[Change]) -> None:
    """Set the new class and attributes of each layer, or of none if an error occurs. The class that parametrize creates
    for a layer is created again, as a subclass of the new class."""
    with contextlib.ExitStack() as undo:
        for layer, new_class, attributes in changes:
            undo.callback(_set, layer, type(layer), dict(vars(layer)))
            kept = {name: value for name, value in vars(layer).items() if name not in unconverted.ADDED_ATTRIBUTES}
            if unconverted.unparametrized_class(layer) is not type(layer):
                class_name = f"Parametrized{new_class.__name__}"
                new_class = make_class(type(new_class), class_name, (new_class,), dict(vars(type(layer))))
            _set(layer, new_class, {**kept, **attributes})
        undo.pop_all()


def _set(layer: nn.Module, new_class: type[nn.Module], attributes: dict[str, object]) -> None:
    set_attribute(layer, "__class__", new_class)
    vars(layer).clear()
    vars(layer).update(attributes)


def _require_no_fsdp(name: str, module: nn.Module, caller: str) -> None:
    """**Raises** RuntimeError if fully_shard has wrapped the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # The import is slow. Without it no module is wrapped.
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        raise RuntimeError(f"{name!r} is already wrapped by fully_shard; call {caller} before fully_shard")
