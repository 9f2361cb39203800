"""Launches the kernels for CUDA tensors, and decides how they go over a tensor.

gpu_tiles.py has the kernels that go over a tensor, gpu_channels.py those that compute channels' numbers. A `Plan`
launches three kernels each way, four around an all_reduce; with momentum=None torch launches those of the counter, too.
Nothing waits for the GPU. The functions at the end are for operators.py, see functions.py.
"""

import ctypes
import functools
from operator import or_
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncbn.kernels import gpu_channels, gpu_tiles
from syncbn.kernels.functions import Functions
from syncbn.kernels.plans import NO_MEMORY, OK, UNSIGNED, Signature, require_memory
from syncbn.layout import Layout
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
At: TypeAlias = tuple[Tensor, int, int]

# Key: all that a kernel is compiled for. Value: how to run it, the function that gives a device's stream, and what
# Triton's launch takes next.
_compiled: dict[tuple[object, ...], tuple[Any, ...]] = {}


class Launch:
    """A kernel with its grid, the dtypes at its addresses, and the numbers behind them.

    Triton's own launch looks at every argument, to find what it has compiled for such arguments. A Launch only looks
    whether the addresses are multiples of `alignment`; another size needs no new compilation.
    Where the dtype is None the kernel gets None, whatever the address.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int], device: torch.device, dtypes: Dtypes, numbers: tuple[Any, ...],
        *constants: object, alignment: int = 1, has_values: bool = True, num_bytes: int = 8, **options: Any,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.dtypes, self.behind = kernel, (*grid, 1), dtypes, (*numbers, *constants)
        self.device, self.alignment = device.index if device.type == "cuda" else -1, alignment
        self.num_bytes = num_bytes  # of a tensor, as Triton is told: its back end for AMD asks if it is 2^31 or more
        # More addresses of 0 than this mean that a tensor has no memory. Tensors without values have none.
        self.most_zeros = dtypes.count(None) if has_values and device.type != "meta" else len(dtypes)
        self.options = options | {"enable_fp_fusion": True}  # a * b + c as one operation; Triton 3.9 warns unless told
        are_large = [isinstance(number, int) and number >= 2**31 for number in numbers]  # int64 to Triton
        self.key = kernel, device, dtypes, constants, *options.values(), *are_large
        self.aligned: Any = None  # the entry of _compiled for addresses that are all multiples of `alignment`

    def __call__(self, *addresses: int, floats: tuple[float, ...] = ()) -> None:
        """Launch for these addresses, 0 where there is nothing."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self(*addresses, floats=floats)
            return
        if addresses.count(0) > self.most_zeros:
            raise RuntimeError(NO_MEMORY)
        ready = self.aligned if self.alignment == 1 or functools.reduce(or_, addresses) % self.alignment == 0 else None
        ready = ready or self._ready(addresses, floats)
        if ready is None:  # Triton has launched it
            return
        # As compiled[grid] of Triton, without what that does for the hooks of a profiler.
        run, stream_of, handles = ready
        run(*self.grid, stream_of(self.device), *handles, *addresses, *floats, *self.behind)

    def _ready(self, addresses: tuple[int, ...], floats: tuple[float, ...]) -> tuple[Any, ...] | None:
        """The compiled kernel for such addresses. The first time None: Triton compiles and launches it itself."""
        are_aligned = (*(address % self.alignment == 0 for address in addresses),)
        ready = _compiled.get((self.key, are_aligned))
        if ready is None:
            tensors = [self._tensor_at(*one) for one in zip(addresses, self.dtypes, strict=True)]
            compiled = self.kernel[self.grid](*tensors, *floats, *self.behind, **self.options)
            if compiled is not None:  # neither interpreted nor recorded
                handles = compiled.function, compiled.packed_metadata, None, None, None
                ready = compiled.run, triton.runtime.driver.active.get_current_stream, handles
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


def _over_channels(channels: int, device: torch.device, kernel: Any, dtypes: Dtypes, *numbers: Any) -> Launch:
    blocks = max(1, triton.cdiv(channels, gpu_channels.CHANNELS.value)), 1
    return Launch(kernel, blocks, device, dtypes, (channels, *numbers), has_values=channels > 0)


