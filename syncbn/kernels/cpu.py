"""Calls the kernels for CPU tensors, which are written in C++ (cpu.cpp), where these could be built.

They are torch operators without a gradient of their own: only for use inside an autograd.Function. What each computes
is defined by the function of the same name in reference.py.
"""

from __future__ import annotations

import functools
import importlib.machinery
from pathlib import Path

import torch
from torch import Tensor

from syncbn import moments
from syncbn.layout import Layout

FILES = [Path(__file__).with_name(f"_cpu{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
OPERATORS = torch.ops.syncbn


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
    sums: Tensor = OPERATORS.channel_sums.default(x, *layout.sizes)
    return sums


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
    result: tuple[Tensor, Tensor] = OPERATORS.normalize.default(
        x, *layout.sizes, sums, eps, weight, bias, residual, relu
    )
    return result


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
    result: tuple[Tensor, Tensor | None, Tensor | None] = OPERATORS.gradient_sums.default(
        dy, x, y, *layout.sizes, statistics, eps, weight_dtype, bias_dtype
    )
    return result


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
    result: tuple[Tensor, Tensor | None] = OPERATORS.input_gradient.default(
        dy, x, y, *layout.sizes, statistics, eps, weight, sums, of_residual
    )
    return result


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if isinstance(momentum, Tensor):
        moments.update_running_stats(running_mean, running_var, statistics, momentum, moves)
    elif moves:  # one operator, which has no result that selective checkpointing could count
        OPERATORS.update_running_stats.default(running_mean, running_var, statistics, momentum)
