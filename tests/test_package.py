"""Catches an import that does more than define names, something that outlives the group, and a name that is lost."""

import doctest
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from jobs import run

import syncbn

EFFECTS = """
import json, os, sys, tempfile, threading
import torch, torch.distributed as dist
import torch.distributed.nn.functional  # in older torch it makes a temporary folder

def resources():
    return threading.active_count(), len(os.listdir("/proc/self/fd")), os.listdir(tempfile.gettempdir())

modules, before = set(sys.modules), resources()
import syncbn
loaded = set(sys.modules) - modules
import syncbn.testing, syncbn.__main__
after, libraries = resources(), len(torch.ops.loaded_libraries)
operators = hasattr(torch.ops.syncbn, "forward_sums_v4")
print(json.dumps([sorted(loaded), before, after, dist.is_initialized(), operators, libraries]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="open files are read from /proc")
def test_an_import_does_nothing(tmp_path: Path) -> None:
    """It loads no modules that torch did not, starts no thread, opens no file, makes no folder, group or operator."""
    loaded, before, after, *made = json.loads(run(sys.executable, "-c", EFFECTS, TMPDIR=str(tmp_path)))
    assert "syncbn.layer" in loaded
    assert [name for name in loaded if not name.startswith("syncbn")] == []
    assert after == before
    assert not any(made), made


def test_a_script_beside_a_clone_finds_the_package(tmp_path: Path) -> None:
    """The clone is a folder `syncbn` too, which Python takes for a package where no path leads to ours."""
    (tmp_path / "syncbn").mkdir()
    run(sys.executable, "-c", "import syncbn; syncbn.SyncBatchNorm", folder=tmp_path)


OUTLIVES = """
import contextlib, threading, time, weakref
from pathlib import Path
import torch, torch.distributed as dist, syncbn
from syncbn.ranks.sites import FunctionCaller
from syncbn.ranks import calls

def gloos_threads():
    names = ""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            names += (thread / "comm").read_text()
    return "gloo" in names

calls.resolve = lambda spec: dist.group.WORLD  # also of one rank
for _ in range(3):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = weakref.ref(dist.group.WORLD)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert gloos_threads()
    collective = calls.eager_call(None, FunctionCaller("a test"), None).new_collective("forward")
    collective.run(time.sleep, 1.2)  # The watchdog polls in this time.
    syncbn.SyncBatchNorm(3)(torch.randn(2, 3)).sum()
    dist.destroy_process_group()
    assert world() is None
deadline = time.monotonic() + 300
while gloos_threads() or threading.active_count() > 1:  # what has been joined may still be seen for a moment
    assert time.monotonic() < deadline
    time.sleep(0.1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc")
def test_nothing_outlives_the_group() -> None:
    """A thread of gloo's that still has a tensor to free when the interpreter ends aborts the process; and neither the
    thread of diagnosis nor, through it, the group stays."""
    run(sys.executable, "-c", OUTLIVES)  # which has imported nothing before


PUBLIC = {
    "SyncBatchNorm", "SyncBatchNorm1d", "SyncBatchNorm2d", "SyncBatchNorm3d",
    "convert_syncbn_model", "revert_syncbn_model", "create_syncbn_process_group",
    "accumulate_running_stats", "summary", "functional", "kernels",
}  # fmt: skip


def test_the_public_table() -> None:
    """Nothing is lost, and no module hides behind a function of its name."""
    names = {name for name, value in vars(syncbn).items() if name in PUBLIC or not isinstance(value, ModuleType)}
    assert {name for name in names if not name.startswith("__")} == PUBLIC
    assert callable(syncbn.summary)
    for name in ("testing", "functional", "kernels", "__main__"):
        assert importlib.util.find_spec(f"syncbn.{name}"), name


@pytest.mark.parametrize("name", ["functional", "convert"])
def test_examples_in_docstrings(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"syncbn.{name}"))
    assert attempted > 0 == failed
