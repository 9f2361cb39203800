"""Swaps the batch-norm layers of a model for synchronised ones and back, by swapping the class of each layer.

The module object stays, with its parameters, buffers, hooks, attributes and training flag, and so do all references to
it: a model may hold one layer at several places.
"""

import contextlib
import sys
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from syncbn.call_stack import warn
from syncbn.comm.groups import ProcessGroupLike, to_spec, torch_group
from syncbn.diagnosis.names import quoted
from syncbn.layer import SyncBatchNorm
from syncbn.reductions import debug_mode
from syncbn.reductions.resolving import make_groups
from syncbn.synchronised_classes import ADDED, class_of, synchronised_class

Model = TypeVar("Model", bound=nn.Module)
Change: TypeAlias = tuple[nn.Module, type[nn.Module], dict[str, Any]]  # a layer, its new class and new attributes

CONVERT = "call syncbn.convert_syncbn_model(model)"
BUILT = "these layers were built as syncbn layers and stay: build them as nn.BatchNorm1d, 2d or 3d"
BY_ITSELF = "normalises by itself; if by its batch, let its forward call syncbn.functional.sync_batch_norm"
HIDDEN = "a forward that was set on the layer hides the class's; convert before you wrap it, or write it in a subclass"
HIDES = "a forward that was set on these layers hides their class's, and they stay: delete it and revert again"
# What a layer loses in a revert, by its option.
LOST = {
    "fuse_relu": "these layers have lost their relu: put an nn.ReLU behind each",
    "channel_last": "these layers take the channels in dim 1 again",
}
MAX_CHARACTERS = 800  # of a description
NAMED, NAME_CHARACTERS = 3, 60  # layers of a class that are named, and how much of a name is shown


def convert_syncbn_model(model: Model, process_group: ProcessGroupLike = None, channel_last: bool = False) -> Model:
    """Make each batch-norm layer of `model` a synchronised layer, in place, and return `model`.

    The name is apex's. Only the class of a layer changes: nn.BatchNorm1d/2d/3d and nn.SyncBatchNorm become ours, a
    subclass becomes a class that keeps its behaviour and gains synchronisation (see synchronised_classes.py), a
    parametrization stays, a lazy layer is synchronised from its first forward.
    Converting again sets the group, if one is given, of layers that are synchronised already, and changes nothing else.
    What cannot be converted is left alone and named in one warning, by class, with what to do: subclasses of
    nn.SyncBatchNorm, scripted and exported layers, layers that have an attribute of a name that ours need or a forward
    set on them (layer.forward = ...), and other modules with running statistics of their own.

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
    found, spec = unsynchronised(model), to_spec(process_group)
    others = [(name, layer, remedy) for name, layer, remedy in found if remedy != CONVERT]
    layers = {name: layer for name, layer, remedy in found if remedy == CONVERT}
    changes: list[Change] = []
    for name, layer in layers.items():
        _require_no_fsdp(name, layer, "convert_syncbn_model")
        if channel_last and isinstance(layer, LazyModuleMixin):
            raise ValueError(f"{name!r} is lazy and counts channels in dim 1; run a forward before channel_last=True")
        # An nn.SyncBatchNorm holds its group itself, which could be neither copied nor pickled.
        own_spec = to_spec(vars(layer).get("process_group")) if spec is None else spec
        added = {"_original_class": class_of(layer), "_process_group": own_spec, "channel_last": channel_last}
        changes.append((layer, synchronised_class(class_of(layer)), added))
    if others:  # before any change, as a warning may be made an error
        warn(f"syncbn did not convert these layers: {described(others)}")
    make_groups(spec)
    debug_mode.run_uncompiled_where_wanted()
    synchronised = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    _apply(changes)
    if spec is not None:
        for layer in synchronised:
            vars(layer)["_process_group"] = spec
    return model


def revert_syncbn_model(model: Model, target: type[_BatchNorm] | None = None) -> Model:
    """Give every layer that `convert_syncbn_model` converted its original class back, in place, and return `model`.

    Statistics and parameters are those that training left. Layers that were built as syncbn layers have no original
    class and stay. One warning names the layers that compute something else then, as they had `fuse_relu=True` or
    `channel_last=True`, those that stay as a forward set on them hides what it calls, and, with a `target`, others that
    stay.

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
        warn(f"syncbn: {'; '.join(f'{what} ({_some(names)})' for what, names in noted.items())}")
    _apply(changes)
    return model


