"""Finds the process group that a group spec means, and makes the groups that an int or "node" needs.

A layer keeps a group spec and not the group itself, so that it can be copied, pickled and saved. A spec is one of
    None          the default group, looked up at each call
    int k         k consecutive ranks: 0..k-1, k..2k-1, ...
    "node"        the ranks of one host: LOCAL_WORLD_SIZE consecutive ranks
    DeviceMesh    a mesh of one dim
    ProcessGroup  kept as `GlobalRanks`: its global ranks and a handle that deepcopy shares and pickle drops

`to_spec` makes the spec of a process group that the user passes, `to_user` gives that group back. A layer may keep a
group that this rank is not in; training it raises ValueError.
`make` is a collective over ALL ranks of the default group, in the same order. Nothing else here communicates.
"""

import functools
import os
from typing import NamedTuple, Self, TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from syncbn.call_stack import callers, warn, warn_once
from syncbn.comm.text_exchange import all_gather_json, by_rank
from syncbn.torch_internals.distributed import existing_groups, timeout_of
from syncbn.torch_internals.state import constant_in_graphs

# Default group -> {int or "node": this rank's group, or None for the default group itself}. A re-made default group
# starts with nothing made, and the old entry goes with the old group.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[int | str, dist.ProcessGroup | None]] = WeakKeyDictionary()


class GlobalRanks:
    """A ProcessGroup as its global ranks and a handle that deepcopy shares and pickle drops, to be looked up again.
    `ranks` is empty on ranks outside of the group, where new_group returns GroupMember.NON_GROUP_MEMBER."""

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None = None) -> None:
        self.ranks, self.handle = ranks, handle

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[type["GlobalRanks"], tuple[tuple[int, ...]]]:
        return GlobalRanks, (self.ranks,)

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}" if self.ranks else "a group without this rank"

    def group(self) -> dist.ProcessGroup | None:
        """The handle; after unpickling, or when its group was destroyed, the oldest group of exactly these ranks."""
        _look_up_again(self)
        return self.handle


@constant_in_graphs  # Dynamo cannot read torch's registry if a group without a name is there, as torchft's may be
def _look_up_again(spec: GlobalRanks) -> None:
    candidates = existing_groups()
    if spec.handle not in candidates:
        spec.handle = next((group for group in candidates if tuple(ranks_in(group)) == spec.ranks), None)


class MeshGroup(NamedTuple):
    """The group that the mesh of a DTensor gives in place of a spec; None for this rank alone."""

    group: dist.ProcessGroup | None


THIS_RANK_ALONE = 1  # the spec of groups of one rank, which need not be made
GroupSpec: TypeAlias = int | str | GlobalRanks | DeviceMesh | None  # what a layer keeps
SpecOfCall: TypeAlias = GroupSpec | MeshGroup
ProcessGroupLike: TypeAlias = dist.ProcessGroup | GroupSpec  # what a user passes


