"""Finds the modules of a model that a conversion leaves, says what to do about each, and summarises those that it
has made."""

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

from syncbn import kernels
from syncbn.arguments import layer_channels
from syncbn.kernels.interface import TRAILER_ELEMENTS
from syncbn.layer import UNKNOWN_NUM_RANKS, SyncBatchNorm
from syncbn.ranks import groups
from syncbn.texts import quote_path
from syncbn.torch_internals import is_compiled

# Attributes that a conversion gives to a layer and a revert takes away: among them all that our class annotates.
# process_group, a property of ours, is an attribute of an nn.SyncBatchNorm.
ADDED_ATTRIBUTES = "process_group", "_original_class", *SyncBatchNorm.__annotations__

# What to do about a layer; `_remedy` has more.
CONVERTIBLE = "call syncbn.convert_syncbn_model(model)"
CUSTOM = "may normalise by its batch; if so, let its forward call syncbn.functional.sync_batch_norm"
EXPORTED = "a part of a scripted or exported model, convert before torch.jit or torch.export"
CALLS_FUNCTION = (
    "may normalise by its batch, by F.batch_norm; if so, call syncbn.functional.sync_batch_norm in its place"
)
UNREGISTERED = "keeps batch norm in a plain list or dict, where no conversion finds it; use nn.ModuleList or ModuleDict"
OVERRIDDEN = (
    "a forward that was set on the layer hides the class's; convert before you wrap it, or write it in a subclass"
)

MAX_NAMED = 3  # layers of a class that are named
MAX_INSPECTED = 100  # elements of a list or dict: it may hold a data set
PREFIXES = "", "F.", "functional.", "nn.functional.", "torch.nn.functional.", "torch."  # of a call of batch_norm
TRAINING_INDEX = 5  # the position of the argument `training` of F.batch_norm and torch.batch_norm
# Raised for a method that has no source or wraps itself, and for source that is incomplete or nested too deeply.
SOURCE_ERRORS = OSError, SyntaxError, TokenError, ValueError, RecursionError, MemoryError

BYTES_PER_ELEMENT = 8  # float64
BY_TORCH = "synchronised by torch's nn.SyncBatchNorm, on GPUs alone"


class LocalLayer(NamedTuple):
    """A layer that may normalise each rank's batch alone."""

    name: str  # in the model
    layer: nn.Module
    remedy: str  # CONVERT where it can be converted


def check_module(model: nn.Module) -> None:
    """**Raises** TypeError unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {model!r} of type {type(model).__name__}; pass the model")


def unparametrized_class(layer: nn.Module) -> type[nn.Module]:
    """The layer's class, below the one that torch.nn.utils.parametrize makes for each layer."""
    return type(layer).__bases__[0] if nn.utils.parametrize.is_parametrized(layer) else type(layer)


def unsynchronised(model: nn.Module) -> list[LocalLayer]:
    """The layers of `model` that may normalise each rank's batch alone."""
    modules = set(model.modules())
    calling = {kind for kind in {type(module) for module in modules} if calls_batch_norm(kind)}
    layers: list[LocalLayer] = []
    for name, module in model.named_modules():
        remedy = _remedy(module)
        if remedy in (None, CUSTOM) and not isinstance(module, SyncBatchNorm):
            if type(module) in calling:
                remedy = CALLS_FUNCTION
            elif any(
                _remedy(part) == CONVERTIBLE and part.training
                for part in _unregistered_modules(module)
                if part not in modules
            ):
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
    except SOURCE_ERRORS:
        return False


def _names_batch_norm(code: CodeType) -> bool:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return "batch_norm" in code.co_names or any(map(_names_batch_norm, nested))


def _is_call_in_training(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) in [f"{prefix}batch_norm" for prefix in PREFIXES]):
        return False
    given = [
        value for place, value in enumerate(node.args) if place == TRAINING_INDEX or isinstance(value, ast.Starred)
    ]
    given += [keyword.value for keyword in node.keywords if keyword.arg in ("training", None)]
    return any(ast.unparse(value) != "False" for value in given)


