"""Triton kernels over whole tensors: partial sums, and the elementwise kernels `normalize` and `input_gradient`.

A tensor is (outer, channel, inner) values in memory. Each program loops over tiles; a tile is several rows of
contiguous values. The channels of a program are called its span:

    inner > 1    A span is a single channel. A row is 4 values of this channel, or 1 value if inner is 4 or not a
                 multiple of 4.
    inner = 1    A span is several adjacent channels. A row is their values at one outer index.

The program (span, part) processes the channels of one span and the rows of one part.

A program accumulates CHUNK tiles in float32, then adds them to a float64 accumulator. It sums x - center, with a center
near the mean: float32 sums of x would lose small differences next to a large mean. A second kernel, in gpu_channels.py,
adds the partial sums of all programs. The order of additions depends only on the sizes and the GPU model: no addition
is atomic, and the same input gives the same bits. float64 inputs are processed in float64 throughout.

Elementwise kernels process the tiles in reverse order, to reuse what the reduction left in the GPU's cache. gpu.py
launches all kernels. The code uses only features of Triton 3.6.
"""

# Triton compiles this source and has types of its own. Constants are upper case. If a branch on a constant returns, the
# rest of the function must be in an explicit else.
# mypy: ignore-errors
# ruff: noqa: N803, RET505, SIM108

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from syncbn.kernels.gpu_channels import N_COPIES, STATUS_WORDS, record_not_finite, store_trailer


class Tiles(NamedTuple):
    """Compile-time constants of the kernels, in addition to the dtypes of their tensors."""

    single_channel: bool  # each program processes one channel
    rows: int  # rows per tile
    columns: int  # values per row
    align: int  # a divisor of inner for a single channel, else of the number of channels
    index: tl.dtype  # dtype of offsets: tl.int32, or tl.int64 for large tensors
    compute: tl.dtype  # tl.float32, or tl.float64 for float64 inputs


UNROLL = tl.constexpr(4)  # tiles per iteration, which are all loaded before the first is used
CHUNK = tl.constexpr(32)  # tiles per float32 sum
# Without this list Triton would compile a kernel again for a size of 1, and for multiples of 16.
SIZES = ["num_rows", "rows_per_program", "channels", "inner", "multiplier", "bit_shift", *STATUS_WORDS]


@triton.jit
def _divisible_sizes(channels, inner, TILES: tl.constexpr):
    """Return the same sizes in a form that shows Triton their divisor, so that it loads several values at once."""
    if TILES.single_channel:
        inner = inner // TILES.align * TILES.align
    else:
        channels = channels // TILES.align * TILES.align
    return channels, inner


@triton.jit
def _span_channels(span, channels, TILES: tl.constexpr):
    """Return the single channel of the span, or a channel for each column; and whether the channel exists."""
    if TILES.single_channel:
        channel = span
    else:
        channel = span * TILES.columns + tl.arange(0, TILES.columns)
    return channel, channel < channels


@triton.jit
def _tile_offsets(first_row, program, TILES: tl.constexpr):
    """Return the offsets of a tile's values, (rows, columns), and a mask of those that exist.

    program: (stop, span, channels, inner, multiplier, bit_shift); rows from `stop` on do not exist.
    """
    stop, span, channels, inner, multiplier, bit_shift = program
    row, column = first_row + tl.arange(0, TILES.rows), tl.arange(0, TILES.columns)
    span, exists = tl.cast(span, row.dtype), (row < stop)[:, None]
    if TILES.single_channel:
        if TILES.index == tl.int64:
            outer = row // (inner // TILES.columns)
        else:  # the same without a division, see _magic_division in gpu.py
            outer = (tl.umulhi(row.to(tl.uint32), multiplier.to(tl.uint32)) >> bit_shift).to(tl.int32)
        start = row * TILES.columns + outer * ((channels - 1) * tl.cast(inner, row.dtype)) + span * inner
        exists = tl.broadcast_to(exists, (TILES.rows, TILES.columns))
    else:
        start = row * channels
        column += span * TILES.columns
        exists = exists & (column < channels)[None, :]
    return start[:, None] + column[None, :], exists


@triton.jit
def _load(pointer, offsets, exists, TILES: tl.constexpr):
    """Load values in the dtype of computation. Values that do not exist are 0."""
    return tl.load(pointer + offsets, mask=exists, other=0.0).to(TILES.compute)


@triton.jit
def _broadcast(values, TILES: tl.constexpr):
    """Return per-channel values in a shape that broadcasts to a tile."""
    if TILES.single_channel:
        return values
    else:
        return values[None, :]


