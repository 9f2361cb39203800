"""Adds up over the ranks on the side roads: in a compiled graph, and where torch transforms the computation."""

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.kernels.plans import NUM_SIGNED
from syncbn.kernels.select import is_transformed
from syncbn.ranks import groups
from syncbn.ranks.reductions import ONE_RANK, TRANSFORMED_GRAPH, EagerReduction, NoReduction, joined_group
from syncbn.torch_internals.autograd import apply_to_stack
from syncbn.torch_internals.distributed import group_in_graph
from syncbn.torch_internals.state import inside_vmap_or_forward_mode, is_compiling


class GraphReduction:
    """The ranks of a group, in a compiled graph, which cannot tell its layer and where nobody reads the total."""

    num_ranks = None  # which nobody reads, either

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def total(self, sums: Tensor, pass_name: str, counted: bool = False, error: Exception | None = None) -> Tensor:
        """The totals of `sums`."""
        if inside_vmap_or_forward_mode():  # Dynamo would lose the total
            raise RuntimeError(TRANSFORMED_GRAPH)
        payload = torch.cat((sums, sums.new_zeros(1 + NUM_SIGNED - counted))) if sums.is_cpu else sums  # unsigned
        dist.all_reduce(payload, group=group_in_graph(self.group))
        return payload[: len(sums)]


Reduction: TypeAlias = NoReduction | EagerReduction | GraphReduction


def reduction_in_graph(spec: groups.GroupSpec | groups.OfMesh, *of_call: Any) -> Reduction:
    """The ranks that a call synchronises in a compiled graph, as `reduction_of`. **Raises** RuntimeError where new
    groups would have to be made, and inside syncbn.join."""
    if not dist.is_initialized():  # in graphs of torch 2.11 WORLD itself is never None
        return ONE_RANK
    if joined_group() is not None:
        raise RuntimeError(
            "inside syncbn.join and recompute_running_stats nothing may be compiled: leave out torch.compile"
        )
    group = groups.existing(spec)
    if group is None and not isinstance(spec, groups.OfMesh):
        raise RuntimeError(
            f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph; "
            "construct or convert the layers after torch.distributed.init_process_group()"
        )
    return ONE_RANK if group is None or group.size() == 1 else GraphReduction(group)


def totals(local: Sequence[Tensor], reduction: Reduction, pass_name: str, counted: bool = False) -> tuple[Tensor, ...]:
    """The totals of each of these sums, by one all_reduce; `counted` when each ends in n.

    In eager mode with gradients they are differentiable, as often as one likes, and may be batched, by whatever vmap:
    the sum is linear, so that its gradient, its tangent and a stack of it are sums over the ranks, too, each one
    all_reduce.
    """
    sums = torch.cat(tuple(local))
    has_graph = torch.is_grad_enabled() and not is_compiling()
    if reduction.group is None or not (has_graph or is_transformed(sums)):
        total = reduction.total(sums, pass_name, counted)
    else:
        total = _total(sums, reduction, pass_name, counted)
        if counted and has_graph:  # a count is a constant
            total = torch.cat((total[:-1], total[-1:].detach()))
    # Not by torch.split: graphs of torch 2.11 under activation checkpointing can neither save it nor compute it again.
    ends = itertools.accumulate(map(len, local))
    return tuple(total[end - len(one) : end] for one, end in zip(local, ends, strict=True))


def _total(sums: Tensor, *others: Any) -> Tensor:
    # A batched gradient hides its graph from an autograd Function, the stack does not.
    return apply_to_stack(lambda stack: _Total.apply(stack, *others), sums)  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    """(sums, reduction, pass_name, counted) -> total. A count's derivatives are 0, and are sent in its place."""

    @staticmethod
    def forward(sums: Tensor, reduction: Reduction, pass_name: str, counted: bool) -> Tensor:
        return reduction.total(sums.flatten().clone(), pass_name, counted).view_as(sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Reduction, str, bool], output: Tensor) -> None:
        _, *ctx.others = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None, None]:
        reduction, pass_name, counted = ctx.others
        pass_name = "backward" if pass_name == "forward" else "double backward"
        return _total(grad_total, reduction, pass_name, counted), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _total(tangent, *ctx.others)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None, None], sums: Tensor, *others: Any) -> tuple[Tensor, int]:
        return _total(sums, *others), in_dims[0]
