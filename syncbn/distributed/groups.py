"""Resolves, for each call of a layer, its specification to the process group that it means now."""

from __future__ import annotations

import functools
import os
import warnings
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from syncbn import torch_private, tracing
from syncbn.diagnosis import call_sites
from syncbn.distributed import new_groups
from syncbn.distributed.collectives import Ranks, interceptors
from syncbn.distributed.specification import OfMesh, own_group

if TYPE_CHECKING:
    from syncbn.distributed.specification import Specification


def make_groups(spec: Specification) -> None:
    """Make the groups that an int or "node" needs: a collective over ALL ranks of the default group, once for each."""
    if isinstance(spec, (int, str)):
        new_groups.make(spec)


def begin_call(spec: Specification | OfMesh, caller: nn.Module | str, input: Tensor | None) -> Ranks:
    """Count a call of a layer, or of the function of this name; the ranks that it synchronises. See `resolve`."""
    if torch_private.is_jit_tracing():
        tracing.refuse_jit_trace()
    group = resolve(spec)
    return Ranks(group, None if group is None else call_sites.new_call(caller, group, input))


def resolve(spec: Specification | OfMesh) -> dist.ProcessGroup | None:
    """The group to synchronise over now; None for a group of one rank, and when there is no process group.

    The first call with an int or "node" makes the groups. **Raises** RuntimeError when that would happen inside a
    compiled graph; ValueError for a part of the ranks inside syncbn.join; and as `own_group`.
    """
    group = existing(spec)
    if group is None:
        if isinstance(spec, OfMesh):
            return None
        compiling = torch_private.is_compiling()
        if not dist.is_initialized():
            if not compiling:
                _warn_if_launched_on_several_ranks()
            return None
        if compiling:
            raise RuntimeError(
                f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph; "
                "construct or convert the layers after torch.distributed.init_process_group()"
            )
        make_groups(spec)
        group = existing(spec)
        assert group is not None
    if group.size() == 1:
        return None
    for interceptor in interceptors:
        if interceptor.joined_group is not None:
            return _joined(group, interceptor.joined_group, spec)
    return group


def _joined(group: dist.ProcessGroup, joined: dist.ProcessGroup, spec: object) -> dist.ProcessGroup:
    if group.size() < joined.size():
        raise ValueError(
            f"inside syncbn.join every layer must synchronise over all {joined.size()} ranks, not over {group.size()} "
            f"(process_group={spec!r}); set process_group=None"
        )
    return joined


def existing(spec: Specification | OfMesh) -> dist.ProcessGroup | None:
    """The group that `spec` means; None when it is not made yet or there is no process group. Communicates nothing.

    **Raises** as `own_group`.
    """
    if spec is None:  # in graphs of torch 2.11 WORLD itself is never None
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(spec, (int, str)):
        return new_groups.made(spec)
    if isinstance(spec, OfMesh):
        return spec.group
    return own_group(spec)


@functools.cache
def _warn_if_launched_on_several_ranks() -> None:
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        warnings.warn(
            f"syncbn is not synchronising: WORLD_SIZE is {world_size} but torch.distributed has no process group. "
            "Call torch.distributed.init_process_group() before the first training step.",
            stacklevel=2,
        )