@triton.jit
def _coefficient(coefficients, index, channels, channel, exists, TILES: tl.constexpr):
    """Load the coefficients with this index, in a shape that broadcasts to a tile."""
    values = tl.load(coefficients + index * channels + channel, mask=exists, other=0.0)
    return _broadcast(values.to(TILES.compute), TILES)


@triton.jit
def _apply_relu_mask(
    dy, difference, x, y, scale, shift, offsets, exists, TILES: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """Return dy, set to 0 where the output of a fused relu is 0. That output is y or, with RELU, computed again from
    `difference`, x - center. Without y and RELU, dy is returned unchanged."""
    if RELU:
        output = tl.fma(difference, scale, shift).to(x.dtype.element_ty).to(TILES.compute)
        return tl.where(output <= 0, 0.0, dy)
    elif y is not None:
        return tl.where(_load(y, offsets, exists, TILES) <= 0, 0.0, dy)
    else:
        return dy


@triton.jit
def _sum_rows(values, TILES: tl.constexpr):
    """Return the sum of each column of a tile. For a single channel `values` is (rows,), and the result is one sum.

    tl.sum(values, 0) of a tile would cause many bank conflicts in shared memory. Few conflicts are left if each thread
    first gets two rows of a column and adds them.
    """
    if TILES.single_channel:
        return tl.sum(values, 0)
    else:
        even, odd = tl.split(tl.reshape(tl.trans(values), (TILES.columns, TILES.rows // 2, 2)))
        return tl.sum(even + odd, 1)


@triton.jit
def _center(x, start, program, TILES: tl.constexpr):
    """Return the mean of the first tile, rounded to the dtype of x, or 0 for a mean that is not finite."""
    offsets, exists = _tile_offsets(start, program, TILES)
    values, count = _load(x, offsets, exists, TILES), tl.minimum(program[0] - start, TILES.rows)
    if TILES.single_channel:
        values, count = tl.sum(values, 1), count * TILES.columns
    total = _sum_rows(values, TILES)
    center = (total / tl.maximum(count, 1).to(TILES.compute)).to(x.dtype.element_ty).to(TILES.compute)
    return tl.where(tl.abs(center) < float("inf"), center, 0.0)  # replaces NaN, too


@triton.jit
def _to_float64(sums, TILES: tl.constexpr):
    """Convert float32 sums of tiles to float64. For a single channel, add them over the columns first."""
    if TILES.single_channel:
        sums = tl.sum(sums, 1)
    return sums.to(tl.float64)


@triton.jit(do_not_specialize=SIZES)
def partial_sums(
    x, dy, y, statistics, partials, signature: tl.float64, count: tl.float64, host_words: tl.int64,
    sequence_number: tl.int64, num_rows, rows_per_program, channels, inner, multiplier, bit_shift, TILES: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """Store partial sums of x and x^2. With dy, mask dy by a fused relu, and store partial sums of dy and
    dy * (x - center).

    partials: (parts, 2, channels) sums; without dy a trailer follows, so that a single part is a complete payload.
    Unless the sums of x are finite, the sequence number is stored in the status words.
    """
    span, part = tl.program_id(0), tl.program_id(1)
    start = tl.cast(part, TILES.index) * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    channels, inner = _divisible_sizes(channels, inner, TILES)
    program = (stop, span, channels, inner, multiplier, bit_shift)
    channel, exists = _span_channels(span, channels, TILES)
    values_per_row = TILES.columns if TILES.single_channel else 1  # values of one channel in a row
    if dy is None:
        center = _center(x, start, program, TILES)
    else:
        center = tl.load(statistics + channel, mask=exists, other=0.0).to(TILES.compute)
    tile_center = _broadcast(center, TILES)
    scale, shift = 0.0, 0.0
    if RELU:  # scale and shift are appended to the statistics
        scale = _coefficient(statistics + N_COPIES, 3, channels, channel, exists, TILES)
        shift = _coefficient(statistics + N_COPIES, 4, channels, channel, exists, TILES)

    zeros = tl.full((TILES.rows, TILES.columns), 0.0, TILES.compute)
    first, second = _to_float64(zeros, TILES), _to_float64(zeros, TILES)
    for chunk in range(start, stop, CHUNK * TILES.rows):
        chunk_first, chunk_second = zeros, zeros
        for row in range(chunk, tl.minimum(chunk + CHUNK * TILES.rows, stop), UNROLL * TILES.rows):
            for tile in tl.static_range(UNROLL):
                offsets, mask = _tile_offsets(row + tile * TILES.rows, program, TILES)
                if dy is None:
                    other = tile_center.to(x.dtype.element_ty)
                    difference = tl.load(x + offsets, mask=mask, other=other).to(TILES.compute) - tile_center
                    factor = difference
                else:
                    difference = _load(x, offsets, mask, TILES) - tile_center
                    factor = _load(dy, offsets, mask, TILES)
                    factor = _apply_relu_mask(factor, difference, x, y, scale, shift, offsets, mask, TILES, RELU)
                chunk_first += factor
                chunk_second += factor * difference
        first += _to_float64(chunk_first, TILES)
        second += _to_float64(chunk_second, TILES)
    first, second = _sum_rows(first, TILES), _sum_rows(second, TILES)

    if dy is None:  # convert sums about the center to sums about zero
        center_sum = center.to(tl.float64) * (tl.cast(stop - start, tl.float64) * values_per_row)
        second += tl.where(center != 0, center * (2 * first + center_sum), 0.0)  # 0 times an infinite sum is NaN
        first += center_sum
    destination = partials + 2 * tl.cast(part, tl.int64) * channels
    tl.store(destination + channel, first, mask=exists)
    tl.store(destination + channels + channel, second, mask=exists)
    if dy is None:
        record_not_finite(first, second, host_words, sequence_number)
        if (span == 0) & (part == 0):
            trailer = partials + 2 * tl.cast(tl.num_programs(1), tl.int64) * channels
            store_trailer(trailer, tl.cast(num_rows, tl.float64) * values_per_row, count, signature)


@triton.jit
def _reverse_range(num_rows, rows_per_program, TILES: tl.constexpr):
    """Return the program's span, its first row, the end of its rows, and the first row of the last iteration."""
    span, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    start = tl.cast(part, TILES.index) * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    return span, start, stop, start + (stop - start - 1) // (UNROLL * TILES.rows) * (UNROLL * TILES.rows)


@triton.jit(do_not_specialize=SIZES)
def normalize(
    x, residual, y, coefficients, num_rows, rows_per_program, channels, inner, multiplier, bit_shift,
    TILES: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Store y = (x - center) * scale + shift (+ residual) (then relu)."""
    span, start, stop, last_start = _reverse_range(num_rows, rows_per_program, TILES)
    channels, inner = _divisible_sizes(channels, inner, TILES)
    program = (stop, span, channels, inner, multiplier, bit_shift)
    channel, exists = _span_channels(span, channels, TILES)
    center = _coefficient(coefficients, 0, channels, channel, exists, TILES)
    scale = _coefficient(coefficients, 1, channels, channel, exists, TILES)
    shift = _coefficient(coefficients, 2, channels, channel, exists, TILES)
    for row in range(start, stop, UNROLL * TILES.rows):
        for tile in tl.static_range(UNROLL):
            offsets, mask = _tile_offsets(last_start - (row - start) + tile * TILES.rows, program, TILES)
            value = tl.fma(_load(x, offsets, mask, TILES) - center, scale, shift)
            if residual is not None:
                value += _load(residual, offsets, mask, TILES)
            if RELU:
                value = tl.where(value <= 0, 0.0, value)
            tl.store(y + offsets, value, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def input_gradient(
    dy, x, y, grad_x, grad_residual, coefficients, num_rows, rows_per_program, channels, inner, multiplier,
    bit_shift, TILES: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Mask dy by a fused relu. Store grad_x = dy * a + (x - center) * b + c, and grad_residual = dy."""
    span, start, stop, last_start = _reverse_range(num_rows, rows_per_program, TILES)
    channels, inner = _divisible_sizes(channels, inner, TILES)
    program = (stop, span, channels, inner, multiplier, bit_shift)
    channel, exists = _span_channels(span, channels, TILES)
    center = _coefficient(coefficients, 0, channels, channel, exists, TILES)
    a = _coefficient(coefficients, 1, channels, channel, exists, TILES)
    b = _coefficient(coefficients, 2, channels, channel, exists, TILES)
    c = _coefficient(coefficients, 3, channels, channel, exists, TILES)
    scale, shift = 0.0, 0.0
    if RELU:
        scale = _coefficient(coefficients, 4, channels, channel, exists, TILES)
        shift = _coefficient(coefficients, 5, channels, channel, exists, TILES)
    for row in range(start, stop, UNROLL * TILES.rows):
        for tile in tl.static_range(UNROLL):
            offsets, mask = _tile_offsets(last_start - (row - start) + tile * TILES.rows, program, TILES)
            difference = _load(x, offsets, mask, TILES) - center
            gradient = _load(dy, offsets, mask, TILES)
            gradient = _apply_relu_mask(gradient, difference, x, y, scale, shift, offsets, mask, TILES, RELU)
            if grad_residual is not None:
                tl.store(grad_residual + offsets, gradient, mask=mask)
            tl.store(grad_x + offsets, gradient * a + difference * b + c, mask=mask)
