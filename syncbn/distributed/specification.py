"""Turns what a user passes as `process_group` into the specification that a layer keeps.

A layer keeps a specification and not the group itself, so that it can be copied, pickled and saved. One of
    None          the default group, looked up at each call
    int k         k consecutive ranks: 0..k-1, k..2k-1, ...
    "node"        the ranks of one host: LOCAL_WORLD_SIZE consecutive ranks
    DeviceMesh    a mesh of one dim
    ProcessGroup  kept as `GlobalRanks`: its global ranks and a handle that deepcopy shares and pickle drops
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch.distributed as dist

from syncbn import torch_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Specification: TypeAlias = "int | str | GlobalRanks | DeviceMesh | None"  # what a layer keeps
    ProcessGroupLike: TypeAlias = "dist.ProcessGroup | Specification"  # what a user passes


class GlobalRanks:
    """A ProcessGroup as its global ranks and a handle that deepcopy shares and pickle drops, to be looked up again."""

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None = None) -> None:
        self.ranks = ranks
        self.handle = handle

    def __deepcopy__(self, memo: dict[int, object]) -> GlobalRanks:
        return self

    def __reduce__(self) -> tuple[type[GlobalRanks], tuple[tuple[int, ...]]]:
        return GlobalRanks, (self.ranks,)

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}"

    def group(self) -> dist.ProcessGroup:
        """The handle; after unpickling, or when its group was destroyed, the oldest group of exactly these ranks.

        **Raises** RuntimeError when there is none.
        """
        existing_groups = torch_private.existing_groups()
        if self.handle not in existing_groups:
            same = (group for group in existing_groups if _ranks_of(group) == self.ranks)
            self.handle = next(same, None)
        if self.handle is None:
            raise RuntimeError(
                f"this layer was loaded with a process group of the global {self}, and no such group exists here. Make "
                "it with torch.distributed.new_group, or set layer.process_group = None for the default group."
            )
        return self.handle


def specification(process_group: ProcessGroupLike) -> Specification:
    """What a layer keeps of `process_group`. Communicates nothing.

    **Raises** TypeError for anything that is not a specification; ValueError for an int below 1, a string other than
    "node", a mesh of several dims, and a group or mesh that does not contain this rank.
    """
    if process_group is None or isinstance(process_group, GlobalRanks) or process_group == "node":
        return process_group
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not in process_group; give each rank a group that contains it")
    if isinstance(process_group, int) and not isinstance(process_group, bool):
        if process_group < 1:
            raise ValueError(f"process_group={process_group}: an int is the number of ranks per group, at least 1")
        return process_group
    if isinstance(process_group, dist.ProcessGroup):
        if dist.get_rank(process_group) < 0:
            raise ValueError(
                f"this rank ({dist.get_rank()}) is not in process_group, whose ranks are {_ranks_of(process_group)}"
            )
        return GlobalRanks(_ranks_of(process_group), process_group)
    if _is_device_mesh(process_group):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {process_group.ndim} dims, expected 1; select one of "
                f'{process_group.mesh_dim_names or "its dims"} by its name: mesh["name"]'
            )
        if process_group.get_coordinate() is None:
            raise ValueError(f"this rank ({dist.get_rank()}) is not in process_group {process_group}")
        return process_group
    raise TypeError(
        'process_group must be None, a ProcessGroup, an int (ranks per group), "node" or a 1-D DeviceMesh, '
        f"got {process_group!r} of type {type(process_group).__name__}"
    )


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _is_device_mesh(candidate: object) -> TypeGuard[DeviceMesh]:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(candidate, DeviceMesh)
