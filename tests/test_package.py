"""Tests that an import has no side effects, that nothing outlives a process group, and that examples run."""

import doctest
import importlib
import json
import sys
from pathlib import Path

import pytest
from jobs import run

EFFECTS = """
import json, os, sys, tempfile, threading
import torch, torch.distributed as dist
import torch.distributed.nn.functional  # in older torch this import creates a temporary folder

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


@pytest.mark.skipif(sys.platform != "linux", reason="reads open files from /proc")
def test_an_import_has_no_side_effects(tmp_path: Path) -> None:
    """Only modules that torch has loaded are loaded, and no thread, file, folder, process group or operator is created.
    A folder named `syncbn` in the working directory, such as a clone, does not hide the package."""
    (tmp_path / "syncbn").mkdir()
    printed = run(sys.executable, "-c", EFFECTS, folder=tmp_path, TMPDIR=str(tmp_path))
    loaded, before, after, *created = json.loads(printed)
    assert "syncbn.layer" in loaded
    assert [name for name in loaded if not name.startswith("syncbn")] == []
    assert after == before
    assert not any(created), created


OUTLIVES = """
import contextlib, threading, time, weakref
from pathlib import Path
import torch, torch.distributed as dist, syncbn
from syncbn.ranks.sites import FunctionCaller
from syncbn.ranks import calls

def gloo_threads():
    names = ""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            names += (thread / "comm").read_text()
    return "gloo" in names

calls.resolve = lambda spec: dist.group.WORLD  # a group of one rank too
for _ in range(2):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = weakref.ref(dist.group.WORLD)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert gloo_threads()
    collective = calls.eager_call(None, FunctionCaller("a test"), None).new_collective("forward")
    collective.run(time.sleep, 1.2)  # the watchdog polls in this time
    syncbn.SyncBatchNorm(3)(torch.randn(2, 3)).sum()
    dist.destroy_process_group()
    assert world() is None
deadline = time.monotonic() + 300
while gloo_threads() or threading.active_count() > 1:  # a joined thread may stay visible for a moment
    assert time.monotonic() < deadline
    time.sleep(0.1)
"""


# torch.distributed.nn.functional would keep the group, if it was first imported after the group was created.
IMPORTED_LATER = """
import weakref, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import syncbn
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads threads from /proc")
@pytest.mark.parametrize("program", [OUTLIVES, IMPORTED_LATER])
def test_no_thread_or_group_outlives_destroy_process_group(program: str) -> None:
    """A thread of gloo that frees a tensor while the interpreter ends would abort the process. The watchdog's thread
    ends too, and keeps no reference to the group."""
    run(sys.executable, "-c", program)  # a new process, which has imported nothing


@pytest.mark.parametrize("name", ["functional", "convert"])
def test_examples_in_docstrings_run(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"syncbn.{name}"))
    assert attempted > 0 == failed
