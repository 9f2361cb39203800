"""Adds up over the ranks in a compiled graph, which cannot tell its layer. The total is not read there."""

import torch.distributed as dist
from torch import Tensor

from syncbn.comm import groups
from syncbn.comm.all_reduce import all_reduce, exchanges
from syncbn.kernels.interface import Mailbox
from syncbn.reductions.guards import joined_group
from syncbn.reductions.interface import ONE_RANK, TRANSFORMED_GRAPH, Reduction
from syncbn.torch_internals.distributed import group_in_graph
from syncbn.torch_internals.state import inside_vmap_or_forward_mode


class GraphReduction(Reduction):
    """The ranks of a group in a compiled graph."""

    group: dist.ProcessGroup
    num_ranks = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, payload: Tensor, pass_name: str, mailbox: Mailbox | None = None) -> Tensor:
        if inside_vmap_or_forward_mode():  # Dynamo would lose the total
            raise RuntimeError(TRANSFORMED_GRAPH)
        return all_reduce(payload, group_in_graph(self.group), exchanges(self.group))


def reduction_in_graph(spec: groups.SpecOfCall) -> Reduction:
    """The ranks that a call synchronises in a compiled graph, as `reduction_of`. **Raises** RuntimeError where new
    groups would have to be made, and inside syncbn.join."""
    if not dist.is_initialized():  # in graphs of torch 2.11 WORLD itself is never None
        return ONE_RANK
    if joined_group() is not None:
        where = "inside syncbn.join and recompute_running_stats"
        raise RuntimeError(f"{where} nothing may be compiled: leave out torch.compile")
    group = groups.existing(spec)
    if group is None and not isinstance(spec, groups.MeshGroup):
        remedy = "construct or convert the layers after torch.distributed.init_process_group()"
        what = f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph"
        raise RuntimeError(f"{what}; {remedy}")
    return ONE_RANK if group is None or group.size() == 1 else GraphReduction(group)
