"""Measure the figures of docs/performance.md, and write its table and its plot.

    python scripts/bench.py page           a quarter of an hour, on two cores that do nothing else

Runs `layers` in one process and `steps` on two ranks, both with glibc's settings that keep freed memory, into --output.
Then replaces what stands in the page between its two marks, and draws the plot beside it.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.guard import KEEP_FREED_MEMORY, ROOT

PAGE = ROOT / "docs" / "performance.md"
MARKS = "<!-- scripts/bench.py page writes what follows -->\n", "<!-- and it ends here -->\n"
SHAPES = ["32x64x56x56", "32x256x28x28", "16x512x14x14", "8x2048x7x7", "8x512x7x7"]
PLAIN, FUSED = "nn.BatchNorm2d", "nn.BatchNorm2d + residual + relu"
COLUMNS = {PLAIN: ("nn.BatchNorm", "syncbn"), FUSED: ("nn.BatchNorm fused", "syncbn fused")}
COLUMNS |= {"by hand": ("hand-written", "syncbn")}  # of the table -> the peer, and what its time is divided by
COLOURS = {"contiguous": "#0072b2", "channels last": "#56b4e9"}
OTHERS = {"nn.BatchNorm": PLAIN, "hand-written": "by hand"}
MODELS = {"resnet": "ResNet-50, 8 images a rank", "segmentation": "U-Net, 2 images a rank"}
Times = dict[tuple[str, str], dict[str, Any]]  # (case, peer) -> its row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", default=SHAPES, help="of the layers (default %(default)s)")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default %(default)s)")
    add("--models", nargs="+", default=list(MODELS), choices=MODELS, help="(default %(default)s)")
    add("--scale", default="1.0", help="of the models' images (default %(default)s)")
    add("--rounds", default="11", help="(default %(default)s)")
    add("--output", type=Path, default=Path("runs/page"), help="folder (default %(default)s)")
    add("--page", type=Path, default=PAGE, help="(default %(default)s)")


def measure(arguments: argparse.Namespace) -> None:
    bench, environment = str(ROOT / "scripts" / "bench.py"), os.environ | KEEP_FREED_MEMORY
    common = ["--rounds", arguments.rounds, "--output", str(arguments.output)]
    layers = ["--shapes", *arguments.shapes, "--dtypes", *arguments.dtypes, *common]
    subprocess.run([sys.executable, bench, "layers", *layers], env=environment, check=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    steps = ["--models", *arguments.models, "--scale", arguments.scale, *common]
    subprocess.run([*torchrun, bench, "steps", *steps], env=environment, check=True)


def ratios(times: Times, case: str) -> dict[str, float]:
    """How many times as long as syncbn each peer takes."""
    return {name: times[case, peer]["both"] / times[case, ours]["both"] for name, (peer, ours) in COLUMNS.items()}


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written(about: dict[str, str], times: Times, steps: dict[str, dict[str, dict[str, float]]], commit: str) -> str:
    """The part of the page between its marks."""
    names = list(dict.fromkeys(case for case, _ in times))
    layers, memory = [], []
    for name in names:
        layers.append([name, *(f"{ratio:.1f}" for ratio in ratios(times, name).values())])
    for peer in ("syncbn", *OTHERS):
        needs = [times[names[0], f"{peer}{kind}"][need] for kind in ("", " fused") for need in ("saved", "peak")]
        memory.append([OTHERS.get(peer, peer), *(f"{need:.1f}" for need in needs)])
    models = [
        [MODELS[name], *(f"{of_kind[other]['both'] / of_kind['syncbn']['both']:.2f}" for other in OTHERS)]
        for name, of_kind in steps.items()
    ]
    return f"""
![How many times as fast as nn.BatchNorm2d a layer's step is, for each size and dtype](static/speed.png)

Measured on {about["date"][:10]} at commit {commit}: {about["processor"]} ({about["cores"]} cores, {about["cpu"]}),
torch {about["torch"]}; medians of `python scripts/bench.py page`.

**One layer**, forward and backward in one process: the time of torch's layer, or of one written by hand, divided by
syncbn's. Above 1 syncbn is faster.

{table(["input", *COLUMNS], layers)}
**Whole steps** on 2 ranks under DDP, one thread each: the time with another layer divided by that with syncbn.

{table(["model", *OTHERS.values()], models)}
**Memory** of a step of {names[0]}:
what is saved for backward, and the most that is allocated at once, divided by the size of the input.

{table(["layer", "saved", "at once", "fused: saved", "fused: at once"], memory)}
"""


def draw(times: Times, file: Path) -> None:
    """Bars: how many times as fast as nn.BatchNorm a layer is, plain and fused."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(case for case, _ in times))
    inputs = list(dict.fromkeys(name.replace(" contiguous", "").replace(" channels last", "") for name in names))
    figure, grid = plt.subplots(1, 2, sharey=True, figsize=(7.5, 1.2 + 0.42 * len(inputs)), layout="constrained")
    for axes, kind in zip(grid, (PLAIN, FUSED), strict=True):
        for place, (layout, colour) in enumerate(COLOURS.items()):
            heights = [index + 0.38 * (place - 0.5) for index in range(len(inputs))]
            bars = axes.barh(heights, [ratios(times, f"{name} {layout}")[kind] for name in inputs], 0.36, color=colour)
            axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8, bbox={"color": "white", "pad": 0.5})
            bars.set_label(layout)
        axes.axvline(1, color="black", linewidth=1)
        axes.set(title=f"times as fast as\n{kind}", yticks=range(len(inputs)))
        axes.set_yticklabels(inputs)
        axes.spines[["right", "top"]].set_visible(False)
    grid[0].invert_yaxis()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=200)


def run(arguments: argparse.Namespace) -> None:
    measure(arguments)
    layers, steps = (json.loads((arguments.output / name).read_text()) for name in ("bench.json", "steps.json"))
    times = {(row["case"], row["peer"]): row for row in layers["times"]}
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    before, rest = arguments.page.read_text().split(MARKS[0])
    _, behind = rest.split(MARKS[1])
    part = written(layers["about"], times, steps["times"], commit)
    arguments.page.write_text(before + MARKS[0] + part + MARKS[1] + behind)
    draw(times, arguments.page.parent / "static" / "speed.png")
    print(f"wrote {arguments.page} and static/speed.png beside it")
