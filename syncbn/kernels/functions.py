"""Offers the plans of a kernel module as functions over tensors, for operators.py.

What each computes is defined by the function of the same name in reference.py.
"""

import functools

import torch
from torch import Tensor

from syncbn.kernels.plans import require_memory
from syncbn.layout import Layout
from syncbn.statistics import has_scale_and_shift


class Functions:
    """The functions that take whole tensors, by `plan`, the class of a kernel module."""

    def __init__(self, plan: type) -> None:
        self.plan = functools.lru_cache(4096)(plan)

    def forward_sums(self, x: Tensor, layout: Layout) -> Tensor:
        require_memory((x,))
        return self.plan(layout, x.dtype, x.device).forward_sums(x)[0]  # type: ignore[no-any-return]

    def forward_outputs(
        self, x: Tensor, layout: Layout, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, eps: float, relu: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight, bias = _dense(weight), _dense(bias)
        require_memory([one for one in (x, weight, bias, residual) if one is not None])
        dtypes = {"weight_dtype": getattr(weight, "dtype", None), "bias_dtype": getattr(bias, "dtype", None)}
        plan = self.plan(layout, x.dtype, x.device, eps, relu=relu, has_residual=residual is not None, **dtypes)
        return plan.forward_outputs(plan.at(x, total), x, total, weight, bias, residual)[:2]  # type: ignore[no-any-return]

    def backward_sums(
        self, dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, statistics: Tensor,
        weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        require_memory([one for one in (x, dy, y, statistics) if one is not None])
        dtypes = {"grad_weight_dtype": weight_dtype, "grad_bias_dtype": bias_dtype}
        relu = y is None and has_scale_and_shift(statistics, layout.sizes[1])
        plan = self.plan(layout, x.dtype, x.device, relu=relu, has_y=y is not None, **dtypes)
        return plan.backward_sums(dy, x, y, statistics)[:3]  # type: ignore[no-any-return]

    def backward_outputs(
        self, dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, total: Tensor, statistics: Tensor,
        weight: Tensor | None, of_residual: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        weight = _dense(weight)
        require_memory([one for one in (x, dy, y, statistics, weight) if one is not None])
        relu = y is None and has_scale_and_shift(statistics, layout.sizes[1])
        dtype = getattr(weight, "dtype", None)
        plan = self.plan(layout, x.dtype, x.device, relu=relu, has_y=y is not None, weight_dtype=dtype)
        at = plan.at(dy, x, y, statistics, total)
        return plan.backward_outputs(at, dy, x, y, total, statistics, weight, True, of_residual)[:2]  # type: ignore[no-any-return]


def _dense(of_channels: Tensor | None) -> Tensor | None:
    return None if of_channels is None else of_channels.contiguous()
