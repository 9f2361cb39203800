"""Chooses the side road of a call that is not ordinary, see step.py: first by its tensors, then by how torch runs.

NestedTensors and DTensors are unwrapped, and the output is wrapped again. All calls then run in watched.py; how torch
runs decides the reduction and how the autograd Function is applied.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn import argument_errors
from syncbn.arguments import Arguments
from syncbn.kernels.plans import NO_MEMORY, is_freed
from syncbn.kernels.select import is_transformed
from syncbn.ranks.reductions import reduction_of
from syncbn.ranks.side_reductions import Reduction, reduction_in_graph
from syncbn.roads import dtensors, nested, traced, watched
from syncbn.torch_internals.autograd import is_wrapped
from syncbn.torch_internals.state import PLAIN_CLASSES, current_backward, is_compiling, is_jit_tracing


class Road(NamedTuple):
    """The differences between the side roads."""

    reduction_of: Callable[..., Reduction]  # (process group, caller, input) -> the ranks that the call synchronises
    apply: watched.Apply  # of an autograd Function
    moves: bool  # the running statistics


def road_now() -> Road:
    """The side road of a call with plain tensors, as torch is running now."""
    if is_compiling():  # a compiled graph leaves what moves out of its recompute by itself
        return Road(reduction_in_graph, _apply_in_graph, moves=True)
    moves = current_backward() == -1  # not in the recompute of activation checkpointing
    if is_jit_tracing():
        return Road(traced.refuse_jit_trace, _apply, moves)
    return Road(reduction_of, _apply, moves)


def train(inputs: Sequence[Arguments], caller: Any, fault: Exception | None = None) -> list[tuple[Tensor, Tensor]]:
    """y and the statistics of all ranks, as step.train, for each of these inputs, by one all_reduce. They have eps,
    momentum and relu in common. **Raises** `fault` too, which the caller has found, on every rank."""
    unwrapped = [unwrap(one) for one in inputs]
    plain = [one for one, _ in unwrapped]
    road = road_now()
    reduction = road.reduction_of(plain[0].process_group, caller, plain[0].input)
    try:
        if fault is not None:
            raise fault
        for one in plain:
            one.check()
            _require_one_call(one, plain[0])
            _require_buffers(one)
        plain[0].check_numbers()
    except Exception as error:  # of whatever class a subclass's _check_input_dim raises
        argument_errors.raise_on_all_ranks(error, plain, reduction, "forward")
    results = watched.normalize(plain, reduction, road.apply)
    for one, (_, statistics) in zip(plain, results, strict=True):
        watched.move_running_stats(one, statistics, road.moves)
    if not is_compiling():  # where an attribute that changes would compile a graph again
        caller._synchronised_ranks = reduction.num_ranks
    return [(wrap(y), statistics) for (y, statistics), (_, wrap) in zip(results, unwrapped, strict=True)]


def unwrap(given: Arguments, synchronises: bool = True) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """The arguments with plain tensors in place of NestedTensors or DTensors, and a function that wraps the output as
    the input was. Arguments with any other input are returned themselves."""
    if type(given.input) not in PLAIN_CLASSES:
        if nested.is_jagged(given.input):
            return nested.unwrap(given)
        if dtensors.is_dtensor(given.input):
            return dtensors.unwrap(given, synchronises)
    return given, lambda output: output


def _require_one_call(one: Arguments, first: Arguments) -> None:
    """Raises ValueError unless both inputs are on one device and, as they may be DTensors, belong to the same ranks."""
    device, expected = one.input.device, first.input.device
    if device != expected:
        raise ValueError(f"{one.name}the input is on {device} but inputs[0] on {expected}; move one")
    if one.process_group != first.process_group:
        raise ValueError(
            f"{one.name}the batches of this input and of inputs[0] lie on different ranks, and one or both are "
            "DTensors; call sync_batch_norm for each"
        )


def _require_buffers(given: Arguments) -> None:
    """Raises RuntimeError where a buffer's memory was freed: torch's operations, which may write there, would crash."""
    if not is_compiling():
        for buffer in (given.running_mean, given.running_var, given.counter):
            if type(buffer) is Tensor and not is_wrapped(buffer) and is_freed(buffer):
                raise RuntimeError(NO_MEMORY)


def _apply_in_graph(function: type[torch.autograd.Function], call: Any, *tensors: Any) -> Any:
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        return function.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return function.forward(call, *tensors)  # which Dynamo (torch 2.13) hands a context, if it is applied


def _apply(function: type[torch.autograd.Function], call: Any, *tensors: Any) -> Any:
    """The function has no rules for vmap and forward mode; the operations of its forward have."""
    return (function.forward if is_transformed(*tensors) else function.apply)(call, *tensors)
