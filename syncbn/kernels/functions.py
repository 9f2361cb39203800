"""Offers the plans of a kernel module as functions over tensors, for operators.py.

What each computes is defined by the function of the same name in reference.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from syncbn import moments
from syncbn.kernels.plans import require_memory
from syncbn.layout import Layout


class Functions:
    """The functions that take whole tensors, by `plan`, the class of a kernel module."""

    def __init__(self, plan: type) -> None:
        self.plan: Any = functools.lru_cache(4096)(plan)

    def _plan_for(self, x: Tensor, layout: Layout, *others: Tensor | None, eps: float = 1.0, **options: Any) -> Any:
        require_memory([one for one in (x, *others) if one is not None])
        return self.plan(layout, x.dtype, x.device, eps, **options)

    def forward_sums(self, x: Tensor, layout: Layout) -> Tensor:
        return self._plan_for(x, layout).forward_sums(x)[0]  # type: ignore[no-any-return]

    def forward_outputs(
        self, x: Tensor, layout: Layout, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, eps: float, relu: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight, bias = _dense(weight), _dense(bias)
        dtypes = {"weight_dtype": _dtype(weight), "bias_dtype": _dtype(bias)}
        flags = {"relu": relu, "has_residual": residual is not None}
        plan = self._plan_for(x, layout, weight, bias, residual, eps=eps, **flags, **dtypes)
        return plan.forward_outputs(plan.at(x, total), x, total, weight, bias, residual)[:2]  # type: ignore[no-any-return]

    def backward_sums(
        self, dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, statistics: Tensor,
        weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        options = _of_relu(y, statistics, layout)
        options |= {"grad_weight_dtype": weight_dtype, "grad_bias_dtype": bias_dtype}
        plan = self._plan_for(x, layout, dy, y, statistics, **options)
        return plan.backward_sums(dy, x, y, statistics)[:3]  # type: ignore[no-any-return]

    def backward_outputs(
        self, dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, total: Tensor, statistics: Tensor,
        weight: Tensor | None, of_residual: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        weight = _dense(weight)
        options = _of_relu(y, statistics, layout) | {"weight_dtype": _dtype(weight), "of_residual": of_residual}
        plan = self._plan_for(x, layout, dy, y, statistics, weight, **options)
        at = plan.at(dy, x, y, statistics, total)
        return plan.backward_outputs(at, dy, x, y, total, statistics, weight, True, of_residual)[:2]  # type: ignore[no-any-return]


def _of_relu(y: Tensor | None, statistics: Tensor, layout: Layout) -> dict[str, Any]:
    return {"relu": y is None and moments.has_scale_and_shift(statistics, layout.sizes[1]), "has_y": y is not None}


def _dense(of_channels: Tensor | None) -> Tensor | None:
    return None if of_channels is None else of_channels.contiguous()


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
