"""Launches the kernels in Triton on CUDA tensors, and decides how they go over a tensor.

gpu_tiles.py has the kernels that go over a tensor, gpu_channels.py those that compute per-channel values and look at
totals. A pass has three launches, four around an all_reduce; with momentum=None torch copies the counter, too. The host
never waits for the GPU.
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

from syncbn.kernels import gpu_channels, gpu_tiles, interface
from syncbn.kernels.interface import NO_BUFFERS, UNSIGNED, Buffers, GradientPair, Inputs, Layout, Saved, StatusWords
from syncbn.statistics import compute_dtype, num_statistics
from syncbn.torch_internals import increment_version

VALUES = 4  # that a thread loads at once; with 8, of 16 bits, the sums would not fit in its registers
COLUMNS = 64, 32  # channels of a tile, where they are neighbours. 32 of 16 bits are 64 bytes
WARPS_IN_RUNS, WARPS = 4, 8  # of a program
SUMMING_REGISTERS, MAPPING_REGISTERS = 80, 64  # of a thread
SUMMING_THREADS = 768  # that run on a multiprocessor at once, with so many registers each
MAX_PARTS = 512  # of a sum, which a second kernel adds; fewer would leave multiprocessors idle where C <= 64
MAPPING_PROGRAMS = 8192
MULTIPROCESSORS = 132  # where there is no GPU
DOUBLE = torch.float64  # of sums and statistics
NO_STATUS = StatusWords(0, 0, 0)

Dtypes: TypeAlias = tuple[torch.dtype | None, ...]
# How to run a compiled kernel, the function that gives a device's stream, what Triton's launch takes next, and the
# kernel itself: since Triton 3.8 its function is unloaded from the GPU when nobody keeps it.
Ready: TypeAlias = tuple[Callable[..., None], Callable[[int], int], tuple[int | tuple[int, ...] | None, ...], object]

# Key: all that a kernel is compiled for, and which addresses are multiples of the alignment.
compiled_kernels: dict[tuple[Hashable, tuple[bool, ...]], Ready] = {}


class Launch:
    """A kernel with its grid, the dtypes at its addresses, and the numbers that follow these.

    Triton's own launch looks at every argument, to find what it has compiled for such arguments. A Launch only looks
    whether the addresses are multiples of `alignment`; another size needs no new compilation.
    Where the dtype is None the kernel gets None, whatever the address.
    """

    def __init__(
        self, kernel: triton.JITFunction, grid: tuple[int, int], device: torch.device, dtypes: Dtypes,
        numbers: tuple[float, ...], constants: tuple[gpu_tiles.Tiles | bool | tl.dtype, ...] = (), alignment: int = 1,
        num_bytes: int = 8, **options: int,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.dtypes, self.numbers = kernel, (*grid, 1), dtypes, (*numbers, *constants)
        self.device, self.alignment = device.index if device.type == "cuda" else -1, alignment
        self.num_bytes = num_bytes  # of a tensor, as Triton is told: its back end for AMD asks if it is 2^31 or more
        self.options = {"enable_fp_fusion": True} | options  # a * b + c as one operation; Triton 3.9 warns unless told
        are_large = [isinstance(number, int) and number >= 2**31 for number in numbers]  # int64 to Triton
        self.key = kernel, device, dtypes, constants, *self.options.values(), *are_large
        self.aligned: Ready | None = None  # the entry of compiled_kernels for addresses that are all multiples

    def __call__(self, *addresses: int, varying: tuple[float, ...] = ()) -> None:
        """Launch for these addresses, 0 where there is nothing; `varying` numbers stand before the others."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self(*addresses, varying=varying)
            return
        ready = self.aligned if self.alignment == 1 or functools.reduce(or_, addresses) % self.alignment == 0 else None
        ready = ready or self._ready(addresses, varying)
        if ready is None:  # Triton has launched it
            return
        # As compiled[grid] of Triton, without what that does for the hooks of a profiler.
        run, stream_of, handles, _ = ready
        run(*self.grid, stream_of(self.device), *handles, *addresses, *varying, *self.numbers)

    def _ready(self, addresses: tuple[int, ...], varying: tuple[float, ...]) -> Ready | None:
        """The compiled kernel for such addresses. The first time None: Triton compiles and launches it itself."""
        are_aligned = (*(address % self.alignment == 0 for address in addresses),)
        ready = compiled_kernels.get((self.key, are_aligned))
        if ready is None:
            tensors = [self._tensor_at(*pair) for pair in zip(addresses, self.dtypes, strict=True)]
            compiled = self.kernel[self.grid](*tensors, *varying, *self.numbers, **self.options)
            if compiled is not None:  # neither interpreted nor recorded
                handles = compiled.function, compiled.packed_metadata, None, None, None
                ready = compiled.run, triton.runtime.driver.active.get_current_stream, handles, compiled
                compiled_kernels[self.key, are_aligned] = ready
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


