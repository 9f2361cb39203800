"""Adds up over the ranks where torch transforms the computation: derivatives of either mode, and vmap.

The sum is linear: its gradient, its tangent and a stack of it are sums over the ranks, too, each one all_reduce.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import torch_private
from syncbn.distributed.reduction import EagerReduction, GraphReduction, NoReduction


class DifferentiableReduction:
    """Another reduction, whose totals are differentiable, as often as one likes, and may be batched. For eager mode."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction: Reduction = reduction
        self.group: dist.ProcessGroup | None = reduction.group
        self.num_ranks: int = reduction.num_ranks
        self.reads_totals: bool = reduction.reads_totals

    def total(self, sums: Tensor, pass_name: str, counted: bool = False, error: Exception | None = None) -> Tensor:
        """One all_reduce of the whole stack where `sums` are batched, by whatever vmap."""
        if self.group is None:
            return sums
        total = _total(sums, self.reduction, pass_name, counted)
        return torch.cat((total[:-1], total[-1:].detach())) if counted else total  # a count is a constant


Reduction: TypeAlias = "NoReduction | EagerReduction | GraphReduction | DifferentiableReduction"


def _total(sums: Tensor, *others: Any) -> Tensor:
    # A batched gradient hides its graph from an autograd Function, the stack does not.
    return torch_private.apply_to_stack(lambda stack: _Total.apply(stack, *others), sums)  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    """(sums, reduction, pass_name, counted) -> total. The derivatives of a count are 0, and travel in its place."""

    @staticmethod
    def forward(sums: Tensor, reduction: Reduction, pass_name: str, counted: bool) -> Tensor:
        return reduction.total(sums.flatten().clone(), pass_name, counted).view_as(sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Reduction, str, bool], output: Tensor) -> None:
        _, *ctx.others = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        reduction, pass_name, counted = ctx.others
        pass_name = "backward" if pass_name == "forward" else "double backward"
        return _total(grad_total, reduction, pass_name, counted), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _total(tangent, *ctx.others)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None, None], sums: Tensor, *others: Any) -> tuple[Tensor, int]:
        return _total(sums, *others), in_dims[0]
