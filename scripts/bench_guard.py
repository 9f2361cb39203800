"""Compare the kernels for CPUs of this tree with those of another commit: `python scripts/bench.py --guard [REF]`.

Without REF it is the last commit of kernels_baseline.csv, which also has their shares of the memory's speed.

Both are built here, each as its commit builds them, in temporary folders. Two processes then take steps of the same
batch norm in turn, so that whatever else the machine does slows both. Each round gives a ratio of times, and their
median decides. What is beyond LIMIT is looked at again in new processes, as the memory that one happened to get may be
slow; a step is slower when it is beyond LIMIT each time.

Run as a script, this file is such a process. It times the `syncbn` that PYTHONPATH leads to, by the public layer alone,
which older commits have too.
"""

from __future__ import annotations

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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
BASELINE = Path(__file__).with_name("kernels_baseline.csv")
SHAPES = "32x64x56x56", "64x512x7x7", "2048x1024"  # 6 to 26 MB of float32: Python's time is small beside
DTYPES = "float32", "bfloat16"
LIMIT = 1.15  # times as long as the other commit's
ATTEMPTS = 3
STEPS_AT_ONCE = 3  # of which the fastest counts
PARTS = "syncbn", "scripts"  # of a commit
BUILD = "import build_kernels, pathlib; build_kernels.build(pathlib.Path(), build_kernels.LIBRARY)"
KEEP_FREED_MEMORY = {  # glibc's: page faults would take longer than the kernels
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}


class Step(NamedTuple):
    """A forward and a backward of one layer."""

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool
    fused: bool  # with residual and relu

    @property
    def name(self) -> str:
        layout = "channels last" if self.channels_last else "contiguous"
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {layout}{' fused' if self.fused else ''}"


def steps_of(shapes: Sequence[str], dtypes: Sequence[str]) -> list[Step]:
    """Each shape in each dtype: contiguous and, where it has four dims, channels last; plain and fused."""
    return [
        Step(tuple(map(int, shape.split("x"))), dtype, channels_last, fused)
        for shape in shapes
        for dtype in dtypes
        for channels_last in ((False, True) if shape.count("x") == 3 else (False,))
        for fused in (False, True)
    ]


class Ratio(NamedTuple):
    """This tree's time by the other commit's."""

    median: float
    spread: float  # half the distance between the quartiles

    @classmethod
    def of(cls, ratios: list[float]) -> Ratio:
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(middle, (high - low) / 2)


Ratios = dict[Step, tuple[Ratio, Ratio]]  # of forward and of backward


def slower(ratios: Ratios) -> list[Step]:
    """The steps whose forward or backward is beyond LIMIT."""
    return [step for step, passes in ratios.items() if max(ratio.median for ratio in passes) > LIMIT]


def slower_each_time(steps: list[Step], measure: Callable[[list[Step]], Ratios]) -> list[Step]:
    """Those of `steps` that are slower in each of ATTEMPTS measurements."""
    for _ in range(ATTEMPTS):
        if steps:
            steps = slower(measure(steps))
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
        environment = os.environ | KEEP_FREED_MEMORY | {"PYTHONPATH": str(self.folder)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, Path(__file__).resolve(), str(self.threads)]
        self.process = subprocess.Popen(command, env=environment, **pipes)
        file, kernels = self._answer()
        if not Path(file).is_relative_to(self.folder) or not kernels.startswith("cpu: C++"):
            raise RuntimeError(f"expected the C++ kernels of {self.folder}, got {kernels!r} of {file}")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its input, with which it ends

    def time_step(self, step: Step) -> tuple[float, float]:
        """Milliseconds of forward and backward."""
        print(json.dumps(step), file=self.process.stdin, flush=True)
        forward, backward = self._answer()
        return forward, backward

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
            forward, backward = [], []
            for index in range(rounds):
                times = {timer: timer.time_step(step) for timer in ((this, other) if index % 2 else (other, this))}
                forward.append(times[this][0] / times[other][0])
                backward.append(times[this][1] / times[other][1])
            found[step] = Ratio.of(forward), Ratio.of(backward)
    return found


def guard(ref: str, rounds: int, shapes: Sequence[str], dtypes: Sequence[str], threads: int) -> int:
    """Compare with a commit, or with the baseline where `ref` is empty: the status to exit with, 1 when slower."""
    ref, console = ref or baseline(), Console(width=100)

    def measure(steps: list[Step]) -> Ratios:
        ratios = compare(this, other, steps, rounds)
        table = Table("this tree / " + ref)
        for column in ("forward", "+-", "backward", "+-"):
            table.add_column(column, justify="right")
        for step, passes in ratios.items():
            table.add_row(step.name, *(f"{number:.2f}" for ratio in passes for number in ratio))
        console.print(table)
        return ratios

    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder, "this").resolve(), Path(folder, "other").resolve()
        copy_commit(ref, there)
        copy_tree(here)
        this, other = Timer(here, threads), Timer(there, threads)
        found = slower_each_time(steps_of(shapes, dtypes), measure)
    more = f"more than {LIMIT - 1:.0%} slower than {ref}"
    console.print(
        f"{more}, {ATTEMPTS} times: {', '.join(step.name for step in found)}" if found else f"nothing is {more}"
    )
    return 1 if found else 0


@functools.lru_cache(1)
def prepare(step: Step) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The layer, x, z and dy."""
    import syncbn

    values = [torch.randn(step.shape).to(getattr(torch, step.dtype)) for _ in range(3)]
    if step.channels_last:
        values = [value.contiguous(memory_format=torch.channels_last) for value in values]
    layer = syncbn.SyncBatchNorm(step.shape[1], fuse_relu=step.fused)
    return layer, values[0].requires_grad_(), values[1].requires_grad_(), values[2]


def time_here(step: Step) -> tuple[float, float]:
    """Milliseconds of forward and backward, all gradients included."""
    layer, x, z, dy = prepare(step)
    x.grad = z.grad = None
    layer.zero_grad()
    start = time.perf_counter()
    y = layer(x, z if step.fused else None)
    middle = time.perf_counter()
    y.backward(dy)
    return (middle - start) * 1e3, (time.perf_counter() - middle) * 1e3


def answer() -> None:
    """Writes the times of each step that comes in, a line each."""
    import syncbn

    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps((syncbn.__file__, syncbn.kernels.available())), flush=True)
    for line in sys.stdin:
        shape, *rest = json.loads(line)
        step = Step(tuple(shape), *rest)
        time_here(step)  # after the other process nothing of this one is in the caches
        forward, backward = zip(*(time_here(step) for _ in range(STEPS_AT_ONCE)), strict=True)
        print(json.dumps((min(forward), min(backward))), flush=True)


if __name__ == "__main__":
    answer()
