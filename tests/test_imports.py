"""Which module imports which: downwards only, without circles; and what `import syncbn` does, which is nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import syncbn

PACKAGE = Path(syncbn.__file__).parent

# From the top to the bottom. A module imports only from lines below its own; within a line, nothing of that line.
ORDER = [
    "__main__",
    "cli.check cli.info",
    "testing lightning",
    "__init__",
    "tools.measure_local_noise",
    "tools.join tools.recompute_running_stats tools.merge_running_stats tools.assert_synced tools.summary",
    "tools.accumulate_running_stats tools.observed_inputs tools.table",
    "tools.running_stats_layers tools.replaced_method",
    "functional convert",
    "many convertibility",
    "synchronised_classes",
    "layer",
    "step",
    "plan roads.choice",
    "new_plans",
    "roads.compiled roads.transformed roads.other_tensors",
    "roads.watched roads.nested roads.dtensors",
    "argument_errors double_backward",
    "roads.traced diagnosis.debug_mode",
    "arguments diagnosis.observer",
    "masks diagnosis.watchdog",
    "diagnosis.report",
    "diagnosis.waiting",
    "diagnosis.this_rank diagnosis.pipeline_check",
    "diagnosis.layer_names diagnosis.process_state diagnosis.signatures",
    "distributed.mesh_groups",
    "distributed.side_reductions distributed.join_protocol",
    "distributed.reduction",
    "distributed.groups",
    "distributed.text_exchange distributed.group_spec",
    "kernels.__init__",
    "kernels.select",
    "kernels.operators kernels.chunked",
    "kernels.gpu kernels.reference",
    "kernels.cpu kernels.gpu_channels kernels.gpu_tiles",
    "moments kernels.plans",
    "layout torch_private",
    "torch_state program",
]  # fmt: skip
LEVELS = {module: level for level, line in enumerate(ORDER) for module in line.split()}

# layer.py: torch's name of the conversion stands on the class, and users type it.
ALLOWED_UPWARDS = {("layer", "convert")}
# Rooms that may know torch.distributed; of its tensors roads.dtensors; and tests of users' own, which start ranks.
KNOWS_RANKS = (
    "distributed.",
    "roads.dtensors",
    "diagnosis.",
    "tools.join",
    "torch_private",
    "testing",
    "__main__",
    "cli.",
)


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {module_name(file): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
ROOMS = {f"{room}.__init__" for room in ("distributed", "diagnosis", "roads", "tools", "cli")}  # which hold nothing


def imported(tree: ast.AST) -> set[str]:
    """The modules of this package that run when this is imported or used; not those for types alone."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "syncbn":
            parent = node.module.removeprefix("syncbn").removeprefix(".")
            for alias in node.names:
                name = f"{parent}.{alias.name}" if parent else alias.name
                target = name if name in MODULES else parent
                found.add(
                    target if target in MODULES else f"{name if f'{name}.__init__' in MODULES else parent}.__init__"
                )
    return found


ARROWS = sorted((module, target) for module, tree in MODULES.items() for target in imported(tree))


def test_every_module_has_its_place() -> None:
    assert set(MODULES) - ROOMS == set(LEVELS)
    for room in ROOMS:
        assert not imported(MODULES[room]), room


def test_imports_run_downwards() -> None:
    upwards = [
        f"{module} imports {target}"
        for module, target in ARROWS
        if LEVELS[module] >= LEVELS[target] and (module, target) not in ALLOWED_UPWARDS
    ]
    assert not upwards


def test_the_one_exception_is_inside_a_method() -> None:
    top = {id(node) for node in MODULES["layer"].body}
    inside = [
        node
        for node in ast.walk(MODULES["layer"])
        if isinstance(node, ast.ImportFrom) and node.module == "syncbn.convert" and id(node) not in top
    ]
    assert len(inside) == 1


@pytest.mark.parametrize("module", sorted(MODULES))
def test_who_knows_torch_distributed(module: str) -> None:
    """Nobody else: so ranks can be thought of in one place."""
    if module.startswith(KNOWS_RANKS):
        return
    names = [ast.unparse(node) for node in ast.walk(MODULES[module]) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not [name for name in names if "torch.distributed" in name]


EFFECTS = """
import json, os, sys, tempfile, threading
import torch, torch.distributed as dist
import torch.distributed.nn.functional  # makes a temporary folder, whoever imports it first
threads, files, folders = threading.active_count(), os.listdir("/proc/self/fd"), os.listdir(tempfile.gettempdir())
{statement}
print(json.dumps({{
    "threads": threading.active_count() - threads,
    "files": len(os.listdir("/proc/self/fd")) - len(files),
    "folders": len(set(os.listdir(tempfile.gettempdir())) - set(folders)),
    "group": dist.is_initialized(),
    "operators": hasattr(torch.ops.syncbn, "forward_sums"),
    "libraries": len(torch.ops.loaded_libraries),
}}))
"""


def effects(statement: str, tmp_path: Path) -> dict[str, int]:
    command = [sys.executable, "-c", EFFECTS.format(statement=statement)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env={"TMPDIR": str(tmp_path)})
    return json.loads(run.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="open files are read from /proc")
def test_an_import_does_nothing(tmp_path: Path) -> None:
    found = effects("import syncbn, syncbn.testing, syncbn.cli.check", tmp_path)
    assert not any(found.values()), found


@pytest.mark.skipif(sys.platform != "linux", reason="open files are read from /proc")
def test_the_check_above_can_fail(tmp_path: Path) -> None:
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    start = f'{thread}; kept = open("/dev/null"); tempfile.mkdtemp()'
    found = effects(f"{start}; dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)", tmp_path)
    assert all(found[name] for name in ("threads", "files", "folders", "group"))
