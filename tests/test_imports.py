"""Tests which modules of the package import which others, and which of them know torch.distributed."""

import ast
import graphlib
from pathlib import Path

import syncbn

PACKAGE = Path(syncbn.__file__).parent
LOWEST = "torch_internals", "texts", "payload"
# By the prefix of a module's name, the prefixes of all that the module may import.
ALLOWED = {
    "torch_internals": LOWEST,
    "payload": (),
    "kernels.": ("kernels.", "statistics", *LOWEST),
    "ranks.": ("ranks.", "kernels.", *LOWEST),
}
KNOW_DISTRIBUTED = "ranks.", "torch_internals", "testing", "__main__"
# Imports inside methods of layer.py: the conversion is also a classmethod of the layer, as in torch, and a program may
# have replaced the forward of torch's class, which then runs like the forward of a subclass.
LATE = {("layer", "convert"), ("layer", "subclasses")}
TREES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): ast.parse(file.read_text())
    for file in PACKAGE.rglob("*.py")
}


def imported_modules(tree: ast.AST) -> set[str]:
    """Return the modules of the package that a module imports, including those for type annotations."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "syncbn":
            parent = node.module.removeprefix("syncbn").removeprefix(".")
            for alias in node.names:
                name = f"{parent}.{alias.name}".strip(".")
                candidates = name, parent, f"{name}.__init__", f"{parent}.__init__".strip(".")
                modules.add(next(candidate for candidate in candidates if candidate in TREES))
    return modules


IMPORTS = {
    module: {other for other in imported_modules(tree) if (module, other) not in LATE} for module, tree in TREES.items()
}


def test_there_are_no_import_cycles() -> None:
    graphlib.TopologicalSorter(IMPORTS).prepare()  # raises a CycleError that names the modules


def test_kernels_and_ranks_import_only_lower_modules() -> None:
    for module, others in IMPORTS.items():
        for prefix, allowed in ALLOWED.items():
            assert not module.startswith(prefix) or all(other.startswith(allowed) for other in others), module


def test_few_modules_import_torch_distributed() -> None:
    for module, tree in TREES.items():
        imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert module.startswith(KNOW_DISTRIBUTED) or "torch.distributed" not in " ".join(imports), module
