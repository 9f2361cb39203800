"""Calls the kernels for CPU tensors, plain C functions (cpu.cpp), directly.

A direct call takes 2 us where an operator takes 5, and skips torch's dispatcher: only for what
torch_private.may_skip_dispatcher accepts; the rest is for operators.py. What each function computes is defined
by the function of the same name in reference.py. Its tensors are dense as `layout` says, which is not checked here.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncbn import moments
from syncbn.layout import Layout

FILE = Path(__file__).with_name("_cpu.so")
CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # cpu.cpp's
NO_DTYPE = 0  # beside a tensor that is None
INTERFACE = 1  # of the C functions: an older library would read other arguments
MAPS, ADDS = 0, 1  # what a function does that needs scratch

_address, _size, _code, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
_sizes, _numbers = (_size, _size, _size), (_address, _code)  # of a layout; in any dtype
PARAMETERS = {
    "channel_sums": (_code, _address, *_sizes, _address, _address),
    "forward_coefficients": (_code, _size, _address, *_numbers, *_numbers, _number, _address, _address),
    "normalize": (_code, _address, *_sizes, _address, _address, _code, _address, _address),
    "gradient_sums": (_code, *(_address,) * 3, *_sizes, *(_address,) * 3, *_numbers, *_numbers),
    "backward_coefficients": (_code, _size, _address, _address, *_numbers, _address),
    "input_gradient": (_code, *(_address,) * 3, *_sizes, *(_address,) * 4),
    "update_running_stats": (_size, *_numbers, *_numbers, _address, _number),
}


class _Library:
    """The C functions, once they are loaded."""

    channel_sums: Any
    forward_coefficients: Any
    normalize: Any
    gradient_sums: Any
    backward_coefficients: Any
    input_gradient: Any
    update_running_stats: Any
    scratch: Any


@functools.cache
def why_not() -> str | None:
    """Load the functions, once: None when they are there, else the reason in a line."""
    if sys.platform != "linux":
        return f"there are none for {sys.platform}"
    if not FILE.exists():
        return "not built: no C++ compiler, or it failed; `pip install -v --no-deps --force-reinstall` of syncbn tells"
    try:
        loaded = ctypes.CDLL(str(FILE))
        functions = {name: loaded[f"syncbn_{name}"] for name in (*PARAMETERS, "interface", "scratch")}
    except (OSError, AttributeError) as error:  # another processor, a torch without torch_parallel_for, another version
        return f"{FILE.name} does not load: {error}"
    if functions["interface"]() != INTERFACE:
        return f"{FILE.name} is of another version of syncbn: install it again"
    for name, parameters in PARAMETERS.items():
        functions[name].argtypes, functions[name].errcheck = parameters, _require_ok  # type: ignore[assignment]
        setattr(_Library, name, functions[name])
    functions["scratch"].argtypes, functions["scratch"].restype = (_code, *_sizes), _size
    _Library.scratch = functools.lru_cache(4096)(functions["scratch"])
    return None


def channel_sums(x: Tensor, layout: Layout) -> Tensor:
    sums = x.new_empty(2 * layout.sizes[1] + 1, dtype=torch.float64)
    scratch = _scratch(x, layout, ADDS)
    _Library.channel_sums(CODES[x.dtype], _address_of(x), *layout.sizes, _address_of(scratch), _address_of(sums))
    return sums


def forward_coefficients(
    sums: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    channels, weight, bias, dtype = sums.numel() // 2, _dense(weight), _dense(bias), moments.compute_dtype(dtype)
    statistics, coefficients = sums.new_empty(3 * channels + 1), sums.new_empty(3 * channels, dtype=dtype)
    _Library.forward_coefficients(
        CODES[dtype], channels, _address_of(sums), *_numbers_of(weight), *_numbers_of(bias), eps,
        _address_of(statistics), _address_of(coefficients),
    )  # fmt: skip
    return statistics, coefficients


def normalize(x: Tensor, layout: Layout, coefficients: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y, scratch = torch.empty_like(x), _scratch(x, layout, MAPS)
    _Library.normalize(
        CODES[x.dtype], _address_of(x), *layout.sizes, _address_of(coefficients), _address_of(residual), relu,
        _address_of(scratch), _address_of(y),
    )  # fmt: skip
    return y


def gradient_sums(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    layout: Layout,
    statistics: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    channels, scratch = layout.sizes[1], _scratch(x, layout, ADDS)
    sums = statistics.new_empty(2 * channels)
    grad_weight = None if weight_dtype is None else x.new_empty(channels, dtype=weight_dtype)
    grad_bias = None if bias_dtype is None else x.new_empty(channels, dtype=bias_dtype)
    _Library.gradient_sums(
        CODES[x.dtype], _address_of(dy), _address_of(x), _address_of(y), *layout.sizes, _address_of(statistics),
        _address_of(scratch), _address_of(sums), *_numbers_of(grad_weight), *_numbers_of(grad_bias),
    )  # fmt: skip
    return sums, grad_weight, grad_bias


def backward_coefficients(sums: Tensor, statistics: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    channels, weight, dtype = sums.numel() // 2, _dense(weight), moments.compute_dtype(dtype)
    coefficients = sums.new_empty(4 * channels, dtype=dtype)
    _Library.backward_coefficients(
        CODES[dtype],
        channels,
        _address_of(sums),
        _address_of(statistics),
        *_numbers_of(weight),
        _address_of(coefficients),
    )
    return coefficients


def input_gradient(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, coefficients: Tensor, of_residual: bool
) -> tuple[Tensor, Tensor | None]:
    scratch = _scratch(x, layout, MAPS)
    grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if of_residual else None
    _Library.input_gradient(
        CODES[x.dtype], _address_of(dy), _address_of(x), _address_of(y), *layout.sizes, _address_of(coefficients),
        _address_of(scratch), _address_of(grad_x), _address_of(grad_residual),
    )  # fmt: skip
    return grad_x, grad_residual


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if isinstance(momentum, Tensor) or not (running_mean.is_contiguous() and running_var.is_contiguous()):
        moments.update_running_stats(running_mean, running_var, statistics, momentum, moves)
    elif moves:
        _Library.update_running_stats(
            running_mean.numel(),
            *_numbers_of(running_mean),
            *_numbers_of(running_var),
            _address_of(statistics),
            momentum,
        )
        if not running_mean.is_inference():  # so that autograd sees that they have changed
            torch.autograd.graph.increment_version((running_mean, running_var))


def _scratch(x: Tensor, layout: Layout, adds: int) -> Tensor | None:
    """Memory for a function, where the little that each has on its stack is not enough."""
    num_bytes = _Library.scratch(adds, *layout.sizes)
    return x.new_empty(num_bytes, dtype=torch.uint8) if num_bytes else None


def _address_of(tensor: Tensor | None) -> int | None:
    """None, which is NULL in C, for None alone. **Raises** RuntimeError for a tensor without memory."""
    if tensor is None:
        return None
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage was resized to 0 bytes")
    return address


def _numbers_of(tensor: Tensor | None) -> tuple[int | None, int]:
    """The address and the dtype of a channel's numbers."""
    return (None, NO_DTYPE) if tensor is None else (_address_of(tensor), CODES[tensor.dtype])


def _dense(of_channels: Tensor | None) -> Tensor | None:
    return None if of_channels is None else of_channels.contiguous()


def _require_ok(status: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if status:
        raise RuntimeError(f"{function.__name__}{arguments} failed with status {status}")
    return status
