"""Launches the Triton kernels on CUDA tensors, and divides the tensors among the programs of a kernel.

gpu_tiles.py contains the kernels that process whole tensors, gpu_channels.py those that compute per-channel values and
check totals. A pass takes three launches, or four with an all_reduce (three in a forward with one partial sum per
channel); with momentum=None torch also copies the counter. The host never waits for the GPU. Triton compiles kernels
for dtypes and layouts, not for each size: a ResNet-50 in bfloat16 compiles 6 kernels in channels last and 10 in
contiguous layout, and 2 more with a group. scripts/gpu_static.py reads their machine code: none of these kernels spills
registers, and none that writes outputs uses float64. The sums of a backward spill with a residual, or with a relu in
float64.
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

from syncbn import payload
from syncbn.kernels import gpu_channels, gpu_tiles, interface
from syncbn.kernels.interface import NO_BUFFERS, Buffers, GradientPair, Inputs, Saved, Status, Sums
from syncbn.kernels.layout import Layout
from syncbn.payload import UNSIGNED
from syncbn.statistics import compute_dtype
from syncbn.torch_internals import increment_version

# Values that a thread loads at once. With 8 values of 16 bits the sums of a thread would not fit in its registers.
VALUES_PER_LOAD = 4
COLUMNS = 64, 32  # channels per tile if inner is 1; 32 values of 16 bits are 64 contiguous bytes
WARPS, COLUMN_WARPS = 4, 8  # warps per program: for a single channel; for several channels
REDUCTION_REGISTERS, ELEMENTWISE_REGISTERS = 80, 64  # registers per thread
REDUCTION_THREADS = 768  # threads with REDUCTION_REGISTERS that run on a multiprocessor at once
# Maximum number of partial sums per channel, which a second kernel adds. A smaller maximum would leave multiprocessors
# idle for C <= 64.
MAX_PARTS = 512
ELEMENTWISE_PROGRAMS = 8192  # maximum number of programs
MULTIPROCESSORS = 132  # assumed without a GPU
DOUBLE = torch.float64  # dtype of sums and statistics
NO_STATUS = interface.StatusWords(0, 0, 0)

Dtypes: TypeAlias = tuple[torch.dtype | None, ...]
# The launcher of a compiled kernel; a function that returns the current stream of a device; the launcher's arguments
# after the stream; and the kernel, because Triton 3.8 unloads an unreferenced kernel from the GPU.
CompiledLaunch: TypeAlias = tuple[Callable[..., None], Callable[[int], int], tuple[object, ...], object]

# Keyed by everything that a kernel is compiled for, and by which addresses are multiples of the alignment.
compiled_kernels: dict[tuple[Hashable, tuple[bool, ...]], CompiledLaunch] = {}


class Launch:
    """A kernel with its grid, the dtypes of its tensors, and the scalars and constants that follow the tensors.

    Triton's own launch inspects every argument to find the compiled kernel. A Launch only checks whether the addresses
    are multiples of `alignment`; a new size needs no new compilation. A dtype of None stands for an argument of None,
    whose address is ignored.
    """

    def __init__(
        self, kernel: triton.JITFunction, grid: tuple[int, int], device: torch.device, dtypes: Dtypes,
        scalars: tuple[float, ...], constants: tuple[gpu_tiles.Tiles | bool | tl.dtype, ...] = (), alignment: int = 1,
        num_bytes: int = 8, **options: int,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.dtypes, self.scalars = kernel, (*grid, 1), dtypes, (*scalars, *constants)
        self.device, self.alignment = device.index if device.type == "cuda" else -1, alignment
        self.num_bytes = num_bytes  # tensor size for Triton, whose AMD back end specialises below 2^31
        self.options = {"enable_fp_fusion": True} | options  # fuse a * b + c; Triton 3.9 warns if this is not given
        are_large = [isinstance(scalar, int) and scalar >= 2**31 for scalar in scalars]  # int64 in Triton
        self.key = kernel, device, dtypes, constants, *self.options.values(), *are_large
        self.aligned: CompiledLaunch | None = None  # compiled for addresses that are all aligned

    def __call__(self, *addresses: int, varying: tuple[float, ...] = ()) -> None:
        """Launch the kernel for these addresses (0: no tensor). `varying` scalars precede the fixed scalars."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self(*addresses, varying=varying)
            return
        is_aligned = self.alignment == 1 or functools.reduce(or_, addresses) % self.alignment == 0
        compiled = (self.aligned if is_aligned else None) or self._get_compiled(addresses, varying)
        if compiled is None:  # Triton has launched the kernel
            return
        # The same as Triton's compiled[grid](...), but without support for hooks of profilers.
        run, get_stream, handles, _ = compiled
        run(*self.grid, get_stream(self.device), *handles, *addresses, *varying, *self.scalars)

    def _get_compiled(self, addresses: tuple[int, ...], varying: tuple[float, ...]) -> CompiledLaunch | None:
        """Return the kernel for addresses aligned like these. In the first call Triton compiles and launches the
        kernel, and this method returns None."""
        are_aligned = (*(address % self.alignment == 0 for address in addresses),)
        compiled = compiled_kernels.get((self.key, are_aligned))
        if compiled is None:
            tensors = [self._tensor_at(*pair) for pair in zip(addresses, self.dtypes, strict=True)]
            kernel = self.kernel[self.grid](*tensors, *varying, *self.scalars, **self.options)
            if kernel is not None:  # None under Triton's interpreter, or if a script only records the launch
                handles = kernel.function, kernel.packed_metadata, None, None, None
                compiled = kernel.run, triton.runtime.driver.active.get_current_stream, handles, kernel
                compiled_kernels[self.key, are_aligned] = compiled
            return None
        if all(are_aligned):
            self.aligned = compiled
        return compiled

    def _tensor_at(self, address: int, dtype: torch.dtype | None) -> Tensor | None:
        """Return a tensor that gives Triton the address, the dtype and the size. Its memory is not read."""
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
        single_channel = inner > 1 and channels > 0
        if single_channel:
            width = align = VALUES_PER_LOAD if inner > VALUES_PER_LOAD and inner % VALUES_PER_LOAD == 0 else 1
            self.spans, self.num_rows, self.warps = channels, outer * inner // width, WARPS
        else:
            # The width with fewer idle lanes, in units of channels / 8, rounded down. In a tie the width is 64.
            width = min(COLUMNS, key=lambda width: 8 * (-channels % width) // max(1, channels))
            align = 1 if channels % VALUES_PER_LOAD else VALUES_PER_LOAD
            self.spans, self.num_rows, self.warps = triton.cdiv(max(1, channels), width), outer * inner, COLUMN_WARPS
        rows = 32 * self.warps * VALUES_PER_LOAD // width
        compute = tl.float64 if dtype == torch.float64 else tl.float32
        # In bytes for AMD, because Triton's AMD back end compiles for offsets of less than 2 GB.
        max_offset = outer * channels * inner * (dtype.itemsize if torch.version.hip else 1)
        index = tl.int64 if max_offset >= 2**31 - 2**24 else tl.int32  # 2^24: a margin for rows out of range
        self.tiles = gpu_tiles.Tiles(single_channel, rows, width, align, index, compute)
        self.scalars = channels, inner, *(_magic_division(inner // width) if single_channel else (0, 0))
        self.channels, self.device = channels, device

    def tile_launch(self, kernel: triton.JITFunction, dtypes: Dtypes, relu: bool) -> Launch:
        """Return a launch with the grid (spans, parts), see gpu_tiles.py."""
        max_parts, registers = ELEMENTWISE_PROGRAMS // max(1, self.spans), ELEMENTWISE_REGISTERS
        if kernel is gpu_tiles.partial_sums:
            programs = _num_multiprocessors(self.device) * REDUCTION_THREADS // (32 * self.warps)  # running at once
            max_parts, registers = min(MAX_PARTS, programs // max(1, self.spans)), REDUCTION_REGISTERS
        rows_per_iteration = gpu_tiles.UNROLL.value * self.tiles.rows
        num_iterations = triton.cdiv(self.num_rows, rows_per_iteration)
        rows_per_program = triton.cdiv(num_iterations, max(1, min(num_iterations, max_parts))) * rows_per_iteration
        grid = self.spans, max(1, triton.cdiv(self.num_rows, max(1, rows_per_program)))
        return Launch(
            kernel, grid, self.device, dtypes, (self.num_rows, rows_per_program, *self.scalars), (self.tiles, relu),
            alignment=16, num_bytes=2**31 if self.tiles.index == tl.int64 else 8, num_warps=self.warps,
            **({} if torch.version.hip else {"maxnreg": registers}),  # unknown to Triton's AMD back end
        )  # fmt: skip

    def channel_launch(
        self, kernel: triton.JITFunction, dtypes: Dtypes, *scalars: float, constants: tuple[tl.dtype, ...] = ()
    ) -> Launch:
        grid = max(1, triton.cdiv(self.channels, gpu_channels.CHANNELS_PER_PROGRAM.value)), 1
        # Without fusion each operation rounds as in torch: another rank may update its statistics by torch operations.
        return Launch(kernel, grid, self.device, dtypes, (self.channels, *scalars), constants, enable_fp_fusion=False)


class Forward(interface.ForwardKernels):
    def __init__(self, config: interface.ForwardConfig) -> None:
        super().__init__(config)
        if not config.single_rank:
            self.for_single_rank = Forward(config._replace(single_rank=True))
        self.channels, launches = config.layout.sizes[1], _Launches(config.layout, config.dtype, config.device)
        self.compute_dtype = compute_dtype(config.dtype)  # dtype of the coefficients
        launch, dtype = launches.channel_launch, config.dtype
        self.partial_sums = launches.tile_launch(gpu_tiles.partial_sums, (dtype, None, None, None, DOUBLE), False)
        self.num_parts = self.partial_sums.grid[1]
        self.add_partials = launch(gpu_channels.add_partials, (DOUBLE, DOUBLE), self.num_parts)
        counter = torch.int64 if config.has_counter else None
        buffer_dtypes = config.mean_dtype, config.var_dtype, counter, counter if config.averages else None
        dtypes: Dtypes = DOUBLE, config.weight_dtype, config.bias_dtype, *buffer_dtypes, DOUBLE, self.compute_dtype
        masks_by_x = config.relu_mask is interface.ReluMask.FROM_X
        scalars = self.num_parts if config.single_rank else 1, int(masks_by_x), float(config.eps)
        self.forward_channels = launch(gpu_channels.forward_channels, dtypes, *scalars)
        dtypes = dtype, dtype if config.has_residual else None, dtype, self.compute_dtype
        self.normalize = launches.tile_launch(gpu_tiles.normalize, dtypes, config.relu)
        self.num_statistics = interface.num_statistics(self.channels, config.relu_mask)

    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, count: int = 0, status_words: Status = None) -> Tensor:
        partials = x.new_empty(payload.num_elements(self.channels * self.num_parts), dtype=DOUBLE)
        host_words, _, sequence_number, _ = status_words or NO_STATUS
        varying = signature, count, host_words, sequence_number
        self.partial_sums(x.data_ptr(), 0, 0, 0, partials.data_ptr(), varying=varying)
        if self.config.single_rank or self.num_parts == 1:
            return partials
        sums = partials.new_empty(payload.num_elements(self.channels))
        self.add_partials(partials.data_ptr(), sums.data_ptr(), varying=(signature, count))
        return sums

    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | None = 0.0,
        status_words: Status = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        (x, weight, bias, residual), (running_mean, running_var, counter) = inputs, buffers
        # These allocations may fail, so they come before the buffers change.
        y, statistics = torch.empty_like(x), total.new_empty(self.num_statistics)
        coefficients = total.new_empty(3 * self.channels, dtype=self.compute_dtype)
        # A copy, because the first program may increment the counter before other programs have read its old value.
        counter_before = counter.clone() if self.config.averages and counter is not None else None
        channel_addresses = map(_address, (weight, bias, running_mean, running_var, counter, counter_before))
        addresses = total.data_ptr(), *channel_addresses, statistics.data_ptr(), coefficients.data_ptr()
        self.forward_channels(*addresses, varying=(float(momentum or 0.0), *(status_words or NO_STATUS)))
        # so that autograd detects the change
        increment_version([buffer for buffer in (running_mean, running_var, counter) if buffer is not None])
        self.normalize(x.data_ptr(), _address(residual), y.data_ptr(), coefficients.data_ptr())
        return y, statistics, True


class Backward(interface.BackwardKernels):
    """With `single_rank`, backward_sums returns coefficients instead of the sums, which saves a launch."""

    def __init__(self, config: interface.BackwardConfig) -> None:
        super().__init__(config)
        self.channels, launches = config.layout.sizes[1], _Launches(config.layout, config.dtype, config.device)
        self.compute_dtype = compute_dtype(config.dtype)  # dtype of the coefficients
        dtype, masks_by_x = config.dtype, int(config.relu_mask is interface.ReluMask.FROM_X)
        y = dtype if config.relu_mask is interface.ReluMask.FROM_Y else None
        sum_dtypes = dtype, dtype, y, DOUBLE, DOUBLE
        self.partial_sums = launches.tile_launch(gpu_tiles.partial_sums, sum_dtypes, bool(masks_by_x))
        self.num_parts = num_parts = self.partial_sums.grid[1]
        launch, kernels, constants = launches.channel_launch, gpu_channels, (launches.tiles.compute,)
        grads = config.grad_weight_dtype, config.grad_bias_dtype
        coefficients = config.weight_dtype, self.compute_dtype
        dtypes: Dtypes = DOUBLE, DOUBLE, DOUBLE, *grads
        self.gradient_sums = launch(kernels.gradient_sums, dtypes, num_parts, constants=constants)
        self.backward_channels = launch(kernels.backward_channels, (DOUBLE, DOUBLE, *coefficients), masks_by_x)
        dtypes = DOUBLE, DOUBLE, *grads, *coefficients
        single_rank = kernels.backward_channels_single_rank
        self.backward_channels_single_rank = launch(single_rank, dtypes, num_parts, masks_by_x, constants=constants)
        dtypes = dtype, dtype, y, dtype, dtype if config.needs_residual else None, self.compute_dtype
        self.input_gradient = launches.tile_launch(gpu_tiles.input_gradient, dtypes, bool(masks_by_x))

    def backward_sums(self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, call_id: Tensor | None = None) -> Sums:
        (x, weight, statistics, y), config = saved, self.config
        weight_dtype, bias_dtype = config.grad_weight_dtype, config.grad_bias_dtype
        grad_weight = None if weight_dtype is None else x.new_empty(self.channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(self.channels, dtype=bias_dtype)
        partials = statistics.new_empty(2 * self.channels * self.num_parts)
        partials_address, statistics_address = partials.data_ptr(), statistics.data_ptr()
        addresses = x.data_ptr(), dy.data_ptr(), _address(y), statistics_address, partials_address
        self.partial_sums(*addresses, varying=(UNSIGNED, 0, 0, 0))
        grads = statistics_address, _address(grad_weight), _address(grad_bias)
        if config.single_rank:
            sums = statistics.new_empty(6 * self.channels, dtype=self.compute_dtype)
            self.backward_channels_single_rank(partials_address, *grads, _address(weight), sums.data_ptr())
        else:
            sums = statistics.new_empty(payload.num_elements(self.channels))
            varying = signature, _address(call_id)
            self.gradient_sums(partials_address, sums.data_ptr(), *grads, varying=varying)
        return sums, grad_weight, grad_bias

    def backward_outputs(self, dy: Tensor, saved: Saved, total: Tensor, status_words: Status = None) -> GradientPair:
        (x, weight, statistics, y), config = saved, self.config
        if not (config.needs_x or config.needs_residual):
            if status_words is not None:
                check_total(total, False, status_words)
            return None, None
        coefficients = total
        if not config.single_rank:
            coefficients = statistics.new_empty(6 * self.channels, dtype=self.compute_dtype)
            addresses = total.data_ptr(), statistics.data_ptr(), _address(weight), coefficients.data_ptr()
            self.backward_channels(*addresses, varying=status_words or NO_STATUS)
        grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if config.needs_residual else None
        outputs = grad_x.data_ptr(), _address(grad_residual), coefficients.data_ptr()
        self.input_gradient(dy.data_ptr(), x.data_ptr(), _address(y), *outputs)
        return grad_x if config.needs_x else None, grad_residual


def check_total(
    total: Tensor, needs_two_values: bool, status_words: interface.StatusWords, sums: Tensor | None = None
) -> None:
    """Check a total that no other kernel checks, and with `sums`, whether the sums of this rank are finite.

    The results are stored in the status words. After a fault, n is set to 0 in `total`. `needs_two_values`: n = 1 is a
    fault. `total` and `sums` are payloads.
    """
    num_sums = payload.sums(total).numel()
    addresses = total.data_ptr() + payload.BYTES_PER_ELEMENT * num_sums, (total if sums is None else sums).data_ptr()
    varying = *status_words, int(needs_two_values), 0 if sums is None else num_sums
    _check_launch(total.device)(*addresses, varying=varying)


@functools.cache
def _check_launch(device: torch.device) -> Launch:
    return Launch(gpu_channels.check_total, (1, 1), device, (DOUBLE, DOUBLE), ())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def _magic_division(divisor: int) -> tuple[int, int]:
    """Return `multiplier`, 32 bits as an int32, and `bit_shift`, which divide without a division:

    n // divisor = n * multiplier >> 32 >> bit_shift for 0 <= n < 2^31.
    """
    bit_shift = (divisor - 1).bit_length() - 1
    multiplier = -(-(2 ** (32 + bit_shift)) // divisor)
    return multiplier - 2**32 * (multiplier >= 2**31), bit_shift
