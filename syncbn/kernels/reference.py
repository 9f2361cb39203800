"""Defines the kernels as torch operations, which run on every device. Other back ends must compute the same results.

Autograd, torch.func and compilers can trace these operations. They make float64 copies of whole tensors.

Tensors      x is non-overlapping and dense, and viewed as (outer, C, inner), see layout.py. dy, y and the
             residual have the shape, dtype and layout of x. Sums, totals and statistics are float64, packed as in
             statistics.py. weight and bias (C,) have any float dtype.
Fused relu   Backward sets dy to 0 where the output of the relu is 0. With a residual that output is the saved y.
             Without a residual y is None, and the output is computed again from x, scale and shift. Both are (C,) and
             are appended to the statistics.
Reductions   They accumulate in float64. For speed the other back ends may first add a few 16-bit values (on GPUs also
             float32 values) in float32. In float32, squares of values beyond 1.8e19 overflow, and squares of values
             below 1e-19 lose digits.
Elementwise  Operations on elements compute in float32, or in float64 for float64 tensors. For values beyond 1e18 the
             float32 coefficient b of backward_outputs underflows, and the gradient loses the term of the variance.
"""

import torch
from torch import Tensor

from syncbn.kernels import interface
from syncbn.kernels.interface import NO_BUFFERS, UNSIGNED, Buffers, GradientPair, Inputs, ReluMask, Saved, StatusWords
from syncbn.kernels.payload import sign
from syncbn.statistics import N_COPIES, compute_dtype, from_sums, unpack, update_buffers


class Forward(interface.ForwardKernels):
    is_direct = False

    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, status_words: StatusWords | None = None) -> Tensor:
        wide, (outer, _, inner) = self.config.layout.fold(x).to(torch.float64), self.config.layout.sizes
        sums = torch.cat((channel_sums(wide), channel_sums(wide.square())))
        trailer = sums.new_full((1,), outer * inner), sums.new_zeros(interface.SIGNATURE_ELEMENTS)
        return sign(torch.cat((sums, *trailer)), signature)

    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | Tensor | None = 0.0,
        status_words: StatusWords | None = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """Return y = (x - center) * scale + shift (+ residual) (then relu), the statistics, and True.

        mean = center + rest, where center has the dtype of computation. The shift contains -rest * scale. Subtracting
        center from an x near the mean is exact.
        """
        (x, weight, bias, residual), config = inputs, self.config
        statistics = from_sums(total[: -interface.SIGNATURE_ELEMENTS], config.eps)
        mean, _, invstd, _ = unpack(statistics, config.layout.sizes[1])
        _, rest = _split_mean(mean, x.dtype)
        scale = invstd if weight is None else invstd * weight.double()
        shift = -rest * scale if bias is None else bias.double() - rest * scale
        if config.relu_mask is ReluMask.FROM_X:
            statistics = torch.cat((statistics, scale, shift))
        y = _normalize(config.layout.fold(x), mean, scale, shift)
        y = y if residual is None else y + config.layout.fold(residual)
        y = y.relu() if config.relu else y
        y = _like(x, y, config)
        update_buffers(*buffers, statistics, momentum)
        return y, statistics, True


