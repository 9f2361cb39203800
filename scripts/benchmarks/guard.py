"""Compare the C++ kernels of this tree with those of another commit.

    python scripts/bench.py guard main

The other commit is cloned. Each tree builds its kernels in place, by its own build script, and runs `bench.py kernels`
in turn, so that other load slows both. The time of a kernel is the smallest of all turns. Prints the time of the
kernels of a step with this tree, divided by the time with the other commit. The exit status is 1 if a ratio is above
LIMIT. Ratios of a commit and itself were up to 1.16 (three runs, two cores that were not idle, 2026-11-28).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.kernels import FUNCTIONS
from benchmarks.measuring import show

ROOT = Path(__file__).resolve().parents[2]
# Inputs of 6 to 26 MB in float32, so that Python's time is a small part of a call.
SHAPES = ["32x64x56x56", "64x512x7x7", "2048x1024"]
LIMIT = 1.2
TURNS = 7
BUILD = "import build_kernels, pathlib; build_kernels.build(pathlib.Path(), build_kernels.LIBRARY)"
# Without these settings of glibc, page faults take longer than the kernels.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", help="the other commit, whose scripts/bench.py must have the part `kernels`")


def measure(tree: Path, output: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Run `bench.py kernels` on one CPU thread, and return case -> kernel -> row of its table."""
    command = [sys.executable, "scripts/bench.py", "kernels", "--shapes", *SHAPES, "--output", output]
    environment = os.environ | KEEP_FREED_MEMORY | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads((output / "kernels.json").read_text())["kernels"]


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        commit = subprocess.check_output(["git", "rev-parse", arguments.ref], cwd=ROOT, text=True).strip()
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        subprocess.run(["git", "checkout", "--quiet", commit], cwd=clone, check=True)
        for tree in (ROOT, clone):
            environment = os.environ | {"PYTHONPATH": str(tree / "scripts")}
            subprocess.run([sys.executable, "-c", BUILD], cwd=tree, env=environment, check=True)
        turns = [[measure(tree, Path(folder)) for tree in (ROOT, clone)] for _ in range(TURNS)]

    def milliseconds(tree: int, case: str, suffix: str) -> float:
        names = ["forward_sums", *(name + suffix for name in FUNCTIONS[1:])]  # forward_sums reads no residual.
        return sum(min(turn[tree][case][name]["ms"] for turn in turns) for name in names)

    steps = {"step": "", "fused step": " fused"}
    ratios = {
        case: {step: milliseconds(0, case, suffix) / milliseconds(1, case, suffix) for step, suffix in steps.items()}
        for case in turns[0][0]
    }
    show(f"this tree / {arguments.ref}", ratios)
    return int(max(ratio for row in ratios.values() for ratio in row.values()) > LIMIT)
