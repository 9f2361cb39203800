"""Launches the kernels for CUDA tensors, and decides how they go over a tensor.

The code of those that go over a tensor is in gpu_tiles.py, of those of channels' numbers in gpu_channels.py.
Launches: forward_sums 2, or 1 for a small tensor, the other functions of a pass 2, update_running_stats 1. Nothing
waits for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncbn import moments
from syncbn.kernels import gpu_channels, gpu_tiles
from syncbn.layout import Layout

SHORTEST_RUN = 32  # values; of shorter ones a thread would load few at once
BYTES_OF_THREAD = 16  # that it loads at once
COLUMNS = 128, 64, 32  # of a tile that is not in runs; fewer where the tensor has fewer. 32 of 16 bits are 64 bytes
THREADS = 256  # of a program, at most
SUMMING_PROGRAMS = 1024  # two or three times as many as run at once on a large GPU
MOST_PARTS = 256  # of a sum, which a second kernel adds
MAPPING_PROGRAMS = 8192
SUMMING_REGISTERS, MAPPING_REGISTERS = 80, 64  # of a thread: for three programs on a multiprocessor, or four
NUMBERS = 1024  # that a program adds at once, in the second kernel of a sum
CHANNELS = 128  # of a program that has one number a channel


class Launch:
    """A kernel, with its grid and what it takes after its tensors.

    Triton's own launch looks at every argument, to find what it has compiled for such arguments; here the numbers are
    the same each time, and only the kinds of tensors may change.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int], *numbers: Any, **options: Any) -> None:
        self.kernel, self.grid, self.numbers = kernel, (*grid, 1), numbers
        self.options = options | {"enable_fp_fusion": True}  # a * b + c as one operation; Triton 3.9 warns unless told
        self.compiled: dict[object, Callable[..., None]] = {}  # for the kinds of tensors

    def __call__(self, *tensors: Tensor | None, floats: tuple[float, ...] = ()) -> None:
        """Launch on the GPU of the first tensor."""
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(*tensors, floats=floats)
            return
        pointers = [None if one is None else one.data_ptr() for one in tensors]
        # What Triton compiles for: dtypes, and whether addresses are multiples of 16; and whether there is memory.
        kinds = (
            device,
            *[
                None if one is None else (one.dtype, pointer % 16 == 0, pointer == 0)  # type: ignore[operator]
                for one, pointer in zip(tensors, pointers, strict=True)
            ],
        )
        launch = self.compiled.get(kinds)
        if launch is not None:
            launch(*pointers, *floats, *self.numbers)  # integers, which a driver need not ask for their address
            return
        for one in tensors:
            if one is not None and one.numel() and not one.untyped_storage().nbytes():
                raise RuntimeError(
                    f"a tensor of shape {tuple(one.shape)} has no memory: its storage was resized to 0 bytes"
                )
        compiled = self.kernel[self.grid](*tensors, *floats, *self.numbers, **self.options)
        if compiled is not None:  # not interpreted
            self.compiled[kinds] = compiled[self.grid]


