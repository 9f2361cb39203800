"""Defines the autograd Function of training. Each way a kernel adds up, one all-reduce follows, a kernel maps.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from syncbn import double_backward, torch_private
from syncbn.arguments import Prepared, require_two_values
from syncbn.distributed.collectives import Ranks
from syncbn.double_backward import BackwardInput, Gradients
from syncbn.kernels import select_kernels
from syncbn.layout import Layout

Result = TypeVar("Result")
TENSORS_PER_INPUT = 5  # tensors of an input: x, weight, bias, residual, num_values


@dataclass(slots=True)
class Call:
    """What the Function keeps of a call besides tensors."""

    layouts: list[Layout]  # of the inputs
    eps: float
    relu: bool
    ranks: Ranks


def normalize(prepared: Sequence[Prepared], eps: float, relu: bool, ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """For each input y, normalised by the statistics of all ranks, and these."""
    layouts, masks = [], []
    tensors: list[Tensor | None] = []
    for layout, mask, tensors_of_input in prepared:
        layouts.append(layout)
        masks.append(mask)
        tensors += tensors_of_input
    function: Callable[..., tuple[Tensor, ...]] = _EagerFunction.apply
    if torch_private.is_compiling():
        builds_graph = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
        # Without gradients Dynamo (torch 2.13) hands a forward with *args a context, which it does not take.
        function = SyncBatchNormFunction.apply if builds_graph else SyncBatchNormFunction.forward
    elif torch_private.inside_functorch():
        function = SyncBatchNormFunction.apply
    flat = function(Call(layouts, eps, relu, ranks), *tensors)
    results = []
    for mask, y, statistics in zip(masks, flat[::2], flat[1::2], strict=True):
        # Gradients at False places become 0 here on their way in, and in the torch.where of masks.py on their way out.
        results.append((y if mask is None else torch.where(mask, y, 0), statistics))
    return results


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
    def forward(call: Call, *tensors: Any) -> tuple[Tensor, ...]:
        kernels, local = select_kernels(tensors[0]), []
        for index, layout in enumerate(call.layouts):
            x, num_values = tensors[TENSORS_PER_INPUT * index], tensors[TENSORS_PER_INPUT * index + 4]
            sums = kernels.channel_sums(x, layout)
            if num_values is not None:
                sums = torch.cat((sums[:-1], num_values.to(torch.float64).view(1)))
            local.append(sums)
        totals = _all_reduce(local, call.ranks, "forward")
        results: list[Tensor] = []
        for index, layout in enumerate(call.layouts):
            x, weight, bias, residual, num_values = tensors[
                TENSORS_PER_INPUT * index : TENSORS_PER_INPUT * index + TENSORS_PER_INPUT
            ]
            if num_values is not None or x.numel() <= layout.sizes[1]:  # else this rank alone has two
                require_two_values(totals[index][-1], x, f"inputs[{index}]: " if len(totals) > 1 else "")
            results += kernels.normalize(x, layout, totals[index], call.eps, weight, bias, residual, call.relu)
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call = call = inputs[0]
        statistics = output[1::2]
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in inputs[3::TENSORS_PER_INPUT]]
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *inputs[1::TENSORS_PER_INPUT],
            *inputs[2::TENSORS_PER_INPUT],
            *statistics,
            *(output[::2] if call.relu else ()),
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call, saved, needs = ctx.call, ctx.saved_tensors, ctx.needs_input_grad
        num_inputs = len(call.layouts)
        per_input = []
        for index in range(num_inputs):
            x, weight, statistics, *ys = saved[index::num_inputs]
            needs_x, needs_weight, needs_bias, needs_residual = needs[
                1 + TENSORS_PER_INPUT * index : TENSORS_PER_INPUT + TENSORS_PER_INPUT * index
            ]
            layout = Layout.of(x, call.layouts[index].channel_dim)  # saved_tensors_hooks may have moved x
            dy, y = grad_outputs[2 * index], layout.dense(ys[0]) if ys else None
            dy = torch.zeros_like(x) if dy is None else layout.dense(dy)
            dtypes = weight.dtype if needs_weight else None, ctx.bias_dtypes[index] if needs_bias else None
            one = BackwardInput(layout.dense(x), dy, y, layout, weight, statistics, needs_x, needs_residual, *dtypes)
            per_input.append(one)
        if torch.is_grad_enabled():  # create_graph=True: the saved statistics are constants to autograd
            results = double_backward.gradients(per_input, call.eps, call.ranks)
        else:
            results = gradients(per_input, call.eps, call.ranks)
        flat: list[Tensor | None] = [None]
        for of_input in results:
            flat += of_input
            flat.append(None)  # of num_values
        return tuple(flat)


class _EagerFunction(torch.autograd.Function):
    """SyncBatchNormFunction in torch's older form, which costs 10 us a call where the newer one takes 28, and 19 with a
    cached signature: torch binds the arguments of a forward beside a setup_context. torch.func needs the newer form."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _profiled("syncbn.forward", SyncBatchNormFunction.forward, *inputs)
        SyncBatchNormFunction.setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return _profiled("syncbn.backward", SyncBatchNormFunction.backward, ctx, *grad_outputs)


def gradients(per_input: Sequence[BackwardInput], eps: float, ranks: Ranks) -> list[Gradients]:
    """Compute the gradients of each input, without a graph. The all_reduce happens whatever is needed."""
    kernels, local, of_parameters = select_kernels(per_input[0].x), [], []
    for x, dy, y, layout, _, statistics, _, _, weight_dtype, bias_dtype in per_input:
        sums, grad_weight, grad_bias = kernels.gradient_sums(
            dy, x, y, layout, statistics, eps, weight_dtype, bias_dtype
        )
        local.append(sums)
        of_parameters.append((grad_weight, grad_bias))
    totals = _all_reduce(local, ranks, "backward")
    results: list[Gradients] = []
    for index, (x, dy, y, layout, weight, statistics, needs_x, needs_residual, _, _) in enumerate(per_input):
        grad_x, grad_residual = None, dy if needs_residual else None
        relu_masks_residual = needs_residual and y is not None
        if needs_x or relu_masks_residual:
            grad_x, of_residual = kernels.input_gradient(
                dy, x, y, layout, statistics, eps, weight, totals[index], relu_masks_residual
            )
            grad_residual = of_residual if relu_masks_residual else grad_residual
        results.append((grad_x, *of_parameters[index], grad_residual))
    return results


def _all_reduce(local: list[Tensor], ranks: Ranks, pass_name: str) -> Sequence[Tensor]:
    """The totals of each of these sums, of one collective."""
    counted = pass_name == "forward"
    if len(local) == 1:
        return [ranks.all_reduce(local[0], pass_name, counted)]
    return torch.split(ranks.all_reduce(torch.cat(local), pass_name, counted), [len(sums) for sums in local])


def _profiled(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """What the function returns; in a range of this name where a profiler records. (record_function costs 10 us.)"""
    if torch_private.is_compiling() or not torch_private.profiler_enabled():
        return function(*arguments)
    with record_function(name):
        return function(*arguments)
