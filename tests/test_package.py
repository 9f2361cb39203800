"""Tests what importing syncbn does, which modules import which others, the installation, and docstrings' examples."""

import ast
import doctest
import graphlib
import importlib
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from guides import ROOT
from jobs import run

import syncbn
from syncbn.kernels import cpu

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


LOWEST = "syncbn.torch_internals", "syncbn.texts", "syncbn.payload"
# Prefix of a module's name -> prefixes of what the module may import from syncbn and torch.distributed. The longest
# prefix of a name counts.
ALLOWED = {
    "syncbn": ("syncbn",),
    "syncbn.__main__": ("syncbn", "torch.distributed"),
    "syncbn.testing": ("syncbn", "torch.distributed"),
    "syncbn.ranks": ("syncbn.ranks", "syncbn.kernels", *LOWEST, "torch.distributed"),
    "syncbn.kernels": ("syncbn.kernels", "syncbn.statistics", *LOWEST),
    "syncbn.torch_internals": (*LOWEST, "torch.distributed"),
    "syncbn.payload": (),
}
# Methods of layer.py import these modules when called: convert_sync_batchnorm imports convert, and forward imports
# subclasses if a program has replaced the forward of nn.BatchNorm.
IMPORTED_IN_METHODS = {("syncbn.layer", "syncbn.convert"), ("syncbn.layer", "syncbn.subclasses")}

# module -> dotted names of the modules and objects that it imports, also for type annotations
IMPORTS: dict[str, list[str]] = {}
for file in (ROOT / "syncbn").rglob("*.py"):
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    imported = IMPORTS[module] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported += [prefix + alias.name for alias in node.names]


def test_modules_import_only_lower_modules_and_few_import_torch_distributed() -> None:
    for importer, names in IMPORTS.items():
        allowed = ALLOWED[max(filter(importer.startswith, ALLOWED), key=len)]
        restricted = [name for name in names if name.startswith(("syncbn", "torch.distributed"))]
        assert [name for name in restricted if not name.startswith(allowed)] == [], importer


def test_there_are_no_import_cycles() -> None:
    graph = graphlib.TopologicalSorter[str]()
    for importer, names in IMPORTS.items():
        for name in names:
            module = name if name in IMPORTS else name.rpartition(".")[0]  # The name is a module, or is in a module.
            if (importer, module) not in IMPORTED_IN_METHODS:
                graph.add(importer, module)
    graph.prepare()  # The CycleError names the modules.


def test_an_installed_package_and_a_clone_find_their_kernels(tmp_path: Path) -> None:
    """pip leaves the library in `clone`, too. The C++ compiler is a program that copies our library, to save time."""
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.so", "__pycache__")
    clone, installed = shutil.copytree(ROOT, tmp_path / "clone", ignore=ignored), tmp_path / "installed"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", installed]
    compiler = f"import shutil, sys; shutil.copy({str(cpu.FILE)!r}, sys.argv[sys.argv.index('-o') + 1])"
    run(sys.executable, "-m", "pip", "install", *options, clone, CXX=shlex.join([sys.executable, "-c", compiler]))
    for folder, package in ((tmp_path, installed), (clone, clone)):
        printed = run(sys.executable, "-m", "syncbn", "info", folder=folder, PYTHONPATH=str(installed))
        assert f"{syncbn.__version__}, {package / 'syncbn'}" in printed
        assert ("cpu: C++" in printed) == cpu.FILE.exists(), printed


@pytest.mark.parametrize("name", ["functional", "convert"])
def test_examples_in_docstrings_run(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"syncbn.{name}"))
    assert attempted > 0
    assert failed == 0
