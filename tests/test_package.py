"""What importing the package does, and what it offers."""

import doctest
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from jobs import run_text

import syncbn

IMPORTED_ONLY_WHERE_NEEDED = (
    "triton",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "numpy.testing",
    "rich",
)


def modules_loaded_by(statement: str) -> set[str]:
    """Of the modules that `import torch` does not load."""
    code = f"import torch, sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_import_loads_nothing_heavy() -> None:
    loaded = modules_loaded_by("import syncbn")
    assert "syncbn.layer" in loaded
    assert not loaded & set(IMPORTED_ONLY_WHERE_NEEDED)
    expected = "syncbn", "torch.distributed.nn", "_remote_module"
    assert not [name for name in loaded if not name.startswith(expected)], "modules that torch did not load already"


def test_the_check_above_can_fail() -> None:
    assert "numpy.testing" in modules_loaded_by("import numpy.testing")


def test_a_script_beside_a_clone_finds_the_package(tmp_path: Path) -> None:
    """The clone is a folder `syncbn` too, which Python takes for a package where no path leads to ours."""
    (tmp_path / "syncbn").mkdir()
    subprocess.run([sys.executable, "-c", "import syncbn; syncbn.SyncBatchNorm"], check=True, cwd=tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc")
def test_gloos_threads_end_with_their_group() -> None:
    """One that still has a tensor to free when the interpreter ends aborts the process."""
    code = """
import os, time
import syncbn
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
dist.destroy_process_group()
deadline = time.monotonic() + 10
while True:  # one that has been joined may still be seen for a moment
    names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
    if "gloo" not in "".join(names) or time.monotonic() > deadline:
        break
    time.sleep(0.1)
print(*names)
"""
    output = run_text(code)
    assert "python" in output
    assert "gloo" not in output


def test_nothing_of_diagnosis_outlives_the_group() -> None:
    """Neither its thread nor, through it, the group."""
    code = """
import threading, time, weakref
import torch, torch.distributed as dist, syncbn
from syncbn.distributed import reduction
from syncbn.distributed.reduction import Caller
reduction.resolve = lambda spec: dist.group.WORLD  # also of one rank
for _ in range(3):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = weakref.ref(dist.group.WORLD)
    caller = Caller("a test")
    with reduction.reduction_of(None, caller, None).other_collective("forward"):
        time.sleep(1.2)  # in which the thread looks
    with syncbn.debug():
        syncbn.SyncBatchNorm(3)(torch.randn(2, 3)).sum()
    dist.destroy_process_group()
    assert world() is None
deadline = time.monotonic() + 10
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.1)
print(threading.active_count())
"""
    assert run_text(code) == "1\n"


PUBLIC = {
    "SyncBatchNorm", "SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d",
    "convert_syncbn_model", "revert_syncbn_model", "create_syncbn_process_group",
    "accumulate_running_stats", "assert_synced", "debug", "join", "measure_local_noise", "merge_running_stats",
    "recompute_running_stats", "summary", "functional", "kernels",
}  # fmt: skip


def test_the_public_table() -> None:
    """Nothing is lost, and no module hides behind a function of its name."""
    names = {name for name, value in vars(syncbn).items() if name in PUBLIC or not isinstance(value, ModuleType)}
    assert {name for name in names if not name.startswith("__")} == PUBLIC == set(syncbn.__all__)
    assert callable(syncbn.summary)
    assert callable(syncbn.join)
    for name in ("testing", "functional", "kernels", "__main__"):
        assert importlib.util.find_spec(f"syncbn.{name}"), name


@pytest.mark.parametrize("name", ["functional", "convert", "tools.measure_local_noise"])
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"syncbn.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
