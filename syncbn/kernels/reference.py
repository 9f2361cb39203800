"""Defines the kernels as torch operations, which run on every device: the other kernel modules must compute the same.

C: channels. `layout` says how x lies in memory: without gaps, as (outer, C, inner). So do dy, y and the residual, which
    have the dtype and shape of x. Sums, totals and statistics are float64, packed as in statistics.py; weight and bias
    (C,) are of any float dtype.
A fused relu: backward must know which values passed it: by its output y where a residual was added; else by x, scale
    and shift (C,), which follow the statistics, and y is None.
Reductions add in float64; values of 16 bits, a few at a time, at first in float32 if that is faster, and on GPUs
    float32 values too: squares of values beyond 1.8e19 then overflow, those of values below 1e-19 lose digits.
Maps compute single values in float32, or in float64 for float64 values. Beside values beyond 1e18 the float32 number b
    of backward_outputs underflows, and with it what the variance contributes to the gradient.
"""

import torch
from torch import Tensor

from syncbn.layout import Layout
from syncbn.statistics import compute_dtype, from_sums, has_scale_and_shift, unpack
from syncbn.statistics import update_running_stats as update_running_stats


def forward_sums(x: Tensor, layout: Layout) -> Tensor:
    """sum x and sum x^2 of each channel, then the number of its values: float64 (2C + 1,)."""
    wide = layout.fold(x).to(torch.float64)
    num_values = wide.new_full((1,), wide.shape[0] * wide.shape[2])
    return torch.cat((wide.sum((0, 2)), wide.square().sum((0, 2)), num_values))


def forward_outputs(
    x: Tensor, layout: Layout, total: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y = (x - center) * scale + shift (+ residual) (then relu), and the statistics, by all ranks' sums.

    mean = center + rest: x - center is exact, and the shift makes up for the rest.
    """
    statistics = from_sums(total, eps)
    mean, _, invstd, _ = unpack(statistics, layout.sizes[1])
    _, rest = _split(mean, x.dtype)
    scale = invstd if weight is None else invstd * weight
    shift = -rest * scale if bias is None else bias - rest * scale
    y = _normalized(x, layout, mean, scale, shift)
    if residual is not None:
        y = y + layout.fold(residual)
    elif relu:
        statistics = torch.cat((statistics, scale, shift))
    if relu:
        y = y.relu()
    return _laid_out(y, x, layout), statistics


def backward_sums(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, statistics: Tensor, weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """sum dy and sum dy * (x - mean) of each channel, (2C,); where the output of a fused relu is 0, dy counts as 0.

    Returns them, and what they are to this rank's parameters in their dtypes, or None without a dtype: grad_weight =
    sum dy * (x - mean) * invstd and grad_bias = sum dy, in memory of their own, as an all_reduce overwrites the sums.
    """
    mean, *_ = unpack(statistics, layout.sizes[1])
    wide_dy = through_relu(dy, x, y, layout, statistics).to(torch.float64)
    xmu = layout.fold(x).to(torch.float64) - mean[:, None]
    sums = torch.cat((wide_dy.sum((0, 2)), (wide_dy * xmu).sum((0, 2))))
    return sums, *gradients_of_parameters(sums, statistics, weight_dtype, bias_dtype)


def gradients_of_parameters(
    sums: Tensor, statistics: Tensor, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """grad_weight and grad_bias, by this rank's sums; None without a dtype."""
    (sum_dy, sum_dy_xmu), (_, _, invstd, _) = sums.chunk(2), unpack(statistics, len(sums) // 2)
    grad_weight = None if weight_dtype is None else (sum_dy_xmu * invstd).to(weight_dtype)
    return grad_weight, None if bias_dtype is None else sum_dy.to(bias_dtype, copy=True)


def backward_outputs(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, total: Tensor, statistics: Tensor,
    weight: Tensor | None, of_residual: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """grad_x = dy * a + (x - center) * b + c, by all ranks' sums of dy and of dy * (x - mean), with which it is

        (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight.

    dy is taken behind the relu, as in backward_sums; with `of_residual` it is returned too, as the gradient of the
    residual.
    """
    mean, _, invstd, num_values = unpack(statistics, layout.sizes[1])
    center, rest = _split(mean, x.dtype)
    mean_dy, mean_dy_xmu = (total / num_values.clamp(min=1)).chunk(2)
    wide_a = invstd if weight is None else invstd * weight
    wide_b = -wide_a * invstd.square() * mean_dy_xmu
    center, a, b, c = _columns(center, wide_a, wide_b, -wide_a * mean_dy - wide_b * rest)
    dy = through_relu(dy, x, y, layout, statistics)
    grad_x = dy.to(center.dtype) * a + (layout.fold(x).to(center.dtype) - center) * b + c
    return _laid_out(grad_x, x, layout), _laid_out(dy, x, layout) if of_residual else None


def _split(mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    center = mean.to(compute_dtype(dtype))
    return center, mean - center


def _columns(center: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """These numbers of channels, each (C, 1), in the dtype of the center. Inductor does not compute again, for each
    value of a map, what torch.cat puts in memory."""
    packed = torch.cat((center, *[one.to(center.dtype) for one in others]))
    return packed.view(1 + len(others), center.shape[0], 1).unbind()


def _laid_out(values: Tensor, x: Tensor, layout: Layout) -> Tensor:
    """The folded `values` in the shape, dtype and memory format of x; not as a view, which users may not change."""
    return layout.unfold(values, x.shape).to(x.dtype, copy=True)


def _normalized(x: Tensor, layout: Layout, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """(x - center) * scale + shift, folded, in the dtype of computation."""
    center, scale, shift = _columns(_split(mean, x.dtype)[0], scale, shift)
    return (layout.fold(x).to(center.dtype) - center) * scale + shift


def through_relu(dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, statistics: Tensor) -> Tensor:
    """dy folded, and 0 where the output of a fused relu is 0. NaN passes, as in torch's relu."""
    channels = layout.sizes[1]
    if y is not None:
        output = layout.fold(y)
    elif has_scale_and_shift(statistics, channels):
        scale, shift = statistics[3 * channels + 1 :].chunk(2)
        output = _normalized(x, layout, statistics[:channels], scale, shift).to(x.dtype)
    else:
        return layout.fold(dy)
    return layout.fold(dy).masked_fill(output <= 0, 0)
