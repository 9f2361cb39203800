"""Computes channels' numbers in Triton: sums of what gpu_tiles.py found, coefficients, running statistics.

A program has CHANNELS channels, and computes in float64. gpu.py launches it. Uses only features of Triton 3.6.
"""

# Triton has types of its own, and reads this source: constants are upper case, branches on them need their else.
# mypy: ignore-errors
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _float64(high, low):
    """A number that came as two, as Triton passes a Python float as a float32."""
    return tl.full([], high, tl.float64) + tl.full([], low, tl.float64)


@triton.jit
def _number(pointer, channel, exists, default: tl.constexpr):
    """A parameter of a channel, which may be None."""
    if pointer is None:
        return tl.full([], default, tl.float64)
    else:
        return tl.load(pointer + channel, mask=exists, other=0.0).to(tl.float64)


@triton.jit
def _store_number(pointer, index, number, exists):
    """Rounded by way of float32, as torch rounds a float64."""
    if pointer.dtype.element_ty != tl.float64:
        number = number.to(tl.float32)
    tl.store(pointer + index, number, mask=exists)


# Sums.


@triton.jit
def _totals(
    parts, channel, exists, num_parts, width, inner, PARTS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """The two sums of each channel over all parts and its columns, `inner` of them."""
    first = tl.zeros((PARTS, CHANNELS), tl.float64)
    second = tl.zeros((PARTS, CHANNELS), tl.float64)
    for first_part in range(0, num_parts * inner, PARTS):
        index = first_part + tl.arange(0, PARTS)
        offsets = tl.cast(2 * (index // inner), tl.int64) * width + index % inner
        mask = (index < num_parts * inner)[:, None] & exists[None, :]
        pointers = parts + offsets[:, None] + (channel * inner)[None, :]
        first += tl.load(pointers, mask=mask, other=0.0)
        second += tl.load(pointers + width, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit(do_not_specialize=["num_parts"])
def sums(parts, sums, num_parts, width, inner, channels, PARTS: tl.constexpr, CHANNELS: tl.constexpr):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    first, second = _totals(parts, channel, exists, num_parts, width, inner, PARTS, CHANNELS)
    tl.store(sums + channel, first, mask=exists)
    tl.store(sums + channels + channel, second, mask=exists)
    if tl.program_id(0) == 0:
        num_values = tl.load(parts + 2 * tl.cast(num_parts, tl.int64) * width)
        tl.store(sums + 2 * channels, num_values)


@triton.jit(do_not_specialize=["num_parts"])
def gradient_sums(
    parts, statistics, sums, grad_weight, grad_bias, num_parts, width, inner, channels,
    PARTS: tl.constexpr, CHANNELS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    sum_dy, sum_dy_xmu = _totals(parts, channel, exists, num_parts, width, inner, PARTS, CHANNELS)
    mean = tl.load(statistics + channel, mask=exists, other=0.0)
    rest = mean - mean.to(COMPUTE).to(tl.float64)
    sum_dy_xmu -= tl.where(rest != 0, rest * sum_dy, 0.0)  # 0 times an infinite sum is NaN
    tl.store(sums + channel, sum_dy, mask=exists)
    tl.store(sums + channels + channel, sum_dy_xmu, mask=exists)
    if grad_weight is not None:
        invstd = tl.load(statistics + 2 * channels + channel, mask=exists, other=0.0)
        _store_number(grad_weight, channel, sum_dy_xmu * invstd, exists)
    if grad_bias is not None:
        _store_number(grad_bias, channel, sum_dy, exists)


# Coefficients and running statistics, from sums that are those of all ranks by now.


@triton.jit
def _store_split(coefficients, mean, channel, exists):
    """Stores the center, in the dtype of the coefficients; returns what it lacks of the mean."""
    center = mean.to(coefficients.dtype.element_ty)
    tl.store(coefficients + channel, center, mask=exists)
    return mean - center.to(tl.float64)


@triton.jit
def forward_coefficients(
    sums, weight, bias, statistics, coefficients, eps, eps_rest, channels, CHANNELS: tl.constexpr
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    num_values = tl.load(sums + 2 * channels)
    count = tl.maximum(num_values, 1.0)
    mean = tl.load(sums + channel, mask=exists, other=0.0) / count
    var = tl.load(sums + channels + channel, mask=exists, other=0.0) / count - mean * mean
    var = tl.where(var < 0, 0.0, var)  # NaN stays
    invstd = 1.0 / tl.sqrt(var + _float64(eps, eps_rest))
    tl.store(statistics + channel, mean, mask=exists)
    tl.store(statistics + channels + channel, var, mask=exists)
    tl.store(statistics + 2 * channels + channel, invstd, mask=exists)
    if tl.program_id(0) == 0:
        tl.store(statistics + 3 * channels, num_values)
    scale = _number(weight, channel, exists, 1.0) * invstd
    rest = _store_split(coefficients, mean, channel, exists)
    _store_number(coefficients, channels + channel, scale, exists)
    _store_number(coefficients, 2 * channels + channel, _number(bias, channel, exists, 0.0) - rest * scale, exists)


@triton.jit
def backward_coefficients(sums, statistics, weight, coefficients, channels, CHANNELS: tl.constexpr):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    count = tl.maximum(tl.load(statistics + 3 * channels), 1.0)
    mean_dy = tl.load(sums + channel, mask=exists, other=0.0) / count
    mean_dy_xmu = tl.load(sums + channels + channel, mask=exists, other=0.0) / count
    invstd = tl.load(statistics + 2 * channels + channel, mask=exists, other=0.0)
    a = _number(weight, channel, exists, 1.0) * invstd
    b = -a * invstd * invstd * mean_dy_xmu
    rest = _store_split(coefficients, tl.load(statistics + channel, mask=exists, other=0.0), channel, exists)
    _store_number(coefficients, channels + channel, a, exists)
    _store_number(coefficients, 2 * channels + channel, b, exists)
    _store_number(coefficients, 3 * channels + channel, -a * mean_dy - b * rest, exists)


@triton.jit
def update_running_stats(
    running_mean, running_var, statistics, momentum_in_memory, momentum, momentum_rest, channels,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """By momentum + momentum_rest, unless momentum_in_memory is given."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    num_values = tl.load(statistics + 3 * channels)
    if momentum_in_memory is None:
        share = _float64(momentum, momentum_rest)
    else:
        share = tl.load(momentum_in_memory).to(tl.float64)
    mean = tl.load(statistics + channel, mask=exists, other=0.0)
    var = tl.load(statistics + channels + channel, mask=exists, other=0.0)
    unbiased_var = var * (num_values / tl.maximum(num_values - 1, 1.0))
    old_mean = tl.load(running_mean + channel, mask=exists, other=0.0).to(tl.float64)
    old_var = tl.load(running_var + channel, mask=exists, other=0.0).to(tl.float64)
    moved_mean = (1 - share) * old_mean + share * mean
    moved_var = (1 - share) * old_var + share * unbiased_var
    _store_number(running_mean, channel, tl.where(num_values > 0, moved_mean, old_mean), exists)
    _store_number(running_var, channel, tl.where(num_values > 1, moved_var, old_var), exists)
