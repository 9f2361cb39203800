"""Computes on CUDA tensors by kernels in Triton, and decides how they go over a tensor.

gpu_tiles.py has the kernels that go over a tensor, gpu_channels.py those that compute per-channel values,
gpu_mailbox.py what looks at totals. A pass has three launches, four around an all_reduce; with momentum=None torch
copies the counter, too. The host never waits for the GPU.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncbn.kernels import gpu_channels, gpu_mailbox, gpu_tiles, interface
from syncbn.kernels.gpu_launch import Dtypes, Launch
from syncbn.kernels.interface import NO_BUFFERS, UNSIGNED, Buffers, GradientPair, Inputs, Mailbox, Saved, Scratch
from syncbn.layout import Layout
from syncbn.statistics import compute_dtype, num_statistics
from syncbn.torch_internals.autograd import increment_version

VALUES = 4  # that a thread loads at once; with 8, of 16 bits, the sums would not fit in its registers
COLUMNS = 64, 32  # channels of a tile, where they are neighbours. 32 of 16 bits are 64 bytes
WARPS_IN_RUNS, WARPS = 4, 8  # of a program
SUMMING_REGISTERS, MAPPING_REGISTERS = 80, 64  # of a thread
SUMMING_THREADS = 768  # that run on a multiprocessor at once, with so many registers each
MOST_PARTS = 512  # of a sum, which a second kernel adds; fewer would leave multiprocessors idle where C <= 64
MAPPING_PROGRAMS = 8192
MULTIPROCESSORS = 132  # where there is no GPU
DOUBLE = torch.float64  # of sums and statistics
NO_MAILBOX = Mailbox(0, 0, 0)


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
            most_parts, registers = min(MOST_PARTS, programs // max(1, self.spans)), SUMMING_REGISTERS
        of_group = gpu_tiles.GROUP.value * self.tiles.rows
        num_groups = triton.cdiv(self.num_rows, of_group)
        rows_of_program = triton.cdiv(num_groups, max(1, min(num_groups, most_parts))) * of_group
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
    def __init__(self, kind: interface.ForwardKind) -> None:
        super().__init__(kind)
        self.channels, launches = kind.layout.sizes[1], _Launches(kind.layout, kind.dtype, kind.device)
        dtype, narrow, of_relu = kind.dtype, compute_dtype(kind.dtype), int(kind.masks_by_x)
        self.parts_of_sums = launches.over_tiles(gpu_tiles.parts_of_sums, (dtype, None, None, None, DOUBLE), False)
        self.num_parts = self.parts_of_sums.grid[1]
        self.add_parts = launches.over_channels(gpu_channels.add_parts, (DOUBLE, DOUBLE), self.num_parts)
        counter = torch.int64 if kind.has_counter else None
        of_buffers = kind.mean_dtype, kind.var_dtype, counter, counter if kind.averages else None
        dtypes = DOUBLE, kind.weight_dtype, kind.bias_dtype, *of_buffers, DOUBLE, narrow
        self.channels_of_parts, self.channels_of_total = (
            launches.over_channels(gpu_channels.forward_channels, dtypes, count, of_relu, float(kind.eps))
            for count in (self.num_parts, 1)
        )
        residual = dtype if kind.has_residual else None
        self.normalize = launches.over_tiles(gpu_tiles.normalize, (dtype, residual, dtype, narrow), kind.relu)
        self.num_statistics = num_statistics(self.channels, kind.masks_by_x)
        self.coefficients_at, self.num_in_scratch = _scratch(self.channels, self.num_parts)

    def forward_sums(
        self, x: Tensor, signature: int = UNSIGNED, is_complete: bool = False, mailbox: Mailbox | None = None
    ) -> tuple[Tensor, Scratch]:
        memory = x.new_empty(self.num_in_scratch, dtype=DOUBLE)
        sums = memory if is_complete else memory.new_empty(2 * self.channels + interface.TRAILER_NUMBERS)
        stays_in_parts = is_complete or self.num_parts == 1
        parts = (sums if stays_in_parts else memory).data_ptr()
        host, _, tag = mailbox or NO_MAILBOX
        self.parts_of_sums(x.data_ptr(), 0, 0, 0, parts, varying=(signature, host, tag))
        if not stays_in_parts:
            self.add_parts(parts, sums.data_ptr(), varying=(signature,))
        return sums, Scratch(memory, is_complete)

    def forward_outputs(
        self, scratch: Scratch | None, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS,
        momentum: float | None = 0.0, mailbox: Mailbox | None = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        (x, weight, bias, residual), (running_mean, running_var, counter) = inputs, buffers
        memory, is_complete = scratch or Scratch(total.new_empty(self.num_in_scratch), is_complete=False)
        y, statistics = torch.empty_like(x), total.new_empty(self.num_statistics)  # before any buffer is updated
        coefficients = memory.data_ptr() + self.coefficients_at
        # The first program counts the batch while others may read how many there were.
        counter_before = counter.clone() if self.kind.averages and counter is not None else None
        launch, sums = (self.channels_of_parts, memory) if is_complete else (self.channels_of_total, total)
        of_channels = map(_address, (weight, bias, running_mean, running_var, counter, counter_before))
        addresses = sums.data_ptr(), *of_channels, statistics.data_ptr(), coefficients
        launch(*addresses, varying=(float(momentum or 0.0), *(mailbox or NO_MAILBOX)))
        # Autograd is to see what has changed.
        increment_version([buffer for buffer in (running_mean, running_var, counter) if buffer is not None])
        self.normalize(x.data_ptr(), _address(residual), y.data_ptr(), coefficients)
        return y, statistics, True


class Backward(interface.BackwardKernels):
    def __init__(self, kind: interface.BackwardKind) -> None:
        super().__init__(kind)
        self.channels, launches = kind.layout.sizes[1], _Launches(kind.layout, kind.dtype, kind.device)
        dtype, narrow, y = kind.dtype, compute_dtype(kind.dtype), kind.dtype if kind.masks_by_y else None
        of_sums = dtype, dtype, y, DOUBLE, DOUBLE
        self.parts_of_sums = launches.over_tiles(gpu_tiles.parts_of_sums, of_sums, kind.masks_by_x)
        num_parts, of_relu = self.parts_of_sums.grid[1], int(kind.masks_by_x)
        grads, weight = (kind.grad_weight_dtype, kind.grad_bias_dtype), kind.weight_dtype
        over, kernels, compute = launches.over_channels, gpu_channels, launches.tiles.compute
        self.gradient_sums = over(kernels.gradient_sums, (DOUBLE, DOUBLE, DOUBLE, *grads), num_parts, compute=compute)
        self.channels_of_total = over(kernels.backward_channels, (DOUBLE, DOUBLE, weight, narrow), of_relu)
        dtypes: Dtypes = DOUBLE, DOUBLE, *grads, weight, narrow
        self.channels_of_parts = over(kernels.backward_channels_of_parts, dtypes, num_parts, of_relu, compute=compute)
        dtypes = dtype, dtype, y, dtype, dtype if kind.needs_residual else None, narrow
        self.input_gradient = launches.over_tiles(gpu_tiles.input_gradient, dtypes, kind.masks_by_x)
        self.coefficients_at, self.num_in_scratch = _scratch(self.channels, num_parts)

    def backward_sums(
        self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, is_complete: bool = False,
        forward_total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Scratch]:  # fmt: skip
        """If the sums are complete, the coefficients are computed here, too: that saves a launch."""
        (x, weight, statistics, y), kind = saved, self.kind
        weight_dtype, bias_dtype = kind.grad_weight_dtype, kind.grad_bias_dtype
        grad_weight = None if weight_dtype is None else x.new_empty(self.channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(self.channels, dtype=bias_dtype)
        memory = sums = statistics.new_empty(self.num_in_scratch)
        parts, of_statistics = memory.data_ptr(), statistics.data_ptr()
        grads = _address(grad_weight), _address(grad_bias)
        self.parts_of_sums(x.data_ptr(), dy.data_ptr(), _address(y), of_statistics, parts, varying=(UNSIGNED, 0, 0))
        if is_complete:
            self.channels_of_parts(parts, of_statistics, *grads, _address(weight), parts + self.coefficients_at)
        else:
            sums = statistics.new_empty(2 * self.channels + interface.TRAILER_NUMBERS)
            addresses = parts, sums.data_ptr(), of_statistics, *grads
            self.gradient_sums(*addresses, varying=(signature, _address(forward_total)))
        return sums, grad_weight, grad_bias, Scratch(memory, is_complete)

    def backward_outputs(
        self, scratch: Scratch | None, dy: Tensor, saved: Saved, total: Tensor, mailbox: Mailbox | None = None
    ) -> GradientPair:
        (x, weight, statistics, y), kind = saved, self.kind
        if not (kind.needs_x or kind.needs_residual):
            if mailbox is not None:
                look_at_total(total, False, mailbox)
            return None, None
        memory, is_complete = scratch or Scratch(total.new_empty(self.num_in_scratch), is_complete=False)
        coefficients = memory.data_ptr() + self.coefficients_at
        if not is_complete:
            addresses = total.data_ptr(), statistics.data_ptr(), _address(weight), coefficients
            self.channels_of_total(*addresses, varying=mailbox or NO_MAILBOX)
        grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if kind.needs_residual else None
        outputs = grad_x.data_ptr(), _address(grad_residual)
        self.input_gradient(dy.data_ptr(), x.data_ptr(), _address(y), *outputs, coefficients)
        return grad_x if kind.needs_x else None, grad_residual


def look_at_total(total: Tensor, is_forward: bool, mailbox: Mailbox, sums: Tensor | None = None) -> None:
    """Notes what the trailer of a total tells, where none of the kernels above reads it, and `sums` of this rank with a
    trailer that are not finite. Behind a fault n of the total becomes 0."""
    num_sums = total.numel() - interface.TRAILER_NUMBERS
    addresses = total.data_ptr() + 8 * num_sums, (total if sums is None else sums).data_ptr()
    _look_at_total(total.device)(*addresses, varying=(*mailbox, int(is_forward), 0 if sums is None else num_sums))


@functools.cache
def _look_at_total(device: torch.device) -> Launch:
    return Launch(gpu_mailbox.look_at_total, (1, 1), device, (DOUBLE, DOUBLE), ())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _scratch(channels: int, num_parts: int) -> tuple[int, int]:
    """At which byte the coefficients begin, behind the parts of sums and a trailer: a multiple of 16; and how many
    float64 all takes."""
    num_in_parts = 2 * channels * num_parts + interface.TRAILER_NUMBERS
    return 8 * num_in_parts, num_in_parts + 6 * channels


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def _division(number: int) -> tuple[int, int]:
    """multiplier, 32 bits as an int32, and shift: n // number = n * multiplier >> 32 >> shift for 0 <= n < 2^31."""
    shift = (number - 1).bit_length() - 1
    multiplier = -(-(2 ** (32 + shift)) // number)
    return multiplier - 2**32 * (multiplier >= 2**31), shift
