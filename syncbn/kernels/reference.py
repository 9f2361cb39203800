"""The four kernels as torch operations: runs on every device and defines what the other kernel modules must compute.

O, C, I: outer, channel and inner size. Per-channel arguments have shape (C,); tensors over values have shape (O, C, I)
    and are contiguous. Reductions return float64. Maps compute in the dtype of `center` (float32, or float64 for
    float64 values) and write into `out`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def channel_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """sum x and sum x^2 over (O, I): float64 (C,), (C,)."""
    wide = x.to(torch.float64)
    return wide.sum((0, 2)), wide.square().sum((0, 2))


def normalize(
    x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, relu: bool, out: Tensor
) -> None:
    """out = (x - center) * scale + shift (+ residual) (then relu)."""
    y = (x.to(center.dtype) - center[:, None]) * scale[:, None] + shift[:, None]
    if residual is not None:
        y = y + residual
    if relu:
        y = y.relu()
    out.copy_(y)


def _through_relu(dy: Tensor, y: Tensor | None) -> Tensor:
    """dy where the fused relu let values pass. `y` is its output, None without one; NaN passes, as in torch's relu."""
    return dy if y is None else dy.masked_fill(y <= 0, 0)


def gradient_sums(dy: Tensor, x: Tensor, center: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """sum dy and sum dy * (x - center) over (O, I): float64 (C,), (C,)."""
    wide_dy = _through_relu(dy, y).to(torch.float64)
    wide_x = x.to(torch.float64)
    return wide_dy.sum((0, 2)), (wide_dy * (wide_x - center.to(torch.float64)[:, None])).sum((0, 2))


def input_gradient(
    dy: Tensor,
    x: Tensor,
    center: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    y: Tensor | None,
    out: Tensor,
    residual_out: Tensor | None,
) -> None:
    """out = dy * a + (x - center) * b + c; residual_out, where asked for, = dy behind the relu."""
    dy = _through_relu(dy, y)
    if residual_out is not None:
        residual_out.copy_(dy)
    out.copy_(dy.to(a.dtype) * a[:, None] + (x.to(center.dtype) - center[:, None]) * b[:, None] + c[:, None])
