"""Goes over whole tensors in Triton: parts of sums, and maps. gpu.py launches it. Uses only features of Triton 3.6.

A tensor is (outer, channel, inner) values in memory. A program goes over *rows* of neighbouring values, several of them
at a time, which is a *tile*:

    in runs   a program has values of one channel. A row is 4 values of a run, which has `inner` neighbours, or 1 value
              where a run is no multiple of 4, or has 4 alone.
    else      inner is 1: a program has some neighbouring channels. A row is one of the `outer`.

Programs are numbered (span, part): which channel or channels, and which of the rows.

A program adds CHUNK tiles in float32 before it adds on in float64; of x it adds the differences from a center near the
mean, as float32 would lose small ones beside a large mean. A second kernel, in gpu_channels.py, adds what the programs
found. The order of additions depends only on the sizes and the GPU model: no addition is atomic, and the same input
gives the same bits. float64 inputs are processed in float64 throughout.

Maps go over the tiles in reverse: what the sums have read last may still be in the GPU's cache.
"""

# Triton has types of its own, and reads this source: constants are upper case, branches on them need their else.
# mypy: ignore-errors
# ruff: noqa: N803, RET505, SIM108

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from syncbn.kernels.gpu_channels import N_COPIES, STATUS_WORDS, record_not_finite, store_trailer


class Tiles(NamedTuple):
    """What kernels are compiled for, beside the dtypes of their tensors."""

    in_runs: bool
    rows: int
    columns: int  # values of a row
    align: int  # divides inner in runs, else the number of channels
    index: tl.dtype  # tl.int64 where int32 does not count the values
    compute: tl.dtype  # tl.float32, or tl.float64


UNROLL = tl.constexpr(4)  # tiles that are loaded before the first is used
CHUNK = tl.constexpr(32)  # tiles
# Triton would compile anew for a size that is 1, or a multiple of 16.
SIZES = ["num_rows", "rows_per_program", "channels", "inner", "multiplier", "bit_shift", *STATUS_WORDS]


@triton.jit
def _divisible_sizes(channels, inner, TILES: tl.constexpr):
    """The same, such that Triton knows what divides them, and loads several values at once."""
    if TILES.in_runs:
        inner = inner // TILES.align * TILES.align
    else:
        channels = channels // TILES.align * TILES.align
    return channels, inner


@triton.jit
def _span_channels(span, channels, TILES: tl.constexpr):
    """The channel of the program's values, or one for each column, and whether there is such a channel."""
    if TILES.in_runs:
        channel = span
    else:
        channel = span * TILES.columns + tl.arange(0, TILES.columns)
    return channel, channel < channels


@triton.jit
def _tile_offsets(first_row, program, TILES: tl.constexpr):
    """Where the values of a tile are, (rows, columns), and which exist.

    program: (stop, span, channels, inner, multiplier, shift); rows from `stop` on do not exist.
    """
    stop, span, channels, inner, multiplier, bit_shift = program
    row, column = first_row + tl.arange(0, TILES.rows), tl.arange(0, TILES.columns)
    span, exists = tl.cast(span, row.dtype), (row < stop)[:, None]
    if TILES.in_runs:
        if TILES.index == tl.int64:
            run = row // (inner // TILES.columns)
        else:  # the same without a division, see gpu.py
            run = (tl.umulhi(row.to(tl.uint32), multiplier.to(tl.uint32)) >> bit_shift).to(tl.int32)
        start = row * TILES.columns + run * ((channels - 1) * tl.cast(inner, row.dtype)) + span * inner
        exists = tl.broadcast_to(exists, (TILES.rows, TILES.columns))
    else:
        start = row * channels
        column += span * TILES.columns
        exists = exists & (column < channels)[None, :]
    return start[:, None] + column[None, :], exists


@triton.jit
def _load(pointer, offsets, exists, TILES: tl.constexpr):
    """0 where there is nothing."""
    return tl.load(pointer + offsets, mask=exists, other=0.0).to(TILES.compute)


