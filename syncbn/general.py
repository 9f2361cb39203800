"""Runs the training calls that are not ordinary, by operators on the same kernels, else by torch's operations.

They are those in a compiled graph or an exported program; under a dispatch mode, a profiler or a transform of
torch.func; with a momentum in a tensor or a bad argument; and those of machines without kernels. The results have the
same bits where operators run, else they are the same up to rounding. Each pass sends the same all_reduce as the
ordinary one, so that ranks which differ in this still fit together. gradients.py has the backward.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from syncbn.arguments import Arguments, require_two_values
from syncbn.diagnosis.positions import CallsOnGroups
from syncbn.gradients import gradients
from syncbn.inputs import masks, traced
from syncbn.inputs.unwrapping import unwrap, without_gaps
from syncbn.kernels.interface import TRAILER_NUMBERS, Kind
from syncbn.kernels.select import general_kernels, is_transformed, why_forced
from syncbn.plan import kind_of
from syncbn.reductions.eager import Reduction, reduction_of
from syncbn.reductions.graph import reduction_in_graph
from syncbn.reductions.totals import total
from syncbn.statistics import lacks_float64, to_float64, update_buffers
from syncbn.torch_internals.autograd import innermost
from syncbn.torch_internals.state import current_backward, inside_vmap, is_compiling, is_jit_tracing, recorded


def train(arguments: Arguments, caller: CallsOnGroups) -> tuple[Tensor, Tensor]:
    """y, and the statistics of all ranks, as ordinary.train."""
    arguments, wrap = unwrap(arguments)
    reduction = reduction_now(arguments, caller)
    try:
        check(arguments)
        arguments.check_numbers()
    except Exception as error:  # of whatever class a subclass's _check_input_dim raises
        raise_on_all_ranks(error, arguments, reduction, "forward")
    y, statistics = normalize(arguments, reduction)
    finish(arguments, statistics, caller, reduction)
    return wrap(y), statistics


def reduction_now(arguments: Arguments, caller: CallsOnGroups) -> Reduction:
    """The ranks that a call with these unwrapped arguments synchronises, as torch is running now."""
    if is_compiling():
        return reduction_in_graph(arguments.process_group, caller, arguments.input)
    if is_jit_tracing():
        traced.refuse_jit_trace()
    return reduction_of(arguments.process_group, caller, arguments.input)


def check(arguments: Arguments) -> None:
    """**Raises** unless a step with these unwrapped arguments can be completed, once the other ranks have taken part;
    but for its numbers."""
    arguments.check()
    arguments.check_memory()
    arguments.check_saved()
    if not is_compiling():
        why_forced()


def finish(arguments: Arguments, statistics: Tensor, caller: CallsOnGroups, reduction: Reduction) -> None:
    """Update the running statistics, count the batch, and note over how many ranks the layer was synchronised. In the
    recompute of activation checkpointing nothing is updated, but the same operators run."""
    updates = is_compiling() or current_backward() == -1  # a graph leaves updates out of its recompute by itself
    buffers = arguments.running_mean, arguments.running_var, arguments.counter
    update_buffers(*buffers, statistics, arguments.momentum, updates)
    note_ranks(caller, reduction)


def note_ranks(caller: CallsOnGroups, reduction: Reduction) -> None:
    """Note over how many ranks the layer was synchronised."""
    if not is_compiling():  # where an attribute that changes would compile a graph again
        object.__setattr__(caller, "_synchronised_ranks", reduction.num_ranks)  # a layer's own may refuse


def normalize(arguments: Arguments, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """y and the statistics. The arguments are plain tensors and have been checked."""
    with recorded("syncbn.forward"), reduction.telling_errors("forward"):
        arguments, apply_mask = masks.apply(arguments)
        arguments = without_gaps(arguments)
        call = Call(kind_of(arguments), reduction)
        tensors = arguments.input, arguments.weight, arguments.bias, arguments.z, arguments.num_values
        y, statistics = apply(SyncBatchNormFunction, call, *tensors)
        return apply_mask(y), statistics


@dataclass(slots=True)
class Call:
    """The arguments of the Function that are no tensors."""

    kind: Kind
    reduction: Reduction


class SyncBatchNormFunction(torch.autograd.Function):
    """(call, x, weight, bias, residual, num_values) -> y, statistics.

    x has no gaps; the residual has its dtype, strides and shape. num_values () is the number of values of a channel
    that count, where a mask has set the others to 0. The statistics of all ranks, packed as in statistics.py, are not
    differentiable.

    Saved for backward and collectives: as in ordinary._Step; two all_reduces in backward with create_graph=True, and
    for a stack of gradients (is_grads_batched, vmap) as many as for one.
    """

    @staticmethod
    def forward(
        call: Call, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        num_values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kernels = general_kernels(call.kind, x, weight, bias, residual)
        sums, handle = kernels.forward_sums(x)
        sums = total_of_all(sums, num_values, call.reduction)
        if num_values is not None or x.numel() <= call.kind.layout.sizes[1]:  # else this rank alone has two values
            require_two_values(sums[-TRAILER_NUMBERS], x)
        y, statistics, _ = kernels.forward_outputs(handle, x, sums, weight, bias, residual)
        return y, statistics

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, x, weight, _, residual, _ = inputs
        y, statistics = output
        ctx.kind, ctx.reduction = call.kind, call.reduction
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, statistics, y if call.kind.relu and residual is not None else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:5]
        with ctx.reduction.telling_errors("backward"):
            return None, *gradients(ctx.kind, dy, ctx.saved_tensors, needed, ctx.reduction), None


def total_of_all(sums: Tensor, num_values: Tensor | None, reduction: Reduction) -> Tensor:
    """The totals of a forward's sums, with `num_values` in the place of n where a mask has counted them."""
    if num_values is not None:
        trailer = -TRAILER_NUMBERS
        sums = torch.cat((sums[:trailer], to_float64(num_values).view(1), sums[trailer + 1 :]))
    return total(sums, reduction, "forward")


