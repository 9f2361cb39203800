"""Launches the kernels for CUDA tensors, and decides how they go over a tensor.

The code of those that go over a tensor is in gpu_tiles.py, of those of channels' numbers in gpu_channels.py. A `Plan`
launches three kernels each way, four around an all_reduce; with momentum=None torch's for the counter come beside.
Nothing waits for the GPU. The functions at the end are for operators.py, see functions.py.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncbn import moments, torch_private
from syncbn.kernels import gpu_channels, gpu_tiles
from syncbn.kernels.functions import Functions
from syncbn.kernels.plans import NO_MEMORY, OK, UNSIGNED, Signature
from syncbn.layout import Layout

VALUES = 4  # that a thread loads at once; of 8 in 16 bits the sums do not fit in its registers
COLUMNS = 64, 32  # channels of a tile, where they are neighbours. 32 of 16 bits are 64 bytes
WARPS_IN_RUNS, WARPS = 4, 8  # of a program
SUMMING_REGISTERS, MAPPING_REGISTERS = 80, 64  # of a thread
SUMMING_THREADS = 768  # of a multiprocessor: what fits with so many registers, at once
MOST_PARTS = 256  # of a sum, which a second kernel adds
MAPPING_PROGRAMS = 8192
MULTIPROCESSORS = 132  # where there is no GPU

# Key: all that a kernel is compiled for. Value: how to run it, the function that gives a device's stream, and what
# Triton's launch takes next.
_compiled: dict[tuple[object, ...], tuple[Any, ...]] = {}


class Launch:
    """A kernel with its grid and what it takes after its tensors; which of these are None never changes.

    Triton's own launch looks at every argument, to find what it has compiled for such arguments. Here only addresses
    may change, of which it knows whether they are multiples of 16. A new size takes a kernel that is there.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int], numbers: tuple[Any, ...], *constants: object, **options: Any
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, (*grid, 1), numbers, constants
        self.behind = *numbers, *constants
        self.options = options | {"enable_fp_fusion": True}  # a * b + c as one operation; Triton 3.9 warns unless told
        self.aligned: Any = None  # the entry of _compiled for addresses that are all multiples of 16

    def __call__(self, *tensors: Tensor | None, floats: tuple[float, ...] = ()) -> None:
        """Launch on the GPU of the first tensor."""
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(*tensors, floats=floats)
            return
        together, pointers = 0, [None if one is None else one.data_ptr() for one in tensors]
        for pointer in pointers:
            if pointer is not None:
                together |= pointer
        if self.aligned is not None and together % 16 == 0 and 0 not in pointers:
            ready = self.aligned
        else:
            ready = self._ready(device, pointers, tensors, floats)
            if ready is None:  # Triton has launched it
                return
        # As compiled[grid] of Triton, without what that does for the hooks of a profiler.
        run, stream_of, *handles = ready
        run(*self.grid, stream_of(device), *handles, None, None, None, *pointers, *floats, *self.behind)

    def _ready(
        self, device: int, pointers: list[int | None], tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]
    ) -> tuple[Any, ...] | None:
        """The compiled kernel for such arguments; or None, and Triton has launched it, as it has to compile it."""
        for one in tensors:
            if one is not None and one.numel() and not one.untyped_storage().nbytes():
                raise RuntimeError(NO_MEMORY)
        kinds = [
            None if one is None or pointer is None else (one.dtype, pointer % 16 == 0)
            for one, pointer in zip(tensors, pointers, strict=True)
        ]
        are_large = [isinstance(number, int) and number >= 2**31 for number in self.numbers]  # int64 to Triton
        key = self.kernel, device, self.constants, *self.options.values(), *kinds, *are_large
        ready = _compiled.get(key)
        if ready is None:
            compiled = self.kernel[self.grid](*tensors, *floats, *self.behind, **self.options)
            if compiled is not None:  # neither interpreted nor recorded
                stream_of = triton.runtime.driver.active.get_current_stream
                _compiled[key] = compiled.run, stream_of, compiled.function, compiled.packed_metadata
        elif all(kind is None or kind[1] for kind in kinds):
            self.aligned = ready
        return ready


