"""Finds batch norm that a conversion does not cover, with a remedy for each module, and summarises synchronised
layers."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from itertools import islice
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn import kernels, payload
from syncbn.arguments import check_module, layer_channels
from syncbn.layer import UNKNOWN_NUM_RANKS, SyncBatchNorm
from syncbn.ranks import groups
from syncbn.texts import quote_path
from syncbn.torch_internals import is_compiled

# Attributes that a conversion or revert removes from a layer before it sets new ones. process_group is included,
# because it is an attribute of nn.SyncBatchNorm and a property of SyncBatchNorm.
ADDED_ATTRIBUTES = "process_group", "_original_class", *SyncBatchNorm.__annotations__

# Remedies, one for each state of a layer. `_remedy` returns two more.
CONVERTIBLE = "call syncbn.convert_syncbn_model(model)"
CUSTOM = "may use the statistics of its batch; if so, let its forward call syncbn.functional.sync_batch_norm"
EXPORTED = "is part of a scripted or exported model; convert before torch.jit or torch.export"
CALLS_FUNCTION = "may call F.batch_norm in training; if so, call syncbn.functional.sync_batch_norm instead"
UNREGISTERED = "keeps batch norm in a plain list or dict, where no conversion finds it; use nn.ModuleList or ModuleDict"
COMMUNICATES = "communicates by itself; leave out the conversion that made it, or derive the class from nn.BatchNorm2d"
OVERRIDDEN = "its forward was replaced; convert before layer.forward = ..., or define the forward in a subclass"

MAX_NAMED = 3  # The number of names that a text lists for a class.
MAX_INSPECTED = 100  # The number of elements inspected per list or dict. A list may hold a data set.
# The prefixes with which code usually calls batch_norm.
PREFIXES = "", "F.", "functional.", "nn.functional.", "torch.nn.functional.", "torch."
TRAINING_INDEX = 5  # Position of the argument `training` of F.batch_norm and torch.batch_norm.
# The exceptions for a method that has no source or wraps itself, and for incomplete or too deeply nested source.
SOURCE_ERRORS = OSError, SyntaxError, TokenError, ValueError, RecursionError, MemoryError

BY_TORCH = "synchronised by torch's nn.SyncBatchNorm, on GPUs only"


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
            if type(module) in calling:
                remedy = CALLS_FUNCTION
            elif any(_remedy(part) == CONVERTIBLE and part.training for part in _unregistered(module) - modules):
                remedy = UNREGISTERED
        if remedy is not None:
            layers.append(LocalLayer(name, module, remedy))
    return layers


def calls_batch_norm(kind: type) -> bool:
    """Return whether a method of the class calls torch's batch norm with one of `PREFIXES`, unless with training=False.
    Inherited methods count. Methods of torch and syncbn, and methods without source, are skipped."""
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    methods = [value for value in values if isinstance(value, (FunctionType, staticmethod, classmethod))]
    return any(map(_calls_in_training, methods))


def _calls_in_training(method: Any) -> bool:
    try:
        function = inspect.unwrap(method)
        package = str(function.__module__).partition(".")[0]
        if package in ("torch", "syncbn") or not _names_batch_norm(function.__code__):  # Reading source is slow.
            return False
        # textwrap.dedent does not dedent a method that contains a comment at the start of a line.
        source = textwrap.indent(inspect.getsource(function), " ")
        return any(map(_is_call_in_training, ast.walk(ast.parse(f"if True:\n{source}"))))
    except SOURCE_ERRORS:
        return False


def _names_batch_norm(code: CodeType) -> bool:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return "batch_norm" in code.co_names or any(map(_names_batch_norm, nested))


def _is_call_in_training(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) in [f"{prefix}batch_norm" for prefix in PREFIXES]):
        return False
    given = [value for i, value in enumerate(node.args) if i == TRAINING_INDEX or isinstance(value, ast.Starred)]
    given += [keyword.value for keyword in node.keywords if keyword.arg in ("training", None)]
    return any(ast.unparse(value) != "False" for value in given)


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


class LayerSummary(NamedTuple):
    """A synchronised layer: one row of the table. The fields are the columns."""

    layer: str  # Dotted name in the model.
    kind: str  # Name of the class.
    channels: int  # C
    group_size: int  # Number of ranks; 1 without a process group.
    forward_bytes: int  # Payload of the forward pass in bytes: 8 * (2C + 5), or 0 in a group of one rank.
    backward_bytes: int  # The same for the backward pass.
    last_step: str  # Whether the last training step synchronised; see `summary`.


class Summary(tuple[LayerSummary, ...]):
    """The rows that `summary` returns. They print as a table with a row of totals, `others`, and the kernels in use."""

    # Up to two lines with remedies: one for layers that are not synchronised, and one for layers of nn.SyncBatchNorm.
    others: tuple[str, ...] = ()

    def __repr__(self) -> str:
        if not self:
            return "\n".join(self.others) or "no synchronised layers: the model has no batch-norm layer that trains"
        header = ("layer", "class", "channels", "group size", "bytes forward", "bytes backward", "last step")
        num_bytes = (sum(row.forward_bytes for row in self), sum(row.backward_bytes for row in self))
        rows = table(header, self, ("total", "", "", "", *num_bytes, ""))
        return "\n".join((rows, *self.others, f"kernels: {kernels.available()}"))


def summary(model: nn.Module) -> Summary:
    """Return a printable table of the synchronised layers of `model`, one row per layer. Does not communicate.

    Columns: dotted name; class; channels C; number of ranks in the group; payload in bytes of a training step, forward
    and backward (in a small gloo group each rank sends these bytes to every other rank, see docs/performance.md); the
    last training step:

        synchronised over N ranks, not synchronised   as recorded in eager mode
        compiled    the layer is in a compiled module, which records nothing
        not known   no record, but the layer has counted batches: in a compiled function, before it was converted, or
                    before its state_dict was saved; or the forward of a subclass calls no batch norm in training
        none yet    no record, and the layer has counted no batches

    Lines below the table list the layers that are not synchronised, and the layers of nn.SyncBatchNorm, which another
    converter may have added. The lines contain remedies.

    **Raises** TypeError unless `model` is a module.
    """
    check_module(model)
    compiled = {part for module in model.modules() if is_compiled(module) for part in module.modules()}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)}
    rows = Summary(_row(name or "(the model)", layer, layer in compiled) for name, layer in layers.items())
    # Once a model has synchronised layers, leave out CUSTOM modules, which may call syncbn.functional, and layers in
    # evaluation mode, which are frozen.
    others = [row for row in unsynchronised(model) if not rows or (row.remedy != CUSTOM and row.layer.training)]
    local = [row for row in others if not isinstance(row.layer, nn.SyncBatchNorm)]
    parts = ("not synchronised", local), (BY_TORCH, [row for row in others if row not in local])
    rows.others = tuple(f"{what}: {describe_layers(part)}" for what, part in parts if part)
    return rows


def _row(name: str, layer: SyncBatchNorm, compiled: bool) -> LayerSummary:
    group_size = groups.size(layer._process_group)
    num_channels = layer_channels(layer)
    num_bytes = payload.BYTES_PER_ELEMENT * payload.num_elements(num_channels) if group_size > 1 else 0
    last_step = "compiled" if compiled else _last_eager_step(layer)
    return LayerSummary(name, type(layer).__name__, num_channels, group_size, num_bytes, num_bytes, last_step)


def _last_eager_step(layer: SyncBatchNorm) -> str:
    """Return the last column of `summary` for a layer that is not in a compiled module."""
    num_ranks, counter = layer._synchronised_ranks, layer.num_batches_tracked
    if num_ranks is None:
        has_trained = counter is not None and not counter.is_meta and int(counter) > 0
        return "not known" if has_trained else "none yet"
    if num_ranks == UNKNOWN_NUM_RANKS:
        return "not known"
    return "not synchronised" if num_ranks == 1 else f"synchronised over {num_ranks} ranks"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], footer: Sequence[object] = ()) -> str:
    """Return the header, a line per row, and the footer, between rules. Columns are as wide as their longest text, so
    that nothing is cut, whatever the width of the terminal."""
    texts = [tuple(map(str, row)) for row in (header, *rows, footer) if row]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
    rule = "  ".join("-" * width for width in widths)
    lines.insert(1, rule)
    if footer:
        lines.insert(-1, rule)
    return "\n".join(lines)