def apply(function: type[torch.autograd.Function], call: object, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The outputs of an autograd Function whose first argument is no tensor.

    It has no rules for vmap and forward mode; the operations of its forward have. And in a graph without gradients
    Dynamo (torch 2.13) would hand the forward a context.
    """
    if is_compiling():
        differentiates = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    else:
        differentiates = not is_transformed(*tensors)
    run = function.apply if differentiates else function.forward
    outputs: tuple[Tensor, ...] = run(call, *tensors)  # type: ignore[no-untyped-call]
    return outputs


def raise_on_all_ranks(error: Exception, arguments: Arguments, reduction: Reduction, pass_name: str) -> NoReturn:
    """Join the all_reduce of the others as a faulty rank, and raise `error` on every rank.

    Only this rank raises on a GPU, in a compiled graph, in a trace of torch.fx, and where the arguments do not tell how
    many numbers the others send. In eager mode its position then has the error.
    """
    traced.refuse_proxies(arguments)
    num_channels, device = _likely_channels(arguments), _device_of(arguments)
    if not reduction.is_read or num_channels is None or not (device.type == "cpu" or lacks_float64(device)):
        reduction.leave_out(error, pass_name)
        raise error  # no rank would read the mark
    sums = torch.zeros(2 * num_channels + TRAILER_NUMBERS, dtype=torch.float64)
    if inside_vmap() and isinstance(x := arguments.input, Tensor):  # the others send a stack
        sums = x.new_zeros(len(sums), dtype=torch.float64, device=sums.device)
    sums[-TRAILER_NUMBERS] = math.nan
    reduction.total(innermost(sums).flatten(), pass_name, error)
    raise AssertionError("internal error: no rank reported the bad argument") from error


def _likely_channels(arguments: Arguments) -> int | None:
    """The number of channels that most arguments have, as one of them is wrong; None if nothing tells it."""
    votes = [tensor.numel() for tensor in arguments.per_channel().values() if isinstance(tensor, Tensor)]
    if not votes and arguments.num_channels:
        return arguments.num_channels
    with contextlib.suppress(Exception):  # no tensor, no such dim, or one whose sizes differ
        votes.append(int(arguments.input.shape[arguments.channel_dim]))
    return max(votes, key=votes.count, default=None)  # the first of equals: a per-channel tensor's


def _device_of(arguments: Arguments) -> torch.device:
    """The device of the first argument that is a tensor."""
    tensors = (*arguments.per_channel().values(), arguments.input)
    return next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), torch.device("cpu"))
