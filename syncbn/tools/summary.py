"""Summarises a model's synchronised layers in a table: the payload of each, and whether it really synchronised."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from syncbn import kernels
from syncbn.arguments import num_channels_of
from syncbn.convert import check_module
from syncbn.kernels.interface import TRAILER_NUMBERS
from syncbn.layer import SyncBatchNorm
from syncbn.ranks import groups
from syncbn.synchronised_classes import NOT_KNOWN
from syncbn.torch_internals.modules import is_compiled
from syncbn.unsynchronised import BY_ITSELF, description, unsynchronised

BYTES_PER_NUMBER = 8  # float64
BY_TORCH = "synchronised by torch's nn.SyncBatchNorm, on GPUs alone"


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
    others = [row for row in unsynchronised(model) if not rows or (row.remedy != BY_ITSELF and row.layer.training)]
    local = [row for row in others if not isinstance(row.layer, nn.SyncBatchNorm)]
    parts = ("not synchronised", local), (BY_TORCH, [row for row in others if row not in local])
    rows.others = tuple(f"{what}: {description(part)}" for what, part in parts if part)
    return rows


def _row(name: str, layer: SyncBatchNorm, compiled: bool) -> LayerSummary:
    group_size = groups.size(layer._process_group)
    num_channels = num_channels_of(layer)
    num_bytes = BYTES_PER_NUMBER * (2 * num_channels + TRAILER_NUMBERS) if group_size > 1 else 0
    last_step = "compiled" if compiled else _last_eager_step(layer)
    return LayerSummary(name, type(layer).__name__, num_channels, group_size, num_bytes, num_bytes, last_step)


def _last_eager_step(layer: SyncBatchNorm) -> str:
    """What is known of the layer's last eager step. Without one since it was converted, copied or loaded the layer may
    have counted batches, in compiled graphs or before."""
    num_ranks, counter = layer._synchronised_ranks, layer.num_batches_tracked
    if num_ranks is None:
        has_trained = counter is not None and not counter.is_meta and int(counter) > 0
        return "not known" if has_trained else "none yet"
    if num_ranks == NOT_KNOWN:
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