@triton.jit
def _broadcast(values, TILES: tl.constexpr):
    """Numbers of channels, such that they go with a tile."""
    if TILES.in_runs:
        return values
    else:
        return values[None, :]


@triton.jit
def _coefficient(coefficients, index, channels, channel, exists, TILES: tl.constexpr):
    """The coefficient of this index, such that it goes with a tile."""
    values = tl.load(coefficients + index * channels + channel, mask=exists, other=0.0)
    return _broadcast(values.to(TILES.compute), TILES)


@triton.jit
def _apply_relu_mask(
    dy, difference, x, y, scale, shift, offsets, exists, TILES: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """dy, but 0 where the output of a relu is 0: y or, with RELU, what `normalize` made of x - center."""
    if RELU:
        output = tl.fma(difference, scale, shift).to(x.dtype.element_ty).to(TILES.compute)
        return tl.where(output <= 0, 0.0, dy)
    elif y is not None:
        return tl.where(_load(y, offsets, exists, TILES) <= 0, 0.0, dy)
    else:
        return dy


@triton.jit
def _sum_rows(values, TILES: tl.constexpr):
    """The sum of each column of a tile; in runs values are (rows,). tl.sum over the rows of columns would have many
    conflicts of banks in shared memory; few are left where a thread first gets two rows of a column, and adds them."""
    if TILES.in_runs:
        return tl.sum(values, 0)
    else:
        even, odd = tl.split(tl.reshape(tl.trans(values), (TILES.columns, TILES.rows // 2, 2)))
        return tl.sum(even + odd, 1)


@triton.jit
def _center(x, start, program, TILES: tl.constexpr):
    """The mean of the first tile, rounded to the dtype of x, or 0 where that is not finite."""
    offsets, exists = _tile_offsets(start, program, TILES)
    values, count = _load(x, offsets, exists, TILES), tl.minimum(program[0] - start, TILES.rows)
    if TILES.in_runs:
        values, count = tl.sum(values, 1), count * TILES.columns
    total = _sum_rows(values, TILES)
    center = (total / tl.maximum(count, 1).to(TILES.compute)).to(x.dtype.element_ty).to(TILES.compute)
    return tl.where(tl.abs(center) < float("inf"), center, 0.0)  # also NaN


@triton.jit
def _to_float64(sums, TILES: tl.constexpr):
    """float64 sums of what each thread has: of rows in runs, else of each place of a tile."""
    if TILES.in_runs:
        sums = tl.sum(sums, 1)
    return sums.to(tl.float64)


@triton.jit(do_not_specialize=SIZES)
def partial_sums(
    x, dy, y, statistics, partials, signature: tl.float64, host_words: tl.int64, sequence_number: tl.int64, num_rows,
    rows_per_program, channels, inner, multiplier, bit_shift, TILES: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Sums of x and x^2; with dy, of dy and dy * (x - mean), where dy counts as 0 if the output of a relu is 0.
    The sequence number is stored in the status words unless the sums of x are finite.

    parts: (parts, 2, channels) numbers; without dy the trailer follows, so that one part is a payload.
    """
    span, part = tl.program_id(0), tl.program_id(1)
    start = tl.cast(part, TILES.index) * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    channels, inner = _divisible_sizes(channels, inner, TILES)
    program = (stop, span, channels, inner, multiplier, bit_shift)
    channel, exists = _span_channels(span, channels, TILES)
    values_per_row = TILES.columns if TILES.in_runs else 1  # that are a channel's
    if dy is None:
        center = _center(x, start, program, TILES)
    else:
        center = tl.load(statistics + channel, mask=exists, other=0.0).to(TILES.compute)
    tile_center = _broadcast(center, TILES)
    scale, shift = 0.0, 0.0
    if RELU:  # they follow the statistics
        scale = _coefficient(statistics + N_COPIES, 3, channels, channel, exists, TILES)
        shift = _coefficient(statistics + N_COPIES, 4, channels, channel, exists, TILES)

    zeros = tl.full((TILES.rows, TILES.columns), 0.0, TILES.compute)
    first, second = _to_float64(zeros, TILES), _to_float64(zeros, TILES)
    for chunk in range(start, stop, CHUNK * TILES.rows):
        chunk_first, chunk_second = zeros, zeros
        for row in range(chunk, tl.minimum(chunk + CHUNK * TILES.rows, stop), UNROLL * TILES.rows):
            for tile in tl.static_range(UNROLL):
                offsets, in_tile = _tile_offsets(row + tile * TILES.rows, program, TILES)
                if dy is None:
                    other = tile_center.to(x.dtype.element_ty)
                    difference = tl.load(x + offsets, mask=in_tile, other=other).to(TILES.compute) - tile_center
                    factor = difference
                else:
                    difference = _load(x, offsets, in_tile, TILES) - tile_center
                    factor = _load(dy, offsets, in_tile, TILES)
                    factor = _apply_relu_mask(factor, difference, x, y, scale, shift, offsets, in_tile, TILES, RELU)
                chunk_first += factor
                chunk_second += factor * difference
        first += _to_float64(chunk_first, TILES)
        second += _to_float64(chunk_second, TILES)
    first, second = _sum_rows(first, TILES), _sum_rows(second, TILES)

    if dy is None:  # about zero
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
            store_trailer(trailer, tl.cast(num_rows, tl.float64) * values_per_row, signature)


@triton.jit
def _reverse_range(num_rows, rows_per_program, TILES: tl.constexpr):
    """The span of the program, the first of its rows, where they stop, and the first of the last group."""
    span, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    start = tl.cast(part, TILES.index) * rows_per_program
    stop = tl.minimum(start + rows_per_program, num_rows)
    return span, start, stop, start + (stop - start - 1) // (UNROLL * TILES.rows) * (UNROLL * TILES.rows)


@triton.jit(do_not_specialize=SIZES)
def normalize(
    x, residual, y, coefficients, num_rows, rows_per_program, channels, inner, multiplier, bit_shift,
    TILES: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    span, start, stop, last_start = _reverse_range(num_rows, rows_per_program, TILES)
    channels, inner = _divisible_sizes(channels, inner, TILES)
    program = (stop, span, channels, inner, multiplier, bit_shift)
    channel, exists = _span_channels(span, channels, TILES)
    center = _coefficient(coefficients, 0, channels, channel, exists, TILES)
    scale = _coefficient(coefficients, 1, channels, channel, exists, TILES)
    shift = _coefficient(coefficients, 2, channels, channel, exists, TILES)
    for row in range(start, stop, UNROLL * TILES.rows):
        for tile in tl.static_range(UNROLL):
            offsets, in_tile = _tile_offsets(last_start - (row - start) + tile * TILES.rows, program, TILES)
            value = tl.fma(_load(x, offsets, in_tile, TILES) - center, scale, shift)
            if residual is not None:
                value += _load(residual, offsets, in_tile, TILES)
            if RELU:
                value = tl.where(value <= 0, 0.0, value)
            tl.store(y + offsets, value, mask=in_tile)


@triton.jit(do_not_specialize=SIZES)
def input_gradient(
    dy, x, y, grad_x, grad_residual, coefficients, num_rows, rows_per_program, channels, inner, multiplier,
    bit_shift, TILES: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
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
            offsets, in_tile = _tile_offsets(last_start - (row - start) + tile * TILES.rows, program, TILES)
            difference = _load(x, offsets, in_tile, TILES) - center
            gradient = _load(dy, offsets, in_tile, TILES)
            gradient = _apply_relu_mask(gradient, difference, x, y, scale, shift, offsets, in_tile, TILES, RELU)
            if grad_residual is not None:
                tl.store(grad_residual + offsets, gradient, mask=in_tile)
            tl.store(grad_x + offsets, gradient * a + difference * b + c, mask=in_tile)
