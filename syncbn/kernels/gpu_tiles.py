"""Goes over whole tensors in Triton: parts of sums, and maps. gpu.py launches it. Uses only features of Triton 3.6.

A tensor is (outer, channel, inner) values in memory, columns = channels * inner of them beside each other. A program
goes over *rows* of neighbouring values, several of them at a time, which is a *tile*:

    in runs   a program has values of one channel. A row is as many as a thread loads at once, of one run of `inner`
              neighbours.
    else      a program has some neighbouring columns, each with its channel. A row is one of the `outer`.

Programs are numbered (span, part): which channel or columns, and which of the rows.

A program adds a group of tiles in float32 before it adds on in float64; of x it adds the differences from a center near
the mean, as float32 would lose small ones beside a large mean. A second kernel, in gpu_channels.py, adds what the
programs found. The order of additions depends on the sizes only: no addition is atomic, and the same input gives the
same bits. Of float64 values all is float64.

Maps go over the tiles in reverse: what the sums have read last may still be in the GPU's cache.
"""

# Triton has types of its own, and reads this source: constants are upper case, branches on them need their else.
# mypy: ignore-errors
# ruff: noqa: N803, N806, RET505, SIM108

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tiles(NamedTuple):
    """How a kernel goes over a tensor: constants."""

    in_runs: bool
    rows: int
    columns: int
    align: int  # divides inner in runs, else all columns of a row of the tensor
    fits: bool  # no program has columns that do not exist
    group: int  # tiles that are loaded before the first is used, and added in float32
    index: Any  # tl.int64 where int32 does not count the values
    compute: Any  # tl.float32, or tl.float64


# Triton would compile anew for a size that is 1, or a multiple of 16.
SIZES = ["num_rows", "rows_of_program", "channels", "inner", "columns", "multiplier", "shift"]


# What a program sees. A number of a channel is one number in a run, else one for each column.


@triton.jit
def _channel(span, channels, inner, TILES: tl.constexpr):
    """The channel of the program's values, and whether there is such a channel."""
    if TILES.in_runs:
        channel = span
    else:
        channel = (span * TILES.columns + tl.arange(0, TILES.columns)) // inner
    return channel, channel < channels


@triton.jit
def _tile(first_row, program, MASKED: tl.constexpr, TILES: tl.constexpr):
    """Where the values of a tile are, (rows, columns), and which exist.

    program: (stop, span, inner, columns, multiplier, shift); with MASKED rows from `stop` on do not exist.
    """
    stop, span, inner, columns, multiplier, shift = program
    inner, columns = inner // TILES.align * TILES.align, columns // TILES.align * TILES.align  # so that Triton knows
    row, column = first_row + tl.arange(0, TILES.rows), tl.arange(0, TILES.columns)
    span = tl.cast(span, row.dtype)
    if TILES.in_runs:
        rows_of_run = inner // TILES.columns
        if TILES.index == tl.int64:
            run = row // rows_of_run
        else:  # the same without a division, see gpu.py
            run = (tl.umulhi(row.to(tl.uint32), multiplier.to(tl.uint32)) >> shift).to(tl.int32)
        start = row * TILES.columns + run * (columns - inner)
        column += span * inner
    else:
        start = row * columns
        column += span * TILES.columns
    offsets = start[:, None] + column[None, :]
    exists = tl.full((TILES.rows, TILES.columns), True, tl.int1)  # with which Triton loads without a mask
    if MASKED:
        exists &= (row < stop)[:, None]
    if not TILES.fits:
        exists &= (column < columns)[None, :]
    return offsets, exists


@triton.jit
def _load(pointer, offsets, exists, TILES: tl.constexpr):
    """0 where there is nothing."""
    return tl.load(pointer + offsets, mask=exists, other=0.0).to(TILES.compute)


@triton.jit
def _through_relu(dy, y, offsets, exists, TILES: tl.constexpr):
    """dy, but 0 where y, the output of a relu, is 0; y may be None."""
    if y is None:
        return dy
    else:
        return tl.where(_load(y, offsets, exists, TILES) <= 0, 0.0, dy)


@triton.jit
def _across(numbers, TILES: tl.constexpr):
    """Numbers of channels, such that they go with a tile."""
    if TILES.in_runs:
        return numbers
    else:
        return numbers[None, :]


