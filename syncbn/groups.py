"""From what a user says about ranks to a process group.

A layer keeps what was said, the specification, and not the group: so it can be copied, pickled and saved.

A specification is one of
    None          the default group, looked up at each call
    int k         k consecutive ranks: 0..k-1, k..2k-1, ...
    "node"        the ranks of one host: LOCAL_WORLD_SIZE consecutive ranks
    DeviceMesh    a mesh of one dim
    ProcessGroup  kept as `Ranks`: its global ranks and a handle that deepcopy shares and pickle drops

`int` and "node" need new groups, which is a collective over ALL ranks of the default group in the same order; they are
made once per default group by `prepare`.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from syncbn.collectives import all_gather_text

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Specification: TypeAlias = "int | str | Ranks | DeviceMesh | None"  # what a layer keeps
    ProcessGroupLike: TypeAlias = "dist.ProcessGroup | Specification"  # what a user may say

# Default group -> {int or "node": this rank's group, or None for the default group itself}. A re-made default group
# starts with nothing made, and the old entry goes with the old group.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[int | str, dist.ProcessGroup | None]] = WeakKeyDictionary()

# While the body of syncbn.join runs: its group, which stands for every group of all ranks.
joined: dist.ProcessGroup | None = None


class Ranks:
    """A ProcessGroup as its global ranks and a handle that deepcopy shares and pickle drops, to be looked up again."""

    def __init__(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None = None) -> None:
        self.ranks = ranks
        self.handle = handle

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        return self

    def __reduce__(self) -> tuple[type[Ranks], tuple[tuple[int, ...]]]:
        return Ranks, (self.ranks,)

    def __repr__(self) -> str:
        return f"ranks {list(self.ranks)}"

    def group(self) -> dist.ProcessGroup:
        """The handle; after unpickling, or when its group was destroyed, the oldest group of exactly these ranks.

        **Raises** RuntimeError when there is none.
        """
        existing = _existing_groups()
        if self.handle not in existing:
            self.handle = next((group for group in existing if _ranks_of(group) == self.ranks), None)
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
    if process_group is None or isinstance(process_group, Ranks) or process_group == "node":
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
        return Ranks(_ranks_of(process_group), process_group)
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
    default_group = dist.group.WORLD
    if isinstance(spec, (int, str)) and default_group is not None:
        made = _made.setdefault(default_group, {})
        if spec not in made:
            made[spec] = _consecutive_group(_agreed_size(spec, default_group), default_group)


def resolve(spec: Specification) -> dist.ProcessGroup | None:
    """The group to synchronise over now; None for a group of one rank, and when there is no process group.

    The first call with an int or "node" makes the groups (see `prepare`). **Raises** RuntimeError when that would
    happen inside a compiled graph.
    """
    if dist.group.WORLD is None:
        if not torch.compiler.is_compiling():
            _warn_if_launched_on_several_ranks()
        return None
    group = existing(spec)
    if group is None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph; "
                "construct or convert the layers after torch.distributed.init_process_group()"
            )
        prepare(spec)
        group = existing(spec)
        assert group is not None
    if group.size() == 1:
        return None
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
    default_group = dist.group.WORLD
    if spec is None or default_group is None:
        return default_group
    if isinstance(spec, (int, str)):
        made = _made.get(default_group, {})
        return (made[spec] or default_group) if spec in made else None
    return spec.group() if isinstance(spec, Ranks) else spec.get_group()


def size(spec: Specification) -> int:
    """How many ranks `spec` means, also before its group is made; 1 without a process group. Communicates nothing."""
    if dist.group.WORLD is None:
        return 1
    if isinstance(spec, int):
        return spec
    if isinstance(spec, Ranks):
        return len(spec.ranks)
    group = existing(spec)
    if group is not None:
        return group.size()
    return ranks_per_host([(os.environ.get("LOCAL_WORLD_SIZE"), None)] * dist.get_world_size())


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


def ranks_per_host(told: Sequence[tuple[str | None, str | None]]) -> int:
    """The group size of "node" from (LOCAL_WORLD_SIZE, LOCAL_RANK) of all ranks, which every rank has received.

    **Raises** ValueError, the same on every rank, when LOCAL_WORLD_SIZE is unset or no positive number, differs between
    ranks, does not divide the number of ranks, or when the ranks of a host are not consecutive.
    """
    needs = 'process_group="node" needs the environment variable LOCAL_WORLD_SIZE (ranks per host; torchrun sets it)'
    for rank, (local_world_size, _) in enumerate(told):
        if local_world_size is None or not local_world_size.isdecimal() or int(local_world_size) < 1:
            raise ValueError(f"{needs}; on rank {rank} it is {local_world_size!r}")
    sizes = sorted({int(local_world_size or 0) for local_world_size, _ in told})
    size = sizes[0]
    if len(sizes) > 1:
        raise ValueError(f"{needs} to be the same on every host; it is {sizes}")
    if len(told) % size:
        raise ValueError(f"{needs} to divide WORLD_SIZE; they are {size} and {len(told)}")
    for rank, (_, local_rank) in enumerate(told):
        if local_rank is not None and local_rank != str(rank % size):
            raise ValueError(
                f"{needs} and consecutive ranks on each host; "
                f"rank {rank} has LOCAL_RANK {local_rank}, expected {rank % size}"
            )
    return size


def _agreed_size(spec: int | str, default_group: dist.ProcessGroup) -> int:
    """Ranks per group, once all ranks have told what they ask for. **Raises** ValueError on all where they differ."""
    mine = (str(spec), (os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("LOCAL_RANK")))
    told = [json.loads(text) for text in all_gather_text(json.dumps(mine), default_group)]
    asked = [one for one, _ in told]
    if len(set(asked)) > 1:
        each = ", ".join(f"rank {rank} for {one}" for rank, one in enumerate(asked))
        raise ValueError(f"the ranks ask for different process groups: {each}; pass the same process_group on all")
    return spec if isinstance(spec, int) else ranks_per_host([of_host for _, of_host in told])


def _consecutive_group(ranks_per_group: int, default_group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    world_size = default_group.size()
    if world_size % ranks_per_group:
        raise ValueError(
            f"the number of ranks must be a multiple of the group size: {world_size} ranks do not divide into groups "
            f"of {ranks_per_group}"
        )
    if ranks_per_group == world_size:
        return None
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups(ranks_per_group, timeout=timeout_of(default_group))  # type: ignore[no-untyped-call]
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long its collectives wait; torch gives a new group 10 or 30 minutes whatever the default group's are."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _existing_groups() -> Collection[dist.ProcessGroup]:
    # torch has no public list of the groups that exist, oldest first.
    return dist.distributed_c10d._world.pg_map.keys()


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
