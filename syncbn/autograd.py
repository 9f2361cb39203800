"""Defines the autograd Function of training. Each way a kernel adds up, one all-reduce follows, a kernel maps.

Symbols: C channels; n values per channel over all ranks r; x, y, dy of any shape, with C channels in one of its dims.

    forward   mean = sum_r sum x / n                    var = max(0, sum_r sum x^2 / n - mean^2)
              y = (x - mean) / sqrt(var + eps) * weight + bias (+ residual) (then relu)
    backward  mean_dy = sum_r sum dy / n                mean_dy_xmu = sum_r sum dy * (x - mean) / n
              grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
              grad_weight = sum dy * (x - mean) * invstd,  grad_bias = sum dy
                            (sums over this rank: DistributedDataParallel averages them)

k independent inputs may share the all-reduces. The Function takes their tensors by role, (*xs, *weights, ...), so that
tensors[index::k] are those of one input. A tuple `per_input` has one element for each input.
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
from syncbn.distributed.transforms import TransformedRanks
from syncbn.double_backward import BackwardInput, Gradients
from syncbn.kernels import is_transformed, reference, select_kernels
from syncbn.layout import Layout

Result = TypeVar("Result")


@dataclass(slots=True)
class Call:
    """What the Function keeps of a call besides tensors."""

    layouts: tuple[Layout, ...]  # of the inputs
    eps: float
    relu: bool
    ranks: Ranks


def normalize(prepared: Sequence[Prepared], eps: float, relu: bool, ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """For each input y, normalised by the statistics of all ranks, and these."""
    layouts, masks, per_input = zip(*prepared, strict=True)
    tensors = [tensor for role in zip(*per_input, strict=True) for tensor in role]
    function: Callable[..., tuple[Tensor, ...]] = _EagerFunction.apply
    if torch_private.is_compiling():
        builds_graph = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
        # Without gradients Dynamo (torch 2.13) hands a forward with *args a context, which it does not take.
        function = SyncBatchNormFunction.apply if builds_graph else SyncBatchNormFunction.forward
    elif torch_private.inside_functorch() or torch_private.forward_mode_level() >= 0:
        function = SyncBatchNormFunction.apply
        if is_transformed(*tensors):  # for which torch's operations have rules, and this Function has none
            function, ranks = SyncBatchNormFunction.forward, TransformedRanks(ranks)
    outputs = function(Call(layouts, eps, relu, ranks), *tensors)
    results = []
    for index, mask in enumerate(masks):
        y, statistics = outputs[index :: len(layouts)]
        # Gradients at False places become 0 here on their way in, and in the torch.where of masks.py on their way out.
        results.append((y if mask is None else torch.where(mask, y, 0), statistics))
    return results


class SyncBatchNormFunction(torch.autograd.Function):
    """(call, *xs, *weights, *biases, *residuals, *num_values) -> (*ys, *statistics); as many of each as inputs.

    x is dense; residual has its dtype and lies as it does; num_values () is how many values of a channel of x
    count, where it is not all of them, and the others are 0. The statistics of all ranks, packed as in moments.py, are
    not differentiable.

    Saved for backward: x, weight, the statistics, and y when relu is fused.
    Collectives: one all_reduce of 2C + 1 float64 in forward, one of 2C in backward (two with create_graph=True), and
    the signatures of signatures.py; none when there is nothing to synchronise. A stack of gradients (is_grads_batched,
    vmap) has as many as one gradient. Backward issues its all_reduce whatever needs_input_grad says: another rank may
    need the sums.
    """

    @staticmethod
    def forward(call: Call, *tensors: Any) -> tuple[Tensor, ...]:
        kernels, num_inputs, local = select_kernels(*tensors), len(call.layouts), []
        for index, layout in enumerate(call.layouts):
            x, _, _, _, num_values = tensors[index::num_inputs]
            sums = kernels.channel_sums(x, layout)
            if num_values is not None:
                sums = torch.cat((sums[:-1], num_values.to(torch.float64).view(1)))
            local.append(sums)
        totals = _all_reduce(local, call.ranks, "forward")
        ys: list[Tensor] = []
        statistics: list[Tensor] = []
        for index, (layout, sums) in enumerate(zip(call.layouts, totals, strict=True)):
            x, weight, bias, residual, num_values = tensors[index::num_inputs]
            if num_values is not None or x.numel() <= layout.sizes[1]:  # else this rank alone has two
                require_two_values(sums[-1], x, f"inputs[{index}]: " if num_inputs > 1 else "")
            of_input, coefficients = kernels.forward_coefficients(sums, weight, bias, call.eps, x.dtype)
            ys.append(kernels.normalize(x, layout, coefficients, residual, call.relu))
            statistics.append(of_input)
        return (*ys, *statistics)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        num_inputs = len(ctx.call.layouts)
        xs_and_weights, biases = tensors[: 2 * num_inputs], tensors[2 * num_inputs : 3 * num_inputs]
        ys, statistics = output[:num_inputs], output[num_inputs:]
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*xs_and_weights, *statistics, *(ys if ctx.call.relu else ()))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call, num_inputs, per_input = ctx.call, len(ctx.call.layouts), []
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        for index, layout in enumerate(call.layouts):
            x, weight, statistics, *ys = saved[index::num_inputs]
            needs_x, needs_weight, needs_bias, needs_residual, _ = needed[index::num_inputs]
            dy = grad_outputs[index]
            if dy is None:
                dy = torch.zeros_like(x)
            # saved_tensors_hooks may have rounded or moved what was saved.
            x, *ys, statistics = _as(dy.dtype, x), *[_as(dy.dtype, y) for y in ys], _as(torch.float64, statistics)
            x, dy, y = layout.dense(x), layout.dense(dy), layout.dense(ys[0]) if ys else None
            dtypes = weight.dtype if needs_weight else None, ctx.bias_dtypes[index] if needs_bias else None
            per_input.append(BackwardInput(x, dy, y, layout, weight, statistics, needs_x, needs_residual, *dtypes))
        if torch.is_grad_enabled():  # create_graph=True: the saved statistics are constants to autograd
            results = double_backward.gradients(per_input, call.eps, TransformedRanks(call.ranks))
        else:
            results = gradients(per_input, call.ranks)
        flat = [gradient for role in zip(*results, strict=True) for gradient in role]
        return (None, *flat, *[None] * num_inputs)  # of call and of num_values


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


def gradients(per_input: Sequence[BackwardInput], ranks: Ranks) -> list[Gradients]:
    """Compute the gradients of each input, without a graph. The all_reduce happens whatever is needed."""
    given = [tensor for one in per_input for tensor in (one.x, one.dy, one.y, one.weight, one.statistics)]
    kernels, local, of_parameters = select_kernels(*given), [], []
    if kernels is reference and is_transformed(*given):
        ranks = TransformedRanks(ranks)
    for x, dy, y, layout, _, statistics, _, _, weight_dtype, bias_dtype in per_input:
        sums, grad_weight, grad_bias = kernels.gradient_sums(dy, x, y, layout, statistics, weight_dtype, bias_dtype)
        local.append(sums)
        of_parameters.append((grad_weight, grad_bias))
    totals = _all_reduce(local, ranks, "backward")
    results: list[Gradients] = []
    for index, (x, dy, y, layout, weight, statistics, needs_x, needs_residual, _, _) in enumerate(per_input):
        grad_x, grad_residual = None, dy if needs_residual else None
        relu_masks_residual = needs_residual and y is not None
        if needs_x or relu_masks_residual:
            coefficients = kernels.backward_coefficients(totals[index], statistics, weight, x.dtype)
            grad_x, of_residual = kernels.input_gradient(dy, x, y, layout, coefficients, relu_masks_residual)
            grad_residual = of_residual if relu_masks_residual else grad_residual
        results.append((grad_x, *of_parameters[index], grad_residual))
    return results


def _as(dtype: torch.dtype, saved: Tensor) -> Tensor:
    return saved if saved.dtype == dtype else saved.to(dtype)


def _all_reduce(local: list[Tensor], ranks: Ranks, pass_name: str) -> Sequence[Tensor]:
    """The totals of each of these sums, of one collective."""
    counted = pass_name == "forward"
    if len(local) == 1:
        return [ranks.all_reduce(local[0], pass_name, counted)]
    return torch.split(ranks.all_reduce(torch.cat(local), pass_name, counted), [len(sums) for sums in local])


def _profiled(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """What the function returns; in a range of this name where a profiler records. (record_function costs 10 us.)"""
    if not torch_private.profiler_enabled() or torch_private.is_compiling():
        return function(*arguments)
    with record_function(name):
        return function(*arguments)
