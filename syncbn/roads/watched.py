"""Runs batch norm on every side road: by operators on the same kernels, with the same bits, else by torch operations.

Dispatch modes, profilers and checkpoints watch operators. Calls with a mask, tensors with gaps, negative views or
momentum in a tensor take this road too.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from syncbn import double_backward
from syncbn.arguments import Arguments, require_two_values
from syncbn.double_backward import BackwardInput, Gradients
from syncbn.kernels.select import select_kernels
from syncbn.layout import Layout
from syncbn.ranks.side_reductions import Reduction, totals
from syncbn.torch_internals.state import profiler_enabled

Apply: TypeAlias = Callable[..., Any]  # (function, call, *tensors) -> its outputs


@dataclass(slots=True)
class Call:
    """The arguments of the Function that are no tensors."""

    layouts: tuple[Layout, ...]  # of the inputs
    eps: float
    relu: bool
    reduction: Reduction


class BatchNorm(torch.autograd.Function):
    """(call, *xs, *weights, *biases, *residuals, *nums_values) -> (*ys, *statistics), of k independent inputs.

    The tensors stand by role: tensors[index::k] belong to one input. x is dense; the residual has its dtype, strides
    and shape. num_values () is the number of values of a channel that count, where a mask has set the others to 0. The
    statistics of all ranks, packed as in statistics.py, are not differentiable.

    Saved for backward and collectives: as in step._Step; two all_reduces in backward with create_graph=True, whatever k
    is, and for a stack of gradients (is_grads_batched, vmap) as many as for one.
    """

    @staticmethod
    def forward(call: Call, *tensors: Any) -> tuple[Tensor, ...]:
        k = len(call.layouts)
        inputs = [(layout, *tensors[index::k]) for index, layout in enumerate(call.layouts)]
        local = [forward_sums(x, num_values, layout) for layout, x, *_, num_values in inputs]
        ys, statistics = [], []
        for index, total in enumerate(totals(local, call.reduction, "forward", counted=True)):
            layout, x, *parameters, num_values = inputs[index]
            if num_values is not None or x.numel() <= layout.sizes[1]:  # else this rank alone has two values
                require_two_values(total[-1], x, f"inputs[{index}]: " if k > 1 else "")
            kernels = select_kernels(x, *parameters)
            y, of_input = kernels.forward_outputs(x, layout, total, *parameters, call.eps, call.relu)
            ys.append(y)
            statistics.append(of_input)
        return (*ys, *statistics)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *tensors = inputs
        k = len(call.layouts)
        ys, statistics = output[:k], output[k:]
        ctx.layouts, ctx.eps, ctx.reduction = call.layouts, call.eps, call.reduction
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in tensors[2 * k : 3 * k]]
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        residuals = tensors[3 * k : 4 * k]
        kept = [y if call.relu and residual is not None else None for y, residual in zip(ys, residuals, strict=True)]
        ctx.save_for_backward(*tensors[: 2 * k], *statistics, *kept)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        k, saved, needed = len(ctx.layouts), ctx.saved_tensors, ctx.needs_input_grad[1:]
        inputs = [
            backward_input(layout, dys[index], saved[index::k], needed[index : 4 * k : k], ctx.bias_dtypes[index])
            for index, layout in enumerate(ctx.layouts)
        ]
        by_role = zip(*gradients(inputs, ctx.eps, ctx.reduction), strict=True)
        return None, *[gradient for of_role in by_role for gradient in of_role], *[None] * k


def normalize(inputs: Sequence[Arguments], reduction: Reduction, apply: Apply) -> list[tuple[Tensor, Tensor]]:
    """y and the statistics of each of these inputs. The arguments have been checked."""
    with _profiled("syncbn.forward"):
        layouts, masks, of_inputs = zip(*[one.prepare() for one in inputs], strict=True)
        call = Call(layouts, inputs[0].eps, bool(inputs[0].relu), reduction)
        outputs = apply(BatchNorm, call, *[tensor for of_role in zip(*of_inputs, strict=True) for tensor in of_role])
        # Gradients at False places become 0 here on their way in, and in the torch.where of masks.py on their way out.
        ys = [y if mask is None else torch.where(mask, y, 0) for y, mask in zip(outputs, masks, strict=False)]
    return list(zip(ys, outputs[len(inputs) :], strict=True))


def move_running_stats(given: Arguments, statistics: Tensor, moves: bool) -> None:
    """Move the running statistics by those of a batch, and count it; with `moves` False, as in the recompute of
    activation checkpointing, only run the same operators."""
    running_mean, running_var, momentum, counter = given.running_mean, given.running_var, given.momentum, given.counter
    if momentum is None and counter is not None:  # the average of all batches, without waiting for a GPU
        momentum = 1.0 / (counter + 1).to(torch.float64)
    if running_mean is not None and running_var is not None:
        kernels = select_kernels(running_mean, running_var, statistics)
        kernels.update_running_stats(running_mean, running_var, statistics, momentum, moves)
    if counter is not None and moves:
        counter.add_(1)


def forward_sums(x: Tensor, num_values: Tensor | None, layout: Layout) -> Tensor:
    """The local sums of x, and the number of values that count."""
    sums: Tensor = select_kernels(x).forward_sums(x, layout)
    return sums if num_values is None else torch.cat((sums[:-1], num_values.to(torch.float64).view(1)))


def backward_input(
    layout: Layout, dy: Tensor | None, saved: tuple[Any, ...], needed: tuple[bool, ...], bias_dtype: torch.dtype | None
) -> BackwardInput:
    """The BackwardInput of saved tensors, which saved_tensors_hooks may have rounded or moved."""
    x, weight, statistics, y = saved
    needs_x, needs_weight, needs_bias, needs_residual = needed
    if dy is None:
        dy = torch.zeros_like(x)
    x, y = layout.dense(x.to(dy.dtype)), None if y is None else layout.dense(y.to(dy.dtype))
    return BackwardInput(
        x, layout.dense(dy), y, layout, weight, statistics.to(torch.float64).contiguous(), needs_x,
        needs_residual, weight.dtype if needs_weight else None, bias_dtype if needs_bias else None,
    )  # fmt: skip


def gradients(inputs: Sequence[BackwardInput], eps: float, reduction: Reduction) -> list[Gradients]:
    """The gradients of each input, with one all_reduce, which happens whichever gradients are needed."""
    with _profiled("syncbn.backward"):
        if torch.is_grad_enabled():  # create_graph=True: the saved statistics are constants to autograd
            return double_backward.gradients(inputs, eps, reduction)
        local, grad_weights, grad_biases = zip(*map(backward_sums, inputs), strict=True)
        total = totals(local, reduction, "backward")
        grad_xs, grad_residuals = zip(*map(backward_outputs, inputs, total), strict=True)
        return list(zip(grad_xs, grad_weights, grad_biases, grad_residuals, strict=True))


def backward_sums(one: BackwardInput) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The local sums, grad_weight and grad_bias."""
    x, dy, y, layout, weight, statistics, *_ = one
    kernels = select_kernels(x, dy, y, weight, statistics)
    return kernels.backward_sums(dy, x, y, layout, statistics, one.weight_dtype, one.bias_dtype)  # type: ignore[no-any-return]


def backward_outputs(one: BackwardInput, total: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """grad_x and grad_residual, by the sums of all ranks."""
    x, dy, y, layout, weight, statistics, *_ = one
    of_residual = one.needs_residual and y is not None
    if not (one.needs_x or of_residual):
        return None, dy if one.needs_residual else None
    kernels = select_kernels(x, dy, y, weight, statistics, total)
    grad_x, grad_residual = kernels.backward_outputs(dy, x, y, layout, total, statistics, weight, of_residual)
    return grad_x, dy if one.needs_residual and y is None else grad_residual


def _profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """A profiler's range of this name while one records."""
    return torch.profiler.record_function(name) if profiler_enabled() else contextlib.nullcontext()
