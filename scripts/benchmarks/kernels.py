"""Time each function of the kernels on large tensors beside a copy: how much of the memory's speed does it reach?

    python scripts/bench.py kernels                                          a GPU if there is one, else a CPU thread
    python scripts/bench.py kernels --shapes 64x256x56x56 --dtypes float32

A time is the median over the rounds. A kernel's rate is the bytes that it must read and write, divided by its time; 1
is the rate of y.copy_(x) of the same tensors in the same run. On GPUs the L2 cache is emptied before each call, and
ATen's own kernels for nn.SyncBatchNorm stand beside. Prints a table, and writes kernels.json to --output.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from benchmarks.measuring import Case, Stopwatch, cases, draw, in_turn, session

from syncbn.kernels import select
from syncbn.layout import Layout

EPS = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", default=["256x256x56x56", "256x2048x14x14"], help="(default %(default)s)")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default %(default)s)")
    add("--rounds", type=int, default=20, help="(default %(default)s)")
    add("--output", type=Path, default=Path("runs/kernels"), help="folder (default %(default)s)")


def calls_of(case: Case, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> what to call, and how many tensors of the input's size it must read and write."""
    x, z, dy = (tensor.detach() for tensor in draw(case, device))
    layout = Layout.of(x, case.channel_dim)
    of_parameters = {"dtype": case.dtype_of_parameters, "device": device}
    weight, bias = torch.ones(case.channels, **of_parameters), torch.zeros(case.channels, **of_parameters)
    kernels = select._in_eager_mode(x)
    sums = kernels.forward_sums(x, layout)
    y, packed = kernels.forward_outputs(x, layout, sums, weight, bias, z, EPS, True)
    dtypes = weight.dtype, bias.dtype
    sums_of_dy, _, _ = kernels.backward_sums(dy, x, y, layout, packed, *dtypes)
    copy = torch.empty_like(x)
    forward_outputs = partial(kernels.forward_outputs, x, layout, sums, weight, bias)
    backward_outputs = partial(kernels.backward_outputs, dy, x)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (partial(copy.copy_, x), 2),
        "x.sum()": (x.sum, 1),
        "forward_sums": (partial(kernels.forward_sums, x, layout), 1),
        "forward_outputs": (partial(forward_outputs, None, EPS, False), 2),
        "backward_sums": (partial(kernels.backward_sums, dy, x, None, layout, packed, *dtypes), 2),
        "backward_outputs": (partial(backward_outputs, None, layout, sums_of_dy, packed, weight, False), 3),
        "forward_outputs fused": (partial(forward_outputs, z, EPS, True), 3),
        "backward_sums fused": (partial(kernels.backward_sums, dy, x, y, layout, packed, *dtypes), 3),
        "backward_outputs fused": (partial(backward_outputs, y, layout, sums_of_dy, packed, weight, True), 5),
    }
    if device.type == "cuda" and case.channel_dim == 1:
        mean, invstd = torch.batch_norm_stats(x, EPS)
        reduced = partial(torch.batch_norm_backward_reduce, dy, x, mean, invstd, weight, True, True, True)
        sum_dy, sum_dy_xmu, _, _ = reduced()
        count = torch.tensor([x.numel() // case.channels], dtype=torch.int32, device=device)
        for_backward = dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count
        calls |= {
            "ATen batch_norm_stats": (partial(torch.batch_norm_stats, x, EPS), 1),
            "ATen batch_norm_elemt": (partial(torch.batch_norm_elemt, x, weight, bias, mean, invstd, EPS), 2),
            "ATen batch_norm_backward_reduce": (reduced, 2),
            "ATen batch_norm_backward_elemt": (partial(torch.batch_norm_backward_elemt, *for_backward), 3),
        }
    return calls


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds; what the call returns is freed afterwards."""
    watch = Stopwatch(device)
    result = call()
    watch.lap()
    (milliseconds,) = watch.laps()
    del result
    return milliseconds


def run_case(case: Case, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, and its share of the copy's rate."""
    calls = calls_of(case, device)
    samples = in_turn({name: partial(time_call, call, device) for name, (call, _) in calls.items()}, rounds, warm_up=2)
    times = {name: statistics.median(values) for name, values in samples.items()}
    return {
        name: {"ms": times[name], "share of copy": tensors / 2 * times["copy"] / times[name]}
        for name, (_, tensors) in calls.items()
    }


def limit(kernels: dict[str, dict[str, float]]) -> float:
    """The time of torch's own operations that read and write what a step does, by that of the step's functions."""
    step = "forward_sums", "forward_outputs", "backward_sums", "backward_outputs"
    return (4 * kernels["x.sum()"]["ms"] + 2 * kernels["copy"]["ms"]) / sum(kernels[name]["ms"] for name in step)


def run(arguments: argparse.Namespace) -> None:
    with session(threads=1) as here:
        results = {}
        for case in cases(arguments.shapes, arguments.dtypes):
            results[case.name] = kernels = run_case(case, here.device, arguments.rounds)
            rows = [(name, f"{one['ms']:.3f}", f"{one['share of copy']:.2f}") for name, one in kernels.items()]
            here.show(f"\n{case.name}", ("function", "ms", "share of the copy's rate"), rows)
            here.console.print(f"4 x.sum() and 2 copies / the four functions: {limit(kernels):.2f}")
            here.write(arguments.output / "kernels.json", kernels=results)
