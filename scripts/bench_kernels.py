"""Time each function of the kernels on large tensors, beside a copy: how much of the memory's speed it reaches.

    python scripts/bench_kernels.py                                          a GPU if there is one, else a CPU thread
    python scripts/bench_kernels.py --shapes 64x256x56x56 --dtypes float32

A time is the median over the rounds; a kernel's rate is the bytes that it must read and write by its time; 1 is the
rate of y.copy_(x) of the same tensors in the same run. On GPUs the second cache is emptied before each call, and ATen's
own kernels for nn.SyncBatchNorm stand beside. Prints a table, and writes kernels.json to --output.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from bench import Case, Stopwatch, cases, choose_device, describe, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor

from syncbn.kernels import select
from syncbn.layout import Layout

EPS = 1e-5


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", default=["256x256x56x56", "256x2048x14x14"], help="(default %(default)s)"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="(default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/kernels"), help="folder (default %(default)s)")
    return parser.parse_args()


def calls_of(case: Case, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> what to call, and how many tensors of the input's size it must read and write."""
    x, z, dy = (tensor.detach() for tensor in draw(case, device))
    layout, channels = Layout.of(x, case.channel_dim), case.shape[case.channel_dim]
    of_channels = {"dtype": torch.promote_types(case.dtype, torch.float32), "device": device}
    weight, bias = torch.ones(channels, **of_channels), torch.zeros(channels, **of_channels)
    kernels = select._in_eager_mode(x)
    sums = kernels.forward_sums(x, layout)
    y, packed = kernels.forward_outputs(x, layout, sums, weight, bias, z, EPS, True)
    dtypes = weight.dtype, bias.dtype
    of_dy, _, _ = kernels.backward_sums(dy, x, y, layout, packed, *dtypes)
    copy = torch.empty_like(x)

    def forward_outputs(residual: Tensor | None) -> Callable[[], object]:
        fused = residual is not None
        return lambda: kernels.forward_outputs(x, layout, sums, weight, bias, residual, EPS, fused)

    def backward_sums(y: Tensor | None) -> Callable[[], object]:
        return lambda: kernels.backward_sums(dy, x, y, layout, packed, *dtypes)

    def backward_outputs(y: Tensor | None) -> Callable[[], object]:
        return lambda: kernels.backward_outputs(dy, x, y, layout, of_dy, packed, weight, y is not None)

    calls = {
        "copy": (lambda: copy.copy_(x), 2),
        "x.sum()": (lambda: x.sum(), 1),
        "forward_sums": (lambda: kernels.forward_sums(x, layout), 1),
        "forward_outputs": (forward_outputs(None), 2),
        "backward_sums": (backward_sums(None), 2),
        "backward_outputs": (backward_outputs(None), 3),
        "forward_outputs fused": (forward_outputs(z), 3),
        "backward_sums fused": (backward_sums(y), 3),
        "backward_outputs fused": (backward_outputs(y), 5),
    }
    if device.type == "cuda" and case.channel_dim == 1:
        mean, invstd = torch.batch_norm_stats(x, EPS)
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
        count = torch.tensor([x.numel() // channels], dtype=torch.int32, device=device)
        calls |= {
            "ATen batch_norm_stats": (lambda: torch.batch_norm_stats(x, EPS), 1),
            "ATen batch_norm_elemt": (lambda: torch.batch_norm_elemt(x, weight, bias, mean, invstd, EPS), 2),
            "ATen batch_norm_backward_reduce": (
                lambda: torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True),
                2,
            ),
            "ATen batch_norm_backward_elemt": (
                lambda: torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count),
                3,
            ),
        }
    return calls


def run_case(case: Case, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds and share of the copy's rate of each call, in turn."""
    calls = calls_of(case, device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(2 + rounds):
        for name, (call, _) in calls.items():
            watch = Stopwatch(device)
            result = call()
            watch.lap()
            (milliseconds,) = watch.laps()
            del result
            if index >= 2:
                samples[name].append(milliseconds)
    times = {name: statistics.median(own) for name, own in samples.items()}
    return {
        name: {"ms": times[name], "share of copy": tensors / 2 * times["copy"] / times[name]}
        for name, (_, tensors) in calls.items()
    }


def limit(ms: dict[str, float]) -> float:
    """The time of torch's own operations that read and write what a step does, by that of the step's functions."""
    functions = "forward_sums", "forward_outputs", "backward_sums", "backward_outputs"
    return (4 * ms["x.sum()"] + 2 * ms["copy"]) / sum(ms[name] for name in functions)


def main() -> None:
    """All cases: a table each, and a file."""
    arguments = parse_arguments()
    device = choose_device(threads=1)
    console, about = Console(width=100), describe(threads=1)
    for key, value in about.items():
        console.print(f"{key}: {value}", highlight=False)
    results = {}
    for case in cases(arguments.shapes, arguments.dtypes):
        results[case.name] = run_case(case, device, arguments.rounds)
        console.print(f"\n{case.name}")
        table = Table("function")
        table.add_column("ms", justify="right")
        table.add_column("share of the copy's rate", justify="right")
        for name, one in results[case.name].items():
            table.add_row(name, f"{one['ms']:.3f}", f"{one['share of copy']:.2f}")
        console.print(table)
        ms = {name: one["ms"] for name, one in results[case.name].items()}
        console.print(f"4 x.sum() and 2 copies / the four functions: {limit(ms):.2f}")
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "kernels.json").write_text(json.dumps({"about": about, "kernels": results}, indent=1))


if __name__ == "__main__":
    main()
