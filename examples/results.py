"""Shared by the jobs that compare ways of training: tables, metrics.json, and the colors of the pictures.

The colors are Okabe & Ito's (https://jfly.uni-koeln.de/color/), which color-blind readers can distinguish.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch
from launch import world_size
from rich.console import Console
from rich.table import Column, Table

START = time.monotonic()
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"
)  # fmt: skip
LOOKS = {  # way of training -> color, marker
    "one process": (BLACK, "o"),
    "syncbn": (BLUE, "s"),
    "local": (VERMILLION, "^"),
    "local, merged": (ORANGE, "v"),
    "local, recomputed": (GREEN, "D"),
    "GroupNorm": (PURPLE, "P"),
}
STYLE = {  # settings of matplotlib
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.size": 10,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
}


def print_table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(headings[0], *(Column(heading, justify="right") for heading in headings[1:]), title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def write(
    arguments: argparse.Namespace,
    metrics: dict[str, Any],
    file: str = "metrics.json",
    **pictures: Callable[[Any], None],
) -> None:
    """Write the metrics as JSON, with the conditions of the run. Write NAME.png for each picture: a function that draws
    on a matplotlib figure."""
    seconds = time.monotonic() - START
    conditions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else platform.machine(),
        "ranks": world_size(),
        "seconds": seconds,
        "settings": {name: str(value) for name, value in vars(arguments).items()},
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / file).write_text(json.dumps(conditions | metrics, indent=1))
    for name, draw in pictures.items():
        from matplotlib import rc_context  # Jobs without pictures run without matplotlib.
        from matplotlib.figure import Figure

        with rc_context(STYLE):
            figure = Figure(layout="constrained")
            draw(figure)
            figure.savefig(arguments.output / f"{name}.png", dpi=120)
    files = file, *(f"{name}.png" for name in pictures)
    print(f"{seconds:.0f} s; wrote to {arguments.output}: {', '.join(files)}")
