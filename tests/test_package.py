"""Tests that importing syncbn has no side effects, and that the examples in docstrings run."""

import doctest
import importlib
import json
import sys
from pathlib import Path

import pytest
from jobs import run

IMPORT = """
import json, os, sys, tempfile, threading
import torch, torch.distributed as dist
import torch.distributed.nn.functional  # syncbn imports it. In older torch the import creates a folder.

def resources():
    return threading.active_count(), len(os.listdir("/proc/self/fd")), os.listdir(tempfile.gettempdir())

modules, before = set(sys.modules), resources()
import syncbn
loaded = set(sys.modules) - modules
import syncbn.testing, syncbn.__main__
operators = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("syncbn::")]
created = dist.is_initialized(), operators, len(torch.ops.loaded_libraries)
print(json.dumps([sorted(loaded), before, resources(), created]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads open files from /proc")
def test_an_import_loads_only_modules_of_syncbn_and_creates_nothing(tmp_path: Path) -> None:
    """The import starts no thread, opens no file, and creates no folder, process group or operator. A folder named
    `syncbn` in the working directory does not hide the package."""
    (tmp_path / "syncbn").mkdir()
    printed = run(sys.executable, "-c", IMPORT, folder=tmp_path, TMPDIR=str(tmp_path))
    loaded, resources_before, resources_after, created = json.loads(printed)
    assert "syncbn.layer" in loaded
    assert [name for name in loaded if not name.startswith("syncbn")] == []
    assert resources_after == resources_before
    assert created == [False, [], 0]


LATE_IMPORT = """
import weakref, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import syncbn
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert group() is None
"""


def test_an_import_after_init_process_group_does_not_keep_the_group() -> None:
    """A group that stays alive keeps gloo's threads running, which may abort the process at its end."""
    run(sys.executable, "-c", LATE_IMPORT)


@pytest.mark.parametrize("name", ["functional", "convert"])
def test_examples_in_docstrings_run(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"syncbn.{name}"))
    assert attempted > 0
    assert failed == 0
