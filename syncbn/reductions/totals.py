"""Adds up over the ranks for calls that are not ordinary: the totals have derivatives and may be batched."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn.kernels.interface import SIGNATURE_NUMBERS, TRAILER_NUMBERS
from syncbn.kernels.select import is_transformed
from syncbn.reductions.interface import Reduction
from syncbn.statistics import to_float64
from syncbn.torch_internals.autograd import apply_to_stack
from syncbn.torch_internals.state import is_compiling


def total(sums: Tensor, reduction: Reduction, pass_name: str) -> Tensor:
    """The totals of float64 `sums` with a trailer, which it may overwrite, by one all_reduce.

    In eager mode with gradients they are differentiable, as often as one likes, and may be batched, by any vmap: the
    sum is linear, so that its gradient, its tangent and a stack of it are sums over the ranks, too, each one
    all_reduce.
    """
    has_graph = torch.is_grad_enabled() and not is_compiling()
    if reduction.group is None or not (has_graph or is_transformed(sums)):
        return reduction.total(sums, pass_name)
    result = _differentiable_total(sums[:-SIGNATURE_NUMBERS], reduction, pass_name)
    n = result[-1:].detach() if has_graph else result[-1:]  # a constant to autograd
    return torch.cat((result[:-1], n, sums.new_zeros(SIGNATURE_NUMBERS)))


def total_with_count(sums: Tensor, num_values: Tensor | None, reduction: Reduction, pass_name: str) -> Tensor:
    """The totals of these sums, with `num_values` in the place of n unless it is None."""
    if num_values is not None:
        trailer = -TRAILER_NUMBERS
        sums = torch.cat((sums[:trailer], to_float64(num_values).view(1), sums[trailer + 1 :]))
    return total(sums, reduction, pass_name)


def total_of_stack(sums: Tensor, reduction: Reduction, pass_name: str, error: Exception | None = None) -> Tensor:
    """`Reduction.total` of sums and n, or of a stack of them as vmap makes, one behind the other. The ranks compare the
    size of the stack first."""
    if sums.ndim > 1:
        reduction.require_as_many(sums[..., 0].numel(), pass_name)
    return reduction.total(F.pad(sums.flatten(), (0, SIGNATURE_NUMBERS)), pass_name, error)


def _differentiable_total(sums: Tensor, reduction: Reduction, pass_name: str) -> Tensor:
    # A batched gradient hides its graph from an autograd Function, the stack does not.
    return apply_to_stack(lambda stack: _Total.apply(stack, reduction, pass_name), sums)  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    """(sums and n, reduction, pass_name) -> their totals. n's place carries 0 in derivative passes."""

    @staticmethod
    def forward(sums: Tensor, reduction: Reduction, pass_name: str) -> Tensor:
        return total_of_stack(sums, reduction, pass_name)[:-SIGNATURE_NUMBERS].view_as(sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.reduction, ctx.pass_name = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        return _differentiable_total(grad_total, ctx.reduction, f"derivative of {ctx.pass_name}"), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _differentiable_total(tangent, ctx.reduction, f"tangent of {ctx.pass_name}")

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, ...], sums: Tensor, reduction: Reduction, pass_name: str
    ) -> tuple[Tensor, int]:
        return _differentiable_total(sums.movedim(in_dims[0], 0), reduction, pass_name), 0
