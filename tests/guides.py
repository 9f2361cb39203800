"""Find and run the code blocks of README.md and docs/, and import examples."""

import importlib
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The guides use these names without importing them.
NAMES = {
    "torch": torch, "Tensor": Tensor, "nn": nn, "F": F, "dist": dist, "itertools": itertools, "syncbn": syncbn,
    "DistributedDataParallel": DistributedDataParallel,
}  # fmt: skip


def python_blocks(page: Path) -> list[str]:
    """Return the Python code blocks of a page, in their order."""
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "python"]


def code_block(page: str, line: str) -> str:
    """Return the Python block of docs/`page` in which a line begins with the text `line`.

    **Raises** AssertionError unless exactly one block has such a line; the message lists the pages that have one.
    """
    beginning = re.compile(rf"^ *{re.escape(line)}", re.MULTILINE)
    blocks = [(path.name, code) for path in ROOT.glob("docs/*.md") for code in python_blocks(path)]
    found = [(name, code) for name, code in blocks if beginning.search(code)]
    pages = [name for name, _ in found]
    assert pages.count(page) == 1, (
        f"docs/{page} must have one Python block with a line that begins with {line!r}; pages with such a block: "
        f"{pages}. If the guide has changed, give the test the block's new page or line."
    )
    return found[pages.index(page)][1]


def run_code(code: str, **names: Any) -> dict[str, Any]:
    """Run a block with the names that the guides use and `names`. Return all of them and those that it defines."""
    names = NAMES | names
    try:
        exec(code, names)
    except BaseException:
        names.clear()  # the traceback would keep a DDP and its group alive, until whose end the other ranks wait
        raise
    return names


def run_block(page: str, line: str, **names: Any) -> dict[str, Any]:
    """Run the block that `code_block` finds."""
    return run_code(code_block(page, line), **names)


def import_example(name: str) -> ModuleType:
    """Import examples/`name`.py."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.append(str(ROOT / "examples"))
    return importlib.import_module(name)
