"""Calls the CPU kernels, C functions in cpu.cpp, with the addresses of the tensors.

A call takes 2 us and bypasses torch's dispatcher, so the tensors must have been checked by kernel_cache.py or
operators.py.
"""

import ctypes
import functools
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from syncbn import payload
from syncbn.kernels import interface
from syncbn.kernels.interface import NO_BUFFERS, Buffers, GradientPair, Inputs, ReluMask, Saved, Status, Sums
from syncbn.payload import UNSIGNED
from syncbn.torch_internals import increment_version

FILE = Path(__file__).with_name("_cpu.so")
DTYPE_CODES = {None: -1, torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # as in cpu.cpp
INTERFACE_VERSION = 13  # version of the C functions' parameters, as in cpu.cpp; a library of another version is refused
NOT_FINITE = 2  # status: a total that carries signatures is not finite

# The structs of cpu.cpp: q is an int64, i an int32, d a double, P an address.
_pack_config = struct.Struct("3qd11i").pack
_pack_forward_outputs = struct.Struct("10Pd").pack
_pack_sums = struct.Struct("8P2q").pack
_pack_backward_outputs = struct.Struct("8P").pack
# The last fields of struct Kind in cpu.cpp.
DTYPES = "dtype", "weight_dtype", "bias_dtype", "mean_dtype", "var_dtype", "grad_weight_dtype", "grad_bias_dtype"

FUNCTIONS = "forward_sums", "forward_outputs", "backward_sums", "backward_outputs", "scratch"
_library = SimpleNamespace()  # the C functions with these names, set by load()


@functools.cache
def load() -> str | None:
    """Load the C functions, once per process. Return None on success, else the reason in one line."""
    if sys.platform != "linux":
        return f"the C++ kernels do not support {sys.platform}"
    if not FILE.exists():
        return _reason_missing()
    try:
        loaded = ctypes.CDLL(str(FILE))
        functions = {name: loaded[f"syncbn_{name}"] for name in (*FUNCTIONS, "interface")}
    except (OSError, AttributeError) as error:  # another processor, or a torch without torch_parallel_for
        return f"{FILE.name} cannot be loaded: {error}"
    if functions.pop("interface")() != INTERFACE_VERSION:
        return f"{FILE.name} is from another version of syncbn; install syncbn again"
    vars(_library).update(functions)
    _library.scratch.restype = ctypes.c_int64
    return None


def _reason_missing() -> str:
    package = FILE.parents[1]
    for folder in sys.path:
        installed = Path(folder, package.name)
        if (installed / FILE.relative_to(package)).exists():
            return f"not built in {package}, which hides the installed {installed}; start Python in another folder"
    return (
        f"not built in {package}: syncbn was not installed from there, there is no C++ compiler, or compiling failed; "
        "run `pip install -v --no-deps --force-reinstall` for syncbn and read its output"
    )


def _c_struct(config: interface.ForwardConfig | interface.BackwardConfig) -> bytes:
    """Return the config as struct Kind of cpu.cpp. Fields that only the other pass has get defaults."""
    dtypes = [DTYPE_CODES[getattr(config, name, None)] for name in DTYPES]
    flags = [getattr(config, name, False) for name in ("relu", "averages")]
    masks = [config.relu_mask is mask for mask in (ReluMask.FROM_Y, ReluMask.FROM_X)]
    return _pack_config(*config.layout.sizes, getattr(config, "eps", 0.0), *dtypes, *flags, *masks)


class Forward(interface.ForwardKernels):
    """The forward kernels. Scratch memory is allocated for each call, because threads may share these kernels."""

    def __init__(self, config: interface.ForwardConfig) -> None:
        super().__init__(config)
        self.c_struct, num_channels = _c_struct(config), config.layout.sizes[1]
        self.num_sums = payload.num_elements(num_channels)
        self.num_statistics = interface.num_statistics(num_channels, config.relu_mask)
        self.scratch_bytes: int = _library.scratch(self.c_struct)

    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, count: int = 0, status_words: Status = None) -> Tensor:
        sums = x.new_empty(self.num_sums, dtype=torch.float64)
        scratch = x.new_empty(self.scratch_bytes, dtype=torch.uint8) if self.scratch_bytes else None
        call = _pack_sums(
            0, x.data_ptr(), 0, 0, sums.data_ptr(), 0, 0, 0 if scratch is None else scratch.data_ptr(), count, signature
        )
        if status := _library.forward_sums(self.c_struct, call):
            _raise_for_status(status)
        return sums

    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | None = 0.0,
        status_words: Status = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        (x, weight, bias, residual), (running_mean, running_var, counter) = inputs, buffers
        y, statistics = torch.empty_like(x), total.new_empty(self.num_statistics)
        call = _pack_forward_outputs(
            x.data_ptr(), total.data_ptr(), 0 if residual is None else residual.data_ptr(),
            0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
            0 if running_mean is None else running_mean.data_ptr(),
            0 if running_var is None else running_var.data_ptr(), 0 if counter is None else counter.data_ptr(),
            y.data_ptr(), statistics.data_ptr(), momentum or 0.0,
        )  # fmt: skip
        status = _library.forward_outputs(self.c_struct, call)
        if status and status != NOT_FINITE:
            _raise_for_status(status)
        if running_mean is not None and running_var is not None:
            both = running_mean, running_var
            increment_version(both if counter is None else (*both, counter))  # Autograd then detects the change.
        elif counter is not None:
            increment_version((counter,))
        return y, statistics, not status


