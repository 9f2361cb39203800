"""The autograd Function of training. Each way: kernels, one all-reduce, channel mathematics, kernels.

Symbols: C channels; n values per channel over all ranks r; x, y, dy of any shape with C channels in `channel_dim`.

    forward   mean = sum_r sum x / n                    var = max(0, sum_r sum x^2 / n - mean^2)
              y = (x - mean) / sqrt(var + eps) * weight + bias (+ residual) (then relu)
    backward  mean_dy = sum_r sum dy / n                mean_dy_xmu = sum_r sum dy * (x - mean) / n
              grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
              grad_weight = sum dy * (x - mean) * invstd,  grad_bias = sum dy
                            (sums over this rank: DistributedDataParallel averages them)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from syncbn import collectives, moments
from syncbn.kernels import reference as kernels
from syncbn.layout import Layout

NO_GRADIENTS = (None,) * 5  # of num_values, channel_dim, eps, relu, group


class SyncBatchNormFunction(torch.autograd.Function):
    """(x, weight, bias, residual, num_values, channel_dim, eps, relu, group) -> y, mean, var, n.

    x and residual are dense in the layout of x and of one dtype; num_values () is how many values of a channel of x
    count, where it is not all of them, and the others are 0; `group` is None when there is nothing to synchronise.
    mean (C,), var (C,) and n () are float64 and not differentiable.

    Saved for backward: x, weight, mean, var, n, and y when relu is fused.
    Collectives: one all_reduce of 2C + 1 float64 in forward, one of 2C in backward (two with create_graph=True); none
    when `group` is None. Backward issues its all_reduce whatever needs_input_grad says: another rank may need the sums.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        num_values: Tensor | None,
        channel_dim: int,
        eps: float,
        relu: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with record_function("syncbn.forward"):
            layout = Layout.of(x, channel_dim)
            folded = layout.fold(x)
            own_values = folded.shape[0] * folded.shape[2] if num_values is None else num_values
            sums = collectives.all_reduce_counted_sums(kernels.channel_sums(folded), own_values, group)
            mean, var, total_values = moments.from_sums(sums)
            collectives.require_two_values(total_values, x.shape)
            center, rest = moments.split_mean(mean, compute_dtype(x))
            scale, shift = moments.output_coefficients(rest, moments.inverse_std(var, eps), weight, bias)
            y = torch.empty_like(x)
            kernels.normalize(
                folded,
                center,
                scale.to(center.dtype),
                shift.to(center.dtype),
                None if residual is None else layout.fold(residual),
                relu,
                layout.fold(y),
            )
        return y, mean, var, total_values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _, _, ctx.channel_dim, ctx.eps, relu, ctx.group = inputs
        y, mean, var, num_values = output
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var, num_values)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, var, num_values, y if relu else None)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, num_values, y = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        with record_function("syncbn.backward"):
            dy = torch.zeros_like(x) if grad_output is None else grad_output
            if torch.is_grad_enabled():  # create_graph=True: the saved statistics are constants to autograd
                gradients = differentiable_gradients(
                    dy, x, y, weight, ctx.bias_dtype, num_values, ctx.channel_dim, ctx.eps, ctx.group
                )
                needed = zip(gradients, ctx.needs_input_grad[:4], strict=True)
                return *(gradient if needs else None for gradient, needs in needed), *NO_GRADIENTS
            dy = Layout.of(x, ctx.channel_dim).dense(dy)
            invstd = moments.inverse_std(var, ctx.eps)
            sums = sum_dy, sum_dy_xmu = gradient_sums(dy, x, y, mean, ctx.channel_dim)
            # Before the all_reduce: Inductor (torch 2.13) lays the sums into the payload, and the total replaces them.
            grad_weight = (sum_dy_xmu * invstd).to(weight.dtype) if needs_weight else None
            grad_bias = sum_dy.to(ctx.bias_dtype) if needs_bias else None
            mean_sums = collectives.all_reduce_sums(sums, ctx.group) / num_values.clamp(min=1)
            grad_x = grad_residual = None
            if needs_x or needs_residual:
                grad_x, grad_residual = input_gradient(
                    dy, x, y, mean, invstd, weight, mean_sums, ctx.channel_dim, needs_residual
                )
        return grad_x, grad_weight, grad_bias, grad_residual, *NO_GRADIENTS


