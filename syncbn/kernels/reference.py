"""Defines the kernels as torch operations, which run on every device. Other back ends must compute the same results.

The fallback uses one of three back ends: this module, whose operations autograd, torch.func and compilers can trace; in
eager mode `Chunked`, which keeps float64 copies small; or operators.py, whose classes derive from those below. The
back ends of the fast path, cpu.py and gpu.py, have methods with more arguments, see interface.py.

Tensors      x is non-overlapping and dense, and viewed as (outer, C, inner), see Layout in interface.py. dy, y and the
             residual have the shape, dtype and layout of x. Sums, totals and statistics are float64, packed as in
             statistics.py. weight and bias (C,) have any float dtype. Here sums have zeros instead of a signature.
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
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from syncbn.kernels import interface
from syncbn.kernels.interface import GradientPair, Inputs, Saved
from syncbn.statistics import N_COPIES, compute_dtype, from_sums, unpack

CHUNK_ELEMENTS = 2**18  # on CPUs: 2 MB in float64, which fit in the caches
GPU_CHUNK_ELEMENTS = 2**24  # 128 MB in float64; with smaller chunks the launches would take most of the time


def signature_of_call(signature: int, forward_total: Tensor) -> Tensor:
    """Return the signature of a backward, float64 (1,): `signature` mixed with the sums in the forward's total.

    The total is the same on all ranks and differs from call to call of a layer. bits_i is the bit pattern of the i-th
    sum, read as an int64, or 0 for NaN, whose bits may differ between ranks. h = sum of bits_i * (2 i + 1). The result
    is signature XOR (h * MIXER >> 40) in all bits below the highest bit of the signature, which is kept.
    """
    sums = forward_total[: -interface.TRAILER_ELEMENTS]
    bits = torch.where(sums.isnan(), 0, sums.view(torch.int64))
    mixed = (bits * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum(0, keepdim=True) * interface.MIXER
    highest = 1 << signature.bit_length() - 1
    return ((mixed >> 40 ^ signature) & highest - 1 | highest).to(torch.float64)


class Operations:
    """Reductions and elementwise operations of both passes, on whole tensors or, if `chunked`, chunk by chunk."""

    chunked = False

    def __init__(self, config: interface.ForwardConfig | interface.BackwardConfig) -> None:
        self.config = config

    def reduce(self, terms: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *others: Tensor | None) -> Tensor:
        """Return the per-channel sums, float64 (2C,), of the two results of `terms`, called with the folded tensors."""
        first, *rest = [torch.cat([*map(channel_sums, terms(*chunk))]) for chunk in self.chunks(x, *others)]
        return sum(rest, first)

    def map_elements(self, function: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
        """Call `function` with the folded tensors. Return its result with the shape, dtype and strides of x.

        The result is not a view, because autograd forbids in-place changes of a view that a Function returns.
        """
        if not self.chunked:
            (chunk,) = self.chunks(x, *others)
            return self.config.layout.unfold(function(*chunk), x.shape).to(x.dtype, copy=True)
        result = torch.empty_like(x)
        for result_chunk, *chunk in self.chunks(result, x, *others):
            assert result_chunk is not None
            result_chunk.copy_(function(*chunk))
        return result

    def chunks(self, *tensors: Tensor | None) -> Iterable[list[Tensor | None]]:
        """Fold the tensors to (outer, channel, inner), and return views of each chunk, or the whole tensors."""
        folded = [None if tensor is None else self.config.layout.fold(tensor) for tensor in tensors]
        if not self.chunked:
            return [folded]
        outer, channels, inner = self.config.layout.sizes
        max_elements = CHUNK_ELEMENTS if self.config.device.type == "cpu" else GPU_CHUNK_ELEMENTS
        rows = max(1, max_elements // max(1, channels * inner))
        columns = max(1, max_elements // max(1, channels * rows))
        starts = itertools.product(range(0, max(1, outer), rows), range(0, max(1, inner), columns))
        return (
            [None if one is None else one[row : row + rows, :, column : column + columns] for one in folded]
            for row, column in starts
        )


def channel_sums(values: Tensor) -> Tensor:
    """Return the sum of each channel of folded values: (C,)."""
    return values.sum((0, 2))


def subtract_mean(x: Tensor, mean: Tensor) -> Tensor:
    """Return x - mean in float64 for a folded x."""
    return x.double() - mean[:, None]


class Forward(Operations):
    config: interface.ForwardConfig

    def forward_sums(self, x: Tensor) -> Tensor:
        def terms(x: Tensor) -> tuple[Tensor, Tensor]:
            wide = x.to(torch.float64)
            return wide, wide.square()

        sums, (outer, _, inner) = self.reduce(terms, x), self.config.layout.sizes
        return torch.cat((sums, sums.new_full((1,), outer * inner), sums.new_zeros(interface.SIGNATURE_ELEMENTS)))

    def forward_outputs(self, inputs: Inputs, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return y = (x - center) * scale + shift (+ residual) (then relu), and the statistics.

        mean = center + rest, where center has the dtype of computation. The shift contains -rest * scale. Subtracting
        center from an x near the mean is exact.
        """
        (x, weight, bias, residual), config = inputs, self.config
        statistics = from_sums(total[: -interface.SIGNATURE_ELEMENTS], self.config.eps)
        mean, _, invstd, _ = unpack(statistics, config.layout.sizes[1])
        _, rest = _split_mean(mean, x.dtype)
        scale = invstd if weight is None else invstd * weight.double()
        shift = -rest * scale if bias is None else bias.double() - rest * scale
        if config.masks_by_x:
            statistics = torch.cat((statistics, scale, shift))

        def normalize(x: Tensor, residual: Tensor | None) -> Tensor:
            y = _normalize(x, mean, scale, shift)
            y = y if residual is None else y + residual
            return y.relu() if config.relu else y

        return self.map_elements(normalize, x, residual), statistics


