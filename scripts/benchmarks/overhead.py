"""Time what synchronising a tiny layer costs beyond its two all_reduces.

    torchrun --nproc-per-node 2 scripts/bench.py overhead

Three things take turns, with (2, 8, 2, 2) float32: forward and backward of a synchronised layer, those of a layer by
itself (process_group=1), and two bare all_reduces of as many numbers. The overhead is the first less the other two.
Prints rank 0's medians over the rounds, in microseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from benchmarks.measuring import in_turn, session
from torch import Tensor

import syncbn

CHANNELS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=31, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of a round (default %(default)s)")


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


def time_all_reduces(steps: int) -> tuple[float]:
    """Microseconds of two all_reduces, the mean of so many pairs."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(2 * steps):
        dist.all_reduce(torch.zeros(2 * CHANNELS + 4, dtype=torch.float64))
    return ((time.perf_counter() - start) / steps * 1e6,)


def run(arguments: argparse.Namespace) -> None:
    with session(on_cpu=True) as here:
        if not dist.is_initialized():
            raise SystemExit("torchrun starts this part: it needs a process group")
        layers = [syncbn.SyncBatchNorm2d(CHANNELS, process_group=group) for group in (None, 1)]
        calls = [partial(time_steps, layer, arguments.steps, time.perf_counter) for layer in layers]
        calls.append(partial(time_all_reduces, arguments.steps))
        names = ("synchronised", "alone", "two all_reduces")
        samples = in_turn(dict(zip(names, calls, strict=True)), arguments.rounds, warm_up=2)
        times = {name: [sum(one) for one in found] for name, found in samples.items()}
        times["overhead"] = [whole - one - two for whole, one, two in zip(*times.values(), strict=True)]
        for name, values in times.items():
            here.print(f"{name:16} {statistics.median(values):7.1f} us")
