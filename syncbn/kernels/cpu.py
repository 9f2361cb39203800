"""The four kernels for CPU tensors, in C++ (cpu.cpp), where the installation could build them.

They are torch operators without a gradient of their own: only for use inside an autograd.Function.
"""

from __future__ import annotations

import functools
import importlib.machinery
from pathlib import Path

import torch
from torch import Tensor

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


def moments(sums: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """mean, var and 1 / sqrt(var + eps) of packed sums, as syncbn/moments.py computes them."""
    mean, var, invstd = torch.ops.syncbn.moments.default(sums, eps)
    return mean, var, invstd


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, num_values: Tensor, momentum: float
) -> None:
    """As syncbn/moments.py does it."""
    torch.ops.syncbn.update_running_stats.default(running_mean, running_var, mean, var, num_values, momentum)


def channel_sums(x: Tensor) -> Tensor:
    sums: Tensor = torch.ops.syncbn.channel_sums.default(x)
    return sums


def normalize(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    relu: bool,
    out: Tensor,
) -> None:
    torch.ops.syncbn.normalize.default(x, mean, invstd, weight, bias, residual, relu, out)


def gradient_sums(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor) -> Tensor:
    sums: Tensor = torch.ops.syncbn.gradient_sums.default(dy, x, y, mean)
    return sums


def input_gradient(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sums: Tensor,
    num_values: Tensor,
    out: Tensor,
    residual_out: Tensor | None,
) -> None:
    torch.ops.syncbn.input_gradient.default(dy, x, y, mean, invstd, weight, sums, num_values, out, residual_out)


FAKES = {
    "moments": lambda sums, eps: [sums.new_empty(sums.numel() // 2) for _ in range(3)],
    "update_running_stats": lambda *_: None,
    "channel_sums": lambda x: x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64),
    "normalize": lambda *_: None,
    "gradient_sums": lambda dy, x, y, mean: x.new_empty(2 * x.shape[1], dtype=torch.float64),
    "input_gradient": lambda *_: None,
}
