"""Finds the modules of a model that may normalise each rank's batch alone, and says what to do about each."""

import ast
import inspect
import textwrap
from itertools import islice
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.layer import SyncBatchNorm
from syncbn.synchronised_classes import ADDED, class_of
from syncbn.texts import quoted

# What to do about a layer; `_remedy` has more.
CONVERT = "call syncbn.convert_syncbn_model(model)"
BY_ITSELF = "may normalise by its batch; if so, let its forward call syncbn.functional.sync_batch_norm"
EXPORTED = "a part of a scripted or exported model, convert before torch.jit or torch.export"
CALLS = "may normalise by its batch, by F.batch_norm; if so, call syncbn.functional.sync_batch_norm in its place"
UNREGISTERED = "keeps batch norm in a plain list or dict, where no conversion finds it; use nn.ModuleList or ModuleDict"
HIDDEN = "a forward that was set on the layer hides the class's; convert before you wrap it, or write it in a subclass"

NAMED = 3  # layers of a class that are named
LOOKED_AT = 100  # elements of a list or dict: it may hold a data set
PREFIXES = "", "F.", "functional.", "nn.functional.", "torch.nn.functional.", "torch."  # of a call of batch_norm
TRAINING = 5  # the position of the argument `training` of F.batch_norm and torch.batch_norm
# Raised for a method that has no source or wraps itself, and for source that is incomplete or nested too deeply.
UNREADABLE = OSError, SyntaxError, TokenError, ValueError, RecursionError, MemoryError


class LocalLayer(NamedTuple):
    """A layer that may normalise each rank's batch alone."""

    name: str  # in the model
    layer: nn.Module
    remedy: str  # CONVERT where it can be converted


def unsynchronised(model: nn.Module) -> list[LocalLayer]:
    """The layers of `model` that may normalise each rank's batch alone."""
    modules = set(model.modules())
    calling = {kind for kind in {type(module) for module in modules} if calls_batch_norm(kind)}
    layers: list[LocalLayer] = []
    for name, module in model.named_modules():
        remedy = _remedy(module)
        if remedy in (None, BY_ITSELF) and not isinstance(module, SyncBatchNorm):
            if type(module) in calling:
                remedy = CALLS
            elif any(_remedy(part) == CONVERT and part.training for part in _in_lists(module) if part not in modules):
                remedy = UNREGISTERED
        if remedy is not None:
            layers.append(LocalLayer(name, module, remedy))
    return layers


def calls_batch_norm(kind: type) -> bool:
    """Whether the source of a method of the class, which may be inherited, calls torch's batch norm by one of its usual
    names, other than with training=False. A method without source, or of torch or syncbn, is left out."""
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    return any(
        _calls_in_training(value) for value in values if isinstance(value, (FunctionType, staticmethod, classmethod))
    )


def _calls_in_training(method: Any) -> bool:
    try:
        function = inspect.unwrap(method)
        package = str(function.__module__).partition(".")[0]
        if package in ("torch", "syncbn") or not _names_batch_norm(function.__code__):  # Reading source is slow.
            return False
        # textwrap.dedent would leave a method indented if a comment in it is not.
        source = textwrap.indent(inspect.getsource(function), " ")
        return any(map(_is_call_in_training, ast.walk(ast.parse(f"if True:\n{source}"))))
    except UNREADABLE:
        return False


def _names_batch_norm(code: CodeType) -> bool:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return "batch_norm" in code.co_names or any(map(_names_batch_norm, nested))


def _is_call_in_training(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) in [f"{prefix}batch_norm" for prefix in PREFIXES]):
        return False
    given = [value for place, value in enumerate(node.args) if place == TRAINING or isinstance(value, ast.Starred)]
    given += [keyword.value for keyword in node.keywords if keyword.arg in ("training", None)]
    return any(ast.unparse(value) != "False" for value in given)


def _in_lists(module: nn.Module) -> list[nn.Module]:
    """The modules in the lists, tuples and dicts that are attributes of `module`, and all modules within those, without
    nn.SyncBatchNorm."""
    # Not of a subclass of dict, in which Lightning copies a module's arguments.
    values = [value for value in vars(module).values() if type(value) in (list, tuple, dict)]
    items = [
        item for value in values for item in islice(value.values() if isinstance(value, dict) else value, LOOKED_AT)
    ]
    parts = [part for item in items if isinstance(item, nn.Module) for part in item.modules()]
    return [part for part in parts if not isinstance(part, nn.SyncBatchNorm)]


def _remedy(module: nn.Module) -> str | None:
    """What to do about a module that may normalise each rank's batch alone; None for any other."""
    if isinstance(module, (SyncBatchNorm, nn.modules.instancenorm._InstanceNorm)):
        return None
    if not isinstance(module, _BatchNorm):
        buffers = {name for name, _ in module.named_buffers(recurse=False)}
        # A module whose weight is a buffer too is a frozen batch norm, which needs no synchronisation.
        if not {"running_mean", "running_var"} & buffers or "weight" in buffers:
            return None
        return EXPORTED if type(module).__module__.startswith("torch.") else BY_ITSELF
    original = class_of(module)
    if original is not nn.SyncBatchNorm:
        if issubclass(original, nn.SyncBatchNorm):
            return "a subclass of nn.SyncBatchNorm communicates by itself, derive it from nn.BatchNorm1d, 2d or 3d"
        taken = [name for name in ADDED if hasattr(module, name)]
        if taken:
            return f"has attributes that ours need, rename {', '.join(taken)}"
    return HIDDEN if "forward" in vars(module) else CONVERT


def description(layers: list[LocalLayer]) -> str:
    """For each class and remedy: how many layers there are, the names of the first, and the remedy."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, layer, remedy in layers:
        names.setdefault((class_of(layer).__name__, remedy), []).append(name)
    return "; ".join(
        f"{len(of_class)} {kind} ({first_names(of_class)}): {remedy}" for (kind, remedy), of_class in names.items()
    )


def first_names(names: list[str]) -> str:
    """The first of these layers' names, with "..." for the others."""
    return ", ".join([quoted(name) or "the model" for name in names[:NAMED]] + ["..."] * (len(names) > NAMED))
