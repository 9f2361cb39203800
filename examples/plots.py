"""Shared by all plots: the color and the marker of each way of training, error bars over seeds, direct labels.

The colors are Okabe & Ito's (https://jfly.uni-koeln.de/color/), which color-blind readers can distinguish.
"""

import statistics
from typing import Any

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
WAY_DISTANCE = 0.12  # distance between two ways at one setting


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation, which is 0 for a single value."""
    return statistics.mean(values), statistics.stdev(values) if values[1:] else 0.0


def draw_over_seeds(figure: Any, errors: dict[str, dict[str, list[float]]], axis: str, joined: bool) -> None:
    """Draw the mean of each way at each setting with a bar of one standard deviation, and a dot for each seed. Join the
    means with a line if the settings are numbers. `errors` is way -> setting -> test error of each seed."""
    figure.set_size_inches(6.4, 4.2)
    axes = figure.subplots()
    for number, (way, settings) in enumerate(errors.items()):
        color, marker = LOOKS[way]
        x = [index + WAY_DISTANCE * (number - (len(errors) - 1) / 2) for index in range(len(settings))]
        means, spread = zip(*map(mean_and_spread, settings.values()), strict=True)
        line = {"linestyle": "-" if joined else "none", "marker": marker, "color": color, "label": way}
        axes.errorbar(x, means, spread, markersize=6, capsize=3, linewidth=1.5, **line)
        for center, seeds in zip(x, settings.values(), strict=True):
            axes.plot([center + WAY_DISTANCE / 3] * len(seeds), seeds, ".", color=color, markersize=4, alpha=0.5)
    axes.set_xticks(range(len(settings)), list(settings))
    axes.set(xlim=(-0.5, len(settings) - 0.5), ylim=(0, None), ylabel="test error (%)")
    figure.legend(loc="outside upper center", ncols=len(errors))
    figure.supxlabel(f"{axis}\n\nmark: mean, bar: ± standard deviation, dots: each of {len(seeds)} seeds", fontsize=10)
