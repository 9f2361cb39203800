"""Shared by all plots: the color and the marker of each way of training, error bars over seeds, direct labels.

The colors are Okabe & Ito's (https://jfly.uni-koeln.de/color/), which color-blind readers can distinguish. This module
does not import matplotlib: `launch.write` makes the figures, and draws none if matplotlib is missing.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    "alone": (BLACK, "o"),
    "padded, mask": (BLUE, "s"),
    "padded, no mask": (PURPLE, "X"),
    "empty batches": (BLUE, "s"),
    "drop": (PURPLE, "X"),
    "drop, as many steps": (ORANGE, "v"),
}
STYLE = {  # matplotlib's settings
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.size": 10,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
}
LABEL_DISTANCE = 0.08  # least distance between two labels, as a share of the axis
WAY_DISTANCE = 0.12  # distance between two ways at one setting

Lines = dict[str, dict[str, list[float]]]  # way -> setting -> value of each seed


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) if values[1:] else 0.0


def draw_over_seeds(axes: Axes, lines: Lines, joined: bool) -> None:
    """Draw the mean of each way with a bar of one standard deviation, and a dot for each seed. Join the means with a
    line if the settings are numbers."""
    settings = list(next(iter(lines.values())))
    for number, (way, values) in enumerate(lines.items()):
        color, marker = LOOKS[way]
        offset = WAY_DISTANCE * (number - (len(lines) - 1) / 2)
        x = [index + offset for index in range(len(settings))]
        means, spread = zip(*map(mean_and_spread, values.values()), strict=True)
        line = {"linestyle": "-" if joined else "none", "marker": marker, "color": color, "label": way}
        axes.errorbar(x, means, spread, markersize=6, capsize=3, linewidth=1.5, **line)
        for center, seeds in zip(x, values.values(), strict=True):
            axes.plot([center + WAY_DISTANCE / 3] * len(seeds), seeds, ".", color=color, markersize=4, alpha=0.5)
    axes.set_xticks(range(len(settings)), settings)
    axes.set_xlim(-0.5, len(settings) - 0.5)


def label_ends(axes: Axes, ends: dict[str, float]) -> None:
    """Write the name of each way to the right of the end of its line, without overlap."""
    low, high = axes.get_ylim()
    lowest_free = low
    for way, value in sorted(ends.items(), key=lambda end: end[1]):
        height = max(value, lowest_free)
        options = {"xycoords": axes.get_yaxis_transform(), "annotation_clip": False, "verticalalignment": "center"}
        axes.annotate(way, (1.01, height), color=LOOKS[way][0], fontweight="bold", **options)
        lowest_free = height + LABEL_DISTANCE * (high - low)


def draw_panels(figure: Figure, panels: dict[str, Lines], axis: str, joined: bool) -> None:
    """Draw panels side by side with one scale from 0, and a legend. Lines have labels at their ends instead."""
    figure.set_size_inches(3.2 * (len(panels) + 1), 4.2)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        draw_over_seeds(axes, lines, joined)
        axes.set_title(title)
    grid[0].set(ylabel="test error (%)", ylim=(0, None))
    lines = next(reversed(panels.values()))
    if joined:
        label_ends(grid[-1], {way: statistics.mean(list(values.values())[-1]) for way, values in lines.items()})
    else:
        handles, names = grid[-1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    num_seeds = len(next(iter(next(iter(lines.values())).values())))
    figure.supxlabel(f"{axis}\n\nmark: mean, bar: ± standard deviation, dots: each of {num_seeds} seeds", fontsize=10)
