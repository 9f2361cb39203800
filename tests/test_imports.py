"""Tests which modules of the package import which others, and which of them know torch.distributed."""

import ast
import graphlib
from pathlib import Path

import syncbn

PACKAGE = Path(syncbn.__file__).parent
LOWEST = "syncbn.torch_internals", "syncbn.texts", "syncbn.payload"
# By the prefix of a module's name, the prefixes of all that the module may import.
ALLOWED = {
    "syncbn.torch_internals": LOWEST,
    "syncbn.payload": (),
    "syncbn.kernels": ("syncbn.kernels", "syncbn.statistics", *LOWEST),
    "syncbn.ranks": ("syncbn.ranks", "syncbn.kernels", *LOWEST),
}
KNOW_DISTRIBUTED = "syncbn.ranks", "syncbn.torch_internals", "syncbn.testing", "syncbn.__main__"
# Imports inside methods of layer.py: the conversion is also a classmethod of the layer, as in torch, and a program may
# have replaced the forward of torch's class, which then runs like the forward of a subclass.
LATE = {("syncbn.layer", "syncbn.convert"), ("syncbn.layer", "syncbn.subclasses")}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


TREES = {module_name(file): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


def imported_modules(tree: ast.AST) -> set[str]:
    """Return the modules of the package that a module imports, including those for type annotations."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [{str(node.module), f"{node.module}.{alias.name}"} & TREES.keys() for node in nodes for alias in node.names]
    return {max(candidates, key=len) for candidates in names if candidates}


IMPORTS = {
    name: {other for other in imported_modules(tree) if (name, other) not in LATE} for name, tree in TREES.items()
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
