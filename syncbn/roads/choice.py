"""Chooses the side road of a call that is not ordinary, see step.py: first by its tensors, then by how torch runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from syncbn import torch_state
from syncbn.arguments import Arguments
from syncbn.distributed.reduction import ONE_RANK, reduction_of
from syncbn.distributed.side_reductions import Reduction, reduction_in_graph
from syncbn.roads import compiled, other_tensors, traced, transformed, watched


class Road(NamedTuple):
    """The differences between the side roads."""

    reduction_of: Callable[..., Reduction]  # (process group, caller, input) -> the ranks that the call synchronises
    apply: watched.Apply  # of an autograd Function
    moves: bool  # the running statistics


def road_now() -> Road:
    """The side road of a call with plain tensors, as torch is running now."""
    if torch_state.is_compiling():  # a compiled graph leaves what moves out of its recompute by itself
        return Road(reduction_in_graph, compiled.apply, moves=True)
    moves = torch_state.current_backward() == -1  # not in the recompute of activation checkpointing
    if torch_state.is_jit_tracing():
        return Road(traced.refuse_jit_trace, watched.apply, moves)
    if torch_state.inside_functorch() or torch_state.forward_mode_level() >= 0:
        return Road(reduction_of, transformed.apply, moves)
    return Road(reduction_of, watched.apply, moves)


def train(given: Arguments, caller: Any) -> tuple[Tensor, Tensor]:
    """y, and the statistics of all ranks, as step.train."""
    plain, wrap = other_tensors.unwrap(given)
    if plain is not given:
        y, statistics = train(plain, caller)
        return wrap(y), statistics
    road = road_now()
    reduction = road.reduction_of(given.process_group, caller, given.input)
    return watched.train(given, caller, reduction, road.apply, road.moves)


def evaluate(given: Arguments, of_plain: Callable[[Arguments], Tensor]) -> Tensor:
    """Evaluates by `of_plain`, which takes plain tensors; the input is another kind of tensor."""
    plain, wrap = other_tensors.unwrap(given, synchronises=False)
    return wrap(of_plain(plain))


def normalize_local_batch(given: Arguments) -> Tensor:
    """y by the statistics of this rank's batch. The arguments have been checked."""
    return watched.normalize(given, ONE_RANK, road_now().apply)[0]
