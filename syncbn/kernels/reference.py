"""The four kernels as torch operations: runs on every device and defines what the other kernel modules must compute.

O, C, I: outer, channel and inner size. Tensors over values have shape (O, C, I), are contiguous and of one dtype.
    Numbers of channels have shape (C,): mean, invstd and sums in float64, weight and bias in any float dtype.
    Reductions add in float64, values of 16 bits at first in float32 if that is faster. Maps compute single values in
    float32, or in float64 for float64 values, and write into `out`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def channel_sums(x: Tensor) -> Tensor:
    """sum x and sum x^2 over (O, I), then their number O * I: float64 (2C + 1,)."""
    wide = x.to(torch.float64)
    num_values = wide.new_full((1,), x.shape[0] * x.shape[2])
    return torch.cat((wide.sum((0, 2)), wide.square().sum((0, 2)), num_values))


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
    """out = (x - mean) * invstd * weight + bias (+ residual) (then relu)."""
    center, rest = _split(mean, x)
    scale = invstd if weight is None else invstd * weight
    shift = -rest * scale if bias is None else bias - rest * scale
    y = (x.to(center.dtype) - center) * _column(scale, center) + _column(shift, center)
    if residual is not None:
        y = y + residual
    if relu:
        y = y.relu()
    out.copy_(y)


def gradient_sums(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor) -> Tensor:
    """sum dy and sum dy * (x - mean) over (O, I): float64 (2C,); of dy behind the relu when its output `y` is given."""
    wide_dy = _through_relu(dy, y).to(torch.float64)
    xmu = x.to(torch.float64) - mean[:, None]
    return torch.cat((wide_dy.sum((0, 2)), (wide_dy * xmu).sum((0, 2))))


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
    """out = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight.

    mean_dy and mean_dy_xmu are `sums` / `num_values`: what gradient_sums gives, over all ranks, and float64 (). dy is
    taken behind the relu when its output `y` is given, and written to `residual_out` where that is asked for.
    """
    center, rest = _split(mean, x)
    mean_dy, mean_dy_xmu = (sums / num_values.clamp(min=1)).chunk(2)
    a = invstd if weight is None else invstd * weight
    b = -a * invstd.square() * mean_dy_xmu
    c = -a * mean_dy - b * rest
    dy = _through_relu(dy, y)
    if residual_out is not None:
        residual_out.copy_(dy)
    a, b, c = (_column(one, center) for one in (a, b, c))
    out.copy_(dy.to(center.dtype) * a + (x.to(center.dtype) - center) * b + c)


def _split(mean: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """mean = center + rest: center (C, 1) in the dtype of computation, so that x - center is exact; rest float64."""
    center = mean.to(torch.promote_types(x.dtype, torch.float32))
    return center[:, None], mean - center


def _column(numbers: Tensor, center: Tensor) -> Tensor:
    return numbers.to(center.dtype)[:, None]


def _through_relu(dy: Tensor, y: Tensor | None) -> Tensor:
    """dy where the fused relu let values pass. `y` is its output, None without one; NaN passes, as in torch's relu."""
    return dy if y is None else dy.masked_fill(y <= 0, 0)
