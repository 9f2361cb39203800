"""Registers the kernels for CPUs and GPUs as torch operators when it is imported; its functions call them.

They serve what cpu.py and gpu.py cannot take: compiled graphs, dispatch modes, transforms, and tensors whose values are
not at their address. The operators check their tensors. They have no gradient of their own, and are only for use inside
an autograd.Function, once select.py has loaded the kernels.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from syncbn import statistics as channels_statistics
from syncbn.kernels import cpu
from syncbn.layout import Layout
from syncbn.statistics import num_statistics

_library = torch.library.Library("syncbn", "DEF")  # type: ignore[no-untyped-call]


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the decorated function, which takes the kernel module first, an operator; `fake` returns tensors like its
    own, without values. Its name then means the function of the kernels' interface, which calls the operator: that
    takes no kernel module, and the layout in the place of `channel_dim`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, functools.partial(function, cpu), "CPU")  # type: ignore[no-untyped-call]
        _library.impl(name, functools.partial(_on_gpu, function), "CUDA")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"syncbn::{name}", fake, lib=_library)
        operator = getattr(torch.ops.syncbn, name).default
        return lambda *given: operator(*[one.channel_dim if isinstance(one, Layout) else one for one in given])

    return register


def _on_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    from syncbn.kernels import gpu  # which imports triton

    return function(gpu, *arguments)


@_operator(
    "forward_sums(Tensor x, int channel_dim) -> Tensor",
    fake=lambda x, channel_dim: x.new_empty(2 * x.shape[channel_dim] + 1, dtype=torch.float64),
)
def forward_sums(kernels: ModuleType, x: Tensor, channel_dim: int) -> Tensor:
    return kernels.forward_sums(x, _layout(x, channel_dim))  # type: ignore[no-any-return]


@_operator(
    "forward_outputs(Tensor x, int channel_dim, Tensor total, Tensor? weight, Tensor? bias, Tensor? residual, "
    "float eps, bool relu) -> (Tensor, Tensor)",
    fake=lambda x, channel_dim, total, weight, bias, residual, eps, relu: (
        torch.empty_like(x),
        total.new_empty(num_statistics(x.shape[channel_dim], relu and residual is None)),
    ),
)
def forward_outputs(
    kernels: ModuleType, x: Tensor, channel_dim: int, total: Tensor, weight: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, eps: float, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    layout = _layout(x, channel_dim)
    channels = layout.sizes[1]
    _check_numbers(x, "total", total, 2 * channels + 1, torch.float64)
    _check_numbers(x, "weight", weight, channels)
    _check_numbers(x, "bias", bias, channels)
    residual = _like_input("residual", residual, x, layout)
    return kernels.forward_outputs(x, layout, total, weight, bias, residual, eps, relu)  # type: ignore[no-any-return]


@_operator(
    "backward_sums(Tensor dy, Tensor x, Tensor? y, int channel_dim, Tensor statistics, ScalarType? weight_dtype, "
    "ScalarType? bias_dtype) -> (Tensor, Tensor?, Tensor?)",
    fake=lambda dy, x, y, channel_dim, statistics, *dtypes: (
        statistics.new_empty(2 * x.shape[channel_dim]),
        *(None if dtype is None else x.new_empty(x.shape[channel_dim], dtype=dtype) for dtype in dtypes),
    ),
)
def backward_sums(
    kernels: ModuleType, dy: Tensor, x: Tensor, y: Tensor | None, channel_dim: int, statistics: Tensor,
    *dtypes: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    layout = _layout(x, channel_dim)
    dy, y = _like_input("dy", dy, x, layout), _like_input("y", y, x, layout)
    _check_statistics(x, statistics, layout.sizes[1])
    return kernels.backward_sums(dy, x, y, layout, statistics, *dtypes)  # type: ignore[no-any-return]


@_operator(
    "backward_outputs(Tensor dy, Tensor x, Tensor? y, int channel_dim, Tensor total, Tensor statistics, "
    "Tensor? weight, bool of_residual) -> (Tensor, Tensor?)",
    fake=lambda dy, x, *arguments: (torch.empty_like(x), torch.empty_like(x) if arguments[-1] else None),
)
def backward_outputs(
    kernels: ModuleType, dy: Tensor, x: Tensor, y: Tensor | None, channel_dim: int, total: Tensor,
    statistics: Tensor, weight: Tensor | None, of_residual: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    layout = _layout(x, channel_dim)
    dy, y, channels = _like_input("dy", dy, x, layout), _like_input("y", y, x, layout), layout.sizes[1]
    _check_numbers(x, "total", total, 2 * channels, torch.float64)
    _check_statistics(x, statistics, channels)
    _check_numbers(x, "weight", weight, channels)
    return kernels.backward_outputs(dy, x, y, layout, total, statistics, weight, of_residual)  # type: ignore[no-any-return]


@_operator(
    "update_running_stats(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor statistics, float momentum) -> ()",
    fake=lambda *_: None,
)
def _update_running_stats(
    kernels: ModuleType, running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float
) -> None:
    channels = len(running_mean)
    _check_statistics(statistics, statistics, channels)
    _check_numbers(statistics, "running_mean", running_mean, channels)
    _check_numbers(statistics, "running_var", running_var, channels)
    kernels.update_running_stats(running_mean, running_var, statistics, momentum)


def _layout(x: Tensor, channel_dim: int) -> Layout:
    """Raises RuntimeError unless x has floats without gaps, in a row or with the channels innermost."""
    return _layout_of_kind(x.shape, x.stride(), x.dtype, channel_dim)


@functools.lru_cache(4096)
def _layout_of_kind(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, channel_dim: int) -> Layout:
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if dtype not in cpu.CODES or not 0 <= channel_dim < x.ndim:
        raise RuntimeError(
            f"expected an input of floats with channels in dim {channel_dim}, got {tuple(shape)}, {dtype}"
        )
    layout = Layout.of(x, channel_dim)
    if layout.dense(x) is not x:
        raise RuntimeError(f"expected an input contiguous or with the channels innermost, got strides {strides}")
    return layout


def _like_input(name: str, other: Any, x: Tensor, layout: Layout) -> Any:
    """`other`, if there is one, as x lies in memory. **Raises** RuntimeError unless it has the dtype and shape of x."""
    if other is None:
        return None
    if other.shape != x.shape or other.dtype is not x.dtype or other.get_device() != x.get_device():
        raise RuntimeError(
            f"expected {name} of {x.dtype} and {tuple(x.shape)} on {x.device}, got {other.dtype} and "
            f"{tuple(other.shape)} on {other.device}"
        )
    return layout.dense(other)  # zeros that autograd has made up have strides of 0


def _check_numbers(x: Tensor, name: str, numbers: Tensor | None, count: int, dtype: torch.dtype | None = None) -> None:
    """Raises RuntimeError unless there are `count` numbers of this dtype without gaps; without a dtype, floats."""
    if numbers is None:
        return
    fits = numbers.dtype is dtype and numbers.is_contiguous() if dtype else numbers.dtype in cpu.CODES
    if not fits or numbers.numel() != count or numbers.get_device() != x.get_device():
        raise RuntimeError(
            f"expected {name} of {count} {dtype or 'floats'} on {x.device}, got {numbers.numel()} {numbers.dtype} on "
            f"{numbers.device}"
        )


def _check_statistics(x: Tensor, statistics: Tensor, channels: int) -> None:
    """Raises RuntimeError unless those of all channels are there, in float64 and without gaps."""
    has_more = statistics.numel() != num_statistics(channels, False)  # scale and shift
    _check_numbers(x, "statistics", statistics, num_statistics(channels, has_more), torch.float64)


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if isinstance(momentum, Tensor) or running_mean.is_neg() or running_var.is_neg():
        channels_statistics.update_running_stats(running_mean, running_var, statistics, momentum, moves)
    elif moves:  # one operator, which has no result that selective checkpointing could count
        _update_running_stats(running_mean, running_var, statistics, momentum)
