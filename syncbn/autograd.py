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

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from syncbn import collectives, kernels, moments
from syncbn.callers import Caller
from syncbn.layout import Layout, dense, laid_out_as

NO_GRADIENTS = (None,) * 6  # of num_values, channel_dim, eps, relu, group, caller


class SyncBatchNormFunction(torch.autograd.Function):
    """(x, weight, bias, residual, num_values, channel_dim, eps, relu, group, caller) -> y, statistics.

    x is dense; residual has its dtype and lies as it does; num_values () is how many values of a channel of x
    count, where it is not all of them, and the others are 0; `group` is None when there is nothing to synchronise.
    The statistics of all ranks, mean, var and n packed as in moments.py, are not differentiable.

    Saved for backward: x, weight, the statistics, and y when relu is fused.
    Collectives: one all_reduce of 2C + 1 float64 in forward, one of 2C in backward (two with create_graph=True), and
    the signatures of collectives.py; none when `group` is None. Backward issues its all_reduce whatever
    needs_input_grad says: another rank may need the sums.
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
        caller: Caller | None,
    ) -> tuple[Tensor, Tensor]:
        with profiled("syncbn.forward"):
            served = kernels.serving(x)
            sums = served.channel_sums(x, channel_dim)
            if num_values is not None:
                sums = torch.cat((sums[:-1], num_values.to(torch.float64).view(1)))
            sums = collectives.all_reduce_counted_sums(sums, group, caller)
            if num_values is not None or x.numel() <= x.shape[channel_dim]:  # else this rank alone has two
                collectives.require_two_values(sums[-1], x.shape)
            output: tuple[Tensor, Tensor] = served.normalize(x, channel_dim, sums, eps, weight, bias, residual, relu)
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _, _, ctx.channel_dim, ctx.eps, relu, ctx.group, ctx.caller = inputs
        y, statistics = output
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, statistics, y if relu else None)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, statistics, y = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        with profiled("syncbn.backward"):
            dy = torch.zeros_like(x) if grad_output is None else grad_output
            if torch.is_grad_enabled():  # create_graph=True: the saved statistics are constants to autograd
                step = Step(dy, x, y, weight, ctx.bias_dtype, statistics[-1])
                (gradients,) = differentiable_gradients([step], ctx.channel_dim, ctx.eps, ctx.group, ctx.caller)
                needed = zip(gradients, ctx.needs_input_grad[:4], strict=True)
                return *(gradient if needs else None for gradient, needs in needed), *NO_GRADIENTS
            served, x = kernels.serving(x), dense(x, ctx.channel_dim)  # saved_tensors_hooks may have moved x and y
            dy = laid_out_as(x, dy, ctx.channel_dim)
            y = None if y is None else laid_out_as(x, y, ctx.channel_dim)
            sums, grad_weight, grad_bias = served.gradient_sums(
                dy,
                x,
                y,
                ctx.channel_dim,
                statistics,
                ctx.eps,
                weight.dtype if needs_weight else None,
                ctx.bias_dtype if needs_bias else None,
            )
            sums = collectives.all_reduce_sums(sums, ctx.group, ctx.caller)
            grad_x = grad_residual = None
            if needs_x or needs_residual:
                of_residual = needs_residual and y is not None
                grad_x, grad_residual = served.input_gradient(
                    dy, x, y, ctx.channel_dim, statistics, ctx.eps, weight, sums, of_residual
                )
                if needs_residual and y is None:
                    grad_residual = dy
        return grad_x, grad_weight, grad_bias, grad_residual, *NO_GRADIENTS


class _WithContext(torch.autograd.Function):
    """SyncBatchNormFunction in torch's older form: at each call torch inspects the signature of a forward beside a
    setup_context, which costs 40 us. torch.func needs the newer form."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = SyncBatchNormFunction.forward(*inputs)
        SyncBatchNormFunction.setup_context(ctx, inputs, output)
        return output

    backward = SyncBatchNormFunction.backward


def apply(*inputs: Any) -> tuple[Tensor, ...]:
    """SyncBatchNormFunction.apply."""
    newer_form = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    function = SyncBatchNormFunction if newer_form else _WithContext
    output: tuple[Tensor, ...] = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


def profiled(name: str) -> AbstractContextManager[object]:
    """record_function, which costs 10 us also when nothing is recorded."""
    recording = not torch.compiler.is_compiling() and torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if recording else contextlib.nullcontext()


class Step(NamedTuple):
    """What the differentiable gradients of one input need; `y` with a fused relu only."""

    dy: Tensor
    x: Tensor
    y: Tensor | None
    weight: Tensor | None
    bias_dtype: torch.dtype | None
    num_values: Tensor


def differentiable_gradients(
    steps: list[Step], channel_dim: int, eps: float, group: dist.ProcessGroup | None, caller: Caller | None
) -> list[tuple[Tensor | None, ...]]:
    """For each step grad_input, grad_weight, grad_bias, grad_residual as a graph of dy, x and weight.

    For a second derivative. Mean and variance are computed again from x, with the all_reduce as part of the graph: two
    in all, whatever the number of steps.
    """
    layouts = [Layout.of(step.x, channel_dim % step.x.ndim) for step in steps]
    wide_xs = [layout.fold(step.x).to(torch.float64) for layout, step in zip(layouts, steps, strict=True)]
    wide_dys = []
    for layout, step in zip(layouts, steps, strict=True):
        wide_dy = layout.fold(step.dy).to(torch.float64)
        wide_dys.append(wide_dy if step.y is None else wide_dy.masked_fill(layout.fold(step.y) <= 0, 0))

    def means_over_ranks(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        packed = [torch.cat((first.sum((0, 2)), second.sum((0, 2)))) for first, second in pairs]
        totals = collectives.differentiable_all_reduce(torch.cat(packed), group, caller, "backward")
        for total, step in zip(torch.split(totals, [one.numel() for one in packed]), steps, strict=True):
            first, second = (total / step.num_values.clamp(min=1)).chunk(2)
            yield first, second

    invstds, xmus = [], []
    pairs = [(wide_x, wide_x.square()) for wide_x in wide_xs]
    for wide_x, (mean, mean_square) in zip(wide_xs, means_over_ranks(pairs), strict=True):
        invstds.append(moments.inverse_std((mean_square - mean.square()).clamp(min=0), eps))
        xmus.append(wide_x - mean[:, None])

    gradients: list[tuple[Tensor | None, ...]] = []
    pairs = [(wide_dy, wide_dy * xmu) for wide_dy, xmu in zip(wide_dys, xmus, strict=True)]
    for step, layout, wide_dy, xmu, invstd, (mean_dy, mean_dy_xmu) in zip(
        steps, layouts, wide_dys, xmus, invstds, means_over_ranks(pairs), strict=True
    ):
        scale = invstd if step.weight is None else invstd * step.weight
        wide_grad_x = (wide_dy - mean_dy[:, None] - xmu * (invstd.square() * mean_dy_xmu)[:, None]) * scale[:, None]
        grad_x, grad_residual = (layout.unfold(wide, step.x.shape).to(step.x.dtype) for wide in (wide_grad_x, wide_dy))
        grad_weight = grad_bias = None
        if step.weight is not None:
            grad_weight = ((wide_dy * xmu).sum((0, 2)) * invstd).to(step.weight.dtype)
        if step.bias_dtype is not None:
            grad_bias = wide_dy.sum((0, 2)).to(step.bias_dtype)
        gradients.append((grad_x, grad_weight, grad_bias, grad_residual))
    return gradients


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which single values are computed: float32, or float64 for float64 values."""
    return torch.promote_types(x.dtype, torch.float32)
