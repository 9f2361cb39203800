"""Makes the table of a model's synchronised layers: what each sends, and whether it really synchronised."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from syncbn import convertibility, kernels
from syncbn.convert import check_module
from syncbn.distributed import groups
from syncbn.kernels.plans import NUM_SIGNED
from syncbn.layer import SyncBatchNorm
from syncbn.tools.table import table
from syncbn.torch_private import is_compiled

BYTES_PER_NUMBER = 8  # float64


class LayerSummary(NamedTuple):
    """One synchronised layer. Its fields are the columns of the table, in order."""

    layer: str  # name in the model
    kind: str  # class
    channels: int  # C
    group_size: int  # ranks; 1 without a process group
    forward_bytes: int  # sent per training step: 8 * (2C + 1), on CPU 8 * (2C + 4); 0 in a group of one
    backward_bytes: int  # 8 * 2C, on CPU 8 * (2C + 4); 0 in a group of one
    last_step: str  # whether the last training step in eager mode synchronised


class Summary(tuple[LayerSummary, ...]):
    """The rows that `summary` returns; printed, a table with a line of totals and one about the kernels."""

    why_empty: str = ""

    def __str__(self) -> str:
        if not self:
            return f"no synchronised layers: {self.why_empty}"
        header = ("layer", "class", "channels", "group size", "bytes forward", "bytes backward", "last eager step")
        num_bytes = (sum(row.forward_bytes for row in self), sum(row.backward_bytes for row in self))
        return f"{table(header, self, ('total', '', '', '', *num_bytes, ''))}\nkernels: {kernels.available()}"

    __repr__ = __str__


def summary(model: nn.Module) -> Summary:
    """A printable table of the synchronised layers of `model`, one row a layer. Communicates nothing.

    Columns: name; class; channels; ranks of its group; bytes it sends per training step forward and backward; and
        whether it really synchronised in its last training step, over how many ranks. That is recorded in eager mode
        only: a layer in a module that torch.compile has wrapped says "compiled", if `model` is that or holds it; one
        that has counted batches otherwise, compiled or before it was loaded, says how many.

    **Raises** TypeError unless `model` is a module.
    """
    check_module(model)
    compiled = {part for module in model.modules() if is_compiled(module) for part in module.modules()}
    rows = Summary(
        _row(name or "(the model)", layer, layer in compiled)
        for name, layer in model.named_modules()
        if isinstance(layer, SyncBatchNorm)
    )
    if not rows:
        rows.why_empty = (
            convertibility.described(convertibility.unsynchronised(model)) or "the model has no batch norm that trains"
        )
    return rows


def _row(name: str, layer: SyncBatchNorm, compiled: bool) -> LayerSummary:
    group_size = groups.size(layer._process_group)
    forward_bytes, backward_bytes = bytes_if_synchronised(layer) if group_size > 1 else (0, 0)
    if compiled:
        last_step = "compiled"
    elif layer._synchronised_ranks is None:
        last_step = _without_eager_step(layer)
    elif layer._synchronised_ranks == 1:
        last_step = "not synchronised"
    else:
        last_step = f"synchronised over {layer._synchronised_ranks} ranks"
    return LayerSummary(
        name,
        type(layer).__name__,
        layer.num_features,
        group_size,
        forward_bytes,
        backward_bytes,
        last_step,
    )


def bytes_if_synchronised(layer: _BatchNorm) -> tuple[int, int]:
    """The bytes that a rank sends in a call's forward and in its backward, in a group of two ranks or more."""
    numbers = 2 * layer.num_features
    on_cpu = all(tensor.is_cpu for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)))
    forward, backward = (1 + NUM_SIGNED, 1 + NUM_SIGNED) if on_cpu else (1, 0)  # beside the sums
    return BYTES_PER_NUMBER * (numbers + forward), BYTES_PER_NUMBER * (numbers + backward)


def _without_eager_step(layer: SyncBatchNorm) -> str:
    """The last column for a layer that has made no eager step in this process; it may have counted batches."""
    counter = layer.num_batches_tracked
    num_batches = 0 if counter is None or counter.is_meta or is_lazy(counter) else int(counter)
    return f"none here; {num_batches} compiled or loaded" if num_batches else "none yet"
