"""Computes, in Triton, what gpu.py launches. Uses only features of Triton 3.6.

A tensor is (outer, channel, inner) numbers in memory: `outer` rows of channels * inner columns. In runs each program
has the columns of one channel; else it has some neighbouring columns, each with its channel. A program goes over tiles
of several rows and columns, in an order that depends on the sizes only.

A program adds FEW tiles in float32 before it adds on in float64; of x it adds the differences from a center near the
mean, as float32 would lose small ones beside a large mean. A second kernel adds what the programs found, always in the
same order: no addition is atomic, and the same input gives the same bits. Of float64 values all is float64.
"""

# Triton has types of its own, and reads this source: constants are upper case, branches on them need their else.
# mypy: ignore-errors
# ruff: noqa: N803, N806, RET505, SIM108

from __future__ import annotations

import triton
import triton.language as tl

FEW = tl.constexpr(16)  # tiles that are added in float32

# Triton compiles anew for an int that is 1, or a multiple of 16, which helps where it shows that memory is aligned. Of
# these it knows nothing, as they change with the size of the batch.
OF_BATCH = ["outer", "num_tiles", "tiles_of_program"]


# What a program sees. A number of a channel is one number in a run, else one for each column.


@triton.jit
def _channel(span, channels, inner, IN_RUNS: tl.constexpr, COLUMNS: tl.constexpr):
    """The channel of the program's values, and whether there is such a channel."""
    if IN_RUNS:
        channel = span
    else:
        channel = (span * COLUMNS + tl.arange(0, COLUMNS)) // inner
    return channel, channel < channels