class Backward(Operations):
    config: interface.BackwardConfig

    def backward_sums(self, dy: Tensor, saved: Saved) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the sums, grad_weight = sum dy * (x - mean) * invstd, and grad_bias = sum dy.

        The gradients do not share memory with the sums, which an all_reduce overwrites.
        """
        x, _, statistics, y = saved
        mean, _, invstd, _ = unpack(statistics, self.config.layout.sizes[1])

        def terms(x: Tensor, dy: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
            wide_dy = apply_relu_mask(self.config, dy, x, y, statistics).double()
            return wide_dy, wide_dy * subtract_mean(x, mean)

        sums = self.reduce(terms, x, dy, y)
        sum_dy, sum_dy_xmu = sums.chunk(2)
        weight_dtype, bias_dtype = self.config.grad_weight_dtype, self.config.grad_bias_dtype
        grad_weight = None if weight_dtype is None else (sum_dy_xmu * invstd).to(weight_dtype)
        grad_bias = None if bias_dtype is None else sum_dy.clone().to(bias_dtype)
        return torch.cat((sums, sums.new_zeros(interface.TRAILER_ELEMENTS))), grad_weight, grad_bias

    def backward_outputs(self, dy: Tensor, saved: Saved, total: Tensor) -> GradientPair:
        """Return grad_x = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight, and grad_residual.

        grad_x is computed as dy * a + (x - center) * b + c. The means are the sums of all ranks divided by n.
        """
        x, weight, statistics, y = saved
        mean, _, invstd, num_values = unpack(statistics, self.config.layout.sizes[1])
        narrow_mean, rest = _split_mean(mean, x.dtype)
        mean_dy, mean_dy_xmu = (total[: -interface.TRAILER_ELEMENTS] / num_values.clamp(min=1)).chunk(2)
        wide_a = invstd if weight is None else invstd * weight.double()
        wide_b = -wide_a * invstd.square() * mean_dy_xmu
        center, a, b, c = _to_columns(narrow_mean, wide_a, wide_b, -wide_a * mean_dy - wide_b * rest)

        def masked_dy(x: Tensor, dy: Tensor, y: Tensor | None) -> Tensor:
            return apply_relu_mask(self.config, dy, x, y, statistics)

        def input_gradient(x: Tensor, dy: Tensor, y: Tensor | None) -> Tensor:
            return masked_dy(x, dy, y).to(center.dtype) * a + (x.to(center.dtype) - center) * b + c

        grad_residual = self.map_elements(masked_dy, x, dy, y) if self.config.needs_residual else None
        return self.map_elements(input_gradient, x, dy, y) if self.config.needs_x else None, grad_residual


class ChunkedForward(Forward):
    chunked = True


class ChunkedBackward(Backward):
    chunked = True


class BackEnd(Protocol):
    """A back end of the fallback: this module, operators.py or `Chunked`."""

    @property
    def Forward(self) -> type[Forward]: ...  # noqa: N802
    @property
    def Backward(self) -> type[Backward]: ...  # noqa: N802


class Chunked:
    """The back end of the chunked classes."""

    Forward, Backward = ChunkedForward, ChunkedBackward


def apply_relu_mask(
    config: interface.BackwardConfig, dy: Tensor, x: Tensor, y: Tensor | None, statistics: Tensor
) -> Tensor:
    """Return dy set to 0 where the output of a fused relu is 0, for folded tensors. NaN passes, as in torch's relu."""
    if not (config.masks_by_x or config.masks_by_y):
        return dy
    if config.masks_by_x:
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
