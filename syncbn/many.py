"""The autograd Function of several independent inputs whose sums share one all-reduce each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import autograd, collectives, kernels, moments
from syncbn.layout import Layout


class SyncBatchNormManyFunction(torch.autograd.Function):
    """(channel_dim, eps, group, k, *xs, *weights, *biases) -> (*ys, *means, *vars, *invstds, *ns), k of each.

    What `SyncBatchNormFunction` is for one input, without residual, relu and mask; xs are dense.

    Saved for backward: x, weight, mean, invstd, n of each input.
    Collectives: one all_reduce of sum(2C + 1) float64 in forward, one of sum(2C) in backward (two with
    create_graph=True); none when `group` is None.
    """

    @staticmethod
    def forward(
        channel_dim: int, eps: float, group: dist.ProcessGroup | None, num_inputs: int, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        xs, weights, biases = by_role(tensors, num_inputs)
        with autograd.profiled("syncbn.forward"):
            folds = [Layout.of(x, channel_dim % x.ndim).fold for x in xs]
            packed = [kernels.serving(x).channel_sums(fold(x)) for x, fold in zip(xs, folds, strict=True)]
            total = collectives.all_reduce_counted_sums(torch.cat(packed), group)
            statistics = [moments.from_sums(sums, eps) for sums in torch.split(total, [one.numel() for one in packed])]
            ys = [torch.empty_like(x) for x in xs]
            of_inputs = zip(xs, ys, folds, weights, biases, statistics, strict=True)
            for index, (x, y, fold, weight, bias, (mean, _, invstd, num_values)) in enumerate(of_inputs):
                collectives.require_two_values(num_values, x.shape, at_fault=f"inputs[{index}]: ")
                kernels.serving(x).normalize(fold(x), mean, invstd, weight, bias, None, False, fold(y))
        return *ys, *_transposed(statistics)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.channel_dim, ctx.eps, ctx.group, ctx.num_inputs, *tensors = inputs
        xs, weights, biases = by_role(tensors, ctx.num_inputs)
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        statistics = output[ctx.num_inputs :]
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        means, _, invstds, counts = by_role(statistics, ctx.num_inputs)
        ctx.save_for_backward(*xs, *weights, *means, *invstds, *counts)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        xs, weights, means, invstds, counts = by_role(ctx.saved_tensors, ctx.num_inputs)
        with autograd.profiled("syncbn.backward"):
            steps = [
                autograd.Step(torch.zeros_like(x) if dy is None else dy, x, None, weight, bias_dtype, num_values)
                for dy, x, weight, bias_dtype, num_values in zip(
                    grad_outputs[: ctx.num_inputs], xs, weights, ctx.bias_dtypes, counts, strict=True
                )
            ]
            if torch.is_grad_enabled():
                gradients = autograd.differentiable_gradients(steps, ctx.channel_dim, ctx.eps, ctx.group)
            else:
                gradients = _gradients(steps, means, invstds, ctx.channel_dim, ctx.group)
        needed = zip(_transposed([one[:3] for one in gradients]), ctx.needs_input_grad[4:], strict=True)
        return None, None, None, None, *(gradient if needs else None for gradient, needs in needed)


def _gradients(
    steps: list[autograd.Step],
    means: tuple[Tensor, ...],
    invstds: tuple[Tensor, ...],
    channel_dim: int,
    group: dist.ProcessGroup | None,
) -> list[tuple[Tensor | None, ...]]:
    """For each step grad_input, grad_weight, grad_bias."""
    each = [
        autograd.Gradient(step.dy, step.x, None, mean, channel_dim % step.x.ndim)
        for step, mean in zip(steps, means, strict=True)
    ]
    sums = [one.sums() for one in each]
    of_parameters = [
        autograd.parameter_gradients(own, invstd, None if step.weight is None else step.weight.dtype, step.bias_dtype)
        for own, invstd, step in zip(sums, invstds, steps, strict=True)
    ]
    totals = torch.split(collectives.all_reduce_sums(torch.cat(sums), group), [len(own) for own in sums])
    gradients: list[tuple[Tensor | None, ...]] = []
    of_inputs = zip(each, steps, invstds, totals, of_parameters, strict=True)
    for gradient, step, invstd, total, of_parameter in of_inputs:
        grad_x, _ = gradient.of_input(invstd, step.weight, total, step.num_values)
        gradients.append((grad_x, *of_parameter))
    return gradients


def by_role(tensors: Sequence[Any], num_inputs: int) -> list[tuple[Any, ...]]:
    """(a1, ..., ak, b1, ..., bk, ...) -> [(a1, ..., ak), (b1, ..., bk), ...]."""
    return [tuple(tensors[start : start + num_inputs]) for start in range(0, len(tensors), num_inputs)]


def _transposed(of_inputs: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """[(a1, b1), ..., (ak, bk)] -> (a1, ..., ak, b1, ..., bk)."""
    return tuple(one for role in zip(*of_inputs, strict=True) for one in role)
