"""Adds up a payload over the ranks of a group in one collective, the same on every path; and formats lists of ranks.

gloo's all_reduce is a ring, in which W ranks wait for 2 (W - 1) messages one after another. In an exchange
(all_to_all_single) each rank sends its payload to all others at once and adds up what it receives, in the order of the
ranks, so that all ranks have the same bits. It sends W / 2 times the bytes: small groups of gloo exchange payloads on
CPU that are not long. All others all_reduce. A rank that exchanges waits until the time-out for one that all_reduces,
as for one in a collective of DistributedDataParallel: gloo does not notice.
"""

import functools
import itertools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.torch_internals.distributed import ALL_REDUCE, ALL_TO_ALL, all_reduce_operator, all_to_all_operator
from syncbn.torch_internals.state import constant_in_graphs

MOST_RANKS_OF_EXCHANGE = 16
MOST_NUMBERS_OF_EXCHANGE = 8192  # 64 kB; longer payloads take an exchange longer than a ring


@constant_in_graphs
def num_exchanging(group: dist.ProcessGroup) -> int:
    """The number of ranks of a group that exchange what they have on CPU; 0 where they all_reduce."""
    is_gloo = "cpu:gloo" in dist.get_backend_config(group).split(",")
    return group.size() if is_gloo and group.size() <= MOST_RANKS_OF_EXCHANGE else 0


def all_reduce(payload: Tensor, group: dist.ProcessGroup, num_exchanging: int, by_operator: bool = False) -> Tensor:
    """Return the total of `payload`, which may be overwritten.

    `num_exchanging`: of the group. `by_operator`: by an operator that returns its result, which a dispatch mode can
    save and a compiler can trace.
    """
    if not (num_exchanging and payload.is_cpu and payload.numel() <= MOST_NUMBERS_OF_EXCHANGE):
        if by_operator:
            return all_reduce_operator(payload, group)
        work = group.allreduce([payload], ALL_REDUCE)
        if work is not None:  # else the result is there already
            work.wait()
        return payload
    sent = payload.repeat(num_exchanging)
    if by_operator:
        received = all_to_all_operator(sent, group)
    else:
        received = torch.full_like(
            sent, math.nan
        )  # stays where another rank has sent less: gloo aborts that rank alone
        group.alltoall_base(received, sent, [], [], ALL_TO_ALL).wait()
    return functools.reduce(torch.add, received.chunk(num_exchanging))


def by_rank(ranks: Iterable[int], texts: Iterable[str]) -> str:
    """A line for each text that is not empty, with its ranks: "ranks 0-2, 5: in bn1 forward, call 3"."""
    lines: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        lines.setdefault(text, []).append(rank)
    return "\n".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in lines.items() if text)


def ranks_in_words(ranks: list[int]) -> str:
    """ranks 0-2, 5."""
    index = itertools.count()  # in a run of consecutive ranks, rank - index is constant
    runs = [[*run] for _, run in itertools.groupby(ranks, lambda rank: rank - next(index))]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
