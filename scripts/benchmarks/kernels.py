"""Time each function of the kernels on large tensors beside a copy: how much of the memory's speed does it reach?

    python scripts/bench.py kernels                                          a GPU if there is one, else a CPU thread
    python scripts/bench.py kernels --shapes 64x256x56x56 --dtypes float32

A time is the median over the rounds. A kernel's rate is the bytes that it must read and write, divided by its time; 1
is the rate of y.copy_(x) of the same tensors in the same run. On GPUs the L2 cache is emptied before each call, and
scripts/gpu.sh has ATen's kernels beside these. Prints a table, and writes kernels.json to --output.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.measuring import Case, cases, draw, in_turn, session, time_stages

from syncbn import payload
from syncbn.kernels import reference
from syncbn.kernels.interface import BackwardConfig, ForwardConfig, ReluMask
from syncbn.kernels.layout import Layout
from syncbn.kernels.select import fast_path_back_end

EPS = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", default=["256x256x56x56", "256x2048x14x14"], help="(default %(default)s)")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default %(default)s)")
    add("--rounds", type=int, default=20, help="(default %(default)s)")
    add("--output", type=Path, default=Path("runs/kernels"), help="folder (default %(default)s)")


def calls_of(back_end: Any, case: Case, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> what to call, and how many tensors of the input's size it must read and write."""
    x, z, dy = (tensor.detach() for tensor in draw(case, device))
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (value(case.channels, dtype=dtype, device=device) for value in (torch.ones, torch.zeros))
    of_statistics = {"dtype": torch.float64, "device": device}
    sums = torch.ones(payload.num_elements(case.channels), **of_statistics)
    packed = torch.ones(3 * case.channels + 4, **of_statistics)
    copy, of_both = torch.empty_like(x), (Layout.of(x, case.channel_dim), x.dtype, x.device)

    calls: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (partial(copy.copy_, x), 2),
        "x.sum()": (x.sum, 1),
    }
    for name, residual in (("", None), (" fused", z)):  # which stands for y, too, of which only the signs matter
        fused = residual is not None
        saved = x, weight, packed, residual
        forward = back_end.Forward(ForwardConfig(*of_both, EPS, fused, fused, dtype, dtype))
        backward = back_end.Backward(
            BackwardConfig(
                *of_both,
                ReluMask.FROM_Y if fused else ReluMask.NONE,
                dtype,
                dtype,
                dtype,
                needs_x=True,
                needs_residual=fused,
            )
        )
        if not fused:
            calls["forward_sums"] = partial(forward.forward_sums, x), 1
        outputs = partial(forward.forward_outputs, (x, weight, bias, residual), sums)
        calls[f"forward_outputs{name}"] = outputs, 2 + fused
        calls[f"backward_sums{name}"] = partial(backward.backward_sums, dy, saved), 2 + fused
        calls[f"backward_outputs{name}"] = partial(backward.backward_outputs, dy, saved, sums), 3 + 2 * fused
    return calls


def run_case(case: Case, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each call, and its share of the copy's rate."""
    x = draw(case, device)[0]
    kind = ForwardConfig(Layout.of(x, case.channel_dim), x.dtype, device)
    calls = calls_of(fast_path_back_end(kind) or reference, case, device)
    timers = {name: partial(time_stages, device, call) for name, (call, _) in calls.items()}
    samples = in_turn(timers, rounds, warm_up=2)
    times = {name: statistics.median(ms for (ms,) in values) for name, values in samples.items()}
    return {
        name: {"ms": times[name], "share of copy": tensors / 2 * times["copy"] / times[name]}
        for name, (_, tensors) in calls.items()
    }


def limit(kernels: dict[str, dict[str, float]]) -> float:
    """The time of torch's own operations that read and write what a step does, by that of the step's functions."""
    step = "forward_sums", "forward_outputs", "backward_sums", "backward_outputs"
    return (4 * kernels["x.sum()"]["ms"] + 2 * kernels["copy"]["ms"]) / sum(kernels[name]["ms"] for name in step)


def run(arguments: argparse.Namespace) -> None:
    with session() as here:
        results = {}
        for case in cases(arguments.shapes, arguments.dtypes):
            results[case.name] = kernels = run_case(case, here.device, arguments.rounds)
            rows = [(name, f"{one['ms']:.3f}", f"{one['share of copy']:.2f}") for name, one in kernels.items()]
            here.show(f"\n{case.name}", ("function", "ms", "share of the copy's rate"), rows)
            here.print(f"4 x.sum() and 2 copies / the four functions: {limit(kernels):.2f}")
            here.write(arguments.output / "kernels.json", kernels=results)
