"""Finds the process group over which a call synchronises now, and makes groups, as a collective that others can see."""

import torch.distributed as dist

from syncbn.comm import groups
from syncbn.comm.groups import MeshGroup, SpecOfCall
from syncbn.diagnosis.collective import Collective
from syncbn.diagnosis.sites import Caller, new_site
from syncbn.reductions.guards import joined_group


def resolve(spec: SpecOfCall) -> dist.ProcessGroup | None:
    """The group to synchronise over now; None for a group of one rank, and when there is no process group.

    The first call with an int or "node" makes the groups. **Raises** ValueError for a part of the ranks inside
    syncbn.join; and as `groups.existing`.
    """
    make_groups(spec)
    group = groups.existing(spec)
    if not (dist.is_initialized() or isinstance(spec, MeshGroup)):
        groups.warn_if_meant_for_several_ranks()
    if group is None or group.size() == 1:
        return None
    joined = joined_group()
    if joined is not None and group.size() < joined.size():
        wanted = f"every layer must synchronise over all {joined.size()} ranks, not over {group.size()}"
        where = "inside syncbn.join and recompute_running_stats"
        raise ValueError(f"{where} {wanted} (process_group={spec!r}); set process_group=None")
    return joined or group


def make_groups(spec: SpecOfCall) -> None:
    """Make the groups that an int or "node" needs, unless they are made: a collective over ALL ranks of the default
    group, which tells the other ranks where this rank waits.

    **Raises** ValueError on every rank when the ranks ask for different groups, or their number does not divide.
    """
    default_group = dist.group.WORLD
    if default_group is not None and isinstance(spec, (int, str)) and groups.existing(spec) is None:
        caller = Caller(f"the making of groups for process_group={spec!r}", is_signed=False)
        with Collective(new_site(caller, default_group), 1, "making"):
            groups.make(spec, default_group)


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
    make_groups(group_size)
    return groups.existing(group_size)
