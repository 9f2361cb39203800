"""Looks up the process group of a group spec, and creates the groups for an int (the number of ranks per group).

A layer keeps a group spec instead of a ProcessGroup, so that the layer can be copied, pickled and saved. A spec is
one of
    None         the default group, looked up at each call
    int k        groups of k consecutive ranks: 0..k-1, k..2k-1, ...
    GlobalRanks  a ProcessGroup: its global ranks, and a handle that deepcopy shares and pickle drops

`to_spec` turns the user's `process_group` argument into a spec, and `to_user` converts the spec back. The spec of a
layer may be a group that does not contain this rank; training the layer then raises ValueError. `make_groups` is a
collective: ALL ranks of the default group must call it, in the same order. Only `resolve` and
`create_syncbn_process_group` call it too; no other function here communicates.
"""

import os
from typing import Self, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from syncbn.ranks.collective import Collective
from syncbn.ranks.sites import FunctionCaller, site_of
from syncbn.ranks.watchdog import recorded
from syncbn.texts import find_frame, warn, warn_once
from syncbn.torch_internals import constant_in_graphs, existing_groups, group_device, group_timeout

# Default group -> {int: this rank's group, or None for the default group itself}. An entry is garbage-collected with
# its default group; a new default group starts without an entry.
_groups_by_size: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup | None]] = WeakKeyDictionary()


class GlobalRanks:
    """The spec of a ProcessGroup: its global ranks, and a handle that deepcopy shares and pickle drops.

    On a rank outside of the group, `ranks` is empty, because new_group returns GroupMember.NON_GROUP_MEMBER there.
    """

    # Whether the group was destroyed. A group of the same ranks does not replace it: it may have been destroyed on this
    # rank alone, and the other ranks may wait in it.
    was_destroyed = False

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None = None) -> None:
        self.ranks, self.handle = ranks, handle

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[type["GlobalRanks"], tuple[tuple[int, ...]]]:
        return GlobalRanks, (self.ranks,)

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}" if self.ranks else "a group without this rank"

    def group(self) -> dist.ProcessGroup | None:
        """Return the ProcessGroup, or None if it was destroyed. After unpickling, return the oldest existing group of
        exactly these ranks, or None if there is none."""
        _refresh_handle(self)
        return self.handle


@constant_in_graphs
def _refresh_handle(spec: GlobalRanks) -> None:
    candidates = existing_groups()
    if spec.handle is not None and spec.handle not in candidates:
        # A handle would keep the connections of the group open, on which other ranks may wait.
        spec.handle, spec.was_destroyed = None, True
    elif spec.handle is None and not spec.was_destroyed:
        same_ranks = (group for group in candidates if tuple(dist.get_process_group_ranks(group)) == spec.ranks)
        spec.handle = next(same_ranks, None)


THIS_RANK_ALONE = 1  # the spec of a group of one rank, for which no ProcessGroup is created
MAX_GROUP_SIZE = 2**31 - 1  # Larger sizes are sent as this size, because a Python int may not fit into an int64.
GroupSpec: TypeAlias = int | GlobalRanks | None
ProcessGroupLike: TypeAlias = dist.ProcessGroup | GroupSpec  # the types that a user may pass


