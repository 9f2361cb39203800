"""Unwraps DTensors: this rank's values are normalised, over the ranks of the mesh among which the batch is sharded.

Per dim of the input's mesh, and what follows for the parameters and buffers that are DTensors too:

| input                   | ranks along it                     | parameters, buffers | their gradients |
|-------------------------|------------------------------------|---------------------|-----------------|
| Shard of batch or space | add up their sums                  | Replicate           | Partial         |
| Shard of the channels   | normalise different channels       | Shard(0)            | Shard(0)        |
| Replicate               | compute the same                   | Replicate           | Replicate       |

Parameters and buffers that are plain tensors are this rank's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from syncbn.arguments import PER_CHANNEL, Options, Tensors
from syncbn.comm.groups import GlobalRanks, MeshGroup, ranks_in
from syncbn.layout import CHANNELS_LAST
from syncbn.reductions.choice import resolve
from syncbn.torch_internals.state import is_compiling

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

    Placements = Sequence[Placement]

# Before torch 2.13 to_local() loses the graph of a gradient, and x.grad of a second derivative would be None.
TO_LOCAL_LOSES_GRAPH = torch.__version__ < "2.13"


def is_dtensor(candidate: object) -> TypeGuard["DTensor"]:
    """Whether this is a DTensor. (Importing its module to ask would be slow.)"""
    return isinstance(candidate, Tensor) and hasattr(candidate, "device_mesh")


def unwrap(
    tensors: Tensors, options: Options, synchronises: bool
) -> tuple[Tensors, Options, Callable[[Tensor], Tensor]]:
    """The arguments with this rank's values in place of DTensors, and a function that makes the output a DTensor placed
    as the input. If it `synchronises`, the process group becomes that of the ranks which add up their sums.

    **Raises** ValueError where the placements do not fit, or where the user passed a process group of other ranks.
    """
    from torch.distributed.tensor import DTensor, Shard

    x = tensors.input
    assert is_dtensor(x)
    mesh, placements, shape = x.device_mesh, x.placements, x.shape
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"the input is a DTensor whose values are not added up yet, its placements are {placements}; "
            "call input.redistribute(placements=...) with Shard or Replicate first"
        )
    rows = [_row(placement, options.channel_dim, x.ndim) for placement in placements]
    _, for_parameters, for_gradients = zip(*rows, strict=True)
    all_channels = channels = None  # of all ranks and of this one, where they are sharded
    if Shard(0) in for_parameters:
        all_channels, channels = (sizes[options.channel_dim] for sizes in (shape, x.to_local().shape))
        options = replace(options, num_channels=None)

    def local(name: str, wanted: "Placements", for_gradient: "Placements | None" = None) -> Tensor | None:
        tensor: Tensor | None = getattr(tensors, name)
        if is_dtensor(tensor):
            if (tensor.device_mesh, tensor.placements) != (mesh, wanted):
                raise ValueError(
                    f"the input is a DTensor with placements {placements} on {mesh}; expected {name} to have "
                    f"{wanted} there, got {tensor.placements} on {tensor.device_mesh}; redistribute it"
                )
            return tensor.to_local(grad_placements=for_gradient)
        if name in PER_CHANNEL and tensor is not None and tensor.shape == (all_channels,) != (channels,):
            raise ValueError(
                f"the input is a DTensor whose channels are sharded, its placements are {placements}, but {name} has "
                f"those of all ranks; call distribute_tensor({name}, input.device_mesh, {list(wanted)})"
            )
        return tensor

    if is_dtensor(tensors.mask):
        raise ValueError("mask is a DTensor, expected that of this rank's values; pass mask.to_local()")
    per_channel = {name: local(name, for_parameters, for_gradients) for name in PER_CHANNEL}
    counter = tensors.counter.to_local() if is_dtensor(tensors.counter) else tensors.counter
    unwrapped = tensors._replace(input=x.to_local(), z=local("z", placements), counter=counter, **per_channel)
    if synchronises:
        group = group_of(x, options.channel_dim)
        if options.process_group is not None:
            passed, needed = sorted(ranks_in(resolve(options.process_group))), sorted(ranks_in(group.group))
            if passed != needed:
                raise ValueError(
                    f"process_group is ranks {passed}, but the batch of the input, a DTensor with placements "
                    f"{placements}, lies on ranks {needed}; set process_group=None, or pass input.to_local()"
                )
        options = replace(options, process_group=group)

    def place(gradient: "DTensor") -> Tensor:
        """Redistributes the gradient. (The backward of from_local does so outside the graph of second derivatives.)"""
        if TO_LOCAL_LOSES_GRAPH and torch.is_grad_enabled():
            raise RuntimeError("DTensors have no second derivatives before torch 2.13: leave out create_graph")
        gradient = gradient.redistribute(placements=placements)
        # Autograd may take its values for z.grad, to which it adds in place.
        return gradient if tensors.z is None else gradient.clone()

    def wrap(output: Tensor) -> Tensor:
        memory_format = torch.contiguous_format if output.is_contiguous() else CHANNELS_LAST[x.ndim]
        stride = torch.empty(shape, device="meta", memory_format=memory_format).stride()
        y = DTensor.from_local(output, mesh, placements, run_check=False, shape=shape, stride=stride)
        if y.requires_grad and not is_compiling():
            y.register_hook(place)
        return y

    return unwrapped, options, wrap


def _row(placement: "Placement", channel_dim: int, ndim: int) -> "tuple[bool, Placement, Placement]":
    """The row of the table above for a dim of the mesh: whether ranks add up along it, and the placements of parameters
    and gradients. A Partial input is refused later; until then it counts as Shard of the batch, so that this rank finds
    the group of the others."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if placement.is_replicate():
        return False, Replicate(), Replicate()
    if not placement.is_partial() and channel_dim in (placement.dim, placement.dim - ndim):  # type: ignore[attr-defined]
        return False, Shard(0), Shard(0)
    return True, Replicate(), Partial()


def group_of(x: "DTensor", channel_dim: int) -> MeshGroup:
    """The group of the ranks that differ from this one along those dims of the mesh that add up, and only along them.

    **Raises** ValueError where this rank is not in the mesh, and where no group has these ranks.
    """
    mesh = x.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the mesh of the input, which is a DTensor on {mesh}")
    adds_up = [_row(placement, channel_dim, x.ndim)[0] for placement in x.placements]
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
    return MeshGroup(group)