class Backward(interface.BackwardKernels):
    """The backward kernels. Scratch memory is allocated for each call, as in Forward."""

    def __init__(self, config: interface.BackwardConfig) -> None:
        super().__init__(config)
        self.c_struct, self.num_channels = _c_struct(config), config.layout.sizes[1]
        self.num_sums = payload.num_elements(self.num_channels)
        self.scratch_bytes: int = _library.scratch(self.c_struct)

    def backward_sums(self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, call_id: Tensor | None = None) -> Sums:
        (x, _, statistics, y), config, num_channels = saved, self.config, self.num_channels
        sums = statistics.new_empty(self.num_sums)
        weight_dtype, bias_dtype = config.grad_weight_dtype, config.grad_bias_dtype
        grad_weight = None if weight_dtype is None else x.new_empty(num_channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(num_channels, dtype=bias_dtype)
        scratch = x.new_empty(self.scratch_bytes, dtype=torch.uint8) if self.scratch_bytes else None
        call = _pack_sums(
            dy.data_ptr(), x.data_ptr(), 0 if y is None else y.data_ptr(), statistics.data_ptr(), sums.data_ptr(),
            0 if grad_weight is None else grad_weight.data_ptr(), 0 if grad_bias is None else grad_bias.data_ptr(),
            0 if scratch is None else scratch.data_ptr(), 0, signature,
        )  # fmt: skip
        if status := _library.backward_sums(self.c_struct, call):
            _raise_for_status(status)
        return sums, grad_weight, grad_bias

    def backward_outputs(self, dy: Tensor, saved: Saved, total: Tensor, status_words: Status = None) -> GradientPair:
        (x, weight, statistics, y), config = saved, self.config
        grad_x = torch.empty_like(x) if config.needs_x or config.needs_residual else None
        grad_residual = torch.empty_like(x) if config.needs_residual else None
        call = _pack_backward_outputs(
            dy.data_ptr(), x.data_ptr(), 0 if y is None else y.data_ptr(), statistics.data_ptr(), total.data_ptr(),
            0 if weight is None else weight.data_ptr(), 0 if grad_x is None else grad_x.data_ptr(),
            0 if grad_residual is None else grad_residual.data_ptr(),
        )  # fmt: skip
        if status := _library.backward_outputs(self.c_struct, call):
            _raise_for_status(status)
        return grad_x if config.needs_x else None, grad_residual


def _raise_for_status(status: int) -> None:
    raise RuntimeError(f"a CPU kernel failed with status {status}: torch_parallel_for returned an error")