class _Launches:
    """Makes the launches for tensors of one layout, dtype and device."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        outer, channels, inner = layout.sizes
        if outer * inner == 0:
            outer, inner = 0, 1
        in_runs = inner > 1 and channels > 0
        if in_runs:
            width = align = VALUES if inner > VALUES and inner % VALUES == 0 else 1
            self.spans, self.num_rows, self.warps = channels, outer * inner // width, WARPS_IN_RUNS
        else:
            # The width that leaves fewer lanes idle, in whole eighths of the channels; 64 where both are equal.
            width = min(COLUMNS, key=lambda width: 8 * (-channels % width) // max(1, channels))
            align = 1 if channels % VALUES else VALUES
            self.spans, self.num_rows, self.warps = triton.cdiv(max(1, channels), width), outer * inner, WARPS
        rows = 32 * self.warps * VALUES // width
        compute = tl.float64 if dtype == torch.float64 else tl.float32
        # Triton's back end for AMD compiles for offsets of less than 2 GB, in bytes.
        most = outer * channels * inner * (dtype.itemsize if torch.version.hip else 1)
        index = tl.int64 if most >= 2**31 - 2**24 else tl.int32  # with room for missing rows
        self.tiles = gpu_tiles.Tiles(in_runs, rows, width, align, index, compute)
        self.numbers = channels, inner, *(_division(inner // width) if in_runs else (0, 0))
        self.channels, self.device = channels, device

    def over_tiles(self, kernel: triton.JITFunction, dtypes: Dtypes, relu: bool) -> Launch:
        """A launch whose grid is (spans, parts)."""
        most_parts, registers = MAPPING_PROGRAMS // max(1, self.spans), MAPPING_REGISTERS
        if kernel is gpu_tiles.parts_of_sums:
            programs = _num_multiprocessors(self.device) * SUMMING_THREADS // (32 * self.warps)  # that run at once
            most_parts, registers = min(MAX_PARTS, programs // max(1, self.spans)), SUMMING_REGISTERS
        group_status = gpu_tiles.GROUP.value * self.tiles.rows
        num_groups = triton.cdiv(self.num_rows, group_status)
        rows_of_program = triton.cdiv(num_groups, max(1, min(num_groups, most_parts))) * group_status
        grid = self.spans, max(1, triton.cdiv(self.num_rows, max(1, rows_of_program)))
        return Launch(
            kernel, grid, self.device, dtypes, (self.num_rows, rows_of_program, *self.numbers), (self.tiles, relu),
            alignment=16, num_bytes=2**31 if self.tiles.index == tl.int64 else 8, num_warps=self.warps,
            **({} if torch.version.hip else {"maxnreg": registers}),  # Triton's back end for AMD knows no such option
        )  # fmt: skip

    def over_channels(
        self, kernel: triton.JITFunction, dtypes: Dtypes, *numbers: float, compute: tl.dtype | None = None
    ) -> Launch:
        grid = max(1, triton.cdiv(self.channels, gpu_channels.CHANNELS.value)), 1
        constants = () if compute is None else (compute,)
        # Each operation rounds, as torch's do: another rank may update the running statistics by these.
        return Launch(kernel, grid, self.device, dtypes, (self.channels, *numbers), constants, enable_fp_fusion=False)


class Forward(interface.ForwardKernels):
    def __init__(self, config: interface.ForwardConfig) -> None:
        super().__init__(config)
        if not config.single_rank:
            self.for_single_rank = Forward(config._replace(single_rank=True))
        self.channels, launches = config.layout.sizes[1], _Launches(config.layout, config.dtype, config.device)
        self.narrow = compute_dtype(config.dtype)  # of coefficients
        over, dtype, of_relu = launches.over_channels, config.dtype, int(config.masks_by_x)
        self.parts_of_sums = launches.over_tiles(gpu_tiles.parts_of_sums, (dtype, None, None, None, DOUBLE), False)
        self.num_parts = self.parts_of_sums.grid[1]
        self.add_parts = over(gpu_channels.add_parts, (DOUBLE, DOUBLE), self.num_parts)
        counter = torch.int64 if config.has_counter else None
        of_buffers = config.mean_dtype, config.var_dtype, counter, counter if config.averages else None
        dtypes = DOUBLE, config.weight_dtype, config.bias_dtype, *of_buffers, DOUBLE, self.narrow
        num_parts = self.num_parts if config.single_rank else 1  # a total is one part
        self.forward_channels = over(gpu_channels.forward_channels, dtypes, num_parts, of_relu, float(config.eps))
        residual = dtype if config.has_residual else None
        self.normalize = launches.over_tiles(gpu_tiles.normalize, (dtype, residual, dtype, self.narrow), config.relu)
        self.num_statistics = num_statistics(self.channels, config.masks_by_x)

    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, status_words: StatusWords | None = None) -> Tensor:
        parts = x.new_empty(2 * self.channels * self.num_parts + interface.TRAILER_ELEMENTS, dtype=DOUBLE)
        host, _, sequence_number = status_words or NO_STATUS
        self.parts_of_sums(x.data_ptr(), 0, 0, 0, parts.data_ptr(), varying=(signature, host, sequence_number))
        if self.config.single_rank or self.num_parts == 1:
            return parts
        sums = parts.new_empty(2 * self.channels + interface.TRAILER_ELEMENTS)
        self.add_parts(parts.data_ptr(), sums.data_ptr(), varying=(signature,))
        return sums

    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | None = 0.0,
        status_words: StatusWords | None = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        (x, weight, bias, residual), (running_mean, running_var, counter) = inputs, buffers
        y, statistics = torch.empty_like(x), total.new_empty(self.num_statistics)  # before any buffer is updated
        coefficients = total.new_empty(3 * self.channels, dtype=self.narrow)
        # The first program counts the batch while others may read how many there were.
        counter_before = counter.clone() if self.config.averages and counter is not None else None
        channel_addresses = map(_address, (weight, bias, running_mean, running_var, counter, counter_before))
        addresses = total.data_ptr(), *channel_addresses, statistics.data_ptr(), coefficients.data_ptr()
        self.forward_channels(*addresses, varying=(float(momentum or 0.0), *(status_words or NO_STATUS)))
        # Autograd is to see what has changed.
        increment_version([buffer for buffer in (running_mean, running_var, counter) if buffer is not None])
        self.normalize(x.data_ptr(), _address(residual), y.data_ptr(), coefficients.data_ptr())
        return y, statistics, True


class Backward(interface.BackwardKernels):
    """With `single_rank`, coefficients stand in place of the sums, which saves a launch."""

    def __init__(self, config: interface.BackwardConfig) -> None:
        super().__init__(config)
        self.channels, launches = config.layout.sizes[1], _Launches(config.layout, config.dtype, config.device)
        self.narrow = compute_dtype(config.dtype)  # of coefficients
        dtype, y, of_relu = config.dtype, config.dtype if config.masks_by_y else None, int(config.masks_by_x)
        of_sums = dtype, dtype, y, DOUBLE, DOUBLE
        self.parts_of_sums = launches.over_tiles(gpu_tiles.parts_of_sums, of_sums, config.masks_by_x)
        self.num_parts = num_parts = self.parts_of_sums.grid[1]
        over, kernels, compute = launches.over_channels, gpu_channels, launches.tiles.compute
        grads, coefficients = (config.grad_weight_dtype, config.grad_bias_dtype), (config.weight_dtype, self.narrow)
        self.gradient_sums = over(kernels.gradient_sums, (DOUBLE, DOUBLE, DOUBLE, *grads), num_parts, compute=compute)
        self.channels_of_total = over(kernels.backward_channels, (DOUBLE, DOUBLE, *coefficients), of_relu)
        dtypes: Dtypes = DOUBLE, DOUBLE, *grads, *coefficients
        self.channels_of_parts = over(kernels.backward_channels_of_parts, dtypes, num_parts, of_relu, compute=compute)
        dtypes = dtype, dtype, y, dtype, dtype if config.needs_residual else None, self.narrow
        self.input_gradient = launches.over_tiles(gpu_tiles.input_gradient, dtypes, config.masks_by_x)

    def backward_sums(
        self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, forward_total: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        (x, weight, statistics, y), config = saved, self.config
        weight_dtype, bias_dtype = config.grad_weight_dtype, config.grad_bias_dtype
        grad_weight = None if weight_dtype is None else x.new_empty(self.channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(self.channels, dtype=bias_dtype)
        parts, of_statistics = statistics.new_empty(2 * self.channels * self.num_parts), statistics.data_ptr()
        of_parts, grads = parts.data_ptr(), (_address(grad_weight), _address(grad_bias))
        self.parts_of_sums(x.data_ptr(), dy.data_ptr(), _address(y), of_statistics, of_parts, varying=(UNSIGNED, 0, 0))
        if config.single_rank:
            sums = statistics.new_empty(6 * self.channels, dtype=self.narrow)
            self.channels_of_parts(of_parts, of_statistics, *grads, _address(weight), sums.data_ptr())
        else:
            sums = statistics.new_empty(2 * self.channels + interface.TRAILER_ELEMENTS)
            addresses = of_parts, sums.data_ptr(), of_statistics, *grads
            self.gradient_sums(*addresses, varying=(signature, _address(forward_total)))
        return sums, grad_weight, grad_bias

    def backward_outputs(
        self, dy: Tensor, saved: Saved, total: Tensor, status_words: StatusWords | None = None
    ) -> GradientPair:
        (x, weight, statistics, y), config = saved, self.config
        if not (config.needs_x or config.needs_residual):
            if status_words is not None:
                look_at_total(total, False, status_words)
            return None, None
        coefficients = total
        if not config.single_rank:
            coefficients = statistics.new_empty(6 * self.channels, dtype=self.narrow)
            addresses = total.data_ptr(), statistics.data_ptr(), _address(weight), coefficients.data_ptr()
            self.channels_of_total(*addresses, varying=status_words or NO_STATUS)
        grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if config.needs_residual else None
        outputs = grad_x.data_ptr(), _address(grad_residual), coefficients.data_ptr()
        self.input_gradient(dy.data_ptr(), x.data_ptr(), _address(y), *outputs)
        return grad_x if config.needs_x else None, grad_residual


def look_at_total(total: Tensor, is_forward: bool, status_words: StatusWords, sums: Tensor | None = None) -> None:
    """Notes what the trailer of a total tells, where none of the kernels above reads it, and `sums` of this rank with a
    trailer that are not finite. Behind a fault n of the total becomes 0."""
    num_sums = total.numel() - interface.TRAILER_ELEMENTS
    addresses = total.data_ptr() + 8 * num_sums, (total if sums is None else sums).data_ptr()
    _look_at_total(total.device)(*addresses, varying=(*status_words, int(is_forward), 0 if sums is None else num_sums))


@functools.cache
def _look_at_total(device: torch.device) -> Launch:
    return Launch(gpu_channels.look_at_total, (1, 1), device, (DOUBLE, DOUBLE), ())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def _division(number: int) -> tuple[int, int]:
    """multiplier, 32 bits as an int32, and shift: n // number = n * multiplier >> 32 >> shift for 0 <= n < 2^31."""
    shift = (number - 1).bit_length() - 1
    multiplier = -(-(2 ** (32 + shift)) // number)
    return multiplier - 2**32 * (multiplier >= 2**31), shift
