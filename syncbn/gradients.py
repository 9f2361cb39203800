"""Computes the gradients on the general road: by kernels, or as a graph of dy, x and weight for a second derivative."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from syncbn.inputs import can_be_unwrapped, plain
from syncbn.kernels import reference
from syncbn.kernels.interface import TRAILER_NUMBERS, BackwardKind, ForwardKind, GradientPair, Needed, Saved
from syncbn.kernels.select import general_back_end
from syncbn.plan import kind_of_backward
from syncbn.ranks.reduction import Reduction
from syncbn.ranks.report import WITH_GRAPH
from syncbn.torch_internals.state import is_compiling, recorded
from syncbn.totals import total

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # of x, weight, bias, residual


class BackwardInput(NamedTuple):
    """What the gradients of one input are computed from. dy and what was saved are as kernels of the kind take them."""

    kind: BackwardKind
    dy: Tensor
    saved: Saved
    passed_dy: Tensor | None  # dy itself if it is the gradient of the residual: to a view autograd may add in place

    @classmethod
    def of(cls, kind: ForwardKind, dy: Tensor | None, saved: Saved, needed: Needed) -> Self:
        """From what a forward of this kind has saved, which saved_tensors_hooks may have rounded or moved."""
        x, weight, statistics, y = saved
        dy = torch.zeros_like(x) if dy is None else dy
        passed_dy = dy if needed[3] and y is None else None
        if can_be_unwrapped(dy):
            dy = plain(dy)

        def dense(tensor: Tensor) -> Tensor:  # Dynamo makes dy contiguous in a backward that asks for its strides
            return tensor if is_compiling() else kind.layout.dense(tensor)

        dense_y = None if y is None else dense(y.to(dy.dtype))
        saved = dense(x.to(dy.dtype)), weight, statistics.double().contiguous(), dense_y
        return cls(kind_of_backward(kind, dy, weight, needed), dense(dy), saved, passed_dy)

    def kernels(self) -> reference.Backward:
        return general_back_end(self.kind, *self.saved, self.dy).Backward(self.kind)


def gradients(kind: ForwardKind, dy: Tensor | None, saved: Saved, needed: Needed, reduction: Reduction) -> Gradients:
    """The gradients behind a forward of this kind. One all_reduce, whichever gradients are needed; with a graph
    (create_graph=True) two. The caller tells the errors of this rank to the others."""
    inputs = BackwardInput.of(kind, dy, saved, needed)
    with recorded("syncbn.backward"):
        if torch.is_grad_enabled():  # the saved statistics are constants to autograd
            return _gradients_with_graph(kind, inputs, reduction)
        kernels = inputs.kernels()
        sums, grad_weight, grad_bias = kernels.backward_sums(inputs.dy, inputs.saved)
        sums = total(sums, reduction, "backward")
        reduction.end_backward()
        grad_x, grad_residual = outputs(kernels, inputs, sums)
        return grad_x, grad_weight, grad_bias, grad_residual


def outputs(kernels: reference.Backward, inputs: BackwardInput, sums: Tensor) -> GradientPair:
    """grad_x and grad_residual, by the sums of all ranks."""
    kind, dy, saved, passed_dy = inputs
    grad_x = grad_residual = None
    if kind.needs_x or kind.needs_residual:
        grad_x, grad_residual = kernels.backward_outputs(dy, saved, sums)
    return grad_x, grad_residual if kind.needs_residual else passed_dy


def _gradients_with_graph(forward: ForwardKind, inputs: BackwardInput, reduction: Reduction) -> Gradients:
    """The gradients as a graph. Mean and variance are computed again from x, with their all_reduce as part of the
    graph: two all_reduces in all.

    The first has a pass name of its own: a rank without create_graph issues only the second.
    """
    kind, dy, (x, weight, statistics, y), passed_dy = inputs
    kernels, num_values = reference.Forward(forward), statistics[3 * kind.layout.sizes[1]].clamp(min=1)
    fold = kind.layout.fold
    sums = total(kernels.forward_sums(x), reduction, WITH_GRAPH)
    mean, mean_square = (sums[:-TRAILER_NUMBERS] / num_values).chunk(2)
    xmu = reference.minus_mean(fold(x), mean)
    invstd = ((mean_square - mean.square()).clamp(min=0) + forward.eps).rsqrt()
    dy = reference.through_relu(kind, fold(dy), fold(x), None if y is None else fold(y), statistics)
    wide_dy = dy.double()
    sum_dy, sum_dy_xmu = reference.channel_sums(wide_dy), reference.channel_sums(wide_dy * xmu)
    sums = total(torch.cat((sum_dy, sum_dy_xmu, sum_dy.new_zeros(TRAILER_NUMBERS))), reduction, "backward")
    mean_dy, mean_dy_xmu = (sums[:-TRAILER_NUMBERS] / num_values).chunk(2)
    scale = invstd if weight is None else invstd * weight.double()
    wide_grad_x = (wide_dy - mean_dy[:, None] - xmu * (invstd.square() * mean_dy_xmu)[:, None]) * scale[:, None]
    grad_x, grad_residual = (kind.layout.unfold(wide, x.shape).to(x.dtype) for wide in (wide_grad_x, wide_dy))
    weight_dtype, bias_dtype = kind.grad_weight_dtype, kind.grad_bias_dtype
    return (
        grad_x if kind.needs_x else None,
        None if weight_dtype is None else (sum_dy_xmu * invstd).to(weight_dtype),
        None if bias_dtype is None else sum_dy.to(bias_dtype),
        grad_residual if kind.needs_residual else passed_dy,
    )
