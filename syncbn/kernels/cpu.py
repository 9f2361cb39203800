"""Calls the kernels for CPU tensors, plain C functions (cpu.cpp), at the addresses of the tensors.

A call takes 2 us and skips torch's dispatcher: a `Plan` is only for tensors that plan.py has checked. The functions at
the end are for operators.py, see functions.py.
"""

import ctypes
import functools
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from syncbn import statistics as channels_statistics
from syncbn.kernels.functions import Functions
from syncbn.kernels.plans import NO_MEMORY, NOT_FINITE, NUM_SIGNED, RANKS_DIFFER, UNSIGNED, Signature, is_freed
from syncbn.layout import Layout
from syncbn.statistics import num_statistics
from syncbn.torch_internals.autograd import increment_version

FILE = Path(__file__).with_name("_cpu.so")
CODES = {None: -1, torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # cpu.cpp's
INTERFACE = 5  # of the C functions: an older library would read other arguments
LACKS_MEMORY = 3  # a status

# The calls' structs of cpu.cpp: P is an address, d a double, q an integer.
_forward_outputs = struct.Struct("11Pdq").pack
_sums = struct.Struct("8P3d").pack
_backward_outputs = struct.Struct("9Pq").pack


class _PlanInC(ctypes.Structure):
    """cpu.cpp's Plan."""

    SIZES = "outer", "channels", "inner"
    DTYPES = "dtype", "weight_dtype", "bias_dtype", "mean_dtype", "var_dtype", "grad_weight_dtype", "grad_bias_dtype"
    FLAGS = "has_residual", "has_y", "has_counter", "relu", "averages", "is_signed"
    _fields_ = (
        *((name, ctypes.c_int64) for name in SIZES),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int32) for name in (*DTYPES, *FLAGS)),
    )


FUNCTIONS = "forward_sums", "forward_outputs", "backward_sums", "backward_outputs", "update_running_stats", "scratch"
_library = SimpleNamespace()  # the C functions by these names, once they are loaded


@functools.cache
def load() -> str | None:
    """Load the functions, once: None when they are there, else the reason in a line."""
    if sys.platform != "linux":
        return f"there are none for {sys.platform}"
    if not FILE.exists():
        return _why_missing()
    try:
        loaded = ctypes.CDLL(str(FILE))
        functions = {name: loaded[f"syncbn_{name}"] for name in (*FUNCTIONS, "interface")}
    except (OSError, AttributeError) as error:  # another processor, a torch without torch_parallel_for, another version
        return f"{FILE.name} does not load: {error}"
    if functions.pop("interface")() != INTERFACE:
        return f"{FILE.name} is of another version of syncbn: install it again"
    vars(_library).update(functions)
    _library.scratch.restype = ctypes.c_int64
    _library.update_running_stats.argtypes = (*(ctypes.c_void_p,) * 4, ctypes.c_double)
    return None


def _why_missing() -> str:
    package = FILE.parents[1]
    for folder in sys.path:
        installed = Path(folder, package.name)
        if (installed / FILE.relative_to(package)).exists():
            return f"not built in {package}, which hides the installed {installed}; start Python in another folder"
    return (
        f"not built in {package}: syncbn was not installed from there, or no C++ compiler was found, or it failed; "
        "`pip install -v --no-deps --force-reinstall` of syncbn tells"
    )


