"""Defines the autograd Function of training. Each way: kernels, one all-reduce, channel mathematics, kernels.

Symbols: C channels; n values per channel over all ranks r; x, y, dy of any shape, with C channels in one of its dims.

    forward   mean = sum_r sum x / n                    var = max(0, sum_r sum x^2 / n - mean^2)
              y = (x - mean) / sqrt(var + eps) * weight + bias (+ residual) (then relu)
    backward  mean_dy = sum_r sum dy / n                mean_dy_xmu = sum_r sum dy * (x - mean) / n
              grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
              grad_weight = sum dy * (x - mean) * invstd,  grad_bias = sum dy
                            (sums over this rank: DistributedDataParallel averages them)

Several independent inputs may share the all-reduces. A tuple `per_input` has one element for each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from syncbn import arguments, double_backward, torch_private
from syncbn.collectives import Ranks
from syncbn.double_backward import BackwardInput, Gradients
from syncbn.kernels import select_kernels
from syncbn.layout import Layout

ROLES = 5  # tensors of an input: x, weight, bias, residual, num_values


@dataclass(slots=True)
class Call:
    """What the Function keeps of a call besides tensors."""

    layouts: tuple[Layout, ...]  # of the inputs
    eps: float
    relu: bool
    ranks: Ranks


class SyncBatchNormFunction(torch.autograd.Function):
    """(call, and for each input x, weight, bias, residual, num_values) -> for each input y, statistics.

    x is dense; residual has its dtype and lies as it does; num_values () is how many values of a channel of x
    count, where it is not all of them, and the others are 0. The statistics of all ranks, mean, var and n packed as in
    moments.py, are not differentiable.

    Saved for backward: x, weight, the statistics, and y when relu is fused.
    Collectives: one all_reduce of 2C + 1 float64 in forward, one of 2C in backward (two with create_graph=True), and
    the signatures of collectives.py; none when there is nothing to synchronise. Backward issues its all_reduce whatever
    needs_input_grad says: another rank may need the sums.
    """

    @staticmethod
    def forward(call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        per_input = _split(tensors, ROLES)
        with profiled("syncbn.forward"):
            local = []
            for (x, _, _, _, num_values), layout in zip(per_input, call.layouts, strict=True):
                sums = select_kernels(x).channel_sums(x, layout)
                if num_values is not None:
                    sums = torch.cat((sums[:-1], num_values.to(torch.float64).view(1)))
                local.append(sums)
            totals = _all_reduce(local, lambda sums: call.ranks.all_reduce(sums, "forward", counted=True))
            results: list[Tensor] = []
            for (x, weight, bias, residual, num_values), layout, sums in zip(
                per_input, call.layouts, totals, strict=True
            ):
                if num_values is not None or x.numel() <= layout.sizes[1]:  # else this rank alone has two
                    name = f"inputs[{len(results) // 2}]: " if len(per_input) > 1 else ""
                    arguments.require_two_values(sums[-1], x, name)
                results += select_kernels(x).normalize(x, layout, sums, call.eps, weight, bias, residual, call.relu)
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        ys, statistics = output[::2], output[1::2]
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in tensors[2::ROLES]]
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[::ROLES], *tensors[1::ROLES], *statistics, *(ys if ctx.call.relu else ()))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call, num_inputs = ctx.call, len(ctx.call.layouts)
        xs, weights, statistics, *ys = _split(ctx.saved_tensors, num_inputs)
        per_input = []
        with profiled("syncbn.backward"):
            for index, needs in enumerate(_split(ctx.needs_input_grad[1:], ROLES)):
                x, weight, dy = xs[index], weights[index], grad_outputs[2 * index]
                needs_x, needs_weight, needs_bias, needs_residual, _ = needs
                one = BackwardInput(
                    dy=torch.zeros_like(x) if dy is None else dy,
                    x=x,
                    y=ys[0][index] if ys else None,
                    weight=weight,
                    statistics=statistics[index],
                    layout=Layout.of(x, call.layouts[index].channel_dim),  # saved_tensors_hooks may have moved x
                    needs_x=needs_x,
                    needs_residual=needs_residual,
                    weight_dtype=weight.dtype if needs_weight else None,
                    bias_dtype=ctx.bias_dtypes[index] if needs_bias else None,
                )
                per_input.append(one)
            if torch.is_grad_enabled():  # create_graph=True: the saved statistics are constants to autograd
                results = double_backward.gradients(per_input, call.eps, call.ranks)
            else:
                results = gradients(per_input, call.eps, lambda sums: call.ranks.all_reduce(sums, "backward"))
        flat: list[Tensor | None] = [None]
        for of_input in results:
            flat += [*of_input, None]  # of num_values
        return tuple(flat)


def gradients(
    per_input: Sequence[BackwardInput], eps: float, all_reduce: Callable[[Tensor], Tensor]
) -> list[Gradients]:
    """The gradients of each input, without a graph; `all_reduce` adds up over the ranks, whatever is needed."""
    dense, local, of_parameters = [], [], []
    for one in per_input:
        layout = one.layout
        x, dy, y = layout.dense(one.x), layout.dense(one.dy), None if one.y is None else layout.dense(one.y)
        sums, grad_weight, grad_bias = select_kernels(x).gradient_sums(
            dy, x, y, layout, one.statistics, eps, one.weight_dtype, one.bias_dtype
        )
        dense.append((x, dy, y))
        local.append(sums)
        of_parameters.append((grad_weight, grad_bias))
    results: list[Gradients] = []
    for one, (x, dy, y), sums, (grad_weight, grad_bias) in zip(
        per_input, dense, _all_reduce(local, all_reduce), of_parameters, strict=True
    ):
        grad_x, grad_residual = None, dy if one.needs_residual else None
        behind_relu = one.needs_residual and y is not None
        if one.needs_x or behind_relu:
            grad_x, of_residual = select_kernels(x).input_gradient(
                dy, x, y, one.layout, one.statistics, eps, one.weight, sums, behind_relu
            )
            grad_residual = of_residual if behind_relu else grad_residual
        results.append((grad_x, grad_weight, grad_bias, grad_residual))
    return results


class _WithContext(torch.autograd.Function):
    """SyncBatchNormFunction in torch's older form, which costs 10 us a call where the newer one takes 28, and 19 with a
    cached signature: torch binds the arguments of a forward beside a setup_context. torch.func needs the newer form."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = SyncBatchNormFunction.forward(*inputs)
        SyncBatchNormFunction.setup_context(ctx, inputs, output)
        return output

    backward = SyncBatchNormFunction.backward


def apply(call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """SyncBatchNormFunction.apply."""
    function: Callable[..., tuple[Tensor, ...]] = _WithContext.apply
    if torch_private.is_compiling():
        # Without gradients Dynamo (torch 2.13) hands a forward with *args a context, which it does not take.
        function = SyncBatchNormFunction.apply if builds_graph(tensors) else SyncBatchNormFunction.forward
    elif torch_private.inside_functorch():
        function = SyncBatchNormFunction.apply
    return function(call, *tensors)


def builds_graph(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def profiled(name: str) -> AbstractContextManager[object]:
    """record_function, where a profiler records."""
    return record_function(name) if torch_private.is_profiling() else contextlib.nullcontext()


def _all_reduce(local: Sequence[Tensor], all_reduce: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
    """The totals of each of these sums, of one collective."""
    if len(local) == 1:
        return [all_reduce(local[0])]
    return torch.split(all_reduce(torch.cat(list(local))), [len(sums) for sums in local])


def _split(tensors: Sequence[Any], length: int) -> list[Any]:
    """Pieces of this length."""
    return [tensors[start : start + length] for start in range(0, len(tensors), length)]
