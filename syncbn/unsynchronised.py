"""Finds the modules of a model that seem to normalise each rank's batch alone, and says what to do about each."""

from collections.abc import Iterator
from types import MethodType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.calls_of_batch_norm import calls_batch_norm
from syncbn.layer import SyncBatchNorm
from syncbn.synchronised_classes import ADDED, class_of
from syncbn.texts import quoted

# What to do about a layer; `_remedy` has more.
CONVERT = "call syncbn.convert_syncbn_model(model)"
BY_ITSELF = "normalises by itself; if by its batch, let its forward call syncbn.functional.sync_batch_norm"
CALLS = (
    "calls F.batch_norm itself; if that normalises by the batch, call syncbn.functional.sync_batch_norm in its place"
)
UNREGISTERED = "keeps batch norm in a plain list or dict, where no conversion finds it; use nn.ModuleList or ModuleDict"
HIDDEN = "a forward that was set on the layer hides the class's; convert before you wrap it, or write it in a subclass"
HELD = "a module or a hook holds the layer's bound forward, which no conversion changes; convert before you take it"

MAX_CHARACTERS = 800  # of a description
NAMED, NAME_CHARACTERS = 3, 60  # layers of a class that are named, and how much of a name is shown


class LocalLayer(NamedTuple):
    """A layer that seems to normalise each rank's batch alone."""

    name: str  # in the model
    layer: nn.Module
    remedy: str  # CONVERT where it can be converted


def unsynchronised(model: nn.Module) -> list[LocalLayer]:
    """The layers of `model` that seem to normalise each rank's batch alone."""
    modules, held = set(model.modules()), _ids_of_held_forwards(model)
    calling = {kind for kind in {type(module) for module in modules} if calls_batch_norm(kind)}
    layers: list[LocalLayer] = []
    for name, module in model.named_modules():
        remedy = _remedy(module, id(module) in held)
        if remedy in (None, BY_ITSELF) and not isinstance(module, SyncBatchNorm):
            if type(module) in calling:
                remedy = CALLS
            elif any(_trains_locally(part) for part in _held_modules(module) if part not in modules):
                remedy = UNREGISTERED
        if remedy is not None:
            layers.append(LocalLayer(name, module, remedy))
    return layers


def _held_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the attributes of a module, in lists, tuples and dicts there, and all modules within those."""
    values, seen = list[object]([vars(module)]), set[int]()
    while values:
        value = values.pop()
        if isinstance(value, nn.Module):
            yield from value.modules()
        elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
            seen.add(id(value))
            if type(value).__module__ in ("builtins", "collections"):  # Lightning copies arguments to a dict of its own
                values.extend(value.values() if isinstance(value, dict) else value)


def _trains_locally(module: nn.Module) -> bool:
    is_synchronised = isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm))
    return isinstance(module, _BatchNorm) and not is_synchronised and module.training


def _ids_of_held_forwards(model: nn.Module) -> set[int]:
    """The ids of the objects whose bound method `forward` is an attribute or a hook of a module. Such a method calls
    the forward of the class that its object had then."""
    values = [value for module in model.modules() for value in vars(module).values()]
    values += [hook for value in values if isinstance(value, dict) for hook in value.values()]
    methods = [value for value in values if isinstance(value, MethodType)]
    return {id(method.__self__) for method in methods if getattr(method, "__name__", "") == "forward"}


def _remedy(module: nn.Module, is_held: bool) -> str | None:
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
    original = class_of(module)
    if original is not nn.SyncBatchNorm:
        if issubclass(original, nn.SyncBatchNorm):
            if original.__module__.startswith("timm."):
                return "do not call timm's convert_sync_batchnorm first: timm's own BatchNorm layers can be converted"
            return "a subclass of nn.SyncBatchNorm communicates by itself, derive it from nn.BatchNorm1d, 2d or 3d"
        taken = [name for name in ADDED if hasattr(module, name)]
        if taken:
            return f"has attributes that ours need, rename {', '.join(taken)}"
    if "forward" in vars(module):
        return HIDDEN
    return HELD if is_held else CONVERT


def class_name(module: nn.Module) -> str:
    """The name of the module's class; of a scripted module's class before it was scripted."""
    return str(module.original_name) if isinstance(module, torch.jit.ScriptModule) else class_of(module).__name__


def description(layers: list[LocalLayer]) -> str:
    """Says for each class and remedy how many layers there are, names the first, and says what to do; at most 1,000
    characters."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, layer, remedy in layers:
        names.setdefault((class_name(layer), remedy), []).append(name)
    parts: list[str] = []
    num_left = len(layers)
    for (kind, remedy), layer_names in names.items():
        parts.append(f"{len(layer_names)} {_shortened(kind)} ({first_names(layer_names)}): {remedy}")
        if len("; ".join(parts)) > MAX_CHARACTERS:
            parts[-1] = f"and {num_left} others"
            break
        num_left -= len(layer_names)
    return "; ".join(parts)


def first_names(names: list[str]) -> str:
    """The first of these layers' names, shortened, with "..." for the others."""
    shown = [_shortened(quoted(name) or "the model") for name in names[:NAMED]]
    return ", ".join(shown + ["..."] * (len(names) > NAMED))


def _shortened(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else f"...{name[-NAME_CHARACTERS:]}"
