"""Tells which and how many ranks a group spec means, without communication."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from syncbn.distributed import new_groups
from syncbn.distributed.group_spec import GlobalRanks, includes_this_rank
from syncbn.distributed.groups import existing

if TYPE_CHECKING:
    from syncbn.distributed.group_spec import GroupSpec


def world() -> dist.ProcessGroup | None:
    """The default group; None where it is one rank, or there is none."""
    default_group = dist.group.WORLD
    return None if default_group is None or default_group.size() == 1 else default_group


def ranks_of(spec: GroupSpec) -> list[int]:
    """The global ranks that `spec` means, this one alone where its group is not made yet or without it."""
    group = existing(spec) if includes_this_rank(spec) else None
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def size(spec: GroupSpec) -> int:
    """How many ranks `spec` means, also before its group is made; 1 without a process group, 0 without this rank."""
    if dist.group.WORLD is None:
        return 1
    if isinstance(spec, int):
        return spec
    if not includes_this_rank(spec):
        return 0
    if isinstance(spec, GlobalRanks):
        return len(spec.ranks)
    group = existing(spec)
    if group is not None:
        return group.size()
    return new_groups.ranks_per_host([(os.environ.get("LOCAL_WORLD_SIZE"), None)] * dist.get_world_size())


def of_torch(spec: GroupSpec) -> Any:
    """What an nn.SyncBatchNorm holds for `spec`. **Raises** RuntimeError where its group does not exist."""
    if dist.group.WORLD is None or spec is None:
        return None
    return existing(spec) if includes_this_rank(spec) else dist.GroupMember.NON_GROUP_MEMBER