class Plan:
    """The plan for tensors of one kind on a GPU, see plans.py.

    `at` is scratch memory, for parts of sums and then coefficients, and addresses of gradients of the parameters.
    """

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, eps: float = 1.0, **options: Any
    ) -> None:
        self.layout, self.dtypes, self.averages = layout, options, options.get("averages")
        self.relu, self.channels = bool(options.get("relu")), layout.sizes[1]
        outer, channels, inner = layout.sizes
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

        def over_tiles(kernel: Any, dtypes: Dtypes, relu: bool, programs: int, most_parts: int, limit: int) -> Launch:
            num_groups = triton.cdiv(num_rows, gpu_tiles.GROUP.value * rows)
            groups_of_program = triton.cdiv(num_groups, max(1, min(num_groups, most_parts, programs // max(1, spans))))
            rows_of_program = groups_of_program * gpu_tiles.GROUP.value * rows
            grid = spans, max(1, triton.cdiv(num_rows, max(1, rows_of_program)))
            numbers = num_rows, rows_of_program, channels, inner, *division
            options: dict[str, Any] = {"alignment": 16, "has_values": outer * channels > 0, "num_warps": warps}
            options["num_bytes"] = 2**31 if index == tl.int64 else 8
            if not torch.version.hip:  # Triton's back end for AMD knows no such option
                options["maxnreg"] = limit
            return Launch(kernel, grid, device, dtypes, numbers, tiles, relu, **options)

        double, narrow = torch.float64, compute_dtype(dtype)  # of sums and statistics; of coefficients
        residual, y = (dtype if options.get(name) else None for name in ("has_residual", "has_y"))
        add, programs = gpu_tiles.parts_of_sums, num_multiprocessors(device) * SUMMING_THREADS // (32 * warps)
        of_sums = programs, MOST_PARTS, SUMMING_REGISTERS
        of_map = MAPPING_PROGRAMS, MAPPING_PROGRAMS, MAPPING_REGISTERS
        self.parts_of_sums = over_tiles(add, (dtype, None, None, None, double), False, *of_sums)
        self.parts_of_gradient_sums = over_tiles(add, (dtype, dtype, y, double, double), self.relu, *of_sums)
        self.normalize = over_tiles(gpu_tiles.normalize, (dtype, residual, dtype, narrow), self.relu, *of_map)
        self.input_gradient, self.input_and_residual_gradient = (
            over_tiles(gpu_tiles.input_gradient, (dtype, dtype, y, dtype, other, narrow), self.relu, *of_map)
            for other in (None, dtype)
        )

        self.num_parts = num_parts = self.parts_of_sums.grid[1]
        num_in_parts = 2 * channels * num_parts + 2  # one is left, for coefficients at a multiple of 16 bytes
        self.coefficients_at, self.num_in_scratch = 8 * num_in_parts, num_in_parts + 6 * channels
        of_relu = int(self.relu and residual is None)
        self.num_statistics = num_statistics(channels, bool(of_relu))
        over_channels = functools.partial(_over_channels, channels, device)
        weight, bias, mean, var, grad_weight, grad_bias = (
            options.get(f"{name}_dtype") for name in ("weight", "bias", "mean", "var", "grad_weight", "grad_bias")
        )
        counter, share = (None, double) if self.averages else (torch.int64, None)
        last = (counter, double, narrow, share) if options.get("has_counter") else (None, double, narrow, None)
        dtypes: Dtypes = (double, double, weight, bias, mean, var, *last)
        self.add_parts, self.forward_of_parts, self.forward_of_total = (
            over_channels(gpu_channels.forward_channels, dtypes, count, is_local, of_relu, *_two(eps))
            for count, is_local in ((num_parts, 1), (num_parts, 0), (1, 0))
        )
        dtypes = double, double, double, weight, grad_weight, grad_bias, narrow
        self.gradient_sums, self.backward_of_parts, self.backward_of_total = (
            over_channels(gpu_channels.backward_channels, dtypes, count, is_local, is_total, of_relu)
            for count, is_local, is_total in ((num_parts, 1, 0), (num_parts, 1, 1), (1, 0, 1))
        )

    def at(self, x: Tensor, *others: Tensor | None) -> At:
        return x.new_empty(self.num_in_scratch, dtype=torch.float64), 0, 0

    def forward_sums(self, x: Tensor, signature: Signature = UNSIGNED, is_alone: bool = False) -> tuple[Tensor, At]:
        scratch = x.new_empty(self.num_in_scratch, dtype=torch.float64)
        sums = scratch if is_alone else scratch.new_empty(2 * self.channels + 1)
        parts = (sums if self.num_parts == 1 else scratch).data_ptr()
        self.parts_of_sums(x.data_ptr(), 0, 0, 0, parts)
        if self.num_parts > 1 and not is_alone:
            # The other addresses are not used, but must not be 0.
            self.add_parts(parts, sums.data_ptr(), *(parts,) * 8, floats=(0.0, 0.0))
        return sums, (scratch, 0, 0)

    def forward_outputs(
        self, at: At, x: Tensor, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, running_mean: Tensor | None = None, running_var: Tensor | None = None,
        counter: Tensor | None = None, momentum: Any = None, compares: bool = True,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        scratch, address = at[0], total.data_ptr()
        y, statistics = torch.empty_like(x), total.new_empty(self.num_statistics)  # before any buffer moves
        coefficients, share = scratch.data_ptr() + self.coefficients_at, None
        if self.averages and counter is not None:
            share = 1.0 / counter.add_(1).to(torch.float64)
            counter, momentum = None, 0.0
        launch = self.forward_of_parts if total is scratch else self.forward_of_total
        launch(
            address, address, 0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
            0 if running_mean is None else running_mean.data_ptr(),
            0 if running_var is None else running_var.data_ptr(), 0 if counter is None else counter.data_ptr(),
            statistics.data_ptr(), coefficients, 0 if share is None else share.data_ptr(), floats=_two(momentum or 0.0),
        )  # fmt: skip
        # Autograd is to see what has changed.
        increment_version([one for one in (running_mean, running_var, counter) if one is not None])
        self.normalize(x.data_ptr(), 0 if residual is None else residual.data_ptr(), y.data_ptr(), coefficients)
        return y, statistics, OK

    def backward_sums(
        self, dy: Tensor, x: Tensor, y: Tensor | None, statistics: Tensor, signature: Signature = UNSIGNED,
        is_alone: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, At]:  # fmt: skip
        weight_dtype, bias_dtype = self.dtypes["grad_weight_dtype"], self.dtypes["grad_bias_dtype"]
        grad_weight = None if weight_dtype is None else x.new_empty(self.channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(self.channels, dtype=bias_dtype)
        scratch = sums = statistics.new_empty(self.num_in_scratch)
        parts, of_statistics = scratch.data_ptr(), statistics.data_ptr()
        grads = 0 if grad_weight is None else grad_weight.data_ptr(), 0 if grad_bias is None else grad_bias.data_ptr()
        self.parts_of_gradient_sums(x.data_ptr(), dy.data_ptr(), 0 if y is None else y.data_ptr(), of_statistics, parts)
        if not is_alone:
            sums = statistics.new_empty(2 * self.channels)
            self.gradient_sums(parts, sums.data_ptr(), of_statistics, parts, *grads, parts)
        return sums, grad_weight, grad_bias, (scratch, *grads)

    def backward_outputs(
        self, at: At, dy: Tensor, x: Tensor, y: Tensor | None, total: Tensor, statistics: Tensor,
        weight: Tensor | None, needs_x: bool, of_residual: bool, compares: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, int]:  # fmt: skip
        scratch, grad_weight, grad_bias = at
        is_alone, needs_map, sums = total is scratch, needs_x or of_residual, total.data_ptr()
        coefficients = scratch.data_ptr() + self.coefficients_at
        if is_alone or needs_map:
            launch = self.backward_of_parts if is_alone else self.backward_of_total
            of_weight = 0 if weight is None else weight.data_ptr()
            launch(sums, sums, statistics.data_ptr(), of_weight, grad_weight, grad_bias, coefficients)
        if not needs_map:
            return None, None, OK
        grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if of_residual else None
        launch = self.input_and_residual_gradient if of_residual else self.input_gradient
        launch(
            dy.data_ptr(), x.data_ptr(), 0 if y is None else y.data_ptr(), grad_x.data_ptr(),
            0 if grad_residual is None else grad_residual.data_ptr(), coefficients,
        )  # fmt: skip
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


def update_running_stats(running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float) -> None:
    require_memory((running_mean, running_var, statistics))
    tensors = means, variances, _ = running_mean.contiguous(), running_var.contiguous(), statistics
    dtypes = tuple(one.dtype for one in tensors)
    launch = _over_channels(running_mean.numel(), statistics.device, gpu_channels.update_running_stats, dtypes)
    launch(*map(Tensor.data_ptr, tensors), floats=_two(momentum))
    increment_version((running_mean, running_var))  # autograd is to see that they have changed
    for buffer, moved in ((running_mean, means), (running_var, variances)):
        if moved is not buffer:
            buffer.copy_(moved)