def to_spec(process_group: ProcessGroupLike) -> GroupSpec:
    """Return the spec of `process_group`, without communication.

    **Raises** ValueError for an int below 1, and for a group that was destroyed or that torch.distributed did not
    create; TypeError for any other type.
    """
    if process_group is None or isinstance(process_group, GlobalRanks):
        return process_group
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        return GlobalRanks(())
    if isinstance(process_group, int) and not isinstance(process_group, bool):
        if process_group < 1:
            raise recorded(ValueError(f"process_group={process_group}: the number of ranks per group is at least 1"))
        return process_group
    if isinstance(process_group, dist.ProcessGroup):
        is_written_in_python = type(process_group).allreduce is not dist.ProcessGroup.allreduce  # such as torchft's
        if process_group not in existing_groups() or is_written_in_python:
            what = f"process_group is a {type(process_group).__name__} that was destroyed, or that was not created by"
            remedy = "pass an existing group, or None for the default group"
            raise recorded(ValueError(f"{what} torch.distributed.new_group(); {remedy}"))
        return GlobalRanks(tuple(dist.get_process_group_ranks(process_group)), process_group)
    remedy = 'for a DeviceMesh, pass mesh.get_group(); for one group per node, int(os.environ["LOCAL_WORLD_SIZE"])'
    what = f"(ranks per group), got {process_group!r} of type {type(process_group).__name__}"
    raise recorded(TypeError(f"process_group must be None, a ProcessGroup or an int {what}; {remedy}"))


def to_user(spec: GroupSpec) -> ProcessGroupLike:
    """Return the process group that the user passed, or `spec` if it is a ProcessGroup that does not exist here."""
    if not isinstance(spec, GlobalRanks):
        return spec
    return (spec.group() or spec) if includes_this_rank(spec) else dist.GroupMember.NON_GROUP_MEMBER


def includes_this_rank(spec: GroupSpec) -> bool:
    """Return whether this rank is in the group."""
    return bool(spec.ranks) if isinstance(spec, GlobalRanks) else True


def lookup(spec: GroupSpec) -> dist.ProcessGroup | None:
    """Return the group of `spec`, without communication. Return None before init_process_group, or if the groups for an
    int have not been created yet.

    **Raises** RuntimeError if the group does not exist, for example because it was destroyed; ValueError if this rank
    is not in it. In both cases a layer falls back neither to another group nor to local statistics.
    """
    if spec is None:
        return dist.group.WORLD
    if isinstance(spec, int):
        default_group = dist.group.WORLD
        made = {} if default_group is None else _groups_by_size.get(default_group, {})
        group_of_int = made.get(spec)
        if group_of_int is None:
            return default_group if spec in made else None
        if group_of_int in existing_groups():
            return group_of_int
        raise recorded(RuntimeError(f"the group of process_group={spec} was destroyed; set layer.process_group anew"))
    group = spec.group()
    if group is not None:
        return group
    group_of_layer = f"the layer's process_group ({spec})"
    if not includes_this_rank(spec):
        remedy = "set layer.process_group on each rank to a group that contains it, or to None for the default group"
        raise recorded(ValueError(f"this rank is not in {group_of_layer} and cannot train it; {remedy}"))
    remedy = "create the group and set layer.process_group to it, or to None for the default group"
    raise recorded(RuntimeError(f"{group_of_layer} was destroyed, or no such group exists here; {remedy}"))


def size(spec: GroupSpec) -> int:
    """Return the number of ranks in the group of `spec`, even before the group is created. Return 1 before
    init_process_group, and 0 if this rank is not in the group."""
    default_group = dist.group.WORLD
    if default_group is None:
        return 1
    if spec is None:
        return default_group.size()
    return spec if isinstance(spec, int) else len(spec.ranks)


def to_torch(spec: GroupSpec) -> dist.ProcessGroup | int | None:
    """Return the group of `spec` as nn.SyncBatchNorm stores it. **Raises** RuntimeError if the group does not exist."""
    if spec is None or dist.group.WORLD is None:
        return None
    if not includes_this_rank(spec):
        return dist.GroupMember.NON_GROUP_MEMBER
    group = lookup(spec)
    if group is None:
        remedy = f"call syncbn.create_syncbn_process_group({spec!r}) on all ranks first"
        raise RuntimeError(f"the groups of process_group={spec!r} have not been created; {remedy}")
    return group


missing_group_is_known = False  # not functools.cache, of which Dynamo warns in the frames after a graph break


