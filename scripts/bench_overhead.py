"""Time what synchronising a tiny layer costs beyond its two all_reduces.

    torchrun --nproc-per-node 2 scripts/bench_overhead.py

In turn, forward and backward of (2, 8, 2, 2) float32: a synchronised layer; the same layer by itself (process_group=1);
an autograd Function that only issues the same two all_reduces. What the first takes beyond the sum of the other two is
the overhead: signatures, positions, the error messages. Prints rank 0's medians over the rounds, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import syncbn

CHANNELS = 8
NUMBERS = 2 * CHANNELS + 4  # float64, of an all_reduce


class TwoAllReduces(torch.autograd.Function):
    """Computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """An all_reduce."""
        ctx.save_for_backward(x, weight)
        dist.all_reduce(torch.zeros(NUMBERS, dtype=torch.float64))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Another."""
        x, weight = ctx.saved_tensors
        dist.all_reduce(torch.zeros(NUMBERS, dtype=torch.float64))
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def microseconds(call: Callable[[Tensor], Tensor], steps: int) -> float:
    """Of forward and backward, the mean of these steps."""
    x, dy = torch.randn(2, CHANNELS, 2, 2, requires_grad=True), torch.randn(2, CHANNELS, 2, 2)
    start = time.perf_counter()
    for _ in range(steps):
        x.grad = None
        call(x).backward(dy)
    return (time.perf_counter() - start) / steps * 1e6


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of a round (default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone = syncbn.SyncBatchNorm2d(CHANNELS, process_group=1)
    weight, bias = alone.weight, alone.bias
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "synchronised": syncbn.SyncBatchNorm2d(CHANNELS),
        "alone": alone,
        "two all_reduces": lambda x: TwoAllReduces.apply(x, weight, bias),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(2 + arguments.rounds):
        for name, call in calls.items():
            dist.barrier()
            taken = microseconds(call, arguments.steps)
            if index >= 2:
                samples[name].append(taken)
    overheads = [whole - one - two for whole, one, two in zip(*samples.values(), strict=True)]
    if dist.get_rank() == 0:
        for name, values in (samples | {"overhead": overheads}).items():
            print(f"{name:16} {statistics.median(values):7.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
