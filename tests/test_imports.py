"""Tests which modules of the package import which others, and which of them know torch.distributed."""

import ast
import graphlib
from pathlib import Path

import syncbn

PACKAGE = Path(syncbn.__file__).parent
LOWEST = "syncbn.torch_internals", "syncbn.texts", "syncbn.payload"
# Prefix of a module's name -> prefixes of the modules that it may import
ALLOWED = {
    "syncbn.torch_internals": LOWEST,
    "syncbn.payload": (),
    "syncbn.kernels": ("syncbn.kernels", "syncbn.statistics", *LOWEST),
    "syncbn.ranks": ("syncbn.ranks", "syncbn.kernels", *LOWEST),
}
KNOW_DISTRIBUTED = "syncbn.ranks", "syncbn.torch_internals", "syncbn.testing", "syncbn.__main__"
# Methods of layer.py import these modules when they are called: as in torch, the conversion is also a classmethod of
# the layer; and a program may have replaced the forward of torch's class, which then runs like that of a subclass.
IMPORTED_IN_METHODS = {("syncbn.layer", "syncbn.convert"), ("syncbn.layer", "syncbn.subclasses")}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


TREES = {module_name(file): ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}


# Imports for type annotations count, too.
IMPORTS: dict[str, set[str]] = {module: set() for module in TREES}
for importer, tree in TREES.items():
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = {name if name in TREES else node.module for name in names} & TREES.keys()
            IMPORTS[importer] |= {module for module in modules if (importer, module) not in IMPORTED_IN_METHODS}


def test_there_are_no_import_cycles() -> None:
    graphlib.TopologicalSorter(IMPORTS).prepare()  # The CycleError names the modules.


def test_kernels_and_ranks_import_only_lower_modules() -> None:
    for prefix, allowed in ALLOWED.items():
        for importer, modules in IMPORTS.items():
            if importer.startswith(prefix):
                assert [module for module in modules if not module.startswith(allowed)] == [], importer


def test_few_modules_import_torch_distributed() -> None:
    for module, tree in TREES.items():
        lines = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert module.startswith(KNOW_DISTRIBUTED) or "torch.distributed" not in " ".join(lines), module