class Plan:
    """The plan for tensors of one kind on a GPU, see plans.py."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, eps: float = 1.0, **options: Any
    ) -> None:
        self.layout, self.dtypes, self.averages = layout, options, options.get("averages")
        self.relu, self.compute, self.channels = (
            bool(options.get("relu")),
            moments.compute_dtype(dtype),
            layout.sizes[1],
        )
        outer, channels, inner = layout.sizes
        if outer * inner == 0:
            outer, inner = 0, 1
        in_runs = inner > 1 and channels > 0
        if in_runs:
            width = align = VALUES if inner > VALUES and inner % VALUES == 0 else 1
            spans, num_rows, warps = channels, outer * inner // width, WARPS_IN_RUNS
        else:
            # 64, or 32 if that leaves at least an eighth of the columns fewer lanes idle.
            width = min(COLUMNS, key=lambda width: 8 * (-channels % width) // max(1, channels))
            align = 1 if channels % VALUES else VALUES
            spans, num_rows, warps = triton.cdiv(max(1, channels), width), outer * inner, WARPS
        rows = 32 * warps * VALUES // width
        compute = tl.float64 if dtype == torch.float64 else tl.float32
        # Triton's back end for AMD compiles for offsets of less than 2 GB, in bytes.
        most = outer * channels * inner * (dtype.itemsize if torch.version.hip else 1)
        index = tl.int64 if most >= 2**31 - 2**24 else tl.int32  # with room for missing rows
        tiles = gpu_tiles.Tiles(in_runs, rows, width, align, index, compute)
        division = _division(inner // width) if in_runs else (0, 0)

        def over_tiles(kernel: Any, *constants: object, programs: int, most_parts: int, registers: int) -> Launch:
            num_groups = triton.cdiv(num_rows, gpu_tiles.GROUP.value * rows)
            groups_of_program = triton.cdiv(num_groups, max(1, min(num_groups, most_parts, programs // max(1, spans))))
            rows_of_program = groups_of_program * gpu_tiles.GROUP.value * rows
            grid = spans, max(1, triton.cdiv(num_rows, max(1, rows_of_program)))
            numbers = num_rows, rows_of_program, channels, inner, *division
            # Triton's back end for AMD knows no such option.
            limit = {} if torch.version.hip else {"maxnreg": registers}
            return Launch(kernel, grid, numbers, tiles, *constants, num_warps=warps, **limit)

        programs = num_multiprocessors(device) * SUMMING_THREADS // (32 * warps)
        self.parts_of_sums, self.parts_of_gradient_sums = (
            over_tiles(
                gpu_tiles.parts_of_sums, relu, programs=programs, most_parts=MOST_PARTS, registers=SUMMING_REGISTERS
            )
            for relu in (False, self.relu)
        )
        of_map: dict[str, Any] = {
            "programs": MAPPING_PROGRAMS, "most_parts": MAPPING_PROGRAMS, "registers": MAPPING_REGISTERS
        }  # fmt: skip
        self.normalize = over_tiles(gpu_tiles.normalize, self.relu, **of_map)
        self.input_gradient = over_tiles(gpu_tiles.input_gradient, self.relu, **of_map)

        self.num_parts = num_parts = self.parts_of_sums.grid[1]
        blocks = max(1, triton.cdiv(channels, gpu_channels.CHANNELS.value)), 1
        of_parts, of_total = (num_parts, channels), (1, channels)
        of_relu = int(self.relu and not options.get("has_residual"))
        self.num_statistics = moments.num_statistics(channels, bool(of_relu))
        self.add_parts = Launch(gpu_channels.add_parts, blocks, of_parts)
        self.forward_of_parts, self.forward_of_total = (
            Launch(gpu_channels.forward_channels, blocks, (*one, of_relu, *_two(eps))) for one in (of_parts, of_total)
        )
        self.gradient_sums, self.backward_of_parts = (
            Launch(gpu_channels.backward_channels, blocks, (*of_parts, of_relu), compute, True) for _ in range(2)
        )
        self.backward_of_total = Launch(gpu_channels.backward_channels, blocks, (*of_total, of_relu), compute, False)

    @staticmethod
    def at(*tensors: Tensor | None) -> None:
        """Nothing: no sums are in parts, and no gradients are left to write."""

    def forward_sums(self, x: Tensor, signature: Signature = UNSIGNED, is_alone: bool = False) -> tuple[Tensor, bool]:
        parts = x.new_empty(2 * self.channels * self.num_parts + 1, dtype=torch.float64)
        self.parts_of_sums(x, None, None, None, parts)
        if is_alone or self.num_parts == 1:
            return parts, is_alone
        sums = x.new_empty(2 * self.channels + 1, dtype=torch.float64)
        self.add_parts(parts, sums)
        return sums, False

    def forward_outputs(
        self, is_alone: Any, x: Tensor, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, running_mean: Tensor | None = None, running_var: Tensor | None = None,
        counter: Tensor | None = None, momentum: Any = None, compares: bool = True,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        y, statistics = torch.empty_like(x), total.new_empty(self.num_statistics)  # before any buffer moves
        coefficients = x.new_empty(3 * self.channels, dtype=self.compute)
        counted, share = counter, None
        if self.averages and counter is not None:
            counted, share, momentum = None, 1.0 / counter.add_(1).to(torch.float64), 0.0
        launch = self.forward_of_parts if is_alone else self.forward_of_total
        launch(
            total, weight, bias, running_mean, running_var, counted, statistics, coefficients, share,
            floats=_two(momentum or 0.0),
        )  # fmt: skip
        moved = [one for one in (running_mean, running_var, counted) if one is not None]
        if moved:  # autograd is to see what has changed
            torch_private.increment_version(moved)
        self.normalize(x, residual, y, coefficients)
        return y, statistics, OK

    def backward_sums(
        self, dy: Tensor, x: Tensor, y: Tensor | None, statistics: Tensor, signature: Signature = UNSIGNED,
        is_alone: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Any]:  # fmt: skip
        weight_dtype, bias_dtype = self.dtypes["grad_weight_dtype"], self.dtypes["grad_bias_dtype"]
        grad_weight = None if weight_dtype is None else x.new_empty(self.channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(self.channels, dtype=bias_dtype)
        parts = statistics.new_empty(2 * self.channels * self.num_parts + 1)
        self.parts_of_gradient_sums(x, dy, y, statistics, parts)
        if is_alone:
            return parts, grad_weight, grad_bias, (grad_weight, grad_bias)
        sums = statistics.new_empty(2 * self.channels)
        self.gradient_sums(parts, sums, statistics, None, grad_weight, grad_bias, None)
        return sums, grad_weight, grad_bias, None

    def backward_outputs(
        self, grads: Any, dy: Tensor, x: Tensor, y: Tensor | None, total: Tensor, statistics: Tensor,
        weight: Tensor | None, needs_x: bool, of_residual: bool, compares: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, int]:  # fmt: skip
        needs_map = needs_x or of_residual
        if grads is None and not needs_map:
            return None, None, OK
        coefficients = x.new_empty((6 if self.relu else 4) * self.channels, dtype=self.compute)
        if grads is None:
            self.backward_of_total(total, None, statistics, weight, None, None, coefficients)
        else:
            self.backward_of_parts(total, None, statistics, weight, *grads, coefficients)
        grad_x = torch.empty_like(x) if needs_map else None
        grad_residual = torch.empty_like(x) if of_residual else None
        if needs_map:
            self.input_gradient(dy, x, y, grad_x, grad_residual, coefficients)
        return grad_x, grad_residual, OK


def num_multiprocessors(device: torch.device) -> int:
    """The multiprocessors of the GPU. Sums start as many programs as run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


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


_functions = Functions(Plan)
forward_sums, forward_outputs = _functions.forward_sums, _functions.forward_outputs
backward_sums, backward_outputs = _functions.backward_sums, _functions.backward_outputs


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if not moves:
        return
    channels = running_mean.numel()
    blocks = max(1, triton.cdiv(channels, gpu_channels.CHANNELS.value)), 1
    launch = Launch(gpu_channels.update_running_stats, blocks, (channels,))
    means, variances = running_mean.contiguous(), running_var.contiguous()
    if isinstance(momentum, Tensor) and momentum.device == statistics.device:
        launch(means, variances, statistics, momentum, floats=(0.0, 0.0))
    else:
        launch(means, variances, statistics, None, floats=_two(float(momentum)))
    for buffer, moved in ((running_mean, means), (running_var, variances)):
        if moved is not buffer:
            buffer.copy_(moved)
        else:  # autograd is to see that it has changed
            torch_private.increment_version((buffer,))