@triton.jit
def _tile(
    tile, span, outer, columns, inner,
    IN_RUNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Where the values of a tile are, (ROWS, COLUMNS), and which exist."""
    tile, span, column = tl.cast(tile, INDEX), tl.cast(span, INDEX), tl.arange(0, COLUMNS)
    if IN_RUNS:
        tiles_of_row = tl.cdiv(inner, COLUMNS)
        row_tile = tile // tiles_of_row
        column_of_run = tile % tiles_of_row * COLUMNS + column
        column = span * inner + column_of_run
        exists = (column_of_run < inner) & (column < columns)
    else:
        row_tile = tile
        column = span * COLUMNS + column
        exists = column < columns
    row = row_tile * ROWS + tl.arange(0, ROWS)
    return row[:, None] * columns + column[None, :], (row < outer)[:, None] & exists[None, :]


@triton.jit
def _values_of_tile(tile, outer, inner, IN_RUNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """How many, int64, of a channel in a run, else of a column."""
    tile = tl.cast(tile, tl.int64)
    if IN_RUNS:
        tiles_of_row = tl.cdiv(inner, COLUMNS)
        rows = tl.minimum(outer - tile // tiles_of_row * ROWS, ROWS)
        return rows * tl.minimum(inner - tile % tiles_of_row * COLUMNS, COLUMNS)
    else:
        return tl.minimum(outer - tile * ROWS, ROWS)


@triton.jit
def _across(numbers, IN_RUNS: tl.constexpr):
    """Numbers of channels, such that they go with a tile."""
    if IN_RUNS:
        return numbers
    else:
        return numbers[None, :]


@triton.jit
def _sum(tile, IN_RUNS: tl.constexpr):
    """Of each channel."""
    of_columns = tl.sum(tile, 0)
    if IN_RUNS:
        return tl.sum(of_columns, 0)
    else:
        return of_columns


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


@triton.jit(do_not_specialize=OF_BATCH)
def parts_of_sums(
    x, dy, y, statistics, parts, outer, channels, inner, columns, num_tiles, tiles_of_program,
    IN_RUNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Of x and x^2; or of dy and dy * (x - mean), where dy is given, of dy behind the relu where its output y is.

    parts: (parts, 2, channels in runs, else columns) numbers, and one more, how many values a channel has.
    """
    span, part = tl.program_id(0), tl.program_id(1)
    first_tile = part * tiles_of_program
    last_tile = tl.minimum(first_tile + tiles_of_program, num_tiles)
    channel, exists = _channel(span, channels, inner, IN_RUNS, COLUMNS)
    if dy is None:
        offsets, mask = _tile(first_tile, span, outer, columns, inner, IN_RUNS, ROWS, COLUMNS, INDEX)
        values = tl.load(x + offsets, mask=mask, other=0.0).to(COMPUTE)
        center = _sum(values, IN_RUNS) / tl.maximum(
            _values_of_tile(first_tile, outer, inner, IN_RUNS, ROWS, COLUMNS), 1
        )
        center = tl.where(tl.abs(center) < float("inf"), center, 0.0)  # also NaN
    else:
        center = tl.load(statistics + channel, mask=exists, other=0.0).to(COMPUTE)

    first = tl.zeros_like(center).to(tl.float64)
    second = tl.zeros_like(center).to(tl.float64)
    num_values = tl.full([], 0, tl.int64)
    for few_tiles in range(first_tile, last_tile, FEW):
        firsts = tl.zeros((ROWS, COLUMNS), COMPUTE)
        seconds = tl.zeros((ROWS, COLUMNS), COMPUTE)
        for tile in range(few_tiles, tl.minimum(few_tiles + FEW, last_tile)):
            offsets, mask = _tile(tile, span, outer, columns, inner, IN_RUNS, ROWS, COLUMNS, INDEX)
            num_values += _values_of_tile(tile, outer, inner, IN_RUNS, ROWS, COLUMNS)
            value = tl.load(x + offsets, mask=mask, other=0.0).to(COMPUTE)
            difference = tl.where(mask, value - _across(center, IN_RUNS), 0.0)
            if dy is None:
                firsts += difference
                seconds += difference * difference
            else:
                gradient = tl.load(dy + offsets, mask=mask, other=0.0).to(COMPUTE)
                if y is not None:
                    output = tl.load(y + offsets, mask=mask, other=0.0).to(COMPUTE)
                    gradient = tl.where(output <= 0, 0.0, gradient)
                firsts += gradient
                seconds += gradient * difference
        first += _sum(firsts.to(tl.float64), IN_RUNS)
        second += _sum(seconds.to(tl.float64), IN_RUNS)

    if dy is None:  # about zero
        of_center = center.to(tl.float64) * num_values
        second += center * (2 * first + of_center)
        first += of_center
    if IN_RUNS:
        column, width = channel, channels
    else:
        column, width = span * COLUMNS + tl.arange(0, COLUMNS), columns
    pair = parts + 2 * tl.cast(part, tl.int64) * width
    tl.store(pair + column, first, mask=exists)
    tl.store(pair + width + column, second, mask=exists)
    if (span == 0) & (part == 0):
        of_channel = tl.full([], outer, tl.float64) * inner
        tl.store(parts + 2 * tl.cast(tl.num_programs(1), tl.int64) * width, of_channel)


@triton.jit
def _totals(parts, channel, exists, num_parts, width, inner, CHANNELS: tl.constexpr):
    """The two sums of each channel over all parts and its columns, `inner` of them."""
    PARTS: tl.constexpr = 128
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
def sums(parts, sums, num_parts, width, inner, channels, CHANNELS: tl.constexpr):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    first, second = _totals(parts, channel, exists, num_parts, width, inner, CHANNELS)
    tl.store(sums + channel, first, mask=exists)
    tl.store(sums + channels + channel, second, mask=exists)
    if tl.program_id(0) == 0:
        num_values = tl.load(parts + 2 * tl.cast(num_parts, tl.int64) * width)
        tl.store(sums + 2 * channels, num_values)


@triton.jit(do_not_specialize=["num_parts"])
def gradient_sums(
    parts, statistics, sums, grad_weight, grad_bias, num_parts, width, inner, channels,
    CHANNELS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    sum_dy, sum_dy_xmu = _totals(parts, channel, exists, num_parts, width, inner, CHANNELS)
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


# Numbers of channels, from sums that are those of all ranks by now.


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


# Maps.


@triton.jit
def _coefficient(coefficients, index, channels, channel, exists, IN_RUNS: tl.constexpr):
    """The coefficient of this index, such that it goes with a tile."""
    return _across(tl.load(coefficients + index * channels + channel, mask=exists, other=0.0), IN_RUNS)


@triton.jit(do_not_specialize=OF_BATCH)
def normalize(
    x, residual, y, coefficients,
    outer, channels, inner, columns, num_tiles, tiles_of_program, RELU: tl.constexpr,
    IN_RUNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    span, part = tl.program_id(0), tl.program_id(1)
    channel, exists = _channel(span, channels, inner, IN_RUNS, COLUMNS)
    center = _coefficient(coefficients, 0, channels, channel, exists, IN_RUNS)
    scale = _coefficient(coefficients, 1, channels, channel, exists, IN_RUNS)
    shift = _coefficient(coefficients, 2, channels, channel, exists, IN_RUNS)
    first_tile = part * tiles_of_program
    for tile in range(first_tile, tl.minimum(first_tile + tiles_of_program, num_tiles)):
        offsets, mask = _tile(tile, span, outer, columns, inner, IN_RUNS, ROWS, COLUMNS, INDEX)
        value = (tl.load(x + offsets, mask=mask, other=0.0).to(COMPUTE) - center) * scale + shift
        if residual is not None:
            value += tl.load(residual + offsets, mask=mask, other=0.0).to(COMPUTE)
        if RELU:
            value = tl.where(value <= 0, 0.0, value)
        tl.store(y + offsets, value, mask=mask)


@triton.jit(do_not_specialize=OF_BATCH)
def input_gradient(
    dy, x, y, grad_x, grad_residual, coefficients,
    outer, channels, inner, columns, num_tiles, tiles_of_program,
    IN_RUNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    span, part = tl.program_id(0), tl.program_id(1)
    channel, exists = _channel(span, channels, inner, IN_RUNS, COLUMNS)
    center = _coefficient(coefficients, 0, channels, channel, exists, IN_RUNS)
    a = _coefficient(coefficients, 1, channels, channel, exists, IN_RUNS)
    b = _coefficient(coefficients, 2, channels, channel, exists, IN_RUNS)
    c = _coefficient(coefficients, 3, channels, channel, exists, IN_RUNS)
    first_tile = part * tiles_of_program
    for tile in range(first_tile, tl.minimum(first_tile + tiles_of_program, num_tiles)):
        offsets, mask = _tile(tile, span, outer, columns, inner, IN_RUNS, ROWS, COLUMNS, INDEX)
        gradient = tl.load(dy + offsets, mask=mask, other=0.0).to(COMPUTE)
        if y is not None:
            output = tl.load(y + offsets, mask=mask, other=0.0).to(COMPUTE)
            gradient = tl.where(output <= 0, 0.0, gradient)
        if grad_residual is not None:
            tl.store(grad_residual + offsets, gradient, mask=mask)
        value = tl.load(x + offsets, mask=mask, other=0.0).to(COMPUTE) - center
        tl.store(grad_x + offsets, gradient * a + value * b + c, mask=mask)


@triton.jit
def update_running_stats(
    running_mean, running_var, statistics, momentum, momentum_rest, mean_stride, var_stride, channels,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    num_values = tl.load(statistics + 3 * channels)
    share = _float64(momentum, momentum_rest)
    mean = tl.load(statistics + channel, mask=exists, other=0.0)
    var = tl.load(statistics + channels + channel, mask=exists, other=0.0)
    unbiased_var = var * (num_values / tl.maximum(num_values - 1, 1.0))
    old_mean = tl.load(running_mean + channel * mean_stride, mask=exists, other=0.0).to(tl.float64)
    old_var = tl.load(running_var + channel * var_stride, mask=exists, other=0.0).to(tl.float64)
    moved_mean = (1 - share) * old_mean + share * mean
    moved_var = (1 - share) * old_var + share * unbiased_var
    _store_number(running_mean, channel * mean_stride, tl.where(num_values > 0, moved_mean, old_mean), exists)
    _store_number(running_var, channel * var_stride, tl.where(num_values > 1, moved_var, old_var), exists)
