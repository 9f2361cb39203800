"""The kernels for CPU tensors, in C++ (cpu.cpp), where it could be built.

They are torch operators without a gradient of their own: only for use inside an autograd.Function. When they are there
they are in this module, under the names and with the arguments of reference.py.
"""

from __future__ import annotations

import functools
import importlib.machinery
from pathlib import Path

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
        globals()[name] = getattr(torch.ops.syncbn, name).default
    return None


# What the operators return, without values.
FAKES = {
    "channel_sums": lambda x, channel_dim: x.new_empty(2 * x.shape[channel_dim] + 1, dtype=torch.float64),
    "normalize": lambda x, channel_dim, sums, *_: (torch.empty_like(x), torch.empty_like(sums)),
    "gradient_sums": lambda dy, x, y, channel_dim, statistics, eps, *dtypes: (
        statistics.new_empty(2 * x.shape[channel_dim]),
        *(None if dtype is None else x.new_empty(x.shape[channel_dim], dtype=dtype) for dtype in dtypes),
    ),
    "input_gradient": lambda dy, x, *arguments: (torch.empty_like(x), torch.empty_like(x) if arguments[-1] else None),
    "update_running_stats": lambda *_: None,
}
