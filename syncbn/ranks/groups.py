"""Finds the process group that a layer means, and makes the groups that an int or "node" needs.

A layer keeps a group spec and not the group itself, so that it can be copied, pickled and saved. One of
    None          the default group, looked up at each call
    int k         k consecutive ranks: 0..k-1, k..2k-1, ...
    "node"        the ranks of one host: LOCAL_WORLD_SIZE consecutive ranks
    DeviceMesh    a mesh of one dim
    ProcessGroup  kept as `GlobalRanks`: its global ranks and a handle that deepcopy shares and pickle drops

`to_spec` makes one of what the user passes, `to_user` gives that back. A layer may keep a group that this rank is not
in; training it raises ValueError.

Making groups is a collective over ALL ranks of the default group, in the same order. Nothing else here communicates.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from syncbn.ranks.text_exchange import all_gather_json, by_rank
from syncbn.torch_internals.distributed import existing_groups, timeout_of

# Default group -> {int or "node": this rank's group, or None for the default group itself}. A re-made default group
# starts with nothing made, and the old entry goes with the old group.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[int | str, dist.ProcessGroup | None]] = WeakKeyDictionary()


class GlobalRanks:
    """A ProcessGroup as its global ranks and a handle that deepcopy shares and pickle drops, to be looked up again.

    On ranks outside of a group new_group returns GroupMember.NON_GROUP_MEMBER: then `ranks` is empty.
    """

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None = None) -> None:
        self.ranks = ranks
        self.handle = handle

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return GlobalRanks, (self.ranks,)

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}" if self.ranks else "a group without this rank"

    def group(self) -> dist.ProcessGroup | None:
        """The handle; after unpickling, or when its group was destroyed, the oldest group of exactly these ranks, if
        there is one."""
        candidates = existing_groups()
        if self.handle not in candidates:
            self.handle = next((group for group in candidates if tuple(ranks_in(group)) == self.ranks), None)
        return self.handle


class OfMesh(NamedTuple):
    """The group that the mesh of a DTensor gives in place of a spec; None for this rank alone."""

    group: dist.ProcessGroup | None


THIS_RANK_ALONE = OfMesh(None)
GroupSpec: TypeAlias = int | str | GlobalRanks | DeviceMesh | None  # what a layer keeps
ProcessGroupLike: TypeAlias = dist.ProcessGroup | GroupSpec  # what a user passes


def to_spec(process_group: ProcessGroupLike) -> GroupSpec:
    """The spec that a layer keeps for `process_group`. Communicates nothing.

    **Raises** ValueError for an int below 1, a mesh of several dims and a group that was destroyed; TypeError for
    anything else.
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
        if process_group not in existing_groups():
            raise ValueError("process_group was destroyed; pass one that exists, or None for the default group")
        return GlobalRanks(tuple(ranks_in(process_group)), process_group)
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


def existing(spec: GroupSpec | OfMesh) -> dist.ProcessGroup | None:
    """The group that `spec` means; None when it is not made yet or there is no process group. Communicates nothing.

    **Raises** RuntimeError where a layer's own group does not exist, as when it was destroyed, ValueError where this
    rank is not in it: it is replaced neither by another group nor by local statistics.
    """
    if spec is None:
        return dist.group.WORLD
    if isinstance(spec, (int, str)):
        default_group = dist.group.WORLD
        if default_group is None or spec not in _made.get(default_group, {}):
            return None
        return _made[default_group][spec] or default_group
    if isinstance(spec, OfMesh):
        return spec.group
    try:
        group = spec.group() if isinstance(spec, GlobalRanks) else spec.get_group()
    except (RuntimeError, IndexError):  # the mesh's was destroyed; this rank is not in it
        group = None
    if group is not None:
        return group
    or_default = "or to None for the default group"
    if not includes_this_rank(spec):
        raise ValueError(
            f"this rank is not in the layer's process_group ({spec}) and cannot train it; set layer.process_group on "
            f"each rank to a group that contains it, {or_default}"
        )
    raise RuntimeError(
        f"the layer's process_group ({spec}) was destroyed, or no such group exists here; make it again and set "
        f"layer.process_group to it, {or_default}"
    )