def _unregistered_modules(module: nn.Module) -> list[nn.Module]:
    """The modules in the lists, tuples and dicts that are attributes of `module`, and all modules within those, without
    nn.SyncBatchNorm."""
    # Not of a subclass of dict, in which Lightning copies a module's arguments.
    values = [value for value in vars(module).values() if type(value) in (list, tuple, dict)]
    items = [
        item for value in values for item in islice(value.values() if isinstance(value, dict) else value, MAX_INSPECTED)
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
        return EXPORTED if type(module).__module__.startswith("torch.") else CUSTOM
    original = unparametrized_class(module)
    if original is not nn.SyncBatchNorm:
        if issubclass(original, nn.SyncBatchNorm):
            return "a subclass of nn.SyncBatchNorm communicates by itself, derive it from nn.BatchNorm1d, 2d or 3d"
        taken = [name for name in ADDED_ATTRIBUTES if hasattr(module, name)]
        if taken:
            return f"has attributes that ours need, rename {', '.join(taken)}"
    return OVERRIDDEN if "forward" in vars(module) else CONVERTIBLE


def describe_layers(layers: list[LocalLayer]) -> str:
    """For each class and remedy: how many layers there are, the names of the first, and the remedy."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, layer, remedy in layers:
        names.setdefault((unparametrized_class(layer).__name__, remedy), []).append(name)
    return "; ".join(
        f"{len(group)} {kind} ({shorten_names(group)}): {remedy}" for (kind, remedy), group in names.items()
    )


def shorten_names(names: list[str]) -> str:
    """The first of these layers' names, with "..." for the others."""
    return ", ".join(
        [quote_path(name) or "the model" for name in names[:MAX_NAMED]] + ["..."] * (len(names) > MAX_NAMED)
    )


class LayerSummary(NamedTuple):
    """One synchronised layer. Its fields are the columns of the table, in order."""

    layer: str  # name in the model
    kind: str  # class
    channels: int  # C
    group_size: int  # ranks; 1 without a process group
    forward_bytes: int  # the payload of a training step: 8 * (2C + 4); 0 in a group of one
    backward_bytes: int  # the same
    last_step: str  # whether the last training step in eager mode synchronised


class Summary(tuple[LayerSummary, ...]):
    """The rows that `summary` returns; printed, a table with a line of totals, `others` and one about the kernels."""

    others: tuple[str, ...] = ()  # a line for those that are not synchronised and one for torch's, with what to do

    def __repr__(self) -> str:
        if not self:
            return "\n".join(self.others) or "no synchronised layers: the model has no batch-norm layer that trains"
        header = ("layer", "class", "channels", "group size", "bytes forward", "bytes backward", "last step")
        num_bytes = (sum(row.forward_bytes for row in self), sum(row.backward_bytes for row in self))
        rows = table(header, self, ("total", "", "", "", *num_bytes, ""))
        return "\n".join((rows, *self.others, f"kernels: {kernels.available()}"))


def summary(model: nn.Module) -> Summary:
    """A printable table of the synchronised layers of `model`, one row a layer. Communicates nothing.

    Columns: name; class; channels; number of ranks in its group; bytes of the payload of a training step, forward and
        backward (a small group of gloo sends it to each other rank, docs/scaling.md); and whether the layer really
        synchronised in its last training step, and over how many ranks. The last is recorded in eager mode only: for a
        layer in a compiled module, if that is `model` or inside it, the column says "compiled"; for a layer that has
        counted batches without a record, as in a compiled function or before it was converted, copied or loaded, "not
        known"; for one that has counted none, "none yet". Lines below name the batch norm of the model that is not
        synchronised, as another converter may have made it since, and what torch's nn.SyncBatchNorm synchronises, with
        what to do.

    **Raises** TypeError unless `model` is a module.
    """
    check_module(model)
    compiled = {part for module in model.modules() if is_compiled(module) for part in module.modules()}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)}
    rows = Summary(_row(name or "(the model)", layer, layer in compiled) for name, layer in layers.items())
    # A layer that normalises by itself may call ours, and a frozen layer normalises by its running statistics.
    others = [row for row in unsynchronised(model) if not rows or (row.remedy != CUSTOM and row.layer.training)]
    local = [row for row in others if not isinstance(row.layer, nn.SyncBatchNorm)]
    parts = ("not synchronised", local), (BY_TORCH, [row for row in others if row not in local])
    rows.others = tuple(f"{what}: {describe_layers(part)}" for what, part in parts if part)
    return rows


def _row(name: str, layer: SyncBatchNorm, compiled: bool) -> LayerSummary:
    group_size = groups.size(layer._process_group)
    num_channels = layer_channels(layer)
    num_bytes = BYTES_PER_ELEMENT * (2 * num_channels + TRAILER_ELEMENTS) if group_size > 1 else 0
    last_step = "compiled" if compiled else _last_eager_step(layer)
    return LayerSummary(name, type(layer).__name__, num_channels, group_size, num_bytes, num_bytes, last_step)


def _last_eager_step(layer: SyncBatchNorm) -> str:
    """What is known of the layer's last eager step. Without one since it was converted, copied or loaded the layer may
    have counted batches, in compiled graphs or before."""
    num_ranks, counter = layer._synchronised_ranks, layer.num_batches_tracked
    if num_ranks is None:
        has_trained = counter is not None and not counter.is_meta and int(counter) > 0
        return "not known" if has_trained else "none yet"
    if num_ranks == UNKNOWN_NUM_RANKS:
        return "not known"
    return "not synchronised" if num_ranks == 1 else f"synchronised over {num_ranks} ranks"


def table(header: Sequence[str], rows: Iterable[Sequence[object]], footer: Sequence[object] = ()) -> str:
    """The header, a line for each row, and the footer, between rules. Columns are as wide as their longest text,
    whatever the terminal's width, so that nothing is cut."""
    texts = [tuple(map(str, row)) for row in (header, *rows, footer) if row]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
    rule = "  ".join("-" * width for width in widths)
    lines.insert(1, rule)
    if footer:
        lines.insert(-1, rule)
    return "\n".join(lines)
