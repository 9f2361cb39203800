"""Launches the kernels for CUDA tensors, and decides how they go over a tensor.

gpu_tiles.py has the kernels that go over a tensor, gpu_channels.py those that compute per-channel values. A pass has
three launches, four around an all_reduce; with momentum=None torch launches those of the counter, too. The host never
waits for the GPU.
"""

import ctypes
import functools
from collections.abc import Callable, Hashable
from operator import or_
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncbn.kernels import gpu_channels, gpu_tiles
from syncbn.kernels.interface import NO_MEMORY, TRAILER_NUMBERS, UNSIGNED, GradientPair, Handle, Kind, Saved
from syncbn.statistics import compute_dtype, num_statistics
from syncbn.torch_internals.autograd import increment_version

VALUES = 4  # that a thread loads at once; with 8, of 16 bits, the sums would not fit in its registers
COLUMNS = 64, 32  # channels of a tile, where they are neighbours. 32 of 16 bits are 64 bytes
WARPS_IN_RUNS, WARPS = 4, 8  # of a program
SUMMING_REGISTERS, MAPPING_REGISTERS = 80, 64  # of a thread
SUMMING_THREADS = 768  # that run on a multiprocessor at once, with so many registers each
MOST_PARTS = 256  # of a sum, which a second kernel adds
MAPPING_PROGRAMS = 8192
MULTIPROCESSORS = 132  # where there is no GPU

Dtypes: TypeAlias = tuple[torch.dtype | None, ...]
# How to run a compiled kernel, the function that gives a device's stream, what Triton's launch takes next, and the
# kernel itself: since Triton 3.8 its function is unloaded from the GPU when nobody keeps it.
Ready: TypeAlias = tuple[Callable[..., None], Callable[[int], int], tuple[int | tuple[int, ...] | None, ...], object]

# Key: all that a kernel is compiled for, and which addresses are multiples of the alignment.
_compiled: dict[tuple[Hashable, tuple[bool, ...]], Ready] = {}


