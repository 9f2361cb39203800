"""Offers the plans of a kernel module as functions over tensors, for operators.py.

What each computes is defined by the function of the same name in reference.py.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from syncbn import moments
from syncbn.kernels.plans import require_memory
from syncbn.layout import Layout

# The options of the plan of a pass.
_FORWARD = "relu", "has_residual", "weight_dtype", "bias_dtype"
_SUMS = "relu", "has_y", "grad_weight_dtype", "grad_bias_dtype"
_OUTPUTS = "relu", "has_y", "weight_dtype", "of_residual"


class Functions:
    """The functions that take whole tensors, by `plan`, the class of a kernel module."""

    def __init__(self, plan: type) -> None:
        @functools.lru_cache(4096)
        def plan_of(
            layout: Layout, dtype: torch.dtype, device: torch.device, eps: float = 1.0,
            names: tuple[str, ...] = (), *options: Any,
        ) -> Any:  # fmt: skip
            return plan(layout, dtype, device, eps, **dict(zip(names, options, strict=True)))

        self.plan = plan_of

    def forward_sums(self, x: Tensor, layout: Layout) -> Tensor:
        require_memory((x,))
        return self.plan(layout, x.dtype, x.device).forward_sums(x)[0]  # type: ignore[no-any-return]

    def forward_outputs(
        self, x: Tensor, layout: Layout, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, eps: float, relu: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight, bias = _dense(weight), _dense(bias)
        require_memory([one for one in (x, weight, bias, residual) if one is not None])
        options = relu, residual is not None, _dtype(weight), _dtype(bias)
        plan = self.plan(layout, x.dtype, x.device, eps, _FORWARD, *options)
        return plan.forward_outputs(plan.at(x, total), x, total, weight, bias, residual)[:2]  # type: ignore[no-any-return]

    def backward_sums(
        self, dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, statistics: Tensor,
        weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        require_memory([one for one in (x, dy, y, statistics) if one is not None])
        options = _has_relu(y, statistics, layout), y is not None, weight_dtype, bias_dtype
        plan = self.plan(layout, x.dtype, x.device, 1.0, _SUMS, *options)
        return plan.backward_sums(dy, x, y, statistics)[:3]  # type: ignore[no-any-return]

    def backward_outputs(
        self, dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, total: Tensor, statistics: Tensor,
        weight: Tensor | None, of_residual: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        weight = _dense(weight)
        require_memory([one for one in (x, dy, y, statistics, weight) if one is not None])
        options = _has_relu(y, statistics, layout), y is not None, _dtype(weight), of_residual
        plan = self.plan(layout, x.dtype, x.device, 1.0, _OUTPUTS, *options)
        at = plan.at(dy, x, y, statistics, total)
        return plan.backward_outputs(at, dy, x, y, total, statistics, weight, True, of_residual)[:2]  # type: ignore[no-any-return]


def _has_relu(y: Tensor | None, statistics: Tensor, layout: Layout) -> bool:
    return y is None and moments.has_scale_and_shift(statistics, layout.sizes[1])


def _dense(of_channels: Tensor | None) -> Tensor | None:
    return None if of_channels is None else of_channels.contiguous()


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