# Sums.


@triton.jit
def _add_group(first, second, first_row, program, x, dy, y, center, MASKED: tl.constexpr, TILES: tl.constexpr):
    """`first` and `second` with what a group of tiles adds to them: float64, a number each row in runs, else a tile."""
    firsts = tl.full((TILES.rows, TILES.columns), 0.0, TILES.compute)
    seconds = tl.full((TILES.rows, TILES.columns), 0.0, TILES.compute)
    GROUP: tl.constexpr = TILES.group
    for tile in tl.static_range(GROUP):
        offsets, exists = _tile(first_row + tile * TILES.rows, program, MASKED, TILES)
        difference = _load(x, offsets, exists, TILES) - _across(center, TILES)
        if dy is None:
            if MASKED:
                difference = tl.where(exists, difference, 0.0)
            firsts += difference
            seconds += difference * difference
        else:
            gradient = _through_relu(_load(dy, offsets, exists, TILES), y, offsets, exists, TILES)
            firsts += gradient
            seconds += gradient * difference
    if TILES.in_runs:  # a thread has the whole row
        return first + tl.sum(firsts, 1).to(tl.float64), second + tl.sum(seconds, 1).to(tl.float64)
    else:
        return first + firsts.to(tl.float64), second + seconds.to(tl.float64)


@triton.jit(do_not_specialize=SIZES)
def parts_of_sums(
    x, dy, y, statistics, parts, num_rows, rows_of_program, channels, inner, columns, multiplier, shift,
    TILES: tl.constexpr,
):  # fmt: skip
    """Of x and x^2; or of dy and dy * (x - mean), where dy is given, of dy behind the relu where its output y is.

    parts: (parts, 2, channels in runs, else columns) numbers, and one more, how many values a channel has.
    """
    span, part = tl.program_id(0), tl.program_id(1)
    start = tl.cast(part, TILES.index) * rows_of_program
    stop = tl.minimum(start + rows_of_program, num_rows)
    program = (stop, span, inner, columns, multiplier, shift)
    channel, exists = _channel(span, channels, inner, TILES)
    values_of_row = TILES.columns if TILES.in_runs else 1  # that are a channel's
    if dy is None:
        offsets, found = _tile(start, program, True, TILES)
        center = tl.sum(_load(x, offsets, found, TILES), 0)
        if TILES.in_runs:
            center = tl.sum(center, 0)
        center /= tl.maximum(tl.minimum(stop - start, TILES.rows), 1) * values_of_row
        center = tl.where(tl.abs(center) < float("inf"), center, 0.0)  # also NaN
    else:
        center = tl.load(statistics + channel, mask=exists, other=0.0).to(TILES.compute)

    if TILES.in_runs:
        first = tl.full((TILES.rows,), 0.0, tl.float64)
        second = tl.full((TILES.rows,), 0.0, tl.float64)
    else:
        first = tl.full((TILES.rows, TILES.columns), 0.0, tl.float64)
        second = tl.full((TILES.rows, TILES.columns), 0.0, tl.float64)
    rest = stop - (stop - start) % (TILES.group * TILES.rows)
    for row in range(start, rest, TILES.group * TILES.rows):
        first, second = _add_group(first, second, row, program, x, dy, y, center, False, TILES)
    if rest < stop:
        first, second = _add_group(first, second, rest, program, x, dy, y, center, True, TILES)
    first, second = tl.sum(first, 0), tl.sum(second, 0)

    if dy is None:  # about zero
        of_center = center.to(tl.float64) * (tl.cast(stop - start, tl.float64) * values_of_row)
        second += tl.where(center != 0, center * (2 * first + of_center), 0.0)  # 0 times an infinite sum is NaN
        first += of_center
    if TILES.in_runs:
        column, width = channel, channels
    else:
        column, width = span * TILES.columns + tl.arange(0, TILES.columns), columns
    pair = parts + 2 * tl.cast(part, tl.int64) * width
    tl.store(pair + column, first, mask=exists)
    tl.store(pair + width + column, second, mask=exists)
    if (span == 0) & (part == 0):
        values = tl.cast(num_rows, tl.float64) * (TILES.columns if TILES.in_runs else inner)
        tl.store(parts + 2 * tl.cast(tl.num_programs(1), tl.int64) * width, values)