class Plan:
    """The plan for CPU tensors, see plans.py. Scratch memory is made for each call: threads may share a plan."""

    def __init__(
        self, layout: Layout, dtype: torch.dtype, device: torch.device, eps: float = 1.0, **options: Any
    ) -> None:
        flags = {name: bool(options.pop(name, False)) for name in _PlanInC.FLAGS}
        dtypes = {name: CODES[options.get(name)] for name in _PlanInC.DTYPES[1:]}
        in_c = _PlanInC(*layout.sizes, eps, CODES[dtype], **dtypes, **flags)
        self.address = ctypes.byref(in_c)  # which keeps it alive
        self.layout, self.relu, self.num_channels, self.dtypes = layout, flags["relu"], layout.sizes[1], options
        behind = (1 + NUM_SIGNED) * flags["is_signed"]
        self.num_forward_sums = 2 * self.num_channels + (behind or 1)
        self.num_backward_sums = 2 * self.num_channels + behind
        self.num_statistics = num_statistics(self.num_channels, self.relu and not flags["has_residual"])
        self.num_scratch: int = _library.scratch(self.address)  # bytes

    @staticmethod
    def at(*tensors: Tensor | None) -> tuple[int, ...]:
        return tuple(0 if one is None else one.data_ptr() for one in tensors)

    def forward_sums(
        self, x: Tensor, signature: Signature = UNSIGNED, is_alone: bool = False
    ) -> tuple[Tensor, tuple[int, int]]:
        sums = x.new_empty(self.num_forward_sums, dtype=torch.float64)
        scratch = x.new_empty(self.num_scratch, dtype=torch.uint8) if self.num_scratch else None
        at = x.data_ptr(), sums.data_ptr()
        call = _sums(0, at[0], 0, 0, at[1], 0, 0, 0 if scratch is None else scratch.data_ptr(), *signature)
        status = _library.forward_sums(self.address, call)
        if status:
            _refuse(status)
        return sums, at

    def forward_outputs(
        self, at: Any, x: Tensor, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, running_mean: Tensor | None = None, running_var: Tensor | None = None,
        counter: Tensor | None = None, momentum: Any = None, compares: bool = True,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        y, statistics = torch.empty_like(x), total.new_empty(self.num_statistics)
        scratch = x.new_empty(self.num_scratch, dtype=torch.uint8) if self.num_scratch else None
        call = _forward_outputs(
            *at, 0 if residual is None else residual.data_ptr(), 0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(), 0 if running_mean is None else running_mean.data_ptr(),
            0 if running_var is None else running_var.data_ptr(), 0 if counter is None else counter.data_ptr(),
            y.data_ptr(), statistics.data_ptr(), 0 if scratch is None else scratch.data_ptr(), momentum or 0.0,
            compares,
        )  # fmt: skip
        status = _library.forward_outputs(self.address, call)
        if status:
            _refuse(status)
        elif running_mean is not None and running_var is not None:  # autograd is to see what has changed
            both = running_mean, running_var
            increment_version(both if counter is None else (*both, counter))
        elif counter is not None:
            increment_version((counter,))
        return y, statistics, status

    def backward_sums(
        self, dy: Tensor, x: Tensor, y: Tensor | None, statistics: Tensor, signature: Signature = UNSIGNED,
        is_alone: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[int, ...]]:  # fmt: skip
        sums = statistics.new_empty(self.num_backward_sums)
        weight_dtype, bias_dtype = self.dtypes["grad_weight_dtype"], self.dtypes["grad_bias_dtype"]
        grad_weight = None if weight_dtype is None else x.new_empty(self.num_channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(self.num_channels, dtype=bias_dtype)
        scratch = x.new_empty(self.num_scratch, dtype=torch.uint8) if self.num_scratch else None
        at = dy.data_ptr(), x.data_ptr(), 0 if y is None else y.data_ptr(), statistics.data_ptr(), sums.data_ptr()
        call = _sums(
            *at, 0 if grad_weight is None else grad_weight.data_ptr(), 0 if grad_bias is None else grad_bias.data_ptr(),
            0 if scratch is None else scratch.data_ptr(), *signature,
        )  # fmt: skip
        status = _library.backward_sums(self.address, call)
        if status:
            _refuse(status)
        return sums, grad_weight, grad_bias, at

    def backward_outputs(
        self, at: Any, dy: Tensor, x: Tensor, y: Tensor | None, total: Tensor, statistics: Tensor,
        weight: Tensor | None, needs_x: bool, of_residual: bool, compares: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, int]:  # fmt: skip
        grad_x = torch.empty_like(x) if needs_x or of_residual else None
        grad_residual = torch.empty_like(x) if of_residual else None
        scratch = x.new_empty(self.num_scratch, dtype=torch.uint8) if self.num_scratch else None
        call = _backward_outputs(
            *at, 0 if weight is None else weight.data_ptr(), 0 if grad_x is None else grad_x.data_ptr(),
            0 if grad_residual is None else grad_residual.data_ptr(), 0 if scratch is None else scratch.data_ptr(),
            compares,
        )  # fmt: skip
        status = _library.backward_outputs(self.address, call)
        if status:
            _refuse(status)
        return grad_x, grad_residual, status


def _refuse(status: int) -> None:
    """Raises unless the status says what all ranks have sent."""
    if status == LACKS_MEMORY:
        raise RuntimeError(NO_MEMORY)
    if not RANKS_DIFFER <= status <= NOT_FINITE:
        raise RuntimeError(f"a kernel for CPUs failed with status {status}")


_functions = Functions(Plan)
forward_sums, forward_outputs = _functions.forward_sums, _functions.forward_outputs
backward_sums, backward_outputs = _functions.backward_sums, _functions.backward_outputs


def update_running_stats(running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float) -> None:
    buffers = running_mean, running_var
    if any(map(is_freed, (*buffers, statistics))):
        raise RuntimeError(NO_MEMORY)
    if not (running_mean.is_contiguous() and running_var.is_contiguous()):
        channels_statistics.update_running_stats(*buffers, statistics, momentum)
        return
    of_channels = Layout(1, False, (1, running_mean.numel(), 1))
    dtypes = {"mean_dtype": running_mean.dtype, "var_dtype": running_var.dtype}
    plan = _functions.plan(of_channels, torch.float32, running_mean.device, **dtypes)
    _library.update_running_stats(plan.address, *Plan.at(*buffers, statistics), momentum)
    increment_version(buffers)
