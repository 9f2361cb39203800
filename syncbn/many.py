"""The autograd Function of several independent inputs whose sums share one all-reduce each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import autograd, collectives, kernels
from syncbn.callers import Caller
from syncbn.layout import dense, laid_out_as


class SyncBatchNormManyFunction(torch.autograd.Function):
    """(channel_dim, eps, group, caller, k, *xs, *weights, *biases) -> (*ys, *statistics), k of each.

    What `SyncBatchNormFunction` is for one input, without residual, relu and mask; xs are dense.

    Saved for backward: x, weight and the statistics of each input.
    Collectives: one all_reduce of sum(2C + 1) float64 in forward, one of sum(2C) in backward (two with
    create_graph=True), and the signatures of collectives.py; none when `group` is None.
    """

    @staticmethod
    def forward(
        channel_dim: int,
        eps: float,
        group: dist.ProcessGroup | None,
        caller: Caller | None,
        num_inputs: int,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        xs, weights, biases = by_role(tensors, num_inputs)
        with autograd.profiled("syncbn.forward"):
            packed = [kernels.serving(x).channel_sums(x, channel_dim % x.ndim) for x in xs]
            total = collectives.all_reduce_counted_sums(torch.cat(packed), group, caller)
            totals = torch.split(total, [one.numel() for one in packed])
            outputs = []
            for index, (x, weight, bias, sums) in enumerate(zip(xs, weights, biases, totals, strict=True)):
                collectives.require_two_values(sums[-1], x.shape, at_fault=f"inputs[{index}]: ")
                normalize = kernels.serving(x).normalize
                outputs.append(normalize(x, channel_dim % x.ndim, sums, eps, weight, bias, residual=None, relu=False))
        return _transposed(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.channel_dim, ctx.eps, ctx.group, ctx.caller, ctx.num_inputs, *tensors = inputs
        xs, weights, biases = by_role(tensors, ctx.num_inputs)
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        statistics = output[ctx.num_inputs :]
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*xs, *weights, *statistics)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, weights, statistics = by_role(ctx.saved_tensors, ctx.num_inputs)
        # saved_tensors_hooks may have moved them. (In torch 2.15 Dynamo cannot trace a generator here.)
        xs = [dense(x, ctx.channel_dim % x.ndim) for x in saved]
        with autograd.profiled("syncbn.backward"):
            steps = [
                autograd.Step(torch.zeros_like(x) if dy is None else dy, x, None, weight, bias_dtype, own[-1])
                for dy, x, weight, bias_dtype, own in zip(
                    grad_outputs[: ctx.num_inputs], xs, weights, ctx.bias_dtypes, statistics, strict=True
                )
            ]
            if torch.is_grad_enabled():
                gradients = autograd.differentiable_gradients(steps, ctx.channel_dim, ctx.eps, ctx.group, ctx.caller)
            else:
                gradients = _gradients(steps, statistics, ctx.channel_dim, ctx.eps, ctx.group, ctx.caller)
        needed = zip(_transposed([one[:3] for one in gradients]), ctx.needs_input_grad[5:], strict=True)
        return None, None, None, None, None, *(gradient if needs else None for gradient, needs in needed)


def _gradients(
    steps: list[autograd.Step],
    statistics: tuple[Tensor, ...],
    channel_dim: int,
    eps: float,
    group: dist.ProcessGroup | None,
    caller: Caller | None,
) -> list[tuple[Tensor | None, ...]]:
    """For each step grad_input, grad_weight, grad_bias."""
    dims = [channel_dim % step.x.ndim for step in steps]
    dys = [laid_out_as(step.x, step.dy, dim) for step, dim in zip(steps, dims, strict=True)]
    own = [
        kernels.serving(step.x).gradient_sums(
            dy, step.x, None, dim, of_input, eps, None if step.weight is None else step.weight.dtype, step.bias_dtype
        )
        for step, dy, dim, of_input in zip(steps, dys, dims, statistics, strict=True)
    ]
    sums = [one for one, *_ in own]
    totals = torch.split(collectives.all_reduce_sums(torch.cat(sums), group, caller), [len(one) for one in sums])
    gradients: list[tuple[Tensor | None, ...]] = []
    of_inputs = zip(steps, dys, dims, statistics, totals, own, strict=True)
    for step, dy, dim, of_input, total, (_, *of_parameters) in of_inputs:
        grad_x, _ = kernels.serving(step.x).input_gradient(
            dy, step.x, None, dim, of_input, eps, step.weight, total, of_residual=False
        )
        gradients.append((grad_x, *of_parameters))
    return gradients


def by_role(tensors: Sequence[Any], num_inputs: int) -> list[tuple[Any, ...]]:
    """(a1, ..., ak, b1, ..., bk, ...) -> [(a1, ..., ak), (b1, ..., bk), ...]."""
    return [tuple(tensors[start : start + num_inputs]) for start in range(0, len(tensors), num_inputs)]


def _transposed(of_inputs: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """[(a1, b1), ..., (ak, bk)] -> (a1, ..., ak, b1, ..., bk)."""
    return tuple(one for role in zip(*of_inputs, strict=True) for one in role)
