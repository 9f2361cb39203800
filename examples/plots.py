"""Gives all plots of the examples one style: a colour and a marker for each way of training, error bars, direct labels.

The colours are Okabe & Ito's (https://jfly.uni-koeln.de/color/), which are told apart on white and by colour-blind
readers. Nothing here imports matplotlib: `launch.write` makes the figures, and does without them where it is missing.
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
LOOKS = {  # of what is compared: colour and marker
    "one process": (BLACK, "o"),
    "syncbn": (BLUE, "s"),
    "local": (VERMILLION, "^"),
    "local, merged": (ORANGE, "v"),
    "local, recomputed": (GREEN, "D"),
    "GroupNorm": (PURPLE, "P"),
    "moving average": (ORANGE, "v"),
    "recomputed": (GREEN, "D"),
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
BETWEEN_LABELS = 0.08  # least distance of two labels, as a share of the axis
BETWEEN_WAYS = 0.12  # distance of ways that share a place of the axis

Lines = dict[str, dict[str, list[float]]]  # way -> place on the axis -> values, of each seed


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation; a single value has no spread."""
    return statistics.mean(values), statistics.stdev(values) if values[1:] else 0.0


def draw_over_seeds(axes: Axes, lines: Lines, joined: bool) -> None:
    """Each way's mean with its standard deviation as a bar, and a small dot for each seed. Lines join the means where
    they are `joined`: places that are numbers, and not categories."""
    places = list(next(iter(lines.values())))
    for number, (way, values) in enumerate(lines.items()):
        colour, marker = LOOKS[way]
        offset = BETWEEN_WAYS * (number - (len(lines) - 1) / 2)
        at = [place + offset for place in range(len(places))]
        means, spread = zip(*map(mean_and_spread, values.values()), strict=True)
        line = {"linestyle": "-" if joined else "none", "marker": marker, "color": colour, "label": way}
        axes.errorbar(at, means, spread, markersize=6, capsize=3, linewidth=1.5, **line)
        for place, seeds in zip(at, values.values(), strict=True):
            axes.plot([place + BETWEEN_WAYS / 3] * len(seeds), seeds, ".", color=colour, markersize=4, alpha=0.5)
    axes.set_xticks(range(len(places)), places)
    axes.set_xlim(-0.5, len(places) - 0.5)


def label_ends(axes: Axes, ends: dict[str, float]) -> None:
    """Write the name of each way to the right of where its line ends, without overlap."""
    low, high = axes.get_ylim()
    lowest_free = low
    for way, value in sorted(ends.items(), key=lambda end: end[1]):
        height = max(value, lowest_free)
        at = {
            "xycoords": axes.get_yaxis_transform(),
            "annotation_clip": False,
            "verticalalignment": "center",
            "fontweight": "bold",
        }
        axes.annotate(way, (1.01, height), color=LOOKS[way][0], **at)
        lowest_free = height + BETWEEN_LABELS * (high - low)


def draw_panels(figure: Figure, panels: dict[str, Lines], axis: str, joined: bool) -> None:
    """Panels side by side with one scale, from 0, and what the marks mean below. Lines have labels at their ends."""
    figure.set_size_inches(3.2 * (len(panels) + 1), 4.2)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        draw_over_seeds(axes, lines, joined)
        axes.set_title(title)
    grid[0].set(ylabel="test error (%)", ylim=(0, None))  # of all panels
    lines = next(reversed(panels.values()))
    if joined:
        label_ends(grid[-1], {way: statistics.mean(list(values.values())[-1]) for way, values in lines.items()})
    else:
        handles, names = grid[-1].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    num_seeds = len(next(iter(next(iter(lines.values())).values())))
    figure.supxlabel(f"{axis}\n\nmark: mean, bar: ± standard deviation, dots: each of {num_seeds} seeds", fontsize=10)