# Maps.


@triton.jit
def _rows_in_reverse(num_rows, rows_of_program, TILES: tl.constexpr):
    """The span of the program, the first of its rows, and where they stop."""
    span, part = tl.num_programs(0) - 1 - tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    start = tl.cast(part, TILES.index) * rows_of_program
    return span, start, tl.minimum(start + rows_of_program, num_rows)


@triton.jit
def _coefficient(coefficients, index, channels, channel, exists, TILES: tl.constexpr):
    """The coefficient of this index, such that it goes with a tile."""
    return _across(tl.load(coefficients + index * channels + channel, mask=exists, other=0.0), TILES)


@triton.jit
def _normalize_group(
    first_row, program, x, residual, y, numbers, RELU: tl.constexpr, MASKED: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    center, scale, shift = numbers
    GROUP: tl.constexpr = TILES.group
    for tile in tl.static_range(GROUP):
        offsets, exists = _tile(first_row + tile * TILES.rows, program, MASKED, TILES)
        value = (_load(x, offsets, exists, TILES) - center) * scale + shift
        if residual is not None:
            value += _load(residual, offsets, exists, TILES)
        if RELU:
            value = tl.where(value <= 0, 0.0, value)
        tl.store(y + offsets, value, mask=exists)


@triton.jit(do_not_specialize=SIZES)
def normalize(
    x, residual, y, coefficients, num_rows, rows_of_program, channels, inner, columns, multiplier, shift,
    TILES: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    span, start, stop = _rows_in_reverse(num_rows, rows_of_program, TILES)
    program = (stop, span, inner, columns, multiplier, shift)
    channel, exists = _channel(span, channels, inner, TILES)
    numbers = (
        _coefficient(coefficients, 0, channels, channel, exists, TILES),
        _coefficient(coefficients, 1, channels, channel, exists, TILES),
        _coefficient(coefficients, 2, channels, channel, exists, TILES),
    )
    of_group = TILES.group * TILES.rows
    rest = stop - (stop - start) % of_group
    if rest < stop:
        _normalize_group(rest, program, x, residual, y, numbers, RELU, True, TILES)
    for row in range(start, rest, of_group):
        _normalize_group(rest - of_group - (row - start), program, x, residual, y, numbers, RELU, False, TILES)


@triton.jit
def _gradient_group(
    first_row, program, dy, x, y, grad_x, grad_residual, numbers, MASKED: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    center, a, b, c = numbers
    GROUP: tl.constexpr = TILES.group
    for tile in tl.static_range(GROUP):
        offsets, exists = _tile(first_row + tile * TILES.rows, program, MASKED, TILES)
        gradient = _through_relu(_load(dy, offsets, exists, TILES), y, offsets, exists, TILES)
        if grad_residual is not None:
            tl.store(grad_residual + offsets, gradient, mask=exists)
        value = gradient * a + (_load(x, offsets, exists, TILES) - center) * b + c
        tl.store(grad_x + offsets, value, mask=exists)


@triton.jit(do_not_specialize=SIZES)
def input_gradient(
    dy, x, y, grad_x, grad_residual, coefficients,
    num_rows, rows_of_program, channels, inner, columns, multiplier, shift, TILES: tl.constexpr,
):  # fmt: skip
    span, start, stop = _rows_in_reverse(num_rows, rows_of_program, TILES)
    program = (stop, span, inner, columns, multiplier, shift)
    channel, exists = _channel(span, channels, inner, TILES)
    numbers = (
        _coefficient(coefficients, 0, channels, channel, exists, TILES),
        _coefficient(coefficients, 1, channels, channel, exists, TILES),
        _coefficient(coefficients, 2, channels, channel, exists, TILES),
        _coefficient(coefficients, 3, channels, channel, exists, TILES),
    )
    of_group = TILES.group * TILES.rows
    rest = stop - (stop - start) % of_group
    if rest < stop:
        _gradient_group(rest, program, dy, x, y, grad_x, grad_residual, numbers, True, TILES)
    for row in range(start, rest, of_group):
        first_row = rest - of_group - (row - start)
        _gradient_group(first_row, program, dy, x, y, grad_x, grad_residual, numbers, False, TILES)