class Backward(interface.BackwardKernels):
    is_direct = False

    def backward_sums(
        self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, forward_total: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the sums, grad_weight = sum dy * (x - mean) * invstd, and grad_bias = sum dy.

        The gradients do not share memory with the sums, which an all_reduce overwrites.
        """
        (_, _, statistics, _), (x, dy, y), config = saved, self._fold(dy, saved), self.config
        mean, _, invstd, _ = unpack(statistics, config.layout.sizes[1])
        wide_dy = apply_relu_mask(config, dy, x, y, statistics).double()
        sum_dy, sum_dy_xmu = channel_sums(wide_dy), channel_sums(wide_dy * subtract_mean(x, mean))
        weight_dtype, bias_dtype = config.grad_weight_dtype, config.grad_bias_dtype
        grad_weight = None if weight_dtype is None else (sum_dy_xmu * invstd).to(weight_dtype)
        grad_bias = None if bias_dtype is None else sum_dy.to(bias_dtype)
        sums = torch.cat((sum_dy, sum_dy_xmu, sum_dy.new_zeros(interface.TRAILER_ELEMENTS)))
        return sign(sums, signature, forward_total), grad_weight, grad_bias

    def backward_outputs(
        self, dy: Tensor, saved: Saved, total: Tensor, status_words: StatusWords | None = None
    ) -> GradientPair:
        """Return grad_x = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight, and grad_residual.

        grad_x is computed as dy * a + (x - center) * b + c. The means are the sums of all ranks divided by n.
        """
        (like_x, weight, statistics, _), (x, dy, y), config = saved, self._fold(dy, saved), self.config
        mean, _, invstd, num_values = unpack(statistics, config.layout.sizes[1])
        narrow_mean, rest = _split_mean(mean, x.dtype)
        mean_dy, mean_dy_xmu = (total[: -interface.TRAILER_ELEMENTS] / num_values.clamp(min=1)).chunk(2)
        wide_a = invstd if weight is None else invstd * weight.double()
        wide_b = -wide_a * invstd.square() * mean_dy_xmu
        center, a, b, c = _to_columns(narrow_mean, wide_a, wide_b, -wide_a * mean_dy - wide_b * rest)
        grad_x = grad_residual = None
        dy = apply_relu_mask(config, dy, x, y, statistics)
        if config.needs_x:
            grad_x = _like(like_x, dy.to(center.dtype) * a + (x.to(center.dtype) - center) * b + c, config)
        if config.needs_residual:
            grad_residual = _like(like_x, dy, config)
        return grad_x, grad_residual

    def _fold(self, dy: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor | None]:
        (x, _, _, y), fold = saved, self.config.layout.fold
        return fold(x), fold(dy), None if y is None else fold(y)


def channel_sums(values: Tensor) -> Tensor:
    """Return the sum of each channel of folded values: (C,)."""
    return values.sum((0, 2))


def subtract_mean(x: Tensor, mean: Tensor) -> Tensor:
    """Return x - mean in float64 for a folded x."""
    return x.double() - mean[:, None]


def _like(x: Tensor, folded: Tensor, config: interface.ForwardConfig | interface.BackwardConfig) -> Tensor:
    """Return a copy of folded values with the shape, dtype and strides of x. The result is not a view, because autograd
    forbids in-place changes of a view that a Function returns."""
    return config.layout.unfold(folded, x.shape).to(x.dtype, copy=True)


def apply_relu_mask(
    config: interface.BackwardConfig, dy: Tensor, x: Tensor, y: Tensor | None, statistics: Tensor
) -> Tensor:
    """Return dy set to 0 where the output of a fused relu is 0, for folded tensors. NaN passes, as in torch's relu."""
    if config.relu_mask is ReluMask.NONE:
        return dy
    if config.relu_mask is ReluMask.FROM_X:
        num_channels = config.layout.sizes[1]
        scale, shift = statistics[3 * num_channels + N_COPIES :].chunk(2)
        y = _normalize(x, statistics[:num_channels], scale, shift).to(x.dtype)
    assert y is not None
    return dy.masked_fill(y <= 0, 0)


def _normalize(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return (x - center) * scale + shift for a folded x, in the dtype of computation."""
    center, scale, shift = _to_columns(_split_mean(mean, x.dtype)[0], scale, shift)
    return (x.to(center.dtype) - center) * scale + shift


def _split_mean(mean: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return center, the mean in the dtype of computation for `dtype`, and rest = mean - center."""
    center = mean.to(compute_dtype(dtype))
    return center, mean - center


def _to_columns(center: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return per-channel values as (C, 1), in the dtype of `center`.

    torch.cat stores the values in memory; otherwise Inductor would compute them again for each element.
    """
    packed = torch.cat((center, *[values.to(center.dtype) for values in others]))
    return packed.view(1 + len(others), center.shape[0], 1).unbind()