def warn_of_missing_group() -> None:
    """Warn, in the first call without a process group, if the environment or nn.DataParallel suggests several ranks."""
    global missing_group_is_known
    missing_group_is_known = True
    world_size = os.environ.get("WORLD_SIZE") or "1"
    if world_size != "1":
        why = f"WORLD_SIZE is {world_size} but torch.distributed has no process group"
        remedy = "Call torch.distributed.init_process_group() before the first training step."
        warn(f"syncbn is not synchronising: {why}. {remedy}")
    if find_frame("torch.nn.parallel.data_parallel") is not None:
        warn_in_data_parallel()


def warn_in_data_parallel() -> None:
    why = "the layer runs in nn.DataParallel, which has threads but no ranks"
    warn_once(f"syncbn is not synchronising: {why}. Use DistributedDataParallel, launched by torchrun.")


def resolve(spec: GroupSpec) -> dist.ProcessGroup | None:
    """Return the group of `spec`, or None for a group of one rank and before init_process_group.

    The first call with an int above 1 creates the groups. **Raises** the errors of `lookup` and `make_groups`.
    """
    if spec == THIS_RANK_ALONE:
        return None
    make_groups(spec)
    group = lookup(spec)
    if not dist.is_initialized() and not missing_group_is_known:
        warn_of_missing_group()
    return None if group is None or group.size() == 1 else group


def make_groups(spec: GroupSpec, of_one_rank: bool = False) -> None:
    """If `spec` is an int, create its groups unless they exist; groups of one rank only if `of_one_rank`.

    This is a collective over ALL ranks of the default group; reports of positions show it. **Raises** the errors of
    `_make`.
    """
    default_group, is_made = dist.group.WORLD, isinstance(spec, int) and (of_one_rank or spec != THIS_RANK_ALONE)
    if isinstance(spec, int) and is_made and default_group is not None and lookup(spec) is None:
        caller = FunctionCaller(f"the creation of groups for process_group={spec!r}", is_signed=False)
        Collective(site_of(caller, default_group), 1, "creation").run(_make, spec, default_group)


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Return this rank's group of `group_size` consecutive ranks, like apex's function of the same name. Return None,
    which stands for the default group, if `group_size` is 0.

    The first call with each size is a collective over all ranks of the default group.

    **Raises** ValueError if `group_size` is not an int or is negative, or if the number of ranks is not a multiple of
    it; RuntimeError before init_process_group.
    """
    if group_size == 0:
        return None
    if not isinstance(group_size, int) or group_size < 0:
        raise recorded(ValueError(f"group_size must be an int that is not negative, got {group_size!r}"))
    if dist.group.WORLD is None:
        raise RuntimeError("create_syncbn_process_group needs torch.distributed.init_process_group() first")
    make_groups(group_size, of_one_rank=True)
    return lookup(group_size)


def _make(size: int, default_group: dist.ProcessGroup) -> None:
    """Create groups of `size` consecutive ranks. This is a collective over ALL ranks of the default group.

    **Raises** ValueError on every rank if the ranks pass different sizes, or if the number of ranks is not a multiple
    of the size.
    """
    sent = torch.tensor([min(size, MAX_GROUP_SIZE)], device=group_device(default_group))
    received = [torch.empty_like(sent) for _ in range(default_group.size())]
    default_group.allgather([received], [sent]).wait()
    sizes = [int(received_size) for received_size in received]
    if len(set(sizes)) > 1:
        each = ", ".join(f"rank {rank} for {group_size}" for rank, group_size in enumerate(sizes))
        raise ValueError(f"the ranks ask for different process groups: {each}; pass the same number on all ranks")
    world_size = default_group.size()
    if world_size % size:
        values = f"{world_size} ranks do not divide into groups of {size}"
        remedy = "pass a divisor, or a ProcessGroup of dist.new_group"
        raise ValueError(f"the number of ranks must be a multiple of the group size: {values}; {remedy}")
    is_default = size == world_size
    group = None if is_default else dist.new_subgroups(size, timeout=group_timeout(default_group))[0]
    _groups_by_size.setdefault(default_group, {})[size] = group
