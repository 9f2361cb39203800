"""Adds up over the ranks where torch transforms the computation: derivatives of either mode, and vmap.

The sum is linear: its gradient, its tangent and a stack of it are sums over the ranks, too, each one all_reduce.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syncbn import torch_private
from syncbn.distributed.collectives import Ranks


class TransformedRanks(Ranks):
    """Ranks whose totals are differentiable, as often as one likes, and may be batched. For eager mode."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks.group, ranks.call)
        self.ranks = ranks

    def all_reduce(self, sums: Tensor, pass_name: str, counted: bool = False, error: Exception | None = None) -> Tensor:
        """As that of Ranks; one all_reduce of the whole stack where `sums` are batched, by whatever vmap."""
        if self.group is None:
            return sums
        total = _all_reduce(sums, self.ranks, pass_name, counted)
        return torch.cat((total[:-1], total[-1:].detach())) if counted else total  # a count is a constant


def _all_reduce(sums: Tensor, *others: Any) -> Tensor:
    # A batched gradient hides its graph from an autograd Function, the stack does not.
    return torch_private.apply_to_stack(lambda stack: _AllReduce.apply(stack, *others), sums)  # type: ignore[no-untyped-call]


class _AllReduce(torch.autograd.Function):
    """(sums, ranks, pass_name, counted) -> total. The derivatives of a count are 0, and travel in its place."""

    @staticmethod
    def forward(sums: Tensor, ranks: Ranks, pass_name: str, counted: bool) -> Tensor:
        return ranks.all_reduce(sums.flatten().clone(), pass_name, counted).view_as(sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Ranks, str, bool], output: Tensor) -> None:
        _, *ctx.others = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        ranks, pass_name, counted = ctx.others
        pass_name = "backward" if pass_name == "forward" else "double backward"
        return _all_reduce(grad_total, ranks, pass_name, counted), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _all_reduce(tangent, *ctx.others)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None, None], sums: Tensor, *others: Any) -> tuple[Tensor, int]:
        return _all_reduce(sums, *others), in_dims[0]
