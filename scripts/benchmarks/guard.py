"""Compare the kernels for CPUs of this tree with those of another commit.

    python scripts/bench.py guard             with the fastest until now, the last of scripts/kernels_baseline.csv
    python scripts/bench.py guard main --shapes 32x64x56x56 --dtypes float32

Both are built here, each as its commit builds them, in temporary folders. Two processes then take turns with steps of
the same batch norm, so that whatever else the machine does slows both. Each round gives a ratio of times, and their
median decides. What is beyond LIMIT is measured again in new processes, as the memory that one happened to get may be
slow; a step is slower when it is beyond LIMIT each time. The last line says whether any is, as does the exit status.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.measuring import Case, cases, draw, median_and_spread, session, time_step

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "scripts" / "kernels_baseline.csv"
SHAPES = ["32x64x56x56", "64x512x7x7", "2048x1024"]  # 6 to 26 MB of float32: Python's time is small beside
LIMIT = 1.15  # times as long as the other commit's
ATTEMPTS = 3
STEPS_AT_ONCE = 3  # of which the fastest counts
PARTS = "syncbn", "scripts"  # of a commit
BUILD = "import build_kernels, pathlib; build_kernels.build(pathlib.Path(), build_kernels.LIBRARY)"
# glibc's settings, without which page faults take longer than the kernels.
KEEP_FREED_MEMORY = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "4294967296")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ref", nargs="?", help="the other commit")
    add("--shapes", nargs="+", default=SHAPES, help="NxCx...; NxLxC with three sizes (default %(default)s)")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default %(default)s)")
    add("--rounds", type=int, default=30, help="of each step (default %(default)s)")
    add("--threads", type=int, default=1, help="(default %(default)s)")


# This tree's time by the other's, of forward and backward: median and spread.
Ratios = dict[Case, list[tuple[float, float]]]


def plain_and_fused(shapes: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    return [case._replace(fused=fused) for case in cases(shapes, dtypes) for fused in (False, True)]


def slower_each_time(found: list[Case], measure: Callable[[list[Case]], Ratios]) -> list[Case]:
    """Those of the cases whose forward or backward is beyond LIMIT in each of ATTEMPTS measurements."""
    for _ in range(ATTEMPTS):
        if found:
            ratios = measure(found)
            found = [case for case in found if max(ratios[case])[0] > LIMIT]
    return found


def baseline() -> str:
    """The last commit of kernels_baseline.csv: the fastest kernels until now."""
    with BASELINE.open() as file:
        return [row["commit"] for row in csv.DictReader(file)][-1]


def copy_commit(ref: str, folder: Path) -> None:
    """PARTS of that commit."""
    archive = folder.with_suffix(".tar")
    if subprocess.run(["git", "archive", f"--output={archive}", ref, *PARTS], cwd=ROOT, check=False).returncode:
        raise SystemExit(f"git has no {ref} to compare with")
    shutil.unpack_archive(archive, folder, filter="data")


def copy_tree(folder: Path) -> None:
    """PARTS of this tree, with what is not committed."""
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


class Timer:
    """Builds the kernels in a folder; as a context, a process that times them."""

    def __init__(self, folder: Path, threads: int) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder / "scripts")}
        subprocess.run([sys.executable, "-c", BUILD], cwd=folder, env=environment, check=True)
        self.folder, self.threads = folder, threads

    def __enter__(self) -> Timer:
        environment = os.environ | KEEP_FREED_MEMORY | {"PYTHONPATH": f"{self.folder}:{ROOT / 'scripts'}"}
        command = [sys.executable, "-P", "-m", "benchmarks.guard", str(self.threads)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        file, kernels = self._answer()
        if not Path(file).is_relative_to(self.folder) or not kernels.startswith("cpu: C++"):
            raise RuntimeError(f"expected the C++ kernels of {self.folder}, got {kernels!r} of {file}")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its input, with which it ends

    def time_step(self, case: Case) -> list[float]:
        """Milliseconds of forward and backward."""
        print(json.dumps(case), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that times {self.folder} ended with status {self.process.wait()}")
        return json.loads(line)


def compare(this: Timer, other: Timer, steps: list[Case], rounds: int) -> Ratios:
    """In new processes, which are the first of a round in turn."""
    found: Ratios = {}
    with this, other:
        for case in steps:
            ratios = []
            for index in range(rounds):
                times = {timer: timer.time_step(case) for timer in ((this, other) if index % 2 else (other, this))}
                ratios.append([mine / theirs for mine, theirs in zip(times[this], times[other], strict=True)])
            found[case] = [median_and_spread(of_pass) for of_pass in zip(*ratios, strict=True)]
    return found


def run(arguments: argparse.Namespace) -> int:
    """1 where a step is slower, else 0."""
    ref = arguments.ref or baseline()
    with session(arguments.threads, on_cpu=True) as here, tempfile.TemporaryDirectory() as folder:
        this_folder, other_folder = (Path(folder, name).resolve() for name in ("this", "other"))
        copy_commit(ref, other_folder)
        copy_tree(this_folder)
        this, other = Timer(this_folder, arguments.threads), Timer(other_folder, arguments.threads)

        def measure(steps: list[Case]) -> Ratios:
            ratios = compare(this, other, steps, arguments.rounds)
            rows = [(case.name, *(f"{number:.2f}" for one in ratios[case] for number in one)) for case in steps]
            here.show("", (f"this tree / {ref}", "forward", "+-", "backward", "+-"), rows)
            return ratios

        slower = slower_each_time(plain_and_fused(arguments.shapes, arguments.dtypes), measure)
        more = f"more than {LIMIT - 1:.0%} slower than {ref}"
        names = ", ".join(case.name for case in slower)
        here.print(f"{more}, {ATTEMPTS} times: {names}" if slower else f"nothing is {more}")
    return 1 if slower else 0


@functools.lru_cache(1)
def timed_step(case: Case) -> Callable[[], list[float]]:
    """Times the `syncbn` that PYTHONPATH leads to, by the public layer alone, which older commits have too."""
    import syncbn

    at_end = {"channel_last": True} if case.channel_dim != 1 else {}
    layer = syncbn.SyncBatchNorm(case.channels, fuse_relu=case.fused, **at_end)
    tensors = draw(case, torch.device("cpu"))
    return functools.partial(time_step, lambda x, z: layer(x, z if case.fused else None), *tensors)


def answer() -> None:
    """Time a step of each case on standard input, and write its times, a line each."""
    import syncbn

    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps((syncbn.__file__, syncbn.kernels.available())), flush=True)
    for line in sys.stdin:
        shape, *others = json.loads(line)
        take_step = timed_step(Case(tuple(shape), *others))
        take_step()  # after the other process nothing of this one is in the caches
        times = [take_step() for _ in range(STEPS_AT_ONCE)]
        print(json.dumps([min(of_pass) for of_pass in zip(*times, strict=True)]), flush=True)


if __name__ == "__main__":  # as Timer starts it
    answer()