def world() -> dist.ProcessGroup | None:
    """The default group; None where it is one rank, or there is none."""
    default_group = dist.group.WORLD
    return None if default_group is None or default_group.size() == 1 else default_group


def ranks_in(group: dist.ProcessGroup | None) -> list[int]:
    """The global ranks of a group; None is this rank alone."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def size(spec: GroupSpec) -> int:
    """The number of ranks that `spec` means, also before its group is made; 1 without a process group, 0 where this
    rank is not in it. **Raises** ValueError for "node" without LOCAL_WORLD_SIZE."""
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
    return ranks_per_host([(os.environ.get("LOCAL_WORLD_SIZE"), None)] * dist.get_world_size())


def of_torch(spec: GroupSpec) -> Any:
    """The group for an nn.SyncBatchNorm, which holds one. **Raises** RuntimeError where the group does not exist."""
    if dist.group.WORLD is None or spec is None:
        return None
    return existing(spec) if includes_this_rank(spec) else dist.GroupMember.NON_GROUP_MEMBER


def make(spec: int | str) -> None:
    """Make the groups that an int or "node" needs, unless they are made: a collective over ALL ranks of the default
    group.

    **Raises** ValueError on every rank when the ranks ask for different groups, or their number does not divide.
    """
    default_group = dist.group.WORLD
    assert default_group is not None
    of_default_group, world_size = _made.setdefault(default_group, {}), default_group.size()
    if spec in of_default_group:
        return
    local = str(spec), (os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("LOCAL_RANK"))
    asked, of_hosts = zip(*all_gather_json(local, default_group), strict=True)
    if len(set(asked)) > 1:
        each = ", ".join(f"rank {rank} for {one}" for rank, one in enumerate(asked))
        raise ValueError(f"the ranks ask for different process groups: {each}; pass the same process_group on all")
    ranks_per_group = spec if isinstance(spec, int) else ranks_per_host(of_hosts)
    if world_size % ranks_per_group:
        divided = f"{world_size} ranks do not divide into groups of {ranks_per_group}"
        raise ValueError(f"the number of ranks must be a multiple of the group size: {divided}")
    group, timeout = None, timeout_of(default_group)
    if ranks_per_group < world_size:
        group, _ = dist.new_subgroups(ranks_per_group, timeout=timeout)  # type: ignore[no-untyped-call]
    of_default_group[spec] = group


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
    make(group_size)
    return existing(group_size)


def ranks_per_host(gathered: Sequence[tuple[str | None, str | None]]) -> int:
    """The group size of "node" from (LOCAL_WORLD_SIZE, LOCAL_RANK) of all ranks, which every rank has received.

    **Raises** ValueError, the same on every rank, when LOCAL_WORLD_SIZE is unset or no positive number, differs between
    ranks, does not divide the number of ranks, or when the ranks of a host are not consecutive.
    """
    needs = 'process_group="node" needs the environment variable LOCAL_WORLD_SIZE (ranks per host; torchrun sets it)'
    given = [local_world_size or "not set" for local_world_size, _ in gathered]
    size = int(given[0]) if given[0].isdecimal() else 0
    if size < 1 or len(set(given)) > 1:
        raise ValueError(f"{needs} to be the same positive number everywhere:\n{by_rank(range(len(given)), given)}")
    if len(gathered) % size:
        raise ValueError(f"{needs} to divide WORLD_SIZE; they are {size} and {len(gathered)}")
    for rank, (_, local_rank) in enumerate(gathered):
        if local_rank is not None and local_rank != str(rank % size):
            raise ValueError(
                f"{needs} and consecutive ranks on each host; "
                f"rank {rank} has LOCAL_RANK {local_rank}, expected {rank % size}"
            )
    return size
