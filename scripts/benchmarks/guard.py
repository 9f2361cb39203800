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
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.measuring import Case, cases, draw, session, time_step

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


class Step(NamedTuple):
    """A forward and a backward of one layer."""

    case: Case
    fused: bool  # with residual and relu

    @property
    def name(self) -> str:
        return f"{self.case.name}{' fused' if self.fused else ''}"


def steps_of(shapes: Sequence[str], dtypes: Sequence[str]) -> list[Step]:
    """Each case, plain and fused."""
    return [Step(case, fused) for case in cases(shapes, dtypes) for fused in (False, True)]


class Ratio(NamedTuple):
    """This tree's time by the other commit's."""

    median: float
    spread: float  # half the distance between the quartiles

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(middle, (high - low) / 2)


Ratios = dict[Step, list[Ratio]]  # of forward and of backward


def slower_each_time(steps: list[Step], measure: Callable[[list[Step]], Ratios]) -> list[Step]:
    """Those of `steps` whose forward or backward is beyond LIMIT in each of ATTEMPTS measurements."""
    for _ in range(ATTEMPTS):
        if steps:
            ratios = measure(steps)
            steps = [step for step in steps if max(ratio.median for ratio in ratios[step]) > LIMIT]
    return steps


def baseline() -> str:
    """The last commit of kernels_baseline.csv: the fastest kernels until now."""
    with BASELINE.open() as file:
        return [row["commit"] for row in csv.DictReader(file)][-1]


def copy_commit(ref: str, folder: Path) -> None:
    """PARTS of that commit. **Raises** SystemExit with git's words where there is none."""
    command = ["git", "archive", ref, *PARTS]
    archived = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archived.returncode:
        raise SystemExit(f"{' '.join(command)}: {archived.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, filter="data")


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

    def time_step(self, step: Step) -> list[float]:
        """Milliseconds of forward and backward."""
        print(json.dumps(step), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that times {self.folder} ended with status {self.process.wait()}")
        return json.loads(line)


def compare(this: Timer, other: Timer, steps: list[Step], rounds: int) -> Ratios:
    """In new processes, which are the first of a round in turn."""
    found: Ratios = {}
    with this, other:
        for step in steps:
            ratios = []
            for index in range(rounds):
                times = {timer: timer.time_step(step) for timer in ((this, other) if index % 2 else (other, this))}
                ratios.append([mine / theirs for mine, theirs in zip(times[this], times[other], strict=True)])
            found[step] = [Ratio.of(of_pass) for of_pass in zip(*ratios, strict=True)]
    return found


def run(arguments: argparse.Namespace) -> int:
    """1 where a step is slower, else 0."""
    ref = arguments.ref or baseline()
    with session(arguments.threads, on_cpu=True) as here, tempfile.TemporaryDirectory() as folder:
        this_folder, other_folder = (Path(folder, name).resolve() for name in ("this", "other"))
        copy_commit(ref, other_folder)
        copy_tree(this_folder)
        this, other = Timer(this_folder, arguments.threads), Timer(other_folder, arguments.threads)

        def measure(steps: list[Step]) -> Ratios:
            ratios = compare(this, other, steps, arguments.rounds)
            rows = [
                (step.name, *(f"{number:.2f}" for ratio in passes for number in ratio))
                for step, passes in ratios.items()
            ]
            here.show("", (f"this tree / {ref}", "forward", "+-", "backward", "+-"), rows)
            return ratios

        slower = slower_each_time(steps_of(arguments.shapes, arguments.dtypes), measure)
        more = f"more than {LIMIT - 1:.0%} slower than {ref}"
        names = ", ".join(step.name for step in slower)
        here.console.print(f"{more}, {ATTEMPTS} times: {names}" if slower else f"nothing is {more}")
    return 1 if slower else 0


@functools.lru_cache(1)
def timed_step(step: Step) -> Callable[[], list[float]]:
    """Times the `syncbn` that PYTHONPATH leads to, by the public layer alone, which older commits have too."""
    import syncbn

    at_end = {"channel_last": True} if step.case.channel_dim != 1 else {}
    layer = syncbn.SyncBatchNorm(step.case.channels, fuse_relu=step.fused, **at_end)
    tensors = draw(step.case, torch.device("cpu"))
    return functools.partial(time_step, lambda x, z: layer(x, z if step.fused else None), *tensors)


def answer() -> None:
    """Time each step that standard input names, and write its times, a line each."""
    import syncbn

    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps((syncbn.__file__, syncbn.kernels.available())), flush=True)
    for line in sys.stdin:
        (shape, *layout), fused = json.loads(line)
        take_step = timed_step(Step(Case(tuple(shape), *layout), fused))
        take_step()  # after the other process nothing of this one is in the caches
        times = [take_step() for _ in range(STEPS_AT_ONCE)]
        print(json.dumps([min(of_pass) for of_pass in zip(*times, strict=True)]), flush=True)


if __name__ == "__main__":  # as Timer starts it
    answer()
