"""Registers the kernels of cpu.py and gpu.py as torch operators, and wraps the operators as a back end.

Operators work where direct calls of cpu.py and gpu.py cannot: in compiled graphs, under dispatch modes and transforms,
and for tensors whose data_ptr() does not point to their values. The operators check their tensors. They have no
autograd formulas: use them only inside an autograd.Function, after select.py has loaded the kernels.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncbn import payload
from syncbn.kernels import interface
from syncbn.kernels.interface import NO_BUFFERS, Buffers, GradientPair, Inputs, ReluMask, Saved, Status, Sums
from syncbn.kernels.layout import Layout
from syncbn.kernels.select import back_end
from syncbn.payload import UNSIGNED
from syncbn.statistics import update_buffers
from syncbn.torch_internals import Function, require_storage

_library = torch.library.Library("syncbn", "DEF")
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
# An operator whose arguments or results change gets a new name, because Inductor's cache on disk may contain graphs
# that call the old operator.


class Forward(interface.ForwardKernels):
    is_direct = False

    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, count: int = 0, status_words: Status = None) -> Tensor:
        return payload.sign(forward_sums(x, self.config.layout.channel_dim), signature, count)

    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | Tensor | None = 0.0,
        status_words: Status = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        (x, weight, bias, residual), config, channel_dim = inputs, self.config, self.config.layout.channel_dim
        y, statistics = forward_outputs(x, channel_dim, total, weight, bias, residual, config.eps, config.relu)
        update_buffers(*buffers, statistics, momentum)
        return y, statistics, True


class Backward(interface.BackwardKernels):
    is_direct = False

    def __init__(self, config: interface.BackwardConfig) -> None:
        super().__init__(config)
        self.channel_dim, self.relu = config.layout.channel_dim, config.relu_mask is not ReluMask.NONE

    def backward_sums(self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, call_id: Tensor | None = None) -> Sums:
        x, _, statistics, y = saved
        dtypes = self.config.grad_weight_dtype, self.config.grad_bias_dtype
        sums, grad_weight, grad_bias = backward_sums(dy, x, y, self.channel_dim, statistics, self.relu, *dtypes)
        return payload.sign(sums, signature, call_id=call_id), grad_weight, grad_bias

    def backward_outputs(self, dy: Tensor, saved: Saved, total: Tensor, status_words: Status = None) -> GradientPair:
        (x, weight, statistics, y), config = saved, self.config
        if not (config.needs_x or config.needs_residual):
            return None, None
        per_channel = self.channel_dim, total, statistics, weight
        grad_x, grad_residual = backward_outputs(dy, x, y, *per_channel, self.relu, config.needs_residual)
        return grad_x if config.needs_x else None, grad_residual


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Function], Function]:
    """Register the decorated function as an operator. `fake` returns tensors with the same metadata, without values."""

    def register(function: Function) -> Function:
        name = schema.partition("(")[0]
        _library.define(schema)
        for device in ("CPU", "CUDA"):
            _library.impl(name, function, device)
        torch.library.register_fake(f"syncbn::{name}", fake, lib=_library)
        operator: Function = getattr(torch.ops.syncbn, name).default
        return operator

    return register


@_operator(
    "forward_sums_v4(Tensor x, int channel_dim) -> Tensor",
    fake=lambda x, channel_dim: x.new_empty(payload.num_elements(x.shape[channel_dim]), dtype=torch.float64),
)
def forward_sums(x: Tensor, channel_dim: int) -> Tensor:
    layout, [x] = _prepare(x, channel_dim)
    config = interface.ForwardConfig(layout, x.dtype, x.device)
    return back_end(x.device).Forward.cached(config).forward_sums(x)


@_operator(
    "forward_outputs_v4(Tensor x, int channel_dim, Tensor total, Tensor? weight, Tensor? bias, Tensor? residual, "
    "float eps, bool relu) -> (Tensor, Tensor)",
    fake=lambda x, channel_dim, total, weight, bias, residual, eps, relu: (
        torch.empty_like(x),
        total.new_empty(interface.num_statistics(x.shape[channel_dim], _relu_mask(relu, residual))),
    ),
)
def forward_outputs(
    x: Tensor, channel_dim: int, total: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    layout, [*inputs, total] = _prepare(x, channel_dim, weight=weight, bias=bias, residual=residual, total=total)
    dtypes = getattr(weight, "dtype", None), getattr(bias, "dtype", None)
    config = interface.ForwardConfig(layout, x.dtype, x.device, eps, relu, residual is not None, *dtypes)
    return back_end(x.device).Forward.cached(config).forward_outputs((*inputs,), total)[:2]


@_operator(
    "backward_sums_v4(Tensor dy, Tensor x, Tensor? y, int channel_dim, Tensor statistics, bool relu, "
    "ScalarType? grad_weight_dtype, ScalarType? grad_bias_dtype) -> (Tensor, Tensor?, Tensor?)",
    fake=lambda dy, x, y, channel_dim, statistics, relu, *dtypes: (
        statistics.new_empty(payload.num_elements(x.shape[channel_dim])),
        *(None if dtype is None else x.new_empty(x.shape[channel_dim], dtype=dtype) for dtype in dtypes),
    ),
)
def backward_sums(
    dy: Tensor, x: Tensor, y: Tensor | None, channel_dim: int, statistics: Tensor, relu: bool,
    grad_weight_dtype: torch.dtype | None, grad_bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    relu_mask = _relu_mask(relu, y)
    layout, [x, dy, y, statistics] = _prepare(x, channel_dim, relu_mask, dy=dy, y=y, statistics=statistics)
    config = interface.BackwardConfig(layout, x.dtype, x.device, relu_mask, None, grad_weight_dtype, grad_bias_dtype)
    return back_end(x.device).Backward.cached(config).backward_sums(dy, (x, None, statistics, y))


@_operator(
    "backward_outputs_v4(Tensor dy, Tensor x, Tensor? y, int channel_dim, Tensor total, Tensor statistics, "
    "Tensor? weight, bool relu, bool needs_residual) -> (Tensor, Tensor?)",
    fake=lambda dy, x, *others: (torch.empty_like(x), torch.empty_like(x) if others[-1] else None),
)
def backward_outputs(
    dy: Tensor, x: Tensor, y: Tensor | None, channel_dim: int, total: Tensor, statistics: Tensor,
    weight: Tensor | None, relu: bool, needs_residual: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    relu_mask = _relu_mask(relu, y)
    layout, [*saved, dy, total] = _prepare(
        x, channel_dim, relu_mask, weight=weight, statistics=statistics, y=y, dy=dy, total=total
    )
    dtype = getattr(weight, "dtype", None)
    config = interface.BackwardConfig(
        layout, x.dtype, x.device, relu_mask, dtype, needs_x=True, needs_residual=needs_residual
    )
    return back_end(x.device).Backward.cached(config).backward_outputs(dy, (*saved,), total)


def _relu_mask(relu: bool, residual_or_y: Tensor | None) -> ReluMask:
    """Return how the relu is masked: from y, which is saved after a residual, or from x."""
    if not relu:
        return ReluMask.NONE
    return ReluMask.FROM_X if residual_or_y is None else ReluMask.FROM_Y


def _prepare(
    x: Tensor, channel_dim: int, relu_mask: ReluMask = ReluMask.NONE, **tensors: Tensor | None
) -> tuple[Layout, list[Any]]:
    """Return the layout of x, whatever the order of its dims in memory, and a list of x and the other tensors.

    x is copied unless it is non-overlapping and dense; dy, y and residual unless they have the strides of x; other
    tensors unless they are contiguous.

    **Raises** RuntimeError unless x is floating-point and has this dim; dy, y and residual have the dtype and shape of
    x; the other tensors have the right lengths and dtypes; all tensors are on the device of x; and no storage was
    freed.
    """
    if x.dtype not in FLOATS or not 0 <= channel_dim < x.ndim:
        raise RuntimeError(
            f"expected a floating-point input with channels in dim {channel_dim}, got {tuple(x.shape)}, {x.dtype}"
        )
    layout = _layout(x.shape, x.stride(), channel_dim)
    if layout is None:
        return _prepare(x.clone(), channel_dim, relu_mask, **tensors)
    channels, prepared = layout.sizes[1], list[Any]([x])
    lengths = {"total": payload.num_elements(channels)}
    lengths["statistics"] = interface.num_statistics(channels, relu_mask)
    for name, tensor in tensors.items():
        if tensor is None:
            prepared.append(None)
            continue
        is_like_x, is_parameter = name in ("dy", "y", "residual"), name in ("weight", "bias")
        shape = x.shape if is_like_x else (lengths.get(name, channels),)
        dtypes = [x.dtype] if is_like_x else [*FLOATS] if is_parameter else [torch.float64]
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.get_device() != x.get_device():
            raise RuntimeError(
                f"expected {name} of shape {tuple(shape)}, {' or '.join(map(str, dtypes))} on {x.device}, got "
                f"{tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
            )
        if not is_like_x:
            tensor = tensor.contiguous()
        elif tensor.stride() != x.stride():  # such as zeros of autograd, whose strides are 0
            tensor = torch.empty_like(x).copy_(tensor)
        prepared.append(tensor)
    require_storage([tensor for tensor in prepared if tensor is not None])
    return layout, prepared


@functools.lru_cache(4096)
def _layout(shape: torch.Size, strides: tuple[int, ...], channel_dim: int) -> Layout | None:
    """Return the layout of a tensor with its dims permuted to their order in memory, or None if it is not dense."""
    order = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
    permuted = torch.empty_strided(shape, strides, device="meta").permute(order)
    return Layout.of(permuted, order.index(channel_dim)) if permuted.is_contiguous() else None
