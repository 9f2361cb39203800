"""Computes the gradients on the general road: by kernels, or as a graph of dy, x and weight for a second derivative."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from syncbn.inputs import subclasses
from syncbn.kernels import reference
from syncbn.kernels.interface import GradientPair, Handle, Kernels, Kind, Needed, Saved
from syncbn.kernels.select import general_kernels
from syncbn.plan import kind_of_backward
from syncbn.ranks.reductions import Reduction, total
from syncbn.torch_internals.state import recorded

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # of x, weight, bias, residual


class BackwardInput(NamedTuple):
    """What the gradients of one input are computed from. dy and what was saved are as kernels of the kind take them."""

    kind: Kind
    dy: Tensor
    saved: Saved
    needs_residual: bool

    @classmethod
    def of(cls, kind: Kind, dy: Tensor | None, saved: Saved, needed: Needed) -> Self:
        """From what a forward of this kind has saved, which saved_tensors_hooks may have rounded or moved."""
        x, weight, statistics, y = saved
        layout, dy = kind.layout, torch.zeros_like(x) if dy is None else dy
        if subclasses.has_memory(dy):
            dy = subclasses.plain(dy)
        dense_y = None if y is None else layout.dense(y.to(dy.dtype))
        saved = layout.dense(x.to(dy.dtype)), weight, statistics.to(torch.float64).contiguous(), dense_y
        return cls(kind_of_backward(kind, dy, weight, needed), layout.dense(dy), saved, needed[3])

    def kernels(self, *others: Tensor) -> Kernels:
        """The kernels for both calls, whose sums are added up with those of `others`."""
        return general_kernels(self.kind, *self.saved, self.dy, *others)


def gradients(kind: Kind, dy: Tensor | None, saved: Saved, needed: Needed, reduction: Reduction) -> Gradients:
    """The gradients behind a forward of this kind. One all_reduce, whichever gradients are needed; with a graph
    (create_graph=True) two."""
    inputs = BackwardInput.of(kind, dy, saved, needed)
    with recorded("syncbn.backward"):
        if torch.is_grad_enabled():  # the saved statistics are constants to autograd
            return gradients_with_graph(inputs, reduction)
        kernels = inputs.kernels()
        sums, grad_weight, grad_bias, handle = kernels.backward_sums(inputs.dy, inputs.saved)
        sums = total(sums, reduction, "backward")
        grad_x, grad_residual = outputs(kernels, handle, inputs, sums)
        return grad_x, grad_weight, grad_bias, grad_residual


def outputs(kernels: Kernels, handle: Handle | None, inputs: BackwardInput, sums: Tensor) -> GradientPair:
    """grad_x and grad_residual, by the sums of all ranks."""
    kind, dy, saved, needs_residual = inputs
    grad_x = grad_residual = None
    if kind.needs_x or kind.needs_residual:
        grad_x, grad_residual = kernels.backward_outputs(handle, dy, saved, sums)
    return grad_x, dy if needs_residual and saved[3] is None else grad_residual


def gradients_with_graph(inputs: BackwardInput, reduction: Reduction) -> Gradients:
    """The gradients as a graph. Mean and variance are computed again from x, with the all_reduce as part of the graph:
    two all_reduces in all."""
    kind, dy, (x, weight, statistics, y), needs_residual = inputs
    layout, num_channels = kind.layout, kind.layout.sizes[1]
    num_values = statistics[3 * num_channels].clamp(min=1)

    def means(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        sums = torch.cat((first.sum((0, 2)), second.sum((0, 2))))
        return (total(sums, reduction, "backward") / num_values).chunk(2)

    wide_x = layout.fold(x).double()
    wide_dy = reference.through_relu(kind, dy, x, y, statistics).double()
    mean, mean_square = means(wide_x, wide_x.square())
    invstd, xmu = ((mean_square - mean.square()).clamp(min=0) + kind.eps).rsqrt(), wide_x - mean[:, None]
    mean_dy, mean_dy_xmu = means(wide_dy, wide_dy * xmu)

    scale = invstd if weight is None else invstd * weight
    wide_grad_x = (wide_dy - mean_dy[:, None] - xmu * (invstd.square() * mean_dy_xmu)[:, None]) * scale[:, None]
    grad_x, grad_residual = (layout.unfold(wide, x.shape).to(x.dtype) for wide in (wide_grad_x, wide_dy))
    weight_dtype, bias_dtype = kind.grad_weight_dtype, kind.grad_bias_dtype
    return (
        grad_x if kind.needs_x else None,
        None if weight_dtype is None else ((wide_dy * xmu).sum((0, 2)) * invstd).to(weight_dtype),
        None if bias_dtype is None else wide_dy.sum((0, 2)).to(bias_dtype),
        grad_residual if needs_residual else None,
    )