def check_module(model: nn.Module) -> None:
    """**Raises** TypeError unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {model!r} of type {type(model).__name__}; pass the model")


def _apply(changes: list[Change]) -> None:
    """Replaces `class_of` each layer. The class that parametrize made above a layer's is made again above the new one.
    After an error all is as it was.

    Nothing is set by the layer's own __setattr__, which may refuse.
    """
    with contextlib.ExitStack() as undo:
        for layer, new_class, attributes in changes:
            undo.callback(_set, layer, type(layer), dict(vars(layer)))
            kept = {name: value for name, value in vars(layer).items() if name not in (*ADDED, "process_group")}
            if class_of(layer) is not type(layer):
                new_class = type(f"Parametrized{new_class.__name__}", (new_class,), dict(vars(type(layer))))
            _set(layer, new_class, kept | attributes)
        undo.pop_all()


def _set(layer: nn.Module, new_class: type[nn.Module], attributes: dict[str, Any]) -> None:
    object.__setattr__(layer, "__class__", new_class)
    vars(layer).clear()
    vars(layer).update(attributes)


def _require_no_fsdp(name: str, module: nn.Module, caller: str) -> None:
    """**Raises** RuntimeError if fully_shard has given the module a class of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and nobody can have wrapped a module without it
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        raise RuntimeError(f"{name!r} is already wrapped by fully_shard; call {caller} before fully_shard")


def unsynchronised(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The layers of `model` that seem to normalise each rank's batch alone: name, layer and remedy, which is CONVERT
    where it can be converted."""
    return [(name, module, remedy) for name, module in model.named_modules() if (remedy := _remedy(module))]


def _remedy(module: nn.Module) -> str | None:
    """What to do about a module that seems to normalise each rank's batch alone; None for any other."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted, convert before torch.jit" if "BatchNorm" in module.original_name else None
    if isinstance(module, (SyncBatchNorm, nn.modules.instancenorm._InstanceNorm)):
        return None
    if not isinstance(module, _BatchNorm):
        buffers = vars(module)["_buffers"]
        # A module whose weight is a buffer too is a frozen batch norm, which needs no synchronisation.
        if (buffers.get("running_mean") is None and buffers.get("running_var") is None) or "weight" in buffers:
            return None
        if type(module) is nn.Module or type(module).__module__ == "torch.export.unflatten":
            return "a part of an exported graph, convert before torch.export"
        return BY_ITSELF
    original_class = class_of(module)
    if original_class is nn.SyncBatchNorm:
        return HIDDEN if "forward" in vars(module) else CONVERT
    if issubclass(original_class, nn.SyncBatchNorm):
        if original_class.__module__.startswith("timm."):
            return "do not call timm's convert_sync_batchnorm first: timm's own BatchNorm layers can be converted"
        return "a subclass of nn.SyncBatchNorm communicates by itself, derive it from nn.BatchNorm1d, 2d or 3d"
    taken = [name for name in ("process_group", *ADDED) if hasattr(module, name)]
    if taken:
        return f"has attributes that ours need, rename {', '.join(taken)}"
    return HIDDEN if "forward" in vars(module) else CONVERT


def kind_of(module: nn.Module) -> str:
    """The name of the module's class; of a scripted module's class before it was scripted."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else class_of(module).__name__


def described(found: list[tuple[str, nn.Module, str]]) -> str:
    """Says for each class how many layers there are, names the first, and what to do; at most 1,000 characters."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, layer, remedy in found:
        names.setdefault((kind_of(layer), remedy), []).append(name)
    parts: list[str] = []
    left = len(found)
    for (kind, remedy), of_kind in names.items():
        parts.append(f"{len(of_kind)} {_shortened(kind)} ({_some(of_kind)}): {remedy}")
        if len("; ".join(parts)) > MAX_CHARACTERS:
            parts[-1] = f"and {left} others"
            break
        left -= len(of_kind)
    return "; ".join(parts)


def _some(names: list[str]) -> str:
    """The first names of these layers, shortened, with "..." for the others."""
    shown = [_shortened(quoted(name) or "the model") for name in names[:NAMED]]
    return ", ".join(shown + ["..."] * (len(names) > NAMED))


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else f"...{name[-NAME_CHARACTERS:]}"
