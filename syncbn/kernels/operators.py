"""Registers the kernels for CPUs and GPUs as torch operators, once it is imported, and calls these.

For what cpu.py and gpu.py cannot take: compiled graphs, dispatch modes, transforms, and tensors whose values are not at
their address. The operators check their tensors, as anybody may call them, and have no gradient of their own: only for
use inside an autograd.Function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from syncbn import moments
from syncbn.kernels import cpu
from syncbn.layout import Layout

SIZES = "SymInt outer, SymInt channels, SymInt inner"
_library = torch.library.Library("syncbn", "DEF")  # type: ignore[no-untyped-call]


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the decorated function, which takes the kernel module first, an operator; `fake` returns tensors like its
    own, without values."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, functools.partial(function, cpu), "CPU")  # type: ignore[no-untyped-call]
        _library.impl(name, functools.partial(_on_gpu, function), "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"syncbn::{name}", fake, lib=_library)
        return getattr(torch.ops.syncbn, name).default  # type: ignore[no-any-return]

    return register


def _on_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    from syncbn.kernels import gpu  # which imports triton

    return function(gpu, *arguments)


@_operator(
    f"channel_sums(Tensor x, {SIZES}) -> Tensor",
    fake=lambda x, outer, channels, inner: x.new_empty(2 * channels + 1, dtype=torch.float64),
)
def _channel_sums(kernels: ModuleType, x: Tensor, *sizes: int) -> Tensor:
    return kernels.channel_sums(x, _layout(sizes, x))  # type: ignore[no-any-return]


@_operator(
    "forward_coefficients(Tensor sums, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    fake=lambda sums, weight, bias, eps, dtype: (
        sums.new_empty(len(sums) // 2 * 3 + 1),
        sums.new_empty(len(sums) // 2 * 3, dtype=moments.compute_dtype(dtype)),
    ),
)
def _forward_coefficients(
    kernels: ModuleType, sums: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    channels = len(sums) // 2
    _check_numbers(sums.device, "sums", sums, 2 * channels + 1, torch.float64)
    _check_numbers(sums.device, "weight", weight, channels)
    _check_numbers(sums.device, "bias", bias, channels)
    return kernels.forward_coefficients(sums, weight, bias, eps, dtype)  # type: ignore[no-any-return]


@_operator(
    f"normalize(Tensor x, {SIZES}, Tensor coefficients, Tensor? residual, bool relu) -> Tensor",
    fake=lambda x, *_: torch.empty_like(x),
)
def _normalize(
    kernels: ModuleType,
    x: Tensor,
    outer: int,
    channels: int,
    inner: int,
    coefficients: Tensor,
    residual: Tensor | None,
    relu: bool,
) -> Tensor:
    layout = _layout((outer, channels, inner), x)
    _check_numbers(x.device, "coefficients", coefficients, 3 * channels, moments.compute_dtype(x.dtype))
    return kernels.normalize(x, layout, coefficients, _like_input("residual", residual, x, layout), relu)  # type: ignore[no-any-return]


@_operator(
    f"gradient_sums(Tensor dy, Tensor x, Tensor? y, {SIZES}, Tensor statistics, ScalarType? weight_dtype, "
    "ScalarType? bias_dtype) -> (Tensor, Tensor?, Tensor?)",
    fake=lambda dy, x, y, outer, channels, inner, statistics, *dtypes: (
        statistics.new_empty(2 * channels),
        *(None if dtype is None else x.new_empty(channels, dtype=dtype) for dtype in dtypes),
    ),
)
def _gradient_sums(
    kernels: ModuleType,
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    outer: int,
    channels: int,
    inner: int,
    statistics: Tensor,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    layout = _layout((outer, channels, inner), x)
    dy, y = _like_input("dy", dy, x, layout), _like_input("y", y, x, layout)
    _check_numbers(x.device, "statistics", statistics, 3 * channels + 1, torch.float64)
    return kernels.gradient_sums(dy, x, y, layout, statistics, *dtypes)  # type: ignore[no-any-return]


@_operator(
    "backward_coefficients(Tensor sums, Tensor statistics, Tensor? weight, ScalarType dtype) -> Tensor",
    fake=lambda sums, statistics, weight, dtype: sums.new_empty(2 * len(sums), dtype=moments.compute_dtype(dtype)),
)
def _backward_coefficients(
    kernels: ModuleType, sums: Tensor, statistics: Tensor, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    channels = len(sums) // 2
    _check_numbers(sums.device, "sums", sums, 2 * channels, torch.float64)
    _check_numbers(sums.device, "statistics", statistics, 3 * channels + 1, torch.float64)
    _check_numbers(sums.device, "weight", weight, channels)
    return kernels.backward_coefficients(sums, statistics, weight, dtype)  # type: ignore[no-any-return]


@_operator(
    f"input_gradient(Tensor dy, Tensor x, Tensor? y, {SIZES}, Tensor coefficients, bool of_residual) "
    "-> (Tensor, Tensor?)",
    fake=lambda dy, x, *arguments: (torch.empty_like(x), torch.empty_like(x) if arguments[-1] else None),
)
def _input_gradient(
    kernels: ModuleType,
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    outer: int,
    channels: int,
    inner: int,
    coefficients: Tensor,
    of_residual: bool,
) -> tuple[Tensor, Tensor | None]:
    layout = _layout((outer, channels, inner), x)
    dy, y = _like_input("dy", dy, x, layout), _like_input("y", y, x, layout)
    _check_numbers(x.device, "coefficients", coefficients, 4 * channels, moments.compute_dtype(x.dtype))
    return kernels.input_gradient(dy, x, y, layout, coefficients, of_residual)  # type: ignore[no-any-return]


@_operator(
    "update_running_stats(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor statistics, float momentum) -> ()",
    fake=lambda *_: None,
)
def _update_running_stats(
    kernels: ModuleType, running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float
) -> None:
    channels = len(statistics) // 3
    _check_numbers(statistics.device, "statistics", statistics, 3 * channels + 1, torch.float64)
    _check_numbers(statistics.device, "running_mean", running_mean, channels)
    _check_numbers(statistics.device, "running_var", running_var, channels)
    kernels.update_running_stats(running_mean, running_var, statistics, momentum)


def _layout(sizes: tuple[int, ...], x: Tensor) -> Layout:
    """Raises RuntimeError unless x lies in memory as (outer, channels, inner)."""
    outer, channels, inner = sizes
    if x.dtype not in cpu.CODES or min(sizes) < 0 or x.numel() != outer * channels * inner:
        raise RuntimeError(
            f"expected an input of {outer} * {channels} * {inner} floats, got {tuple(x.shape)}, {x.dtype}"
        )
    if x.is_contiguous():
        return Layout(0, False, (outer, channels, inner))
    for dim in range(x.ndim):
        if inner == 1 and x.shape[dim] == channels and x.movedim(dim, -1).is_contiguous():
            return Layout(dim, True, (outer, channels, inner))
    raise RuntimeError(f"expected an input contiguous or with the channels innermost, got strides {x.stride()}")


def _like_input(name: str, other: Any, x: Tensor, layout: Layout) -> Any:
    """`other`, if there is one, as x lies in memory. **Raises** RuntimeError unless it has the dtype and shape of x."""
    if other is None:
        return None
    if (other.dtype, other.shape, other.device) != (x.dtype, x.shape, x.device):
        raise RuntimeError(
            f"expected {name} of {x.dtype} and {tuple(x.shape)} on {x.device}, got {other.dtype} and "
            f"{tuple(other.shape)} on {other.device}"
        )
    return layout.dense(other)  # a materialised tensor of zeros has strides of 0


def _check_numbers(
    device: torch.device, name: str, numbers: Tensor | None, count: int, dtype: torch.dtype | None = None
) -> None:
    """Raises RuntimeError unless there are `count` numbers of this dtype without gaps; without a dtype, floats."""
    if numbers is None:
        return
    fits = numbers.dtype == dtype and numbers.is_contiguous() if dtype else numbers.dtype in cpu.CODES
    if numbers.device != device or numbers.shape != (count,) or not fits:
        raise RuntimeError(
            f"expected {name} of {count} {dtype or 'floats'} on {device}, got {tuple(numbers.shape)}, {numbers.dtype} "
            f"on {numbers.device}"
        )


# The kernels' interface.


def channel_sums(x: Tensor, layout: Layout) -> Tensor:
    return _channel_sums(x, *layout.sizes)  # type: ignore[no-any-return]


forward_coefficients = _forward_coefficients


def normalize(x: Tensor, layout: Layout, coefficients: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    return _normalize(x, *layout.sizes, coefficients, residual, relu)  # type: ignore[no-any-return]


def gradient_sums(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    layout: Layout,
    statistics: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _gradient_sums(dy, x, y, *layout.sizes, statistics, weight_dtype, bias_dtype)  # type: ignore[no-any-return]


backward_coefficients = _backward_coefficients


def input_gradient(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, coefficients: Tensor, of_residual: bool
) -> tuple[Tensor, Tensor | None]:
    return _input_gradient(dy, x, y, *layout.sizes, coefficients, of_residual)  # type: ignore[no-any-return]


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if isinstance(momentum, Tensor) or running_mean.is_neg() or running_var.is_neg():
        moments.update_running_stats(running_mean, running_var, statistics, momentum, moves)
    elif moves:  # one operator, which has no result that selective checkpointing could count
        _update_running_stats(running_mean, running_var, statistics, momentum)