class Launch:
    """A kernel with its grid, the dtypes at its addresses, and the numbers that follow these.

    Triton's own launch looks at every argument, to find what it has compiled for such arguments. A Launch only looks
    whether the addresses are multiples of `alignment`; another size needs no new compilation.
    Where the dtype is None the kernel gets None, whatever the address.
    """

    def __init__(
        self, kernel: triton.JITFunction, grid: tuple[int, int], device: torch.device, dtypes: Dtypes,
        numbers: tuple[float, ...], *constants: gpu_tiles.Tiles | bool, alignment: int = 1, has_values: bool = True,
        num_bytes: int = 8, **options: int,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.dtypes, self.numbers = kernel, (*grid, 1), dtypes, (*numbers, *constants)
        self.device, self.alignment = device.index if device.type == "cuda" else -1, alignment
        self.num_bytes = num_bytes  # of a tensor, as Triton is told: its back end for AMD asks if it is 2^31 or more
        # More addresses of 0 than this mean that a tensor has no memory. Tensors without values have none.
        self.most_zeros = dtypes.count(None) if has_values and device.type != "meta" else len(dtypes)
        self.options = options | {"enable_fp_fusion": True}  # a * b + c as one operation; Triton 3.9 warns unless told
        are_large = [isinstance(number, int) and number >= 2**31 for number in numbers]  # int64 to Triton
        self.key = kernel, device, dtypes, constants, *options.values(), *are_large
        self.aligned: Ready | None = None  # the entry of _compiled for addresses that are all multiples of `alignment`

    def __call__(self, *addresses: int, more: tuple[float, ...] = ()) -> None:
        """Launch for these addresses, 0 where there is nothing; `more`: the numbers that differ from call to call."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self(*addresses, more=more)
            return
        if addresses.count(0) > self.most_zeros:
            raise RuntimeError(NO_MEMORY)
        ready = self.aligned if self.alignment == 1 or functools.reduce(or_, addresses) % self.alignment == 0 else None
        ready = ready or self._ready(addresses, more)
        if ready is None:  # Triton has launched it
            return
        # As compiled[grid] of Triton, without what that does for the hooks of a profiler.
        run, stream_of, handles, _ = ready
        run(*self.grid, stream_of(self.device), *handles, *addresses, *more, *self.numbers)

    def _ready(self, addresses: tuple[int, ...], more: tuple[float, ...]) -> Ready | None:
        """The compiled kernel for such addresses. The first time None: Triton compiles and launches it itself."""
        are_aligned = (*(address % self.alignment == 0 for address in addresses),)
        ready = _compiled.get((self.key, are_aligned))
        if ready is None:
            tensors = [self._tensor_at(*pair) for pair in zip(addresses, self.dtypes, strict=True)]
            compiled = self.kernel[self.grid](*tensors, *more, *self.numbers, **self.options)
            if compiled is not None:  # neither interpreted nor recorded
                handles = compiled.function, compiled.packed_metadata, None, None, None
                ready = compiled.run, triton.runtime.driver.active.get_current_stream, handles, compiled
                _compiled[self.key, are_aligned] = ready
            return None
        if all(are_aligned):
            self.aligned = ready
        return ready

    def _tensor_at(self, address: int, dtype: torch.dtype | None) -> Tensor | None:
        """Tells Triton the address, the dtype and the size. Nobody reads the memory."""
        if dtype is None:
            return None
        if address == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer((ctypes.c_byte * self.num_bytes).from_address(address), dtype=dtype)


class Kernels:
    """See interface.Kernels."""

    def __init__(self, kind: Kind) -> None:
        dtype, device = kind.dtype, kind.device
        outer, channels, inner = kind.layout.sizes
        if outer * inner == 0:
            outer, inner = 0, 1
        in_runs = inner > 1 and channels > 0
        if in_runs:
            width = align = VALUES if inner > VALUES and inner % VALUES == 0 else 1
            spans, num_rows, warps = channels, outer * inner // width, WARPS_IN_RUNS
        else:
            # The width that leaves fewer lanes idle, in whole eighths of the channels; 64 where both are equal.
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

        def over_tiles(
            kernel: triton.JITFunction, dtypes: Dtypes, relu: bool, programs: int, most_parts: int, limit: int
        ) -> Launch:
            num_groups = triton.cdiv(num_rows, gpu_tiles.GROUP.value * rows)
            groups_of_program = triton.cdiv(num_groups, max(1, min(num_groups, most_parts, programs // max(1, spans))))
            rows_of_program = groups_of_program * gpu_tiles.GROUP.value * rows
            grid = spans, max(1, triton.cdiv(num_rows, max(1, rows_of_program)))
            numbers = num_rows, rows_of_program, channels, inner, *division
            return Launch(
                kernel, grid, device, dtypes, numbers, tiles, relu, alignment=16, has_values=outer * channels > 0,
                num_bytes=2**31 if index == tl.int64 else 8, num_warps=warps,
                **({} if torch.version.hip else {"maxnreg": limit}),  # Triton's back end for AMD knows no such option
            )  # fmt: skip

        def over_channels(kernel: triton.JITFunction, dtypes: Dtypes, *numbers: float) -> Launch:
            grid = max(1, triton.cdiv(channels, gpu_channels.CHANNELS.value)), 1
            return Launch(kernel, grid, device, dtypes, (channels, *numbers), has_values=channels > 0)

        double, narrow = torch.float64, compute_dtype(dtype)  # of sums and statistics; of coefficients
        residual, y = dtype if kind.has_residual else None, dtype if kind.relu and kind.has_residual else None
        masks_by_x, of_relu = kind.masks_by_x(), int(kind.masks_by_x())
        add, programs = gpu_tiles.parts_of_sums, num_multiprocessors(device) * SUMMING_THREADS // (32 * warps)
        of_sums = programs, MOST_PARTS, SUMMING_REGISTERS
        of_map = MAPPING_PROGRAMS, MAPPING_PROGRAMS, MAPPING_REGISTERS
        self.parts_of_sums = over_tiles(add, (dtype, None, None, None, double), False, *of_sums)
        self.parts_of_gradient_sums = over_tiles(add, (dtype, dtype, y, double, double), masks_by_x, *of_sums)
        self.normalize = over_tiles(gpu_tiles.normalize, (dtype, residual, dtype, narrow), kind.relu, *of_map)
        dtypes: Dtypes = dtype, dtype, y, dtype, dtype if kind.needs_residual else None, narrow
        self.input_gradient = over_tiles(gpu_tiles.input_gradient, dtypes, masks_by_x, *of_map)

        self.num_parts = num_parts = self.parts_of_sums.grid[1]
        num_in_parts = 2 * channels * num_parts + TRAILER_NUMBERS  # so that coefficients are at a multiple of 16 bytes
        self.coefficients_at, self.num_in_scratch = 8 * num_in_parts, num_in_parts + 6 * channels
        self.kind, self.channels, self.num_statistics = kind, channels, num_statistics(channels, masks_by_x)
        counter, share = (None, double) if kind.averages else (torch.int64, None)
        last = (counter, double, narrow, share) if kind.has_counter else (None, double, narrow, None)
        dtypes = double, double, kind.weight_dtype, kind.bias_dtype, kind.mean_dtype, kind.var_dtype, *last
        self.add_parts, self.forward_of_parts, self.forward_of_total = (
            over_channels(gpu_channels.forward_channels, dtypes, count, is_local, of_relu, *_two(kind.eps))
            for count, is_local in ((num_parts, 1), (num_parts, 0), (1, 0))
        )
        dtypes = double, double, double, kind.weight_dtype, kind.grad_weight_dtype, kind.grad_bias_dtype, narrow
        self.gradient_sums, self.backward_of_parts, self.backward_of_total = (
            over_channels(gpu_channels.backward_channels, dtypes, count, is_local, is_total, of_relu)
            for count, is_local, is_total in ((num_parts, 1, 0), (num_parts, 1, 1), (1, 0, 1))
        )

    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, is_alone: bool = False) -> tuple[Tensor, Handle]:
        scratch = x.new_empty(self.num_in_scratch, dtype=torch.float64)
        sums = scratch if is_alone else scratch.new_empty(2 * self.channels + TRAILER_NUMBERS)
        parts = (sums if self.num_parts == 1 else scratch).data_ptr()
        self.parts_of_sums(x.data_ptr(), 0, 0, 0, parts, more=(signature,))
        if self.num_parts > 1 and not is_alone:
            # The other addresses are not used, but must not be 0.
            self.add_parts(parts, sums.data_ptr(), *(parts,) * 8, more=(signature, 0.0, 0.0))
        return sums, Handle(scratch)

    def forward_outputs(
        self, handle: Handle | None, x: Tensor, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, running_mean: Tensor | None = None, running_var: Tensor | None = None,
        counter: Tensor | None = None, momentum: float | None = 0.0,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        scratch = handle.scratch if handle else total.new_empty(self.num_in_scratch)
        address = total.data_ptr()
        y, statistics = torch.empty_like(x), total.new_empty(self.num_statistics)  # before any buffer is updated
        coefficients, share = scratch.data_ptr() + self.coefficients_at, None
        if self.kind.averages and counter is not None:
            share = 1.0 / counter.add_(1).to(torch.float64)
            counter, momentum = None, 0.0
        launch = self.forward_of_parts if total is scratch else self.forward_of_total
        launch(
            address, address, *map(_address, (weight, bias, running_mean, running_var, counter)),
            statistics.data_ptr(), coefficients, _address(share), more=(UNSIGNED, *_two(momentum or 0.0)),
        )  # fmt: skip
        # Autograd is to see what has changed.
        increment_version([buffer for buffer in (running_mean, running_var, counter) if buffer is not None])
        self.normalize(x.data_ptr(), _address(residual), y.data_ptr(), coefficients)
        return y, statistics, True

    def backward_sums(
        self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, is_alone: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Handle]:
        x, _, statistics, y = saved
        weight_dtype, bias_dtype = self.kind.grad_weight_dtype, self.kind.grad_bias_dtype
        grad_weight = None if weight_dtype is None else x.new_empty(self.channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(self.channels, dtype=bias_dtype)
        scratch = sums = statistics.new_empty(self.num_in_scratch)
        parts, of_statistics = scratch.data_ptr(), statistics.data_ptr()
        grads = _address(grad_weight), _address(grad_bias)
        self.parts_of_gradient_sums(x.data_ptr(), dy.data_ptr(), _address(y), of_statistics, parts, more=(UNSIGNED,))
        if not is_alone:
            sums = statistics.new_empty(2 * self.channels + TRAILER_NUMBERS)
            self.gradient_sums(parts, sums.data_ptr(), of_statistics, parts, *grads, parts, more=(signature,))
        return sums, grad_weight, grad_bias, Handle(scratch, *grads)

    def backward_outputs(self, handle: Handle | None, dy: Tensor, saved: Saved, total: Tensor) -> GradientPair:
        (x, weight, statistics, y), kind = saved, self.kind
        scratch, *grads = handle or Handle(total.new_empty(self.num_in_scratch))
        is_alone, needs_map, sums = total is scratch, kind.needs_x or kind.needs_residual, total.data_ptr()
        coefficients = scratch.data_ptr() + self.coefficients_at
        if is_alone or needs_map:
            launch = self.backward_of_parts if is_alone else self.backward_of_total
            launch(sums, sums, statistics.data_ptr(), _address(weight), *grads, coefficients, more=(UNSIGNED,))
        if not needs_map:
            return None, None
        grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if kind.needs_residual else None
        others = grad_x.data_ptr(), _address(grad_residual), coefficients
        self.input_gradient(dy.data_ptr(), x.data_ptr(), _address(y), *others)
        return grad_x if kind.needs_x else None, grad_residual


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
