"""Runs the calls whose operators something watches, by operators on the same kernels, with the same bits.

Dispatch modes, profilers and checkpoints watch operators. Calls with a mask, tensors with gaps, negative views or
momentum in a tensor take this road too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from syncbn import argument_errors, double_backward, torch_state
from syncbn.arguments import Arguments, require_two_values
from syncbn.distributed.reduction import EagerReduction, NoReduction
from syncbn.distributed.side_reductions import DifferentiableReduction, Reduction
from syncbn.double_backward import BackwardInput, Gradients
from syncbn.kernels.select import is_transformed, select_kernels
from syncbn.layout import Layout

Result = TypeVar("Result")
Apply: TypeAlias = Callable[..., Any]  # (function, call, *tensors) -> its outputs


@dataclass(slots=True)
class Call:
    """The arguments of the Function that are no tensors."""

    layout: Layout
    eps: float
    relu: bool
    reduction: Reduction


class BatchNorm(torch.autograd.Function):
    """(call, x, weight, bias, residual, num_values) -> y, statistics.

    x is dense; the residual has its dtype, strides and shape. num_values () is the number of values of a channel that
    count, where a mask has set the others to 0. The statistics of all ranks, packed as in moments.py, are not
    differentiable.

    Saved for backward: x, weight, the statistics, and y when relu is fused. Collectives: as the ordinary step's, two in
    backward with create_graph=True. A stack of gradients (is_grads_batched, vmap) has as many as one gradient. Backward
    issues its all_reduce whatever needs_input_grad says: another rank may need the sums.
    """

    @staticmethod
    def forward(
        call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        num_values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kernels = select_kernels(x, weight, bias, residual)
        sums = forward_sums(x, num_values, call.layout)
        total = call.reduction.total(sums, "forward", counted=True)
        may_be_one = num_values is not None or x.numel() <= call.layout.sizes[1]  # else this rank alone has two values
        if call.reduction.reads_totals and may_be_one:
            require_two_values(total[-1], x)
        outputs: tuple[Tensor, Tensor] = kernels.forward_outputs(
            x, call.layout, total, weight, bias, residual, call.eps, call.relu
        )
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, x, weight, bias, _, _ = inputs
        y, statistics = output
        ctx.layout, ctx.eps, ctx.reduction = call.layout, call.eps, call.reduction
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, statistics, y if call.relu else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return None, *backward(ctx, ctx.saved_tensors, ctx.needs_input_grad[1:5], dy), None


def apply(function: type[torch.autograd.Function], call: Any, *tensors: Any) -> Any:
    """The outputs of a Function of a side road."""
    return function.apply(call, *tensors)  # type: ignore[no-untyped-call]


def train(given: Arguments, caller: Any, reduction: Reduction, apply: Apply, moves: bool) -> tuple[Tensor, Tensor]:
    """y, and the statistics of all ranks, as step.train. The running statistics move, or with `moves` False not."""
    try:
        given.check()
        given.check_numbers()
    except Exception as error:  # of whatever class a subclass's _check_input_dim raises
        argument_errors.raise_on_all_ranks(error, [given], reduction)
    y, statistics = _profiled("syncbn.forward", normalize, given, reduction, apply)
    move_running_stats(given, statistics, moves)
    if isinstance(reduction, (NoReduction, EagerReduction)):  # an attribute that changes would compile a graph again
        caller._synchronised_ranks = reduction.num_ranks
    return y, statistics


def normalize(given: Arguments, reduction: Reduction, apply: Apply) -> tuple[Tensor, Tensor]:
    """y and the statistics. The arguments have been checked."""
    layout, mask, tensors = given.prepare()
    y, statistics = apply(BatchNorm, Call(layout, given.eps, bool(given.relu), reduction), *tensors)
    # Gradients at False places become 0 here on their way in, and in the torch.where of masks.py on their way out.
    return y if mask is None else torch.where(mask, y, 0), statistics


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


def backward(ctx: Any, saved: tuple[Any, ...], needed: tuple[bool, ...], dy: Tensor | None) -> Gradients:
    """The gradients of x, weight, bias and residual that are needed; `ctx` belongs to step._Step or to BatchNorm."""
    return _profiled("syncbn.backward", _backward, ctx, saved, needed, dy)


def _backward(ctx: Any, saved: tuple[Any, ...], needed: tuple[bool, ...], dy: Tensor | None) -> Gradients:
    return gradients([backward_input(ctx.layout, dy, saved, needed, ctx.bias_dtype)], ctx.eps, ctx.reduction)[0]


def backward_input(
    layout: Layout, dy: Tensor | None, saved: tuple[Any, ...], needed: tuple[bool, ...], bias_dtype: torch.dtype | None
) -> BackwardInput:
    """The BackwardInput of saved tensors, which saved_tensors_hooks may have rounded or moved."""
    x, weight, statistics, y = saved
    needs_x, needs_weight, needs_bias, needs_residual = needed
    if dy is None:
        dy = torch.zeros_like(x)
    x, y, statistics = _as(dy.dtype, x), None if y is None else _as(dy.dtype, y), _as(torch.float64, statistics)
    return BackwardInput(
        layout.dense(x), layout.dense(dy), None if y is None else layout.dense(y), layout, weight, statistics, needs_x,
        needs_residual, weight.dtype if needs_weight else None, bias_dtype if needs_bias else None,
    )  # fmt: skip


def gradients(inputs: Sequence[BackwardInput], eps: float, reduction: Reduction) -> list[Gradients]:
    """The gradients of each input, with one all_reduce, which happens whichever gradients are needed."""
    if torch.is_grad_enabled():  # create_graph=True: the saved statistics are constants to autograd
        return double_backward.gradients(inputs, eps, DifferentiableReduction(reduction))
    local, grad_weights, grad_biases = zip(*map(backward_sums, inputs), strict=True)
    grad_xs, grad_residuals = zip(*map(backward_outputs, inputs, totals(local, reduction, "backward")), strict=True)
    return list(zip(grad_xs, grad_weights, grad_biases, grad_residuals, strict=True))


def totals(local: Sequence[Tensor], reduction: Reduction, pass_name: str, counted: bool = False) -> tuple[Tensor, ...]:
    """The totals of each of these sums, by one collective; `counted` when each ends in n."""
    if is_transformed(*local) and not isinstance(reduction, DifferentiableReduction):
        reduction = DifferentiableReduction(reduction)
    return torch.split(reduction.total(torch.cat(tuple(local)), pass_name, counted), [*map(len, local)])


def backward_sums(one: BackwardInput) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The local sums, grad_weight and grad_bias."""
    kernels, (x, dy, y, _, statistics) = select_kernels(*one.tensors()), one.tensors()
    sums: tuple[Tensor, Tensor | None, Tensor | None] = kernels.backward_sums(
        dy, x, y, one.layout, statistics, one.weight_dtype, one.bias_dtype
    )
    return sums


def backward_outputs(one: BackwardInput, total: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """grad_x and grad_residual, by the sums of all ranks."""
    kernels, (x, dy, y, weight, statistics) = select_kernels(*one.tensors(), total), one.tensors()
    of_residual = one.needs_residual and y is not None
    if not (one.needs_x or of_residual):
        return None, dy if one.needs_residual else None
    grad_x, grad_residual = kernels.backward_outputs(dy, x, y, one.layout, total, statistics, weight, of_residual)
    return grad_x, grad_residual if of_residual or not one.needs_residual else dy


def _as(dtype: torch.dtype, saved: Tensor) -> Tensor:
    return saved if saved.dtype == dtype else saved.to(dtype)


def _profiled(name: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls the function, in a profiler's range of this name while one records."""
    if not torch_state.profiler_enabled():
        return function(*arguments)
    with record_function(name):
        return function(*arguments)