class Launches:
    """The launches for tensors of these sizes and this dtype."""

    def __init__(self, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
        outer, channels, inner = sizes
        if outer * inner == 0:
            outer, inner = 0, 1
        columns, vector = channels * inner, BYTES_OF_THREAD // dtype.itemsize
        in_runs = inner >= SHORTEST_RUN and channels > 0
        align = math.gcd(inner if in_runs else columns, 16)
        if in_runs:
            width = min(vector, align)
            spans, num_rows = channels, outer * inner // width
        else:
            across = max(1, columns)
            widths = [min(width, triton.next_power_of_2(across)) for width in COLUMNS]
            # The widest, unless a narrower one has fewer idle lanes, counted in whole eighths of the columns.
            width = min(widths, key=lambda width: 8 * (-across % width) // across)
            spans, num_rows = triton.cdiv(across, width), outer
        vectors_of_span = triton.next_power_of_2(max(1, num_rows * width // vector))
        threads = min(THREADS, max(32, vectors_of_span // 4))
        rows = threads * max(1, vector // width // 2) if in_runs else max(1, threads * vector // width)
        compute = tl.float64 if dtype == torch.float64 else tl.float32
        index = tl.int64 if outer * columns >= 2**31 - 2**24 else tl.int32  # with room for rows that do not exist
        fits = in_runs or spans * width == columns
        # Of 16-bit values a thread has eight columns, and as many float64 sums in its registers.
        group_of_sums = 2 if dtype.itemsize == 2 and not in_runs else 4
        division = _division(inner // width) if in_runs else (0, 0)

        def over_tiles(kernel: Any, *constants: object, group: int, most_parts: int, registers: int) -> Launch:
            num_groups = triton.cdiv(num_rows, group * rows)
            groups_of_program = triton.cdiv(num_groups, max(1, min(num_groups, most_parts)))
            parts = triton.cdiv(num_groups, max(1, groups_of_program))
            rows_of_program = groups_of_program * group * rows
            tiles = gpu_tiles.Tiles(in_runs, rows, width, align, fits, group, index, compute)
            numbers = num_rows, rows_of_program, channels, inner, columns, *division, tiles, *constants
            # Triton's back end for AMD knows no such option.
            options = {} if torch.version.hip else {"maxnreg": registers}
            return Launch(kernel, (spans, max(1, parts)), *numbers, num_warps=threads // 32, **options)

        most_parts = min(MOST_PARTS, SUMMING_PROGRAMS // spans)
        self.parts_of_sums = over_tiles(
            gpu_tiles.parts_of_sums, group=group_of_sums, most_parts=most_parts, registers=SUMMING_REGISTERS
        )
        num_parts = self.parts_of_sums.grid[1]
        of_column = (num_parts, channels, 1) if in_runs else (num_parts, columns, inner)  # parts, their width, columns
        at_once = min(MOST_PARTS, max(8, triton.next_power_of_2(num_parts * of_column[2])))
        blocks = max(1, triton.cdiv(channels, NUMBERS // at_once)), 1
        of_parts = *of_column, channels, at_once, NUMBERS // at_once
        self.sums = Launch(gpu_channels.sums, blocks, *of_parts)
        self.gradient_sums = Launch(gpu_channels.gradient_sums, blocks, *of_parts, compute)
        self.numbers_of_parts = 2 * of_column[1] * num_parts + 1
        self.parts_are_sums = num_parts * of_column[2] == 1

        of_map: dict[str, Any] = {"group": 4, "most_parts": MAPPING_PROGRAMS // spans, "registers": MAPPING_REGISTERS}
        self.normalize = [over_tiles(gpu_tiles.normalize, relu, **of_map) for relu in (False, True)]
        self.input_gradient = over_tiles(gpu_tiles.input_gradient, **of_map)


class LaunchesOfChannels:
    """The launches for numbers of so many channels."""

    def __init__(self, channels: int) -> None:
        grid = max(1, triton.cdiv(channels, CHANNELS)), 1
        self.forward_coefficients = Launch(gpu_channels.forward_coefficients, grid, channels, CHANNELS)
        self.backward_coefficients = Launch(gpu_channels.backward_coefficients, grid, channels, CHANNELS)
        self.update_running_stats = Launch(gpu_channels.update_running_stats, grid, channels, CHANNELS)


launches = functools.lru_cache(1024)(Launches)
launches_of_channels = functools.lru_cache(1024)(LaunchesOfChannels)


def _division(number: int) -> tuple[int, int]:
    """multiplier, 32 bits as an int32, and shift: n // number = n * multiplier >> 32 >> shift for 0 <= n < 2^31."""
    shift = (number - 1).bit_length() - 1
    multiplier = -(-(2 ** (32 + shift)) // number)
    return multiplier - 2**32 * (multiplier >= 2**31), shift


@functools.lru_cache(1024)
def _two(number: float) -> tuple[float, float]:
    """Two float32 whose sum is the number, to 48 bits."""
    high = ctypes.c_float(number).value
    return high, float(number) - high


def forward_sums(x: Tensor, layout: Layout) -> Tensor:
    of_sizes = launches(layout.sizes, x.dtype)
    parts = _empty_numbers(x, of_sizes.numbers_of_parts)
    of_sizes.parts_of_sums(x, None, None, None, parts)
    if of_sizes.parts_are_sums:
        return parts
    sums = _empty_numbers(x, 2 * layout.sizes[1] + 1)
    of_sizes.sums(parts, sums)
    return sums


def forward_outputs(
    x: Tensor, layout: Layout, total: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    channels = layout.sizes[1]
    statistics, coefficients = _empty_numbers(total, 3 * channels + 1), _empty_coefficients(x, 3 * channels)
    launch = launches_of_channels(channels).forward_coefficients
    launch(total, _dense(weight), _dense(bias), statistics, coefficients, floats=_two(eps))
    y = torch.empty_like(x)
    launches(layout.sizes, x.dtype).normalize[relu](x, residual, y, coefficients)
    return y, statistics


def backward_sums(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, statistics: Tensor, weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    of_sizes, channels = launches(layout.sizes, x.dtype), layout.sizes[1]
    parts, sums = _empty_numbers(x, of_sizes.numbers_of_parts), _empty_numbers(x, 2 * channels)
    grad_weight = None if weight_dtype is None else x.new_empty(channels, dtype=weight_dtype)
    grad_bias = None if bias_dtype is None else x.new_empty(channels, dtype=bias_dtype)
    of_sizes.parts_of_sums(x, dy, y, statistics, parts)
    of_sizes.gradient_sums(parts, statistics, sums, grad_weight, grad_bias)
    return sums, grad_weight, grad_bias


def backward_outputs(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, total: Tensor, statistics: Tensor,
    weight: Tensor | None, of_residual: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    channels = layout.sizes[1]
    coefficients = _empty_coefficients(x, 4 * channels)
    launches_of_channels(channels).backward_coefficients(total, statistics, _dense(weight), coefficients)
    grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if of_residual else None
    launches(layout.sizes, x.dtype).input_gradient(dy, x, y, grad_x, grad_residual, coefficients)
    return grad_x, grad_residual


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if not moves:
        return
    launch = launches_of_channels(running_mean.numel()).update_running_stats
    means, variances = running_mean.contiguous(), running_var.contiguous()
    if isinstance(momentum, Tensor) and momentum.device == statistics.device:
        launch(means, variances, statistics, momentum, floats=(0.0, 0.0))
    else:
        launch(means, variances, statistics, None, floats=_two(float(momentum)))
    for buffer, moved in ((running_mean, means), (running_var, variances)):
        if moved is not buffer:
            buffer.copy_(moved)
        elif not buffer.is_inference():  # autograd is to see that it has changed
            torch.autograd.graph.increment_version(buffer)


def _empty_numbers(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=torch.float64)


def _empty_coefficients(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=moments.compute_dtype(x.dtype))


def _dense(of_channels: Tensor | None) -> Tensor | None:
    return None if of_channels is None else of_channels.contiguous()
