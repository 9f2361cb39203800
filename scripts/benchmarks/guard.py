"""Compare the kernels for CPUs of this tree with those of another commit.

    python scripts/bench.py guard             with the fastest until now, the last of scripts/kernels_baseline.csv
    python scripts/bench.py guard main --shapes 32x64x56x56 --dtypes float32

Both are built here, each as its commit builds them, in temporary folders. Two processes then take turns with steps of
the same batch norm, so that whatever else the machine does slows both. Each round gives a ratio of times, and their
median decides. What is beyond LIMIT is measured again in new processes, as the memory that one happened to get may be
slow; a step is slower when it is beyond LIMIT each time. The last line says whether any is, as does the exit status.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch
from benchmarks.measuring import Case, cases, draw, in_turn, median_and_spread, session, time_step

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
    archive = folder.with_suffix(".tar")
    if subprocess.run(["git", "archive", f"--output={archive}", ref, *PARTS], cwd=ROOT, check=False).returncode:
        raise SystemExit(f"git has no {ref} to compare with")
    shutil.unpack_archive(archive, folder, filter="data")


def copy_tree(folder: Path) -> None:
    """PARTS of this tree, with what is not committed."""
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))


def start(folder: Path, threads: int) -> ProcessPoolExecutor:
    """A process with the syncbn of this folder, which times steps."""
    os.environ.update(KEEP_FREED_MEMORY)  # of the new process
    process = ProcessPoolExecutor(1, get_context("spawn"))
    process.submit(import_syncbn, folder, threads).result()
    return process


def import_syncbn(folder: Path, threads: int) -> None:
    sys.path.insert(0, str(folder))
    import syncbn

    torch.set_num_threads(threads)
    file, kernels = syncbn.__file__, syncbn.kernels.available()
    if not Path(file).is_relative_to(folder) or not kernels.startswith("cpu: C++"):
        raise RuntimeError(f"expected the C++ kernels of {folder}, got {kernels!r} of {file}")


@lru_cache(1)
def timed_step(case: Case) -> Callable[[], list[float]]:
    """Of the public layer alone, which older commits have too."""
    import syncbn

    at_end = {"channel_last": True} if case.channel_dim != 1 else {}
    layer = syncbn.SyncBatchNorm(case.channels, fuse_relu=case.fused, **at_end)
    tensors = draw(case, torch.device("cpu"))
    return partial(time_step, lambda x, z: layer(x, z if case.fused else None), *tensors)


def fastest_of_some(case: Case) -> list[float]:
    """Milliseconds of forward and backward."""
    take_step = timed_step(case)
    take_step()  # after the other process nothing of this one is in the caches
    times = [take_step() for _ in range(STEPS_AT_ONCE)]
    return [min(of_pass) for of_pass in zip(*times, strict=True)]


def time_in(process: ProcessPoolExecutor, case: Case) -> list[float]:
    return process.submit(fastest_of_some, case).result()


def compare(this: Path, other: Path, threads: int, steps: list[Case], rounds: int) -> Ratios:
    """In new processes."""
    found: Ratios = {}
    with start(this, threads) as ours, start(other, threads) as theirs:
        for case in steps:
            times = in_turn({one: partial(time_in, one, case) for one in (theirs, ours)}, rounds, warm_up=0)
            ratios = torch.tensor(times[ours]) / torch.tensor(times[theirs])  # (rounds, passes)
            found[case] = [median_and_spread(of_pass) for of_pass in ratios.T]
    return found


def run(arguments: argparse.Namespace) -> int:
    ref = arguments.ref or baseline()
    with session(arguments.threads, on_cpu=True) as here, tempfile.TemporaryDirectory() as folder:
        this, other = (Path(folder, name).resolve() for name in ("this", "other"))
        copy_commit(ref, other)
        copy_tree(this)
        for one in (this, other):
            environment = os.environ | {"PYTHONPATH": str(one / "scripts")}
            subprocess.run([sys.executable, "-c", BUILD], cwd=one, env=environment, check=True)

        def measure(steps: list[Case]) -> Ratios:
            ratios = compare(this, other, arguments.threads, steps, arguments.rounds)
            rows = [(case.name, *(f"{number:.2f}" for one in ratios[case] for number in one)) for case in steps]
            here.show("", (f"this tree / {ref}", "forward", "+-", "backward", "+-"), rows)
            return ratios

        slower = slower_each_time(plain_and_fused(arguments.shapes, arguments.dtypes), measure)
        more = f"more than {LIMIT - 1:.0%} slower than {ref}"
        names = ", ".join(case.name for case in slower)
        here.print(f"{more}, {ATTEMPTS} times: {names}" if slower else f"nothing is {more}")
    return bool(slower)
