"""Computes the gradients as a graph of dy, x and weight, for a second derivative."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from syncbn.kernels import reference
from syncbn.layout import Layout
from syncbn.ranks.side_reductions import Reduction, totals

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # of x, weight, bias, residual
Pairs = Sequence[tuple[Tensor, ...]]  # of tensors


class BackwardInput(NamedTuple):
    """The tensors and options from which the gradients of one input are computed. x, dy and y have this `layout`."""

    x: Tensor
    dy: Tensor
    y: Tensor | None  # only with a fused relu behind a residual
    layout: Layout
    weight: Tensor | None
    statistics: Tensor  # of all ranks, packed as in statistics.py
    needs_x: bool
    needs_residual: bool
    weight_dtype: torch.dtype | None  # of grad_weight; None where it is not needed
    bias_dtype: torch.dtype | None


def gradients(per_input: Sequence[BackwardInput], eps: float, reduction: Reduction) -> list[Gradients]:
    """Compute the gradients of each input as a graph.

    Mean and variance are computed again from x, with the all_reduce as part of the graph: two in all, whatever the
    number of inputs.
    """
    wide_xs = [one.layout.fold(one.x).double() for one in per_input]
    wide_dys = [reference.through_relu(one.dy, one.x, one.y, one.layout, one.statistics).double() for one in per_input]

    invstds, xmus = [], []
    pairs = [(wide_x, wide_x.square()) for wide_x in wide_xs]
    for wide_x, (mean, mean_square) in zip(wide_xs, _means(per_input, pairs, reduction), strict=True):
        invstds.append(((mean_square - mean.square()).clamp(min=0) + eps).rsqrt())
        xmus.append(wide_x - mean[:, None])

    grads: list[Gradients] = []
    pairs = [(wide_dy, wide_dy * xmu) for wide_dy, xmu in zip(wide_dys, xmus, strict=True)]
    for one, wide_dy, xmu, invstd, (mean_dy, mean_dy_xmu) in zip(
        per_input, wide_dys, xmus, invstds, _means(per_input, pairs, reduction), strict=True
    ):
        scale = invstd if one.weight is None else invstd * one.weight
        wide_grad_x = (wide_dy - mean_dy[:, None] - xmu * (invstd.square() * mean_dy_xmu)[:, None]) * scale[:, None]
        grad_x, grad_z = [one.layout.unfold(wide, one.x.shape).to(one.x.dtype) for wide in (wide_grad_x, wide_dy)]
        grad_weight = None if one.weight_dtype is None else ((wide_dy * xmu).sum((0, 2)) * invstd).to(one.weight_dtype)
        grad_bias = None if one.bias_dtype is None else wide_dy.sum((0, 2)).to(one.bias_dtype)
        grads.append((grad_x if one.needs_x else None, grad_weight, grad_bias, grad_z if one.needs_residual else None))
    return grads


def _means(per_input: Sequence[BackwardInput], pairs: Pairs, reduction: Reduction) -> Pairs:
    """The means of both terms of each pair, folded tensors, over the values of all ranks: one all_reduce."""
    sums = [torch.cat((first.sum((0, 2)), second.sum((0, 2)))) for first, second in pairs]
    means = []
    for of_input, one in zip(totals(sums, reduction, "backward"), per_input, strict=True):
        num_values = one.statistics[3 * one.layout.sizes[1]].clamp(min=1)
        means.append((of_input / num_values).chunk(2))
    return means
