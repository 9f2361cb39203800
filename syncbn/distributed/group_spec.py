"""Turns what a user passes as `process_group` into the group spec that a layer keeps.

A layer keeps a spec and not the group itself, so that it can be copied, pickled and saved. One of
    None          the default group, looked up at each call
    int k         k consecutive ranks: 0..k-1, k..2k-1, ...
    "node"        the ranks of one host: LOCAL_WORLD_SIZE consecutive ranks
    DeviceMesh    a mesh of one dim
    ProcessGroup  kept as `GlobalRanks`: its global ranks and a handle that deepcopy shares and pickle drops

`to_user` gives back what the user passed. A group that this rank is not in may be kept too: training raises.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from syncbn import torch_private

GroupSpec: TypeAlias = "int | str | GlobalRanks | DeviceMesh | None"  # what a layer keeps
ProcessGroupLike: TypeAlias = "dist.ProcessGroup | GroupSpec"  # what a user passes


class GlobalRanks:
    """A ProcessGroup as its global ranks and a handle that deepcopy shares and pickle drops, to be looked up again.

    torch gives a rank that is not in a new group GroupMember.NON_GROUP_MEMBER: no ranks.
    """

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None = None) -> None:
        self.ranks = ranks
        self.handle = handle

    def __deepcopy__(self, memo: dict[int, object]) -> GlobalRanks:
        return self

    def __reduce__(self) -> tuple[type[GlobalRanks], tuple[tuple[int, ...]]]:
        return GlobalRanks, (self.ranks,)

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}" if self.ranks else "a group without this rank"

    def group(self) -> dist.ProcessGroup | None:
        """The handle; after unpickling, or when its group was destroyed, the oldest group of exactly these ranks, if
        there is one."""
        existing_groups = torch_private.existing_groups()
        if self.handle not in existing_groups:
            same = (group for group in existing_groups if _ranks_of(group) == self.ranks)
            self.handle = next(same, None)
        return self.handle


class OfMesh(NamedTuple):
    """The group that the mesh of a DTensor gives in place of a spec; None for this rank alone."""

    group: dist.ProcessGroup | None


THIS_RANK_ALONE = OfMesh(None)


def to_spec(process_group: ProcessGroupLike) -> GroupSpec:
    """The spec that a layer keeps for `process_group`. Communicates nothing.

    **Raises** TypeError for anything that is not a spec; ValueError for an int below 1, a string other than
    "node", a mesh of several dims, and a group that was destroyed.
    """
    if process_group is None or isinstance(process_group, GlobalRanks) or process_group == "node":
        return process_group
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return GlobalRanks(())
    if isinstance(process_group, int) and not isinstance(process_group, bool):
        if process_group < 1:
            raise ValueError(f"process_group={process_group}: an int is the number of ranks per group, at least 1")
        return process_group
    if isinstance(process_group, dist.ProcessGroup):
        if process_group not in torch_private.existing_groups():
            raise ValueError("process_group was destroyed; pass one that exists, or None for the default group")
        return GlobalRanks(_ranks_of(process_group), process_group)
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {process_group.ndim} dims, expected 1; select one of "
                f'{process_group.mesh_dim_names or "its dims"} by its name: mesh["name"]'
            )
        return process_group
    raise TypeError(
        'process_group must be None, a ProcessGroup, an int (ranks per group), "node" or a 1-D DeviceMesh, '
        f"got {process_group!r} of type {type(process_group).__name__}"
    )


def to_user(spec: GroupSpec) -> ProcessGroupLike:
    """The process group as the user passed it; `spec` itself for a ProcessGroup that does not exist here."""
    if not isinstance(spec, GlobalRanks):
        return spec
    return (spec.group() or spec) if spec.ranks else dist.GroupMember.NON_GROUP_MEMBER


def includes_this_rank(spec: GroupSpec) -> bool:
    """Whether this rank is in the group."""
    if isinstance(spec, GlobalRanks):
        return bool(spec.ranks)
    return spec is None or isinstance(spec, (int, str)) or spec.get_coordinate() is not None


def own_group(spec: GlobalRanks | DeviceMesh) -> dist.ProcessGroup:
    """The group of a layer that has its own; never falls back to another group or to local statistics.

    **Raises** RuntimeError where it does not exist, as when it was destroyed; ValueError where this rank is not in it.
    """
    group: dist.ProcessGroup | None = None
    if isinstance(spec, GlobalRanks):
        group = spec.group()
    else:
        try:
            group = spec.get_group()
        except (RuntimeError, IndexError):  # it was destroyed; this rank is not in it
            group = None
    if group is None and not includes_this_rank(spec):
        raise ValueError(
            f"this rank is not in the layer's process_group ({spec}) and cannot train it; set layer.process_group on "
            "each rank to a group that contains it, or to None for the default group"
        )
    if group is None:
        raise RuntimeError(
            f"the layer's process_group ({spec}) was destroyed, or no such group exists here; make it again and set "
            "layer.process_group to it, or to None for the default group"
        )
    return group


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
