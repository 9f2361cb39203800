"""Adds up a payload over the ranks of a group, in one collective, alike on every road.

gloo's all_reduce is a ring, in which W ranks wait for 2 (W - 1) messages one after another. In an exchange
(all_to_all_single) each rank sends its payload to all others at once and adds up what it receives, in the order of the
ranks, so that all ranks have the same bits. It sends W / 2 times the bytes: small groups of gloo exchange payloads on
CPU that are not long. All others all_reduce. A rank that exchanges waits until the time-out for one that all_reduces,
as for one in a collective of DistributedDataParallel: gloo does not notice.
"""

import functools
import math

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.torch_internals.distributed import all_reduce_operator, all_to_all_operator
from syncbn.torch_internals.state import constant_in_graphs

MOST_RANKS_OF_EXCHANGE = 16
MOST_NUMBERS_OF_EXCHANGE = 8192  # 64 kB; longer payloads take an exchange longer than a ring


@constant_in_graphs
def exchanges(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group exchange what they have on CPU."""
    return group.size() <= MOST_RANKS_OF_EXCHANGE and "cpu:gloo" in dist.get_backend_config(group).split(",")


def all_reduce(payload: Tensor, group: dist.ProcessGroup, exchanges: bool, by_operator: bool = False) -> Tensor:
    """The total of `payload`, which it may overwrite; `by_operator` by one that a dispatch mode can save."""
    if not (exchanges and payload.is_cpu and payload.numel() <= MOST_NUMBERS_OF_EXCHANGE):
        if by_operator:
            return all_reduce_operator(payload, group)
        dist.all_reduce(payload, group=group)
        return payload
    num_ranks = group.size()
    sent = payload.repeat(num_ranks)
    if by_operator:
        received = all_to_all_operator(sent, group)
    else:
        # In eager mode NaN stays where another rank has sent less; gloo aborts that rank alone.
        received = torch.full_like(sent, math.nan)
        dist.all_to_all_single(received, sent, group=group)
    return functools.reduce(torch.add, received.view(num_ranks, -1).unbind())
