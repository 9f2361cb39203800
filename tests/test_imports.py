"""Catches an import that runs upwards or in a circle."""

import ast
from pathlib import Path

import syncbn

PACKAGE = Path(syncbn.__file__).parent

# From the top to the bottom. A module imports only from lines below its own; within a line, nothing of that line.
ORDER = [
    "__main__",
    "testing",
    "__init__",
    "convert functional",
    "unconverted running_stats",
    "layer",
    "step",
    "fallback",
    "inputs plan",
    "arguments",
    "ranks.reduction",
    "ranks.status",
    "ranks.sites",
    "ranks.watchdog",
    "ranks.report",
    "ranks.positions ranks.groups",
    "ranks.all_reduce",
    "kernels.__init__",
    "kernels.select",
    "kernels.graphs",
    "kernels.operators",
    "kernels.in_parts",
    "kernels.gpu kernels.reference kernels.cpu",
    "kernels.gpu_channels kernels.gpu_launch",
    "kernels.gpu_tiles",
    "kernels.gpu_mailbox",
    "kernels.interface",
    "statistics",
    "layout call_stack torch_internals.autograd torch_internals.distributed",
    "torch_internals.state torch_internals.inductor texts",
]  # fmt: skip
LEVELS = {module: level for level, line in enumerate(ORDER) for module in line.split()}

# Within a method of layer.py: torch's name of the conversion stands on the class, and users type it.
ALLOWED_UPWARDS = {("layer", "convert")}
# Rooms that may know torch.distributed; and tests of users' own, which start ranks.
KNOWS_RANKS = "ranks.", "torch_internals.distributed", "testing", "__main__"

MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): ast.parse(file.read_text())
    for file in PACKAGE.rglob("*.py")
}
EMPTY = {f"{room}.__init__" for room in ("ranks", "torch_internals")}  # which hold nothing


def imported(tree: ast.AST) -> set[str]:
    """The modules of this package that this one imports, also for types alone."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "syncbn":
            parent = node.module.removeprefix("syncbn").removeprefix(".")
            for alias in node.names:
                name = f"{parent}.{alias.name}".strip(".")
                candidates = name, parent, f"{name}.__init__", f"{parent}.__init__".strip(".")
                found.add(next(candidate for candidate in candidates if candidate in MODULES))
    return found


def test_every_module_has_its_place() -> None:
    assert set(MODULES) - EMPTY == set(LEVELS)
    for room in EMPTY:
        assert not imported(MODULES[room]), room


def test_imports_run_downwards() -> None:
    upwards = [
        f"{module} imports {target}"
        for module, tree in MODULES.items()
        for target in imported(tree)
        if LEVELS[module] >= LEVELS[target] and (module, target) not in ALLOWED_UPWARDS
    ]
    assert not upwards


def test_who_knows_torch_distributed() -> None:
    """Nobody else: so ranks can be thought of in one place."""
    for module, tree in MODULES.items():
        names = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert module.startswith(KNOWS_RANKS) or "torch.distributed" not in " ".join(names), module
