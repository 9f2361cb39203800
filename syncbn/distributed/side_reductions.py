"""Adds up over the ranks on the side roads: in a compiled graph, and where torch transforms the computation."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import torch_private
from syncbn.distributed import groups
from syncbn.distributed.group_spec import GroupSpec, OfMesh
from syncbn.distributed.reduction import TRANSFORMED_GRAPH, EagerReduction, NoReduction, joined_group
from syncbn.kernels.plans import NUM_SIGNED


class GraphReduction:
    """The ranks of a group, in a compiled graph, which cannot tell its layer and where nobody reads the total."""

    reads_totals = False

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group  # None for this rank alone

    def total(self, sums: Tensor, pass_name: str, counted: bool = False, error: Exception | None = None) -> Tensor:
        """The totals of `sums`."""
        if self.group is None:
            return sums
        if torch_private.inside_vmap_or_forward_mode():  # Dynamo would lose the total
            raise RuntimeError(TRANSFORMED_GRAPH)
        payload = torch.cat((sums, sums.new_zeros(1 + NUM_SIGNED - counted))) if sums.is_cpu else sums  # unsigned
        dist.all_reduce(payload, group=torch_private.group_in_graph(self.group))
        return payload[: len(sums)]


def reduction_in_graph(spec: GroupSpec | OfMesh, *of_call: Any) -> GraphReduction:
    """The ranks that a call synchronises in a compiled graph, as `reduction_of`. **Raises** RuntimeError where new
    groups would have to be made, and inside syncbn.join."""
    if not dist.is_initialized():  # in graphs of torch 2.11 WORLD itself is never None
        return GraphReduction(None)
    if joined_group() is not None:
        raise RuntimeError("inside syncbn.join nothing may be compiled: leave out torch.compile")
    group = groups.existing(spec)
    if group is None and not isinstance(spec, OfMesh):
        raise RuntimeError(
            f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph; "
            "construct or convert the layers after torch.distributed.init_process_group()"
        )
    return GraphReduction(None if group is None or group.size() == 1 else group)


class DifferentiableReduction:
    """Another reduction, whose totals are differentiable, as often as one likes, and may be batched. For eager mode.

    The sum is linear: its gradient, its tangent and a stack of it are sums over the ranks, too, each one all_reduce.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction: Reduction = reduction
        self.group: dist.ProcessGroup | None = reduction.group
        self.reads_totals: bool = reduction.reads_totals

    def total(self, sums: Tensor, pass_name: str, counted: bool = False, error: Exception | None = None) -> Tensor:
        """One all_reduce of the whole stack where `sums` are batched, by whatever vmap."""
        if self.group is None:
            return sums
        total = _total(sums, self.reduction, pass_name, counted)
        has_graph = counted and torch.is_grad_enabled()
        return torch.cat((total[:-1], total[-1:].detach())) if has_graph else total  # a count is a constant


Reduction: TypeAlias = "NoReduction | EagerReduction | GraphReduction | DifferentiableReduction"


def _total(sums: Tensor, *others: Any) -> Tensor:
    # A batched gradient hides its graph from an autograd Function, the stack does not.
    return torch_private.apply_to_stack(lambda stack: _Total.apply(stack, *others), sums)  # type: ignore[no-untyped-call]


class _Total(torch.autograd.Function):
    """(sums, reduction, pass_name, counted) -> total. The derivatives of a count are 0, and travel in its place."""

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