def differentiable_gradients(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    num_values: Tensor,
    channel_dim: int,
    eps: float,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor | None, ...]:
    """grad_input, grad_weight, grad_bias, grad_residual as a graph of dy, x and weight, for a second derivative.

    The mean and the variance are computed again from x, with the all_reduce as part of the graph: two in all.
    """
    layout = Layout.of(x, channel_dim)
    wide_x, wide_dy = (layout.fold(given).to(torch.float64) for given in (x, dy))
    if y is not None:
        wide_dy = wide_dy.masked_fill(layout.fold(y) <= 0, 0)

    def mean_over_ranks(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        packed = torch.cat((first.sum((0, 2)), second.sum((0, 2))))
        return (collectives.differentiable_all_reduce(packed, group) / num_values.clamp(min=1)).chunk(2)

    mean, mean_square = mean_over_ranks(wide_x, wide_x.square())
    invstd = moments.inverse_std((mean_square - mean.square()).clamp(min=0), eps)
    xmu = wide_x - mean[:, None]
    mean_dy, mean_dy_xmu = mean_over_ranks(wide_dy, wide_dy * xmu)
    scale = invstd if weight is None else invstd * weight
    wide_grad_x = (wide_dy - mean_dy[:, None] - xmu * (invstd.square() * mean_dy_xmu)[:, None]) * scale[:, None]
    return (
        layout.unfold(wide_grad_x, x.shape).to(x.dtype),
        None if weight is None else ((wide_dy * xmu).sum((0, 2)) * invstd).to(weight.dtype),
        None if bias_dtype is None else wide_dy.sum((0, 2)).to(bias_dtype),
        layout.unfold(wide_dy, x.shape).to(x.dtype),
    )


def gradient_sums(dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
    """This rank's sum dy and sum dy * (x - mean), float64 (C,); of dy behind the relu when its output `y` is given.

    dy, x and y are dense in one layout; `mean` is float64.
    """
    layout = Layout.of(x, channel_dim)
    center, rest = moments.split_mean(mean, compute_dtype(x))
    folded_y = None if y is None else layout.fold(y)
    sum_dy, sum_dy_xmc = kernels.gradient_sums(layout.fold(dy), layout.fold(x), center, folded_y)
    return sum_dy, sum_dy_xmc - rest * sum_dy


def input_gradient(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    mean_sums: Tensor,
    channel_dim: int,
    needs_residual: bool,
) -> tuple[Tensor, Tensor | None]:
    """grad_input and, where needed, grad_residual. `mean_sums` packs mean_dy and mean_dy_xmu: float64 (2C,)."""
    layout = Layout.of(x, channel_dim)
    center, rest = moments.split_mean(mean, compute_dtype(x))
    mean_dy, mean_dy_xmu = mean_sums.chunk(2)
    coefficients = moments.input_gradient_coefficients(rest, invstd, weight, mean_dy, mean_dy_xmu)
    a, b, c = (coefficient.to(center.dtype) for coefficient in coefficients)
    grad_x = torch.empty_like(x)
    grad_residual = torch.empty_like(x) if needs_residual and y is not None else None
    kernels.input_gradient(
        layout.fold(dy),
        layout.fold(x),
        center,
        a,
        b,
        c,
        None if y is None else layout.fold(y),
        layout.fold(grad_x),
        None if grad_residual is None else layout.fold(grad_residual),
    )
    return grad_x, dy if needs_residual and y is None else grad_residual


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which single values are computed: float32, or float64 for float64 values."""
    return torch.promote_types(x.dtype, torch.float32)
