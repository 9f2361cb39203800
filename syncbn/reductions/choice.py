"""Chooses the reduction of a call: finds or makes the process group, and asks whether torch compiles. Adds up in
compiled graphs.
"""

from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.comm import groups
from syncbn.comm.all_reduce import all_reduce, exchanges
from syncbn.comm.groups import GroupSpec
from syncbn.diagnosis.collective import Collective
from syncbn.diagnosis.sites import Caller, CallsOnGroups, new_site
from syncbn.kernels.interface import Mailbox
from syncbn.reductions.eager import EagerReduction
from syncbn.reductions.interface import ONE_RANK, Reduction
from syncbn.torch_internals.state import constant_in_graphs, is_compiling, is_jit_tracing


def reduction_now(spec: GroupSpec, caller: CallsOnGroups, input: Tensor | None) -> Reduction:
    """The ranks that a call synchronises. **Raises** RuntimeError in torch.jit.trace, which cannot record them, before
    anything is sent: often one rank alone records."""
    if is_compiling():
        return reduction_in_graph(spec)
    if is_jit_tracing():
        raise RuntimeError(
            "syncbn: torch.jit.trace, which torch.onnx.export(dynamo=False) uses, cannot record batch norm of all "
            "ranks: call syncbn.revert_syncbn_model(model) first, or model.eval()"
        )
    return reduction_of(spec, caller, getattr(input, "dtype", None))


def reduction_of(spec: GroupSpec, caller: CallsOnGroups, dtype: torch.dtype | None) -> Reduction:
    """The reduction over the ranks that a call synchronises in eager mode; counts the call. See `resolve`."""
    group = dist.group.WORLD if spec is None else groups.existing(spec)
    if group is None and spec is None:
        groups.warn_if_meant_for_several_ranks()
        return ONE_RANK
    site = caller._call_site
    # The site of the last call is used again if it still fits.
    if group is None or site is None or site.state.group() is not group or site.caller() is not caller:
        group = resolve(spec)
        if group is None:
            return ONE_RANK
        site = new_site(caller, group)
        object.__setattr__(caller, "_call_site", site)  # a layer's own may refuse
    return EagerReduction(group, site, dtype)


class GraphReduction(Reduction):
    """The ranks of a group in a compiled graph, which cannot tell its layer. The total is not read there."""

    group: dist.ProcessGroup
    num_ranks = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, payload: Tensor, pass_name: str, mailbox: Mailbox | None = None) -> Tensor:
        return all_reduce(payload, self.group, exchanges(self.group))


def reduction_in_graph(spec: GroupSpec) -> Reduction:
    """**Raises** RuntimeError where new groups would have to be made, and in an export over several ranks."""
    # Dynamo guards WORLD, so it compiles again for another default group; it folds is_initialized() without a guard. In
    # graphs of torch 2.11 WORLD itself is never None.
    if spec == groups.THIS_RANK_ALONE or dist.group.WORLD is None or not dist.is_initialized():
        return ONE_RANK
    group = groups.existing(spec)
    if group is None:
        what = f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph"
        remedy = "construct or convert the layers after torch.distributed.init_process_group()"
        _raise_in_graph(f"{what}; {remedy}")
    if group.size() == 1:
        return ONE_RANK
    if torch.compiler.is_exporting():
        what = "torch.export cannot record batch norm over several ranks in training"
        _raise_in_graph(f"syncbn: {what}; call model.eval() or syncbn.revert_syncbn_model(model) first")
    return GraphReduction(group)


@constant_in_graphs  # At an error that Dynamo traces it would break the graph, and run the layer in eager mode.
def _raise_in_graph(message: str) -> NoReturn:
    raise RuntimeError(message)


def note_ranks(caller: CallsOnGroups, reduction: Reduction) -> None:
    """Note over how many ranks the caller was synchronised."""
    if not is_compiling():  # where an attribute that changes would compile a graph again
        object.__setattr__(caller, "_synchronised_ranks", reduction.num_ranks)  # a layer's own may refuse


def resolve(spec: GroupSpec) -> dist.ProcessGroup | None:
    """The group to synchronise over now; None for a group of one rank, and when there is no process group.

    The first call with an int above 1 makes the groups. **Raises** as `groups.existing`.
    """
    if spec == groups.THIS_RANK_ALONE:
        return None
    make_groups(spec)
    group = groups.existing(spec)
    if not dist.is_initialized():
        groups.warn_if_meant_for_several_ranks()
    return None if group is None or group.size() == 1 else group


def make_groups(spec: GroupSpec) -> None:
    """Make the groups that an int above 1 needs, unless they are made. **Raises** as `_make_groups`."""
    if isinstance(spec, int) and spec != groups.THIS_RANK_ALONE:
        _make_groups(spec)


def _make_groups(spec: int) -> None:
    """Make the groups of an int, unless they are made: a collective over ALL ranks of the default group, which tells
    the other ranks where this rank waits.

    **Raises** ValueError on every rank when the ranks ask for different groups, or their number does not divide.
    """
    default_group = dist.group.WORLD
    if default_group is not None and groups.existing(spec) is None:
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
    _make_groups(group_size)
    return groups.existing(group_size)
