"""Adds up over the ranks for calls that are not ordinary: the totals have derivatives and may be batched."""

import itertools
from typing import Any

import torch
from torch import Tensor

from syncbn.kernels.select import is_transformed
from syncbn.ranks.reductions import Reduction
from syncbn.torch_internals.autograd import apply_to_stack
from syncbn.torch_internals.state import is_compiling


def total(sums: Tensor, reduction: Reduction, pass_name: str, ends_in_n: bool = False) -> Tensor:
    """The totals of float64 `sums`, which it may overwrite, by one all_reduce.

    In eager mode with gradients they are differentiable, as often as one likes, and may be batched, by any vmap: the
    sum is linear, so that its gradient, its tangent and a stack of it are sums over the ranks, too, each one
    all_reduce.
    """
    has_graph = torch.is_grad_enabled() and not is_compiling()
    if reduction.group is None or not (has_graph or is_transformed(sums)):
        return reduction.total(sums, pass_name, ends_in_n)
    result = _differentiable_total(sums, reduction, pass_name, ends_in_n)
    return torch.cat((result[:-1], result[-1:].detach())) if ends_in_n and has_graph else result  # n is a constant


def totals(several: list[Tensor], reduction: Reduction, pass_name: str, ends_in_n: bool = False) -> list[Tensor]:
    """The totals of each of these sums, by one all_reduce; `ends_in_n` when the last number is an n."""
    result = total(torch.cat(several), reduction, pass_name, ends_in_n)
    # Not by torch.split: graphs of torch 2.11 under activation checkpointing can neither save it nor compute it again.
    ends = itertools.accumulate(map(len, several))
    return [result[end - len(sums) : end] for sums, end in zip(several, ends, strict=True)]


def _differentiable_total(sums: Tensor, reduction: Reduction, pass_name: str, ends_in_n: bool) -> Tensor:
    # A batched gradient hides its graph from an autograd Function, the stack does not.
    return apply_to_stack(lambda stack: _Total.apply(stack, reduction, pass_name, ends_in_n), sums)  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    """(sums, reduction, pass_name, ends_in_n) -> total. The derivatives of n are 0, and are sent in its place."""

    @staticmethod
    def forward(sums: Tensor, reduction: Reduction, pass_name: str, ends_in_n: bool) -> Tensor:
        return reduction.total(sums.flatten().clone(), pass_name, ends_in_n).view_as(sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.of_call = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        reduction, pass_name, ends_in_n = ctx.of_call
        return _differentiable_total(grad_total, reduction, f"derivative of {pass_name}", ends_in_n), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        reduction, pass_name, ends_in_n = ctx.of_call
        return _differentiable_total(tangent, reduction, f"tangent of {pass_name}", ends_in_n)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, ...], sums: Tensor, *of_call: Any) -> tuple[Tensor, int]:
        return _differentiable_total(sums, *of_call), in_dims[0]
