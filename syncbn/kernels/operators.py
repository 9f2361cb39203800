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

FLOATS = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
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
    f"forward_sums(Tensor x, {SIZES}) -> Tensor",
    fake=lambda x, outer, channels, inner: x.new_empty(2 * channels + 1, dtype=torch.float64),
)
def _forward_sums(kernels: ModuleType, x: Tensor, *sizes: int) -> Tensor:
    return kernels.forward_sums(x, _layout(sizes, x))  # type: ignore[no-any-return]


@_operator(
    f"forward_outputs(Tensor x, {SIZES}, Tensor total, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
    "bool relu) -> (Tensor, Tensor)",
    fake=lambda x, outer, channels, inner, total, weight, bias, residual, eps, relu: (
        torch.empty_like(x),
        total.new_empty(moments.num_statistics(channels, relu and residual is None)),
    ),
)
def _forward_outputs(
    kernels: ModuleType, x: Tensor, outer: int, channels: int, inner: int, total: Tensor, weight: Tensor | None,
    bias: Tensor | None, residual: Tensor | None, eps: float, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    layout = _layout((outer, channels, inner), x)
    _check_numbers(x.device, "total", total, 2 * channels + 1, torch.float64)
    _check_numbers(x.device, "weight", weight, channels)
    _check_numbers(x.device, "bias", bias, channels)
    residual = _like_input("residual", residual, x, layout)
    return kernels.forward_outputs(x, layout, total, weight, bias, residual, eps, relu)  # type: ignore[no-any-return]


@_operator(
    f"backward_sums(Tensor dy, Tensor x, Tensor? y, {SIZES}, Tensor statistics, ScalarType? weight_dtype, "
    "ScalarType? bias_dtype) -> (Tensor, Tensor?, Tensor?)",
    fake=lambda dy, x, y, outer, channels, inner, statistics, *dtypes: (
        statistics.new_empty(2 * channels),
        *(None if dtype is None else x.new_empty(channels, dtype=dtype) for dtype in dtypes),
    ),
)
def _backward_sums(
    kernels: ModuleType, dy: Tensor, x: Tensor, y: Tensor | None, outer: int, channels: int, inner: int,
    statistics: Tensor, *dtypes: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    layout = _layout((outer, channels, inner), x)
    dy, y = _like_input("dy", dy, x, layout), _like_input("y", y, x, layout)
    _check_statistics(x.device, statistics, channels)
    return kernels.backward_sums(dy, x, y, layout, statistics, *dtypes)  # type: ignore[no-any-return]


@_operator(
    f"backward_outputs(Tensor dy, Tensor x, Tensor? y, {SIZES}, Tensor total, Tensor statistics, Tensor? weight, "
    "bool of_residual) -> (Tensor, Tensor?)",
    fake=lambda dy, x, *arguments: (torch.empty_like(x), torch.empty_like(x) if arguments[-1] else None),
)
def _backward_outputs(
    kernels: ModuleType, dy: Tensor, x: Tensor, y: Tensor | None, outer: int, channels: int, inner: int,
    total: Tensor, statistics: Tensor, weight: Tensor | None, of_residual: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    layout = _layout((outer, channels, inner), x)
    dy, y = _like_input("dy", dy, x, layout), _like_input("y", y, x, layout)
    _check_numbers(x.device, "total", total, 2 * channels, torch.float64)
    _check_statistics(x.device, statistics, channels)
    _check_numbers(x.device, "weight", weight, channels)
    return kernels.backward_outputs(dy, x, y, layout, total, statistics, weight, of_residual)  # type: ignore[no-any-return]


@_operator(
    "update_running_stats(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor statistics, float momentum) -> ()",
    fake=lambda *_: None,
)
def _update_running_stats(
    kernels: ModuleType, running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float
) -> None:
    channels = len(running_mean)
    _check_statistics(statistics.device, statistics, channels)
    _check_numbers(statistics.device, "running_mean", running_mean, channels)
    _check_numbers(statistics.device, "running_var", running_var, channels)
    kernels.update_running_stats(running_mean, running_var, statistics, momentum)


def _layout(sizes: tuple[int, ...], x: Tensor) -> Layout:
    """Raises RuntimeError unless x lies in memory as (outer, channels, inner)."""
    return _layout_of_kind(sizes, x.shape, x.stride(), x.dtype)


@functools.lru_cache(4096)
def _layout_of_kind(
    sizes: tuple[int, ...], shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
) -> Layout:  # fmt: skip
    outer, channels, inner = sizes
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if x.dtype not in FLOATS or min(sizes) < 0 or x.numel() != outer * channels * inner:
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
    if other.shape != x.shape or other.dtype != x.dtype or other.device != x.device:
        raise RuntimeError(
            f"expected {name} of {x.dtype} and {tuple(x.shape)} on {x.device}, got {other.dtype} and "
            f"{tuple(other.shape)} on {other.device}"
        )
    if other.stride() == x.stride():
        return other
    return layout.dense(other)  # a materialised tensor of zeros has strides of 0


def _check_numbers(
    device: torch.device, name: str, numbers: Tensor | None, count: int, dtype: torch.dtype | None = None
) -> None:
    """Raises RuntimeError unless there are `count` numbers of this dtype without gaps; without a dtype, floats."""
    if numbers is None:
        return
    fits = numbers.dtype == dtype and numbers.is_contiguous() if dtype else numbers.dtype in FLOATS
    if numbers.device != device or numbers.shape != (count,) or not fits:
        raise RuntimeError(
            f"expected {name} of {count} {dtype or 'floats'} on {device}, got {tuple(numbers.shape)}, {numbers.dtype} "
            f"on {numbers.device}"
        )


def _check_statistics(device: torch.device, statistics: Tensor, channels: int) -> None:
    """Raises RuntimeError unless those of all channels are there, in float64 and without gaps."""
    count = moments.num_statistics(channels, moments.has_scale_and_shift(statistics, channels))
    _check_numbers(device, "statistics", statistics, count, torch.float64)


# The kernels' interface.


def forward_sums(x: Tensor, layout: Layout) -> Tensor:
    return _forward_sums(x, *layout.sizes)  # type: ignore[no-any-return]


def forward_outputs(x: Tensor, layout: Layout, *others: Any) -> tuple[Tensor, Tensor]:
    return _forward_outputs(x, *layout.sizes, *others)  # type: ignore[no-any-return]


def backward_sums(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, *others: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return _backward_sums(dy, x, y, *layout.sizes, *others)  # type: ignore[no-any-return]


def backward_outputs(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, *others: Any
) -> tuple[Tensor, Tensor | None]:
    return _backward_outputs(dy, x, y, *layout.sizes, *others)  # type: ignore[no-any-return]


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if isinstance(momentum, Tensor) or running_mean.is_neg() or running_var.is_neg():
        moments.update_running_stats(running_mean, running_var, statistics, momentum, moves)
    elif moves:  # one operator, which has no result that selective checkpointing could count
        _update_running_stats(running_mean, running_var, statistics, momentum)
