"""Shared by the jobs that compare ways of training: tables, metrics.json and pictures."""

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table

START_OF_JOB = time.monotonic()
# Way of training -> color, marker. Color-blind readers can distinguish the colors (https://jfly.uni-koeln.de/color/).
LOOKS = {
    "one process": ("#000000", "o"),
    "syncbn": ("#0072b2", "s"),
    "local": ("#d55e00", "^"),
    "local, merged": ("#e69f00", "v"),
    "local, recomputed": ("#009e73", "D"),
    "GroupNorm": ("#cc79a7", "P"),
}


def print_table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(headings[0], *(Column(heading, justify="right") for heading in headings[1:]), title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def write(arguments: argparse.Namespace, metrics: dict[str, Any], file: str = "metrics.json", **pictures: Any) -> None:
    """Write the metrics as JSON, with the conditions of the run, and the pictures.

    The argument `name=draw` writes the picture name.png, and `draw(figure)` draws it on a figure of matplotlib.
    """
    seconds = time.monotonic() - START_OF_JOB
    conditions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else platform.machine(),
        "ranks": dist.get_world_size(),
        "seconds": seconds,
        "settings": {name: str(value) for name, value in vars(arguments).items()},
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / file).write_text(json.dumps(conditions | metrics, indent=1))
    for name, draw in pictures.items():
        from matplotlib import style  # Jobs without pictures run without matplotlib.
        from matplotlib.figure import Figure

        with style.context("seaborn-v0_8-whitegrid"):
            figure = Figure(layout="constrained")
            draw(figure)
            figure.savefig(arguments.output / f"{name}.png", dpi=120)
    files = file, *(f"{name}.png" for name in pictures)
    print(f"{seconds:.0f} s; wrote to {arguments.output}: {', '.join(files)}")
