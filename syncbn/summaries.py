"""Summarises the synchronised layers of a model in a table, and names those that do not synchronise."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from syncbn import kernels, payload
from syncbn.arguments import check_module, layer_channels
from syncbn.layer import UNKNOWN_NUM_RANKS, SyncBatchNorm
from syncbn.ranks import groups
from syncbn.torch_internals import is_compiled
from syncbn.unconverted import CUSTOM, describe_layers, unsynchronised

BY_TORCH = "synchronised by torch's nn.SyncBatchNorm, on GPUs only"


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
