"""Compare the C++ kernels of this tree with those of another commit.

    python scripts/bench.py guard             with the fastest commit, in the last row of scripts/kernels_baseline.csv
    python scripts/bench.py guard main --shapes 32x64x56x56 --dtypes float32

Each commit builds its kernels in a temporary folder, by its own build script. Two processes take turns with steps of
the same batch norm, so that other load slows both processes. The result is the median over the rounds of the ratio of
their times. A case with a ratio above LIMIT is measured again in new processes, because the memory of one process may
be slower than that of the other. The exit status is 1 if the ratio of a case is above LIMIT in all ATTEMPTS.
"""

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch
from benchmarks.measuring import Case, cases, draw, interleave, median_and_spread, session, show, time_step

ROOT = Path(__file__).resolve().parents[2]
# Inputs of 6 to 26 MB in float32, so that Python's time is a small part of a step.
SHAPES = ["32x64x56x56", "64x512x7x7", "2048x1024"]
LIMIT = 1.15  # this tree's time / the other commit's time
ATTEMPTS = 3
FOLDERS = "syncbn", "scripts"  # contain all that the build of a commit needs
BUILD = "import build_kernels, pathlib; build_kernels.build(pathlib.Path(), build_kernels.LIBRARY)"
# Without these settings of glibc, page faults take longer than the kernels.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ref", nargs="?", help="the other commit")
    add("--shapes", nargs="+", default=SHAPES, help="NxCx...; NxLxC with three sizes (default %(default)s)")
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default %(default)s)")
    add("--rounds", type=int, default=30, help="rounds of each case (default %(default)s)")


def build(folder: Path, ref: str | None = None) -> None:
    """Build the kernels of a commit in a folder, or of this tree with its uncommitted changes if `ref` is None."""
    if ref is None:
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    else:
        archive = folder.with_suffix(".tar")
        subprocess.run(["git", "archive", f"--output={archive}", ref, *FOLDERS], cwd=ROOT, check=True)
        shutil.unpack_archive(archive, folder, filter="data")
    environment = os.environ | {"PYTHONPATH": str(folder / "scripts")}
    subprocess.run([sys.executable, "-c", BUILD], cwd=folder, env=environment, check=True)


def import_syncbn(folder: Path) -> None:
    """Import the syncbn of this folder, in a new process."""
    sys.path.insert(0, str(folder))
    import syncbn

    torch.set_num_threads(1)
    file, kernels = syncbn.__file__, syncbn.kernels.available()
    if not Path(file).is_relative_to(folder) or not kernels.startswith("cpu: C++"):
        raise RuntimeError(f"expected the C++ kernels of {folder}, got {kernels!r} of {file}")


@lru_cache(1)
def make_step(case: Case) -> Callable[[], list[float]]:
    """Return a function that times a step of the public layer, which all commits have.

    The cache keeps the layer and the tensors of a case for all rounds. The next case replaces them.
    """
    import syncbn

    options = {"channel_last": True} if case.channel_dim != 1 else {}
    layer = syncbn.SyncBatchNorm(case.channels, fuse_relu=case.fused, **options)
    tensors = draw(case, torch.device("cpu"))
    return partial(time_step, lambda x, z: layer(x, z if case.fused else None), *tensors)


def fastest_step(case: Case) -> list[float]:
    """Return the smallest milliseconds of forward and of backward over three steps, after a step that fills caches."""
    times = [make_step(case)() for _ in range(4)]
    return torch.tensor(times[1:]).amin(0).tolist()


def time_in(process: ProcessPoolExecutor, case: Case) -> list[float]:
    return process.submit(fastest_step, case).result()


def compare(this: Path, other: Path, rounds: int, cases_to_time: list[Case]) -> dict[str, dict[str, float]]:
    """Return the ratios of this tree's times to the other's, measured in new processes."""
    os.environ.update(KEEP_FREED_MEMORY)
    new_process, rows = partial(ProcessPoolExecutor, 1, get_context("spawn"), import_syncbn), {}
    with new_process((this,)) as this_process, new_process((other,)) as other_process:
        for case in cases_to_time:
            calls = {"other": partial(time_in, other_process, case), "this": partial(time_in, this_process, case)}
            times = interleave(calls, rounds, warm_up=0)
            ratios = torch.tensor(times["this"]) / torch.tensor(times["other"])  # (rounds, 2)
            (forward, forward_spread), (backward, backward_spread) = map(median_and_spread, ratios.T)
            rows[case.name] = {"forward": forward, "forward +-": forward_spread}
            rows[case.name] |= {"backward": backward, "backward +-": backward_spread}
    return rows


def run(arguments: argparse.Namespace) -> int:
    with (ROOT / "scripts" / "kernels_baseline.csv").open() as file:
        ref = arguments.ref or [*csv.DictReader(file)][-1]["commit"]
    remaining = [c._replace(fused=fused) for c in cases(arguments.shapes, arguments.dtypes) for fused in (False, True)]
    with session(on_cpu=True), tempfile.TemporaryDirectory() as folder:
        this, other = Path(folder).resolve() / "this", Path(folder).resolve() / "other"
        build(this)
        build(other, ref)
        for _ in range(ATTEMPTS):
            rows = compare(this, other, arguments.rounds, remaining)
            show(f"this tree / {ref}", rows)
            remaining = [c for c in remaining if max(rows[c.name]["forward"], rows[c.name]["backward"]) > LIMIT]
            if not remaining:
                print(f"no case is more than {LIMIT - 1:.0%} slower than {ref}")
                return 0
    names = ", ".join(case.name for case in remaining)
    print(f"more than {LIMIT - 1:.0%} slower than {ref}, {ATTEMPTS} times: {names}")
    return 1
