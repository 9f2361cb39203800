"""Finds, for each call of a layer, the ranks that its process group means now."""

from __future__ import annotations

import functools
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from syncbn.distributed import new_groups, reduction
from syncbn.distributed.group_spec import OfMesh, own_group
from syncbn.distributed.reduction import ONE_RANK, EagerReduction, NoReduction

if TYPE_CHECKING:
    from syncbn.distributed.group_spec import GroupSpec


def reduction_of(spec: GroupSpec | OfMesh, caller: Any, input: Any) -> NoReduction | EagerReduction:
    """The ranks that a call of a layer or a `Caller` synchronises in eager mode; counts the call. See `resolve`."""
    group = dist.group.WORLD if spec is None else existing(spec)
    if group is None and spec is None:
        _warn_if_launched_on_several_ranks()
        return ONE_RANK
    site = caller._call_site
    # Unless the site of the last call still fits; a guard may bring a group of its own.
    if group is None or site is None or site.group() is not group or site.caller() is not caller or reduction.guards:
        group = resolve(spec)
        if group is None:
            return ONE_RANK
        site = caller._call_site = reduction.diagnosis.new_site(caller, group)
    assert group is not None
    return EagerReduction(group, site, getattr(input, "dtype", None))


def resolve(spec: GroupSpec | OfMesh) -> dist.ProcessGroup | None:
    """The group to synchronise over now; None for a group of one rank, and when there is no process group.

    The first call with an int or "node" makes the groups. **Raises** ValueError for a part of the ranks inside
    syncbn.join; and as `own_group`.
    """
    group = existing(spec)
    if group is None and not isinstance(spec, OfMesh):
        if not dist.is_initialized():
            _warn_if_launched_on_several_ranks()
            return None
        make_groups(spec)
        group = existing(spec)
    if group is None or group.size() == 1:
        return None
    joined = reduction.joined_group()
    if joined is not None and group.size() < joined.size():
        raise ValueError(
            f"inside syncbn.join every layer must synchronise over all {joined.size()} ranks, not over {group.size()} "
            f"(process_group={spec!r}); set process_group=None"
        )
    return joined or group


def make_groups(spec: GroupSpec) -> None:
    """Make the groups that an int or "node" needs: a collective over ALL ranks of the default group, once for each."""
    if isinstance(spec, (int, str)):
        new_groups.make(spec)


def existing(spec: GroupSpec | OfMesh) -> dist.ProcessGroup | None:
    """The group that `spec` means; None when it is not made yet or there is no process group. Communicates nothing.

    **Raises** as `own_group`.
    """
    if spec is None:
        return dist.group.WORLD
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
