"""Find and run the code blocks of README.md and docs/."""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # groups: the language, the code
# The guides use these names without importing them.
NAMES = {
    "torch": torch, "Tensor": Tensor, "nn": nn, "F": F, "dist": dist, "itertools": itertools, "os": os,
    "syncbn": syncbn, "DistributedDataParallel": DistributedDataParallel,
}  # fmt: skip


def python_blocks(page: Path) -> list[str]:
    """Return the Python code blocks of a page, in their order."""
    return [code for language, code in BLOCK.findall(page.read_text()) if language == "python"]


def code_block(page: str, line: str) -> str:
    """Return the only Python block of docs/`page` that has a line which begins with `line`."""
    beginning = re.compile(rf"^ *{re.escape(line)}", re.MULTILINE)
    blocks = [code for code in python_blocks(ROOT / "docs" / page) if beginning.search(code)]
    assert len(blocks) == 1, f"{len(blocks)} Python blocks of docs/{page} have a line that begins with {line!r}"
    return blocks[0]


def run_code(code: str, **names: Any) -> dict[str, Any]:
    """Run code with the variables `names` and NAMES. Return these variables and those that the code assigns."""
    variables = NAMES | names
    try:
        exec(code, variables)
    except BaseException:
        variables.clear()  # The traceback would keep a DDP and its group alive, and the other ranks would wait.
        raise
    return variables


def run_block(page: str, line: str, **names: Any) -> dict[str, Any]:
    """Run the code block of docs/`page` that has a line which begins with `line`, like `run_code`."""
    return run_code(code_block(page, line), **names)
