"""Unwraps DTensors: this rank's values are normalised, over the ranks of the mesh whose values are of one batch.

Per dim of the input's mesh, and what follows for the parameters and buffers that are DTensors too:

| input                   | ranks along it                     | parameters, buffers | their gradients |
|-------------------------|------------------------------------|---------------------|-----------------|
| Shard of batch or space | add up their sums                  | Replicate           | Partial         |
| Shard of the channels   | normalise each its own             | Shard(0)            | Shard(0)        |
| Replicate               | compute the same                   | Replicate           | Replicate       |

Parameters and buffers that are plain tensors are this rank's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from syncbn.arguments import Arguments
from syncbn.ranks.groups import GlobalRanks, GroupSpec, OfMesh, ranks_in
from syncbn.ranks.reductions import resolve
from syncbn.torch_internals.state import is_compiling

# Before torch 2.13 to_local() loses the graph of a gradient, and x.grad of a second derivative would be None.
TO_LOCAL_LOSES_GRAPH = torch.__version__ < "2.13"


def is_dtensor(candidate: Any) -> TypeGuard[Any]:
    """Whether this is a DTensor. (Importing its module to ask would be slow.)"""
    return isinstance(candidate, Tensor) and hasattr(candidate, "device_mesh")


def unwrap(arguments: Arguments, synchronises: bool) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """The arguments with this rank's values in place of DTensors, and a function that makes the output a DTensor placed
    as the input. If it `synchronises`, the arguments' process group becomes that of the ranks which add up their sums.

    **Raises** ValueError, the same on all ranks, where the placements do not fit, or where the user passed a process
    group of other ranks.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x: Any = arguments.input
    mesh, placements, shape, stride = x.device_mesh, x.placements, x.shape, x.stride()
    rules: list[tuple[bool, Any, Any]] = []  # of each dim of the mesh, as above
    for placement in placements:
        if placement.is_partial():
            raise ValueError(
                f"the input is a DTensor whose values are not added up yet, its placements are {placements}; "
                "call input.redistribute(placements=...) with Shard or Replicate first"
            )
        if placement.is_replicate():
            rules.append((False, Replicate(), Replicate()))
        elif placement.dim - arguments.channel_dim in (0, x.ndim):
            rules.append((False, Shard(0), Shard(0)))
        else:
            rules.append((True, Replicate(), Partial()))
    adds_up, of_parameters, of_gradients = zip(*rules, strict=True)
    shards_channels = Shard(0) in of_parameters

    def local(name: str, given: Any, wanted: Any, of_gradient: Any = None) -> Any:
        if is_dtensor(given):
            if (given.device_mesh, given.placements) != (mesh, wanted):
                raise ValueError(
                    f"the input is a DTensor with placements {placements} on {mesh}; expected {name} to have "
                    f"{wanted} there, got {given.placements} on {given.device_mesh}; redistribute it"
                )
            return given.to_local(grad_placements=of_gradient)
        return given

    plain: dict[str, Any] = {"input": x.to_local(), "z": local("z", arguments.z, placements)}
    for name, given in arguments.per_channel().items():
        plain[name] = local(name, given, of_parameters, of_gradients)
        if shards_channels and given is plain[name] is not None:
            _require_own_channels(name, given, x, arguments.channel_dim, of_parameters)
    if is_dtensor(arguments.mask):
        raise ValueError("mask is a DTensor, expected that of this rank's values; pass mask.to_local()")
    plain["counter"] = arguments.counter.to_local() if is_dtensor(arguments.counter) else arguments.counter
    if shards_channels:
        plain["num_channels"] = None
    if synchronises:
        plain["process_group"] = _group_of(mesh, adds_up, arguments.process_group, placements)

    def place(gradient: Any) -> Any:
        """Redistributes the gradient. (The backward of from_local does so outside the graph of second derivatives.)"""
        if TO_LOCAL_LOSES_GRAPH and torch.is_grad_enabled():
            raise RuntimeError("DTensors have no second derivatives before torch 2.13: leave out create_graph")
        return gradient.redistribute(placements=placements)

    def wrap(output: Tensor) -> Tensor:
        y = DTensor.from_local(output, mesh, placements, run_check=False, shape=shape, stride=stride)
        if y.requires_grad and not is_compiling():
            y.register_hook(place)  # type: ignore[no-untyped-call]
        return y

    return dataclasses.replace(arguments, **plain), wrap


def _require_own_channels(name: str, given: Tensor, x: Any, channel_dim: int, of_parameters: Any) -> None:
    """Raises ValueError where a plain tensor has the channels of all ranks, and x only those of this one."""
    if given.shape == (x.shape[channel_dim],) != (x.to_local().shape[channel_dim],):
        raise ValueError(
            f"the input is a DTensor whose channels are sharded, its placements are {x.placements}, but {name} has "
            f"those of all ranks; call distribute_tensor({name}, input.device_mesh, {list(of_parameters)})"
        )


def _group_of(mesh: DeviceMesh, adds_up: tuple[bool, ...], spec: GroupSpec | OfMesh, placements: Any) -> OfMesh:
    """The group of the ranks that differ from this one along those dims of the mesh that add up, and only along them.

    **Raises** ValueError where this rank is not in the mesh, where no group has these ranks, and where they are not
    those of the `spec` that the user passed, for an input with these placements.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the mesh of the input, which is a DTensor on {mesh}")
    dims = [dim for dim, adds in enumerate(adds_up) if adds and mesh.size(dim) > 1]
    group = None  # this rank alone
    if len(dims) == 1:
        group = mesh.get_group(dims[0])
    elif dims:
        ranks = mesh.mesh[tuple(slice(None) if dim in dims else coordinate[dim] for dim in range(mesh.ndim))]
        group = GlobalRanks(tuple(sorted(ranks.flatten().tolist()))).group()
        if group is None:
            raise ValueError(
                f"the batch of the input, a DTensor on {mesh}, lies on ranks {ranks.tolist()}, which have no process "
                "group in common; make it once with torch.distributed.new_group, on all ranks"
            )
    if spec is not None:
        given, of_mesh = (sorted(ranks_in(one)) for one in (resolve(spec), group))
        if given != of_mesh:
            raise ValueError(
                f"process_group is ranks {given}, but the batch of the input, a DTensor with placements {placements}, "
                f"lies on ranks {of_mesh}; set process_group=None, or pass input.to_local()"
            )
    return OfMesh(group)
