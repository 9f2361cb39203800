"""Calls the kernels for CPU tensors, which are written in C++ (cpu.cpp), where these could be built.

They are torch operators without a gradient of their own: only for use inside an autograd.Function. What each computes
is defined by the function of the same name in reference.py.
"""

from __future__ import annotations

import functools
import importlib.machinery
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncbn import moments
from syncbn.layout import Layout

FILES = [Path(__file__).with_name(f"_cpu{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]

# By name, once they are loaded. (A look-up in torch.ops costs 1 us.)
_operators: dict[str, Callable[..., Any]] = {}


@functools.cache
def why_not() -> str | None:
    """Load the operators, once: None when they are there, else the reason in a line."""
    file = next((file for file in FILES if file.exists()), None)
    if file is None:
        return "not built: install with a C++ compiler and pip install --no-build-isolation"
    try:
        torch.ops.load_library(file)  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{file.name} does not load: {error}"
    for name, fake in FAKES.items():
        torch.library.register_fake(f"syncbn::{name}")(fake)
        _operators[name] = getattr(torch.ops.syncbn, name).default
    return None


# What the operators return, without values.
FAKES = {
    "channel_sums": lambda x, outer, channels, inner: x.new_empty(2 * channels + 1, dtype=torch.float64),
    "normalize": lambda x, outer, channels, inner, sums, *_: (torch.empty_like(x), torch.empty_like(sums)),
    "gradient_sums": lambda dy, x, y, outer, channels, inner, statistics, eps, *dtypes: (
        statistics.new_empty(2 * channels),
        *(None if dtype is None else x.new_empty(channels, dtype=dtype) for dtype in dtypes),
    ),
    "input_gradient": lambda dy, x, *arguments: (torch.empty_like(x), torch.empty_like(x) if arguments[-1] else None),
    "update_running_stats": lambda *_: None,
}


def channel_sums(x: Tensor, layout: Layout) -> Tensor:
    return _operators["channel_sums"](x, *layout.sizes)  # type: ignore[no-any-return]


def normalize(
    x: Tensor,
    layout: Layout,
    sums: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    return _operators["normalize"](x, *layout.sizes, sums, eps, weight, bias, residual, relu)  # type: ignore[no-any-return]


def gradient_sums(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    layout: Layout,
    statistics: Tensor,
    eps: float,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _operators["gradient_sums"](dy, x, y, *layout.sizes, statistics, eps, weight_dtype, bias_dtype)  # type: ignore[no-any-return]


def input_gradient(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    layout: Layout,
    statistics: Tensor,
    eps: float,
    weight: Tensor | None,
    sums: Tensor,
    of_residual: bool,
) -> tuple[Tensor, Tensor | None]:
    return _operators["input_gradient"](dy, x, y, *layout.sizes, statistics, eps, weight, sums, of_residual)  # type: ignore[no-any-return]


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if isinstance(momentum, Tensor):
        moments.update_running_stats(running_mean, running_var, statistics, momentum, moves)
    elif moves:  # one operator, which has no result that selective checkpointing could count
        _operators["update_running_stats"](running_mean, running_var, statistics, momentum)
