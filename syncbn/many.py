"""Normalises several independent inputs, whose passes share one all_reduce each way.

The Function takes the tensors of k inputs by role, (*xs, *weights, ...): tensors[index::k] belong to one input.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncbn import argument_errors, step
from syncbn.arguments import Arguments, require_two_values
from syncbn.distributed.group_spec import ProcessGroupLike, to_spec
from syncbn.distributed.reduction import ONE_RANK, Caller
from syncbn.distributed.side_reductions import Reduction
from syncbn.kernels.select import select_kernels
from syncbn.layout import Layout
from syncbn.roads import choice, other_tensors, watched

_SYNC_BATCH_NORM_MANY = Caller("sync_batch_norm_many")


def sync_batch_norm_many(
    inputs: Iterable[Tensor],
    running_means: Iterable[Tensor | None] | None = None,
    running_vars: Iterable[Tensor | None] | None = None,
    weights: Iterable[Tensor | None] | None = None,
    biases: Iterable[Tensor | None] | None = None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    process_group: ProcessGroupLike = None,
    *,
    channel_dim: int = 1,
) -> list[Tensor]:
    r"""`sync_batch_norm` of each of k independent inputs, with one all_reduce for all of them each way.

    It equals k calls, each input with statistics, buffers and parameters of its own; use it for detection heads over
    several pyramid levels, siamese views and the like. The all_reduces carry the bytes of k calls together, so it saves
    latency. There is no all_reduce in evaluation, with one rank or without a process group. All ranks must pass the
    same number of inputs.

    Args:
        inputs: k tensors as `sync_batch_norm` takes them, on one device; their shapes and channels may differ.
        running_means, running_vars, weights, biases: k tensors (C,) or None each; None for none at all.
        training, momentum, eps, process_group, channel_dim: as in `sync_batch_norm`, for all inputs.

    Returns:
        k tensors of the inputs' shapes, dtypes and memory formats.

    Raises:
        ValueError, TypeError: as `sync_batch_norm`, with the index of the input. (If the ranks pass different numbers
            of inputs, gloo aborts them.)

    >>> levels = [torch.tensor([[1.0], [3.0]]), torch.tensor([[10.0, 0.0], [30.0, 0.0]])]
    >>> sync_batch_norm_many(levels)[1]
    tensor([[-1.0000,  0.0000],
            [ 1.0000,  0.0000]])
    """
    lists = {"running_means": running_means, "running_vars": running_vars, "weights": weights, "biases": biases}
    xs = _as_list("inputs", inputs)
    roles: dict[str, list[Any]] = {
        name: [None] * len(xs) if one is None else _as_list(name, one) for name, one in lists.items()
    }
    spec = to_spec(process_group) if training else None
    given = [
        Arguments(x, mean, var, weight, bias, momentum, eps, channel_dim, process_group=spec, name=f"inputs[{index}]: ")
        for index, (x, mean, var, weight, bias) in enumerate(itertools.zip_longest(xs, *roles.values()))
    ][: len(xs)]
    unwrapped = [other_tensors.unwrap(one, synchronises=training) for one in given]
    plain = [one for one, _ in unwrapped]
    road = choice.road_now()
    reduction: Reduction = ONE_RANK
    if training:
        of_first = plain[0].process_group if plain else spec
        reduction = road.reduction_of(of_first, _SYNC_BATCH_NORM_MANY, xs[0] if xs else None)
    try:
        _check_lists(xs, roles)
        _check_groups(plain)
    except ValueError as error:
        argument_errors.raise_on_all_ranks(error, plain, reduction)
    if not training:
        for one in plain:
            one.require_running_stats()
        return [wrap(step.evaluate(one)) for one, wrap in unwrapped]
    results = _train(plain, road, reduction) if xs else []
    return [wrap(output) for output, (_, wrap) in zip(results, unwrapped, strict=True)]


def _train(inputs: list[Arguments], road: choice.Road, reduction: Reduction) -> list[Tensor]:
    """The output of each input; its running statistics move."""
    name = ""
    try:
        for one in inputs:
            name = one.name
            one.check()
        name = ""
        inputs[0].check_numbers()  # all inputs share them
    except Exception as error:  # of whatever class a tensor subclass raises
        argument_errors.raise_on_all_ranks(error, inputs, reduction, name)
    layouts, _, per_input = zip(*[one.prepare() for one in inputs], strict=True)
    xs, weights, biases, *_ = zip(*per_input, strict=True)
    tensors = *xs, *weights, *biases
    outputs = road.apply(_BatchNorms, _Call(layouts, inputs[0].eps, reduction), *tensors)
    for one, statistics in zip(inputs, outputs[len(inputs) :], strict=True):
        watched.move_running_stats(one, statistics, road.moves)
    return list(outputs[: len(inputs)])


@dataclass(slots=True)
class _Call:
    """The arguments of the Function that are no tensors."""

    layouts: tuple[Layout, ...]  # of the inputs
    eps: float
    reduction: Reduction


class _BatchNorms(torch.autograd.Function):
    """(call, *xs, *weights, *biases) -> (*ys, *statistics), each input as in watched.BatchNorm."""

    @staticmethod
    def forward(call: _Call, *tensors: Any) -> tuple[Tensor, ...]:
        kernels, xs = select_kernels(*tensors), tensors[: len(call.layouts)]
        local = [kernels.forward_sums(x, layout) for x, layout in zip(xs, call.layouts, strict=True)]
        totals = watched.totals(local, call.reduction, "forward", counted=True)
        ys, statistics = [], []
        for index, (layout, total) in enumerate(zip(call.layouts, totals, strict=True)):
            x, weight, bias = tensors[index :: len(xs)]
            if call.reduction.reads_totals and x.numel() <= layout.sizes[1]:  # else this rank alone has two values
                require_two_values(total[-1], x, f"inputs[{index}]: " if len(xs) > 1 else "")
            y, of_input = kernels.forward_outputs(x, layout, total, weight, bias, None, call.eps, False)
            ys.append(y)
            statistics.append(of_input)
        return (*ys, *statistics)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        num_inputs = len(ctx.call.layouts)
        statistics = output[num_inputs:]
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in tensors[2 * num_inputs :]]
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[: 2 * num_inputs], *statistics)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call, saved, needed = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        num_inputs = len(call.layouts)
        inputs = [
            watched.backward_input(
                layout, grad_outputs[index], (*saved[index::num_inputs], None), (*needed[index::num_inputs], False),
                ctx.bias_dtypes[index],
            )
            for index, layout in enumerate(call.layouts)
        ]  # fmt: skip
        results = watched.gradients(inputs, call.eps, call.reduction)
        grad_xs, grad_weights, grad_biases, _ = zip(*results, strict=True)
        return None, *grad_xs, *grad_weights, *grad_biases


def _as_list(name: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, Tensor):
        raise TypeError(f"expected {name} to be a list of tensors, got one tensor; use {name}.unbind()")
    return list(given)


def _check_groups(arguments: list[Arguments]) -> None:
    """Raises ValueError unless all inputs, of which some may be DTensors, are synchronised over the same ranks."""
    for one in arguments:
        if one.process_group != arguments[0].process_group:
            raise ValueError(
                f"{one.name}the batches of this input and of inputs[0] lie on different ranks, and one or both are "
                "DTensors; call sync_batch_norm for each"
            )


def _check_lists(xs: list[Tensor], roles: dict[str, list[Any]]) -> None:
    """Raises ValueError unless the other lists are as long as that of the inputs, which are on one device."""
    for name, role in roles.items():
        if len(role) != len(xs):
            raise ValueError(f"expected {len(xs)} {name}, one for each input, got {len(role)}")
    devices = [x.device for x in xs if isinstance(x, Tensor)]
    for index, device in enumerate(devices):
        if device != devices[0]:
            raise ValueError(f"inputs[{index}]: the input is on {device} but inputs[0] on {devices[0]}; move one")
