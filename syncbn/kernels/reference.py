"""Defines the kernels as torch operations, which run on every device. Other back ends must compute the same results.

Autograd, torch.func and compilers can trace these operations on whole tensors. Otherwise the operations run on one
chunk of the tensors after another, see `_chunks`: a float64 copy of a whole tensor would need more memory and, on CPUs,
2 to 4 times as long.

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

import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from syncbn import payload
from syncbn.kernels import interface
from syncbn.kernels.interface import NO_BUFFERS, Buffers, GradientPair, Inputs, ReluMask, Saved, Status, Sums
from syncbn.payload import UNSIGNED
from syncbn.statistics import N_COPIES, compute_dtype, from_sums, unpack, update_buffers
from syncbn.torch_internals import PLAIN_OR_NONE, is_compiling, is_transformed

AnyConfig: TypeAlias = interface.ForwardConfig | interface.BackwardConfig

CHUNK_ELEMENTS = 2**18  # on CPUs: 2 MB in float64, which fit in the caches
GPU_CHUNK_ELEMENTS = 2**24  # 128 MB in float64; with smaller chunks the launches would take most of the time


class Forward(interface.ForwardKernels):
    is_direct = False

    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, count: int = 0, status_words: Status = None) -> Tensor:
        def terms(x: Tensor) -> tuple[Tensor, Tensor]:
            wide = x.to(torch.float64)
            return wide, wide.square()

        sums, (outer, _, inner) = _reduce(self.config, terms, x), self.config.layout.sizes
        return payload.sign(payload.from_sums(sums, outer * inner), signature, count)

    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | Tensor | None = 0.0,
        status_words: Status = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """Return y = (x - center) * scale + shift (+ residual) (then relu), the statistics, and True.

        mean = center + rest, where center has the dtype of computation. The shift contains -rest * scale. Subtracting
        center from an x near the mean is exact.
        """
        (x, weight, bias, residual), config = inputs, self.config
        statistics = from_sums(payload.sums_and_num_values(total), config.eps)
        mean, _, invstd, _ = unpack(statistics, config.layout.sizes[1])
        _, rest = _split_mean(mean, x.dtype)
        scale = invstd if weight is None else invstd * weight.double()
        shift = -rest * scale if bias is None else bias.double() - rest * scale
        if config.relu_mask is ReluMask.FROM_X:
            statistics = torch.cat((statistics, scale, shift))

        def normalize(x: Tensor, residual: Tensor | None) -> Tensor:
            y = _normalize(x, mean, scale, shift)
            y = y if residual is None else y + residual
            return y.relu() if config.relu else y

        y = _map_elements(config, normalize, x, residual)
        update_buffers(*buffers, statistics, momentum)
        return y, statistics, True


class Backward(interface.BackwardKernels):
    is_direct = False

    def backward_sums(self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, call_id: Tensor | None = None) -> Sums:
        """Return the sums, grad_weight = sum dy * (x - mean) * invstd, and grad_bias = sum dy.

        The gradients do not share memory with the sums, which an all_reduce overwrites.
        """
        (x, _, statistics, y), config = saved, self.config
        mean, _, invstd, _ = unpack(statistics, config.layout.sizes[1])

        def terms(x: Tensor, dy: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
            wide_dy = apply_relu_mask(config, dy, x, y, statistics).double()
            return wide_dy, wide_dy * subtract_mean(x, mean)

        sums = _reduce(config, terms, x, dy, y)
        sum_dy, sum_dy_xmu = sums.chunk(2)
        weight_dtype, bias_dtype = config.grad_weight_dtype, config.grad_bias_dtype
        grad_weight = None if weight_dtype is None else (sum_dy_xmu * invstd).to(weight_dtype)
        grad_bias = None if bias_dtype is None else sum_dy.clone().to(bias_dtype)
        return payload.sign(payload.from_sums(sums), signature, call_id=call_id), grad_weight, grad_bias

    def backward_outputs(self, dy: Tensor, saved: Saved, total: Tensor, status_words: Status = None) -> GradientPair:
        """Return grad_x = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight, and grad_residual.

        grad_x is computed as dy * a + (x - center) * b + c. The means are the sums of all ranks divided by n.
        """
        (x, weight, statistics, y), config = saved, self.config
        mean, _, invstd, num_values = unpack(statistics, config.layout.sizes[1])
        narrow_mean, rest = _split_mean(mean, x.dtype)
        mean_dy, mean_dy_xmu = (payload.sums(total) / num_values.clamp(min=1)).chunk(2)
        wide_a = invstd if weight is None else invstd * weight.double()
        wide_b = -wide_a * invstd.square() * mean_dy_xmu
        center, a, b, c = _to_columns(narrow_mean, wide_a, wide_b, -wide_a * mean_dy - wide_b * rest)

        def masked_dy(x: Tensor, dy: Tensor, y: Tensor | None) -> Tensor:
            return apply_relu_mask(config, dy, x, y, statistics)

        def input_gradient(x: Tensor, dy: Tensor, y: Tensor | None) -> Tensor:
            return masked_dy(x, dy, y).to(center.dtype) * a + (x.to(center.dtype) - center) * b + c

        grad_residual = _map_elements(config, masked_dy, x, dy, y) if config.needs_residual else None
        return _map_elements(config, input_gradient, x, dy, y) if config.needs_x else None, grad_residual


def _reduce(config: AnyConfig, terms: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor | None) -> Tensor:
    """Return the per-channel sums, float64 (2C,), of the two results of `terms`, called with the folded tensors."""
    first, *rest = [torch.cat([*map(channel_sums, terms(*chunk))]) for chunk in _chunks(config, *tensors)]
    return sum(rest, first)


def _map_elements(config: AnyConfig, function: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
    """Call `function` with the folded tensors. Return its result with the shape, dtype and strides of x.

    The result is not a view, because autograd forbids in-place changes of a view that a Function returns.
    """
    if not _in_chunks(x, *others):
        (whole,) = _chunks(config, x, *others)
        return config.layout.unfold(function(*whole), x.shape).to(x.dtype, copy=True)
    result = torch.empty_like(x)
    for target, *chunk in _chunks(config, result, x, *others):
        target.copy_(function(*chunk))
    return result


def _in_chunks(*tensors: Tensor | None) -> bool:
    """Return whether operations on these tensors are neither traced nor differentiated."""
    if is_compiling() or torch.is_grad_enabled() or is_transformed(*tensors):
        return False
    return PLAIN_OR_NONE.issuperset(map(type, tensors))


def _chunks(config: AnyConfig, *tensors: Tensor | None) -> list[list[Any]]:
    """Fold the tensors to (outer, channel, inner), and return views of one chunk after another or of the whole."""
    folded = [None if tensor is None else config.layout.fold(tensor) for tensor in tensors]
    if not _in_chunks(*tensors):
        return [folded]
    outer, channels, inner = config.layout.sizes
    max_elements = CHUNK_ELEMENTS if config.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    rows = max(1, max_elements // max(1, channels * inner))
    columns = max(1, max_elements // max(1, channels * rows))
    starts = itertools.product(range(0, max(1, outer), rows), range(0, max(1, inner), columns))
    return [
        [None if one is None else one[row : row + rows, :, column : column + columns] for one in folded]
        for row, column in starts
    ]


def channel_sums(values: Tensor) -> Tensor:
    """Return the sum of each channel of folded values: (C,)."""
    return values.sum((0, 2))


def subtract_mean(x: Tensor, mean: Tensor) -> Tensor:
    """Return x - mean in float64 for a folded x."""
    return x.double() - mean[:, None]


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
