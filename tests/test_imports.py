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
# Methods of layer.py import these modules when they are called. Like torch's layer, the layer has a classmethod that
# converts models. If a program has replaced the forward of torch's class, the layer calls it like that of a subclass.
IMPORTED_IN_METHODS = {("syncbn.layer", "syncbn.convert"), ("syncbn.layer", "syncbn.subclasses")}


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


# module -> dotted names of the modules and objects that it imports, also for type annotations
NAMES: dict[str, list[str]] = {}
for file in PACKAGE.rglob("*.py"):
    names = NAMES[module_name(file)] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names += [prefix + alias.name for alias in node.names]
IMPORTS: dict[str, set[str]] = {module: set() for module in NAMES}  # module -> modules of syncbn that it imports
for importer, names in NAMES.items():
    for name in names:
        module = name if name in NAMES else name.rpartition(".")[0]  # The name is a module, or an object in a module.
        if module in NAMES and (importer, module) not in IMPORTED_IN_METHODS:
            IMPORTS[importer].add(module)


def test_there_are_no_import_cycles() -> None:
    graphlib.TopologicalSorter(IMPORTS).prepare()  # The CycleError names the modules.


def test_kernels_and_ranks_import_only_lower_modules() -> None:
    for prefix, allowed in ALLOWED.items():
        for importer, modules in IMPORTS.items():
            if importer.startswith(prefix):
                assert [module for module in modules if not module.startswith(allowed)] == [], importer


def test_few_modules_import_torch_distributed() -> None:
    for module, names in NAMES.items():
        imported = [name for name in names if name.startswith("torch.distributed")]
        assert imported == [] or module.startswith(KNOW_DISTRIBUTED), module
