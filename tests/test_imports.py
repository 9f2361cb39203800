"""Catches imports in a circle, and a room of the package that imports what stands above it."""

import ast
import graphlib
from pathlib import Path

import syncbn

PACKAGE = Path(syncbn.__file__).parent
LOWEST = "torch_internals", "texts", "payload"
ROOMS = {  # the beginning of a module's name -> the beginnings of all that it may import
    "torch_internals": LOWEST,
    "payload": (),  # not the kernels: ranks do not need them for what they send
    "kernels.": ("kernels.", "statistics", *LOWEST),
    "ranks.": ("ranks.", "kernels.", *LOWEST),
}
# Rooms that may know torch.distributed; and tests of users' own, which start ranks.
KNOWS_RANKS = "ranks.", "torch_internals", "testing", "__main__"
# Within methods of layer.py: torch's name of the conversion stands on the class, and users type it; and a program may
# have replaced the forward of torch's own class, which then runs like that of a subclass.
LATE = {("layer", "convert"), ("layer", "subclasses")}
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): ast.parse(file.read_text())
    for file in PACKAGE.rglob("*.py")
}


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


IMPORTS = {module: {one for one in imported(tree) if (module, one) not in LATE} for module, tree in MODULES.items()}


def test_imports_make_no_circle() -> None:
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises a CycleError with the modules of one


def test_rooms_import_only_what_stands_below() -> None:
    for module, others in IMPORTS.items():
        for room, allowed in ROOMS.items():
            assert not module.startswith(room) or all(other.startswith(allowed) for other in others), module


def test_who_knows_torch_distributed() -> None:
    """Nobody else: so ranks can be thought of in one place."""
    for module, tree in MODULES.items():
        names = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert module.startswith(KNOWS_RANKS) or "torch.distributed" not in " ".join(names), module
