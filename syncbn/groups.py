"""Looks up the process group that a layer synchronises over, from its `process_group`.

A layer keeps a specification and not the group itself, so that it can be copied, pickled and saved. One of
    None          the default group, looked up at each call
    int k         k consecutive ranks: 0..k-1, k..2k-1, ...
    "node"        the ranks of one host: LOCAL_WORLD_SIZE consecutive ranks
    DeviceMesh    a mesh of one dim
    ProcessGroup  kept as `GlobalRanks`: its global ranks and a handle that deepcopy shares and pickle drops
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

from syncbn import call_sites, new_groups, torch_private
from syncbn.collectives import Ranks, joined_group

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


def prepare(spec: Specification) -> None:
    """Make the groups that an int or "node" needs: a collective over ALL ranks of the default group, once for each."""
    if isinstance(spec, (int, str)):
        new_groups.make(spec)


def ranks_of_call(spec: Specification, of: nn.Module | str, input: Tensor | None) -> Ranks:
    """The ranks that the next call of a layer, or of the function of this name, synchronises. See `resolve`."""
    group = resolve(spec)
    if group is None or torch_private.is_compiling():
        return Ranks(group)
    return Ranks(group, call_sites.new_call(of, group, input))


def resolve(spec: Specification) -> dist.ProcessGroup | None:
    """The group to synchronise over now; None for a group of one rank, and when there is no process group.

    The first call with an int or "node" makes the groups. **Raises** RuntimeError when that would happen inside a
    compiled graph; ValueError for a part of the ranks inside syncbn.join.
    """
    if dist.group.WORLD is None:
        if not torch_private.is_compiling():
            _warn_if_launched_on_several_ranks()
        return None
    group = existing(spec)
    if group is None:
        if torch_private.is_compiling():
            raise RuntimeError(
                f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph; "
                "construct or convert the layers after torch.distributed.init_process_group()"
            )
        prepare(spec)
        group = existing(spec)
        assert group is not None
    if group.size() == 1:
        return None
    joined = joined_group()
    if joined is None:
        return group
    if group.size() < joined.size():
        raise ValueError(
            f"inside syncbn.join every layer must synchronise over all {joined.size()} ranks, not over {group.size()} "
            f"(process_group={spec!r}); set process_group=None"
        )
    return joined


def existing(spec: Specification) -> dist.ProcessGroup | None:
    """The group that `spec` means; None when it is not made yet or there is no process group. Communicates nothing."""
    if spec is None or dist.group.WORLD is None:
        return dist.group.WORLD
    if isinstance(spec, (int, str)):
        return new_groups.made(spec)
    return spec.group() if isinstance(spec, GlobalRanks) else spec.get_group()


def size(spec: Specification) -> int:
    """How many ranks `spec` means, also before its group is made; 1 without a process group. Communicates nothing."""
    if dist.group.WORLD is None:
        return 1
    if isinstance(spec, int):
        return spec
    if isinstance(spec, GlobalRanks):
        return len(spec.ranks)
    group = existing(spec)
    if group is not None:
        return group.size()
    return new_groups.ranks_per_host([(os.environ.get("LOCAL_WORLD_SIZE"), None)] * dist.get_world_size())


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """This rank's group of `group_size` consecutive ranks, as apex's function of the same name.

    A collective over all ranks of the default group the first time a size is asked for. 0 means all ranks: None.

    **Raises** ValueError when `group_size` is negative, exceeds the number of ranks or does not divide it; RuntimeError
    before init_process_group.
    """
    if group_size == 0:
        return None
    if group_size < 0:
        raise ValueError(f"group_size must not be negative, got {group_size}")
    if dist.group.WORLD is None:
        raise RuntimeError("create_syncbn_process_group needs torch.distributed.init_process_group() first")
    spec = specification(group_size)
    prepare(spec)
    return existing(spec)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _is_device_mesh(candidate: object) -> TypeGuard[DeviceMesh]:
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(candidate, DeviceMesh)


@functools.cache
def _warn_if_launched_on_several_ranks() -> None:
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        warnings.warn(
            f"syncbn is not synchronising: WORLD_SIZE is {world_size} but torch.distributed has no process group. "
            "Call torch.distributed.init_process_group() before the first training step.",
            stacklevel=2,
        )
