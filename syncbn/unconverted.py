"""Finds batch norm that a conversion does not cover, with a remedy for each module."""

import contextlib
import dis
import inspect
from itertools import islice
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.layer import SyncBatchNorm
from syncbn.texts import quote_path

# Attributes that a conversion or revert removes from a layer before it sets new ones. process_group is included,
# because it is an attribute of nn.SyncBatchNorm and a property of SyncBatchNorm.
ADDED_ATTRIBUTES = "process_group", "_original_class", *SyncBatchNorm.__annotations__

# Remedies, one for each state of a layer. `_remedy` returns two more.
CONVERTIBLE = "call syncbn.convert_syncbn_model(model)"
CUSTOM = "may use the statistics of its batch; if so, let its forward call syncbn.functional.sync_batch_norm"
EXPORTED = "is part of a scripted or exported model; convert before torch.jit or torch.export"
CALLS_FUNCTION = "may call F.batch_norm in training; if so, call syncbn.functional.sync_batch_norm instead"
UNREGISTERED = "keeps batch norm in a plain list or dict, where no conversion finds it; use nn.ModuleList or ModuleDict"
COMMUNICATES = "communicates by itself; leave out the conversion that made it, or derive from nn.BatchNorm1d, 2d or 3d"
OVERRIDDEN = "its forward was replaced; convert before layer.forward = ..., or define the forward in a subclass"

MAX_NAMED = 3  # The number of names that a text lists for a class.
MAX_INSPECTED = 100  # The number of elements inspected per list or dict. A list may hold a data set.
MODULE_NAMES = "F", "functional", "nn", "torch", "batch_norm"  # the names from which code usually loads batch_norm
ATTRIBUTE_LOADS = "LOAD_ATTR", "LOAD_METHOD", "EXTENDED_ARG"  # LOAD_METHOD: Python 3.11


class LocalLayer(NamedTuple):
    """A layer that may normalise each rank's batch alone."""

    name: str  # The dotted name in the model.
    layer: nn.Module
    remedy: str  # CONVERTIBLE if `convert_syncbn_model` can convert the layer.


def unparametrized_class(layer: nn.Module) -> type[nn.Module]:
    """Return the class of the layer, or its base if torch.nn.utils.parametrize has created the class."""
    return type(layer).__bases__[0] if nn.utils.parametrize.is_parametrized(layer) else type(layer)


def unsynchronised(model: nn.Module) -> list[LocalLayer]:
    """Return the layers of `model` that may normalise each rank's batch alone."""
    modules = set(model.modules())
    calling = {kind for kind in {type(module) for module in modules} if calls_batch_norm(kind)}
    layers: list[LocalLayer] = []
    for name, module in model.named_modules():
        remedy = _remedy(module)
        if remedy in (None, CUSTOM) and not isinstance(module, SyncBatchNorm):
            if type(module) in calling and "weight" not in module._buffers:  # else a frozen batch norm
                remedy = CALLS_FUNCTION
            elif any(_remedy(part) == CONVERTIBLE and part.training for part in _unregistered(module) - modules):
                remedy = UNREGISTERED
        if remedy is not None:
            layers.append(LocalLayer(name, module, remedy))
    return layers


def calls_batch_norm(kind: type) -> bool:
    """Return whether the code of a method of the class names a batch_norm of torch, such as F.batch_norm.

    Inherited methods count. Methods of torch and syncbn are skipped. The values of arguments are not known, so that a
    call with training=False counts too.
    """
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    return any(map(_method_names_batch_norm, values))


def _method_names_batch_norm(method: Any) -> bool:
    if not isinstance(method, (FunctionType, staticmethod, classmethod)):
        return False
    with contextlib.suppress(ValueError):  # The method wraps itself.
        function = inspect.unwrap(method)  # type: ignore[arg-type]
        if isinstance(function, FunctionType) and str(function.__module__).partition(".")[0] not in ("torch", "syncbn"):
            return _names_batch_norm(function.__code__)
    return False


def _names_batch_norm(code: CodeType) -> bool:
    from_module = False  # whether the last instructions name a module, and then load attributes
    if "batch_norm" in code.co_names:
        for instruction in dis.get_instructions(code):
            if instruction.opname not in ATTRIBUTE_LOADS:
                from_module = instruction.argval in MODULE_NAMES
            if from_module and instruction.argval == "batch_norm":
                return True
    return any(_names_batch_norm(constant) for constant in code.co_consts if isinstance(constant, CodeType))


def _unregistered(module: nn.Module) -> set[nn.Module]:
    """Return the modules in lists, tuples and dicts that are attributes of `module`, and the submodules of these
    modules. Leave out nn.SyncBatchNorm."""
    # Subclasses of dict are skipped, because Lightning keeps a copy of a module's arguments in a subclass of dict.
    values = [value for value in vars(module).values() if type(value) in (list, tuple, dict)]
    items = [
        item for each in values for item in islice(each.values() if isinstance(each, dict) else each, MAX_INSPECTED)
    ]
    parts = {part for item in items if isinstance(item, nn.Module) for part in item.modules()}
    return {part for part in parts if not isinstance(part, nn.SyncBatchNorm)}


def _remedy(module: nn.Module) -> str | None:
    """Return the remedy for a module that may normalise each rank's batch alone; None for any other module."""
    if isinstance(module, (SyncBatchNorm, nn.modules.instancenorm._InstanceNorm)):
        return None
    if not isinstance(module, _BatchNorm):
        buffers = {name for name, _ in module.named_buffers(recurse=False)}
        # A module whose weight is a buffer is a frozen batch norm, which needs no synchronisation.
        if not {"running_mean", "running_var"} & buffers or "weight" in buffers:
            return None
        return EXPORTED if type(module).__module__.startswith("torch.") else CUSTOM
    original = unparametrized_class(module)
    if original is not nn.SyncBatchNorm:
        if issubclass(original, nn.SyncBatchNorm):
            return COMMUNICATES
        taken = [name for name in ADDED_ATTRIBUTES if hasattr(module, name)]
        if taken:
            return f"has attributes whose names syncbn uses; rename {', '.join(taken)}"
    return OVERRIDDEN if "forward" in vars(module) else CONVERTIBLE


def describe_layers(layers: list[LocalLayer]) -> str:
    """Return, for each class and remedy, the number of layers, the first names, and the remedy."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, layer, remedy in layers:
        names.setdefault((unparametrized_class(layer).__name__, remedy), []).append(name)
    return "; ".join(
        f"{len(group)} {kind} ({shorten_names(group)}): {remedy}" for (kind, remedy), group in names.items()
    )


def shorten_names(names: list[str]) -> str:
    """Return the first names, with "..." for the others."""
    shown = [quote_path(name) or "the model" for name in names[:MAX_NAMED]]
    return ", ".join(shown + ["..."] * (len(names) > MAX_NAMED))
