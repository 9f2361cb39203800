"""Time each function of the kernels on large tensors, compared with a copy.

    python scripts/bench.py kernels                                          a GPU if there is one, else a CPU thread
    python scripts/bench.py kernels --shapes 64x256x56x56 --dtypes float32

A time is the median over the rounds. The rate of a kernel is the number of bytes that the kernel must read and write,
divided by its time, relative to the rate of y.copy_(x) in the same run. On GPUs each call starts with a cold L2 cache.
Prints a table, and writes kernels.json to --output.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.measuring import Case, cases, draw, interleave, session, show, time_stages, write

from syncbn.kernels import reference
from syncbn.kernels.interface import BackwardConfig, ForwardConfig, ReluMask
from syncbn.kernels.layout import Layout
from syncbn.kernels.select import fast_path_back_end
from syncbn.payload import num_elements
from syncbn.statistics import pack

FUNCTIONS = "forward_sums", "forward_outputs", "backward_sums", "backward_outputs"  # the order of a training step
# Name -> call, number of tensors of the input's size that the call must read and write.
Calls = dict[str, tuple[Callable[[], object], int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", default=["256x256x56x56", "256x2048x14x14"], help="(default %(default)s)")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default %(default)s)")
    add("--rounds", type=int, default=20, help="(default %(default)s)")
    add("--output", type=Path, default=Path("runs/kernels"), help="folder (default %(default)s)")


def kernel_calls(case: Case, device: torch.device, back_end: Any = None) -> Calls:
    """Return the calls of the kernels' functions on random tensors. The default back end is the one that layers use."""
    x, z, dy = (tensor.detach() for tensor in draw(case, device))
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = torch.ones(case.channels, dtype=dtype, device=device)
    bias = torch.zeros_like(weight)
    double = {"dtype": torch.float64, "device": device}
    sums = torch.ones(num_elements(case.channels), **double)
    statistics = pack(*torch.ones(3, case.channels, **double), torch.ones(1, **double))  # any values take the same time
    layout = Layout.of(x, case.channel_dim), x.dtype, x.device
    back_end = back_end or fast_path_back_end(ForwardConfig(*layout)) or reference
    calls: Calls = {}
    for fused in (False, True):
        name, residual = (" fused", z) if fused else ("", None)
        saved = x, weight, statistics, residual  # With a fused relu a step saves y. Here the residual has its place.
        forward = back_end.Forward(ForwardConfig(*layout, 1e-5, fused, fused, dtype, dtype))
        mask = ReluMask.FROM_Y if fused else ReluMask.NONE
        options = {"needs_x": True, "needs_residual": fused}
        backward = back_end.Backward(BackwardConfig(*layout, mask, dtype, dtype, dtype, **options))
        outputs = partial(forward.forward_outputs, (x, weight, bias, residual), sums)
        if not fused:
            calls["forward_sums"] = partial(forward.forward_sums, x), 1
        calls[f"forward_outputs{name}"] = outputs, 2 + fused
        calls[f"backward_sums{name}"] = partial(backward.backward_sums, dy, saved), 2 + fused
        calls[f"backward_outputs{name}"] = partial(backward.backward_outputs, dy, saved, sums), 3 + 2 * fused
    return calls


def run_case(case: Case, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each call, and its share of the copy's rate."""
    x = draw(case, device)[0].detach()
    calls: Calls = {"copy": (partial(torch.empty_like(x).copy_, x), 2), "x.sum()": (x.sum, 1)}
    calls |= kernel_calls(case, device)
    timers = {name: partial(time_stages, device, call) for name, (call, _) in calls.items()}
    ms = {name: statistics.median(map(sum, times)) for name, times in interleave(timers, rounds, warm_up=2).items()}
    return {
        name: {"ms": ms[name], "share of the copy's rate": tensors / 2 * ms["copy"] / ms[name]}
        for name, (_, tensors) in calls.items()
    }


def run(arguments: argparse.Namespace) -> None:
    results = {}
    with session() as device:
        for case in cases(arguments.shapes, arguments.dtypes):
            results[case.name] = rows = run_case(case, device, arguments.rounds)
            show(case.name, rows)
            # Together, 4 x.sum() and 2 copies move as many bytes as the four functions of a step.
            limit = 4 * rows["x.sum()"]["ms"] + 2 * rows["copy"]["ms"]
            print(f"4 x.sum() and 2 copies / the four functions: {limit / sum(rows[f]['ms'] for f in FUNCTIONS):.2f}")
            write(arguments.output / "kernels.json", kernels=results)
