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
from syncbn.layout import Layout

NO_GRADIENTS = (None,) * 5  # of num_values, channel_dim, eps, relu, group


class SyncBatchNormFunction(torch.autograd.Function):
    """(x, weight, bias, residual, num_values, channel_dim, eps, relu, group) -> y, mean, var, invstd, n.

    x and residual are dense in the layout of x and of one dtype; num_values () is how many values of a channel of x
    count, where it is not all of them, and the others are 0; `group` is None when there is nothing to synchronise.
    mean (C,), var (C,), invstd (C,) and n () are float64 and not differentiable.

    Saved for backward: x, weight, mean, invstd, n, and y when relu is fused.
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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        with profiled("syncbn.forward"):
            fold = Layout.of(x, channel_dim).fold
            folded, served = fold(x), kernels.serving(x)
            packed = served.channel_sums(folded)
            if num_values is not None:
                packed = torch.cat((packed[:-1], num_values.to(torch.float64).view(1)))
            statistics = moments.from_sums(collectives.all_reduce_counted_sums(packed, group), eps)
            collectives.require_two_values(statistics.num_values, x.shape)
            y = torch.empty_like(x)
            served.normalize(
                folded,
                statistics.mean,
                statistics.invstd,
                weight,
                bias,
                None if residual is None else fold(residual),
                relu,
                fold(y),
            )
        return y, *statistics

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, _, _, ctx.channel_dim, ctx.eps, relu, ctx.group = inputs
        y, mean, var, invstd, num_values = output
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var, invstd, num_values)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, invstd, num_values, y if relu else None)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, num_values, y = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
        with profiled("syncbn.backward"):
            dy = torch.zeros_like(x) if grad_output is None else grad_output
            if torch.is_grad_enabled():  # create_graph=True: the saved statistics are constants to autograd
                step = Step(dy, x, y, weight, ctx.bias_dtype, num_values)
                (gradients,) = differentiable_gradients([step], ctx.channel_dim, ctx.eps, ctx.group)
                needed = zip(gradients, ctx.needs_input_grad[:4], strict=True)
                return *(gradient if needs else None for gradient, needs in needed), *NO_GRADIENTS
            gradient = Gradient(dy, x, y, mean, ctx.channel_dim)
            sums = gradient.sums()
            grad_weight, grad_bias = parameter_gradients(
                sums, invstd, weight.dtype if needs_weight else None, ctx.bias_dtype if needs_bias else None
            )
            sums = collectives.all_reduce_sums(sums, ctx.group)
            grad_x = grad_residual = None
            if needs_x or needs_residual:
                grad_x, grad_residual = gradient.of_input(invstd, weight, sums, num_values, needs_residual)
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
    steps: list[Step], channel_dim: int, eps: float, group: dist.ProcessGroup | None
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
        totals = collectives.differentiable_all_reduce(torch.cat(packed), group)
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


class Gradient:
    """The two kernels of backward for one input x: dy behind a relu that gave `y`; mean float64 (C,)."""

    def __init__(self, dy: Tensor, x: Tensor, y: Tensor | None, mean: Tensor, channel_dim: int) -> None:
        self.layout = Layout.of(x, channel_dim)
        self.dy, self.x, self.mean = self.layout.dense(dy), x, mean
        self.folded = [None if one is None else self.layout.fold(one) for one in (self.dy, x, y)]
        self.kernels = kernels.serving(x)

    def sums(self) -> Tensor:
        """This rank's backward payload, float64 (2C,): sum dy, sum dy * (x - mean)."""
        sums: Tensor = self.kernels.gradient_sums(*self.folded, self.mean)
        return sums

    def of_input(
        self, invstd: Tensor, weight: Tensor | None, sums: Tensor, num_values: Tensor, needs_residual: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """grad_input and, where needed, grad_residual; `sums` is the payload of all ranks."""
        grad_x = torch.empty_like(self.x)
        has_relu = self.folded[2] is not None
        grad_residual = torch.empty_like(self.x) if needs_residual and has_relu else None
        outs = (None if one is None else self.layout.fold(one) for one in (grad_x, grad_residual))
        self.kernels.input_gradient(*self.folded, self.mean, invstd, weight, sums, num_values, *outs)
        return grad_x, self.dy if needs_residual and not has_relu else grad_residual


def parameter_gradients(
    sums: Tensor, invstd: Tensor, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """grad_weight and grad_bias of this rank's `sums`, each in its dtype, or None without one.

    They share no memory with `sums`, which the all_reduce overwrites.
    """
    sum_dy, sum_dy_xmu = sums.chunk(2)
    grad_weight = None if weight_dtype is None else (sum_dy_xmu * invstd).to(weight_dtype)
    return grad_weight, None if bias_dtype is None else sum_dy.to(bias_dtype, copy=True)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which single values are computed: float32, or float64 for float64 values."""
    return torch.promote_types(x.dtype, torch.float32)
