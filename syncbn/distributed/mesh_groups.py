"""Finds the process group of the ranks that add up their sums for a DTensor."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from syncbn.distributed.group_spec import GlobalRanks, GroupSpec, OfMesh
from syncbn.distributed.reduction import resolve


def group_of(mesh: DeviceMesh, adds_up: list[bool], spec: GroupSpec | OfMesh, placements: Any) -> OfMesh:
    """The ranks that differ from this one along the dims of the mesh that add up alone.

    **Raises** ValueError where this rank is not in the mesh, where no group has these ranks, and where they are not
    those of the `spec` that the user passed, for an input with these placements.
    """
    group = _group(mesh, adds_up)
    if spec is not None:
        _require_same(spec, group, placements)
    return OfMesh(group)


def _group(mesh: DeviceMesh, adds_up: list[bool]) -> dist.ProcessGroup | None:
    """The group of the ranks that differ from this one along these dims of the mesh alone; None for this rank alone.

    **Raises** ValueError where this rank is not in the mesh, or no group has these ranks.
    """
    own = mesh.get_coordinate()
    if own is None:
        raise ValueError(f"this rank is not in the mesh of the input, which is a DTensor on {mesh}")
    dims = [dim for dim, adds in enumerate(adds_up) if adds and mesh.size(dim) > 1]
    if not dims:
        return None
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if math.prod([mesh.size(dim) for dim in dims]) == dist.get_world_size():
        return dist.group.WORLD
    ranks = mesh.mesh[tuple(slice(None) if dim in dims else own[dim] for dim in range(mesh.ndim))]
    group = GlobalRanks(tuple(sorted(ranks.flatten().tolist()))).group()
    if group is None:
        raise ValueError(
            f"the batch of the input, a DTensor on {mesh}, lies on ranks {ranks.tolist()}, which have no process group "
            "in common; make it once with torch.distributed.new_group, on all ranks"
        )
    return group


def _require_same(spec: GroupSpec | OfMesh, group: dist.ProcessGroup | None, placements: Any) -> None:
    """Raises ValueError unless `spec`, which the user passed, means the ranks of this group."""
    given, of_mesh = (
        [dist.get_rank()] if one is None else sorted(dist.get_process_group_ranks(one))
        for one in (resolve(spec), group)
    )
    if given != of_mesh:
        raise ValueError(
            f"process_group is ranks {given}, but the batch of the input, a DTensor with placements {placements}, lies "
            f"on ranks {of_mesh}; set process_group=None, or pass input.to_local()"
        )
