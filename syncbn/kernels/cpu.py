"""The four kernels for CPU tensors, in C++ (cpu.cpp), where the installation could build them.

They are torch operators without a gradient of their own: only for use inside an autograd.Function.
"""

from __future__ import annotations

import functools
import importlib.machinery
from pathlib import Path
from typing import Any

import torch

FILES = [Path(__file__).with_name(f"_cpu{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]


@functools.cache
def why_not() -> str | None:
    """None when the operators are there, else the reason in a line."""
    file = next((file for file in FILES if file.exists()), None)
    if file is None:
        return "not built: install with a C++ compiler and pip install --no-build-isolation"
    try:
        torch.ops.load_library(file)  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{file.name} does not load: {error}"
    for name, fake in FAKES.items():
        torch.library.register_fake(f"syncbn::{name}")(fake)
    return None


def __getattr__(name: str) -> Any:
    """The operators, under the names and with the arguments of reference.py; and those for moments.py."""
    return getattr(torch.ops.syncbn, name).default


FAKES = {
    "moments": lambda sums, eps: [sums.new_empty(sums.numel() // 2) for _ in range(3)],
    "update_running_stats": lambda *_: None,
    "channel_sums": lambda x: x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64),
    "normalize": lambda *_: None,
    "gradient_sums": lambda dy, x, y, mean: x.new_empty(2 * x.shape[1], dtype=torch.float64),
    "input_gradient": lambda *_: None,
}