def to_spec(process_group: ProcessGroupLike) -> GroupSpec:
    """The spec that a layer keeps for `process_group`. Communicates nothing.

    **Raises** ValueError for an int below 1, a mesh of several dims, and a group that was destroyed, or that
    torch.distributed did not make; TypeError for anything else.
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
        is_known = process_group in existing_groups()
        # It does its all_reduce in Python, over ranks that torch's registry does not know: it does not know the group,
        # or takes it for this rank alone, as torchft's.
        is_written_in_python = type(process_group).allreduce is not dist.ProcessGroup.allreduce
        if is_written_in_python and not (is_known and len(ranks_in(process_group)) > 1):
            what = f"process_group is a {type(process_group).__name__}, which torch.distributed did not make"
            raise ValueError(f"{what}; pass a group of torch.distributed.new_group() or init_device_mesh()")
        if not is_known:
            raise ValueError("process_group was destroyed; pass one that exists, or None for the default group")
        return GlobalRanks(tuple(ranks_in(process_group)), process_group)
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            remedy = f'select one of {process_group.mesh_dim_names or "its dims"} by its name: mesh["name"]'
            raise ValueError(f"process_group is a DeviceMesh of {process_group.ndim} dims, expected 1; {remedy}")
        return process_group
    expected = 'None, a ProcessGroup, an int (ranks per group), "node" or a 1-D DeviceMesh'
    raise TypeError(f"process_group must be {expected}, got {process_group!r} of type {type(process_group).__name__}")


def to_user(spec: GroupSpec) -> ProcessGroupLike:
    """The process group as the user passed it; `spec` itself for a ProcessGroup that does not exist here."""
    if not isinstance(spec, GlobalRanks):
        return spec
    return (spec.group() or spec) if includes_this_rank(spec) else dist.GroupMember.NON_GROUP_MEMBER


def includes_this_rank(spec: GroupSpec) -> bool:
    """Whether this rank is in the group."""
    if isinstance(spec, GlobalRanks):
        return bool(spec.ranks)
    return spec is None or isinstance(spec, (int, str)) or spec.get_coordinate() is not None


def existing(spec: SpecOfCall) -> dist.ProcessGroup | None:
    """The group that `spec` means; None when it is not made yet or there is no process group. Communicates nothing.

    **Raises** RuntimeError where a layer's own group does not exist, as when it was destroyed, ValueError where this
    rank is not in it: a layer never falls back to another group or to local statistics.
    """
    if spec is None:
        return dist.group.WORLD
    if isinstance(spec, (int, str)):
        default_group = dist.group.WORLD
        made = {} if default_group is None else _made.get(default_group, {})
        return (made[spec] or default_group) if spec in made else None
    if isinstance(spec, MeshGroup):
        return spec.group
    try:
        group = spec.group() if isinstance(spec, GlobalRanks) else spec.get_group()
    except (RuntimeError, IndexError):  # the mesh's group was destroyed; this rank is not in it
        group = None
    if group is not None:
        return group
    group_of_layer = f"the layer's process_group ({spec})"
    if not includes_this_rank(spec):
        remedy = "set layer.process_group on each rank to a group that contains it, or to None for the default group"
        raise ValueError(f"this rank is not in {group_of_layer} and cannot train it; {remedy}")
    remedy = "make it again and set layer.process_group to it, or to None for the default group"
    raise RuntimeError(f"{group_of_layer} was destroyed, or no such group exists here; {remedy}")


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


def torch_group(spec: GroupSpec) -> dist.ProcessGroup | int | None:
    """The group for an nn.SyncBatchNorm, which holds one. **Raises** RuntimeError where the group does not exist."""
    if spec is None or dist.group.WORLD is None:
        return None
    if not includes_this_rank(spec):
        return dist.GroupMember.NON_GROUP_MEMBER
    group = existing(spec)
    if group is None:
        remedy = f"call convert_syncbn_model(model, {spec!r}) on all ranks first"
        raise RuntimeError(f"the groups of process_group={spec!r} have not been made; {remedy}")
    return group


def make(spec: int | str, default_group: dist.ProcessGroup) -> None:
    """Make the groups of an int or "node", a collective over ALL ranks of the default group.

    **Raises** ValueError on every rank when the ranks ask for different groups, or their number does not divide.
    """
    request = [str(spec), os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("LOCAL_RANK")]
    specs, *hosts = zip(*all_gather_json(request, default_group), strict=True)
    if len(set(specs)) > 1:
        each = ", ".join(f"rank {rank} for {wanted}" for rank, wanted in enumerate(specs))
        raise ValueError(f"the ranks ask for different process groups: {each}; pass the same process_group on all")
    world_size = default_group.size()
    ranks_per_group = spec if isinstance(spec, int) else ranks_per_host([*zip(*hosts, strict=True)])
    if world_size % ranks_per_group:
        divided = f"{world_size} ranks do not divide into groups of {ranks_per_group}"
        raise ValueError(f"the number of ranks must be a multiple of the group size: {divided}")
    group = None
    if ranks_per_group < world_size:
        group = dist.new_subgroups(ranks_per_group, timeout=timeout_of(default_group))[0]
    _made.setdefault(default_group, {})[spec] = group


def ranks_per_host(gathered: list[tuple[str | None, str | None]]) -> int:
    """The group size of "node" from (LOCAL_WORLD_SIZE, LOCAL_RANK) of all ranks, which every rank has received.

    **Raises** ValueError, the same on every rank, when LOCAL_WORLD_SIZE is unset or no positive number, differs between
    ranks, does not divide the number of ranks, or when the ranks of a host are not consecutive.
    """
    needs = 'process_group="node" needs the environment variable LOCAL_WORLD_SIZE (ranks per host; torchrun sets it)'
    values = [local_world_size or "not set" for local_world_size, _ in gathered]
    size = int(values[0]) if values[0].isdecimal() and len(values[0]) < 10 else 0  # int() refuses thousands of digits
    if size < 1 or len(set(values)) > 1:
        raise ValueError(f"{needs} to be the same positive number everywhere:\n{by_rank(range(len(values)), values)}")
    if len(gathered) % size:
        raise ValueError(f"{needs} to divide WORLD_SIZE; they are {size} and {len(gathered)}")
    for rank, (_, local_rank) in enumerate(gathered):
        if local_rank not in (None, "", str(rank % size)):
            what = f"rank {rank} has LOCAL_RANK {local_rank}, expected {rank % size}"
            raise ValueError(f"{needs} and consecutive ranks on each host; {what}")
    return size


@functools.cache
def warn_if_meant_for_several_ranks() -> None:
    """Warn, in the first call without a process group, if there are other ranks."""
    world_size = os.environ.get("WORLD_SIZE") or "1"
    if world_size != "1":
        why = f"WORLD_SIZE is {world_size} but torch.distributed has no process group"
        remedy = "Call torch.distributed.init_process_group() before the first training step."
        warn(f"syncbn is not synchronising: {why}. {remedy}")
    if any(isinstance(caller, nn.DataParallel) for _, caller in callers()):
        warn_in_data_parallel()


def warn_in_data_parallel() -> None:
    why = "the layer runs in nn.DataParallel, which has threads but no ranks"
    warn_once(f"syncbn is not synchronising: {why}. Use DistributedDataParallel, launched by torchrun.")
