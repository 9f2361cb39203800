"""The all-reduces of batch norm: what is sent, how often, and the mark of a faulty rank.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | numbers | received everywhere       |
|----------|---------------------------------------------|---------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, n_r             | 2C + 1  | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean)                 | 2C      | their sums over all ranks |

All numbers are float64: sums about zero, so that uneven and empty ranks need no special case. Each pass is exactly one
all_reduce when the group has two or more ranks, and none otherwise (`group` is None). A rank whose arguments are bad
cannot compute its sums but must not leave
the others waiting: it joins the forward all_reduce with zeros and n_r = NaN, which every rank sees in the total.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce_sums(sums: tuple[Tensor, ...], group: dist.ProcessGroup | None) -> Tensor:
    """The sums over all ranks of the backward payload: `sums`, each float64 (C,), packed in one tensor."""
    packed = torch.cat(sums)
    if group is not None:
        dist.all_reduce(packed, group=group)
    return packed


def all_reduce_counted_sums(sums: tuple[Tensor, ...], num_values: int, group: dist.ProcessGroup | None) -> Tensor:
    """The sums over all ranks of the forward payload: `sums`, each float64 (C,), then this rank's values per channel.

    **Raises** on every rank what any rank reports through `raise_on_all_ranks`. The total is read on CPU in eager mode
    only: on a GPU that would stop the host, in a compiled graph it would split the graph.
    """
    packed = all_reduce_sums((*sums, sums[0].new_full((1,), num_values)), group)
    if group is not None and _can_read(packed) and math.isnan(packed[-1]):
        _exchange_faults(None, group)
    return packed


def require_two_values(num_values: Tensor, input_shape: torch.Size) -> None:
    """F.batch_norm's ValueError when the whole group has one value per channel; read on CPU in eager mode only."""
    if _can_read(num_values) and num_values == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, got 1 over all ranks "
            f"(input size on this rank {tuple(input_shape)}). Use a larger batch or eval()."
        )


def raise_on_all_ranks(
    error: Exception, num_channels: int, device: torch.device, group: dist.ProcessGroup | None
) -> NoReturn:
    """Join the forward all_reduce of `num_channels` channels as a faulty rank, then raise `error` on every rank.

    On a GPU and in compiled graphs, where no rank reads the mark, `error` is raised on this rank alone.
    """
    if group is None or device.type != "cpu" or torch.compiler.is_compiling():
        raise error
    payload = torch.zeros(2 * num_channels + 1, dtype=torch.float64, device=device)
    payload[-1] = math.nan
    dist.all_reduce(payload, group=group)
    _exchange_faults(error, group)


def _can_read(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _exchange_faults(error: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Every rank tells its error or None; all raise the first faulty rank's type with every faulty rank's text."""
    errors: list[Exception | None] = [None] * group.size()
    dist.all_gather_object(errors, error, group=group)
    ranks_by_text: dict[str, list[int]] = {}
    for group_rank, fault in enumerate(errors):
        if fault is not None:
            ranks_by_text.setdefault(str(fault), []).append(dist.get_global_rank(group, group_rank))
    lines = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_by_text.items()]
    first = next(fault for fault in errors if fault is not None)
    raise type(first)("\n".join(lines)) from error
