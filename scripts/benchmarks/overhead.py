"""Time what synchronising a tiny layer costs beyond its two all_reduces.

    torchrun --nproc-per-node 2 scripts/bench.py overhead

Three calls take turns, forward and backward of (2, 8, 2, 2) float32: a synchronised layer; a layer by itself
(process_group=1); and an autograd Function that only issues the same two all_reduces. The overhead is what the first
takes beyond the sum of the others: signatures, positions, the error messages. Prints rank 0's medians over the rounds,
in microseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.measuring import in_turn, session
from torch import Tensor

import syncbn

CHANNELS = 8
NUMBERS = 2 * CHANNELS + 4  # float64, of an all_reduce


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=31, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of a round (default %(default)s)")


class TwoAllReduces(torch.autograd.Function):
    """Computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        dist.all_reduce(torch.zeros(NUMBERS, dtype=torch.float64))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dist.all_reduce(torch.zeros(NUMBERS, dtype=torch.float64))
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def time_steps(layer: Callable[[Tensor], Tensor], steps: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Microseconds of forward and backward, means of these steps."""
    x, dy = torch.randn(2, CHANNELS, 2, 2, requires_grad=True), torch.randn(2, CHANNELS, 2, 2)
    if dist.is_initialized():
        dist.barrier()
    forward = backward = 0.0
    for _ in range(steps):
        x.grad = None
        start = clock()
        y = layer(x)
        middle = clock()
        y.backward(dy)
        forward, backward = forward + middle - start, backward + clock() - middle
    return forward / steps * 1e6, backward / steps * 1e6


def run(arguments: argparse.Namespace) -> None:
    with session(on_cpu=True) as here:
        if not dist.is_initialized():
            raise SystemExit("torchrun starts this part: it needs a process group")
        alone = syncbn.SyncBatchNorm2d(CHANNELS, process_group=1)
        layers = {
            "synchronised": syncbn.SyncBatchNorm2d(CHANNELS),
            "alone": alone,
            "two all_reduces": lambda x: TwoAllReduces.apply(x, alone.weight, alone.bias),
        }
        calls = {name: partial(time_steps, one, arguments.steps, time.perf_counter) for name, one in layers.items()}
        times = {
            name: [sum(one) for one in found] for name, found in in_turn(calls, arguments.rounds, warm_up=2).items()
        }
        times["overhead"] = [whole - one - two for whole, one, two in zip(*times.values(), strict=True)]
        for name, values in times.items():
            here.print(f"{name:16} {statistics.median(values):7.1f} us")
