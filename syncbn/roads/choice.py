"""Chooses the side road of a call that is not ordinary, see step.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from syncbn import torch_state
from syncbn.arguments import Arguments
from syncbn.distributed import groups, side_reductions
from syncbn.distributed.reduction import ONE_RANK
from syncbn.distributed.side_reductions import Reduction
from syncbn.roads import compiled, other_tensors, traced, transformed, watched

if TYPE_CHECKING:
    from syncbn.distributed.group_spec import GroupSpec, OfMesh


def train(given: Arguments, caller: Any) -> tuple[Tensor, Tensor]:
    """y, and the statistics of all ranks, as step.train."""
    plain, wrap = other_tensors.unwrap(given)
    if plain is not given:
        y, statistics = train(plain, caller)
        return wrap(y), statistics
    return watched.train(
        given, caller, reduction_now(given.process_group, caller, given.input), apply_now(), moves_now()
    )


def evaluate(given: Arguments, of_plain: Callable[[Arguments], Tensor]) -> Tensor:
    """`of_plain` of plain tensors, for an input that is none."""
    plain, wrap = other_tensors.unwrap(given, synchronises=False)
    return wrap(of_plain(plain))


def normalize_local_batch(given: Arguments) -> Tensor:
    """y by the statistics of this rank's batch, of arguments that have been checked."""
    return watched.normalize(given, ONE_RANK, apply_now())[0]


def apply_now() -> watched.Apply:
    """How a Function of a side road is applied, as torch is running now."""
    if torch_state.is_compiling():
        return compiled.apply
    is_transformed = torch_state.inside_functorch() or torch_state.forward_mode_level() >= 0
    return transformed.apply if is_transformed else watched.apply


def moves_now() -> bool:
    """Whether running statistics move: not in the recompute of activation checkpointing, but always in a compiled
    graph, which leaves the writes out of its recompute by itself."""
    return torch_state.is_compiling() or torch_state.current_backward() == -1


def reduction_now(spec: GroupSpec | OfMesh, caller: Any, input: Any) -> Reduction:
    """The ranks that a call synchronises, as torch is running now."""
    if torch_state.is_compiling():
        return side_reductions.reduction_in_graph(spec)
    if torch_state.is_jit_tracing():
        traced.refuse_jit_trace()
    return groups.reduction_of(spec, caller, input)
