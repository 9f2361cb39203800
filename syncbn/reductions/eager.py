"""Adds up over the ranks of a group in eager mode, where the total is read on CPU and errors come to all ranks."""

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.comm import groups
from syncbn.comm.all_reduce import all_reduce
from syncbn.diagnosis.collective import Collective
from syncbn.diagnosis.failures import warn_not_finite
from syncbn.diagnosis.sites import CallsOnGroups, Site, new_site
from syncbn.diagnosis.waits import event_behind
from syncbn.kernels.interface import SIGNATURE_NUMBERS, TRAILER_NUMBERS
from syncbn.reductions.agreement import fault_in_total
from syncbn.reductions.guards import guards
from syncbn.reductions.interface import ONE_RANK, TRANSFORMED_GRAPH, Reduction
from syncbn.reductions.resolving import resolve
from syncbn.torch_internals.state import current_dispatch_mode


class EagerReduction(Reduction):
    """The ranks of a group, in eager mode."""

    group: dist.ProcessGroup
    is_read = True

    def __init__(self, group: dist.ProcessGroup, site: Site, dtype: torch.dtype | None) -> None:
        site.num_calls += 1
        self.group, self.site, self.call, self.dtype = group, site, site.num_calls, dtype
        self.num_ranks, self.signatures = site.num_ranks, site.signatures

    def all_reduce(
        self, payload: Tensor, pass_name: str, error: Exception | None = None, by_operator: bool = False
    ) -> Tensor:
        """The total, see `Reduction`; `by_operator` by one that a dispatch mode can save."""
        if torch.compiler.is_dynamo_compiling():  # after the graph of a caller was broken
            raise RuntimeError(TRANSFORMED_GRAPH)
        collective, fault = Collective(self.site, self.call, pass_name, payload.device, self.dtype), None
        for guard in guards:
            guard.before_all_reduce(collective, payload)
        if self.call == 1 and pass_name == "forward":
            self.site.tell_call((len(payload) - TRAILER_NUMBERS) // 2)
        with collective:
            total = all_reduce(payload, self.group, self.site.exchanges, by_operator)
            if total.is_cuda and not by_operator:
                self.site.rank.on_gpu.add(collective, event_behind(total.device))
            if total.is_cpu and type(total) is Tensor:  # else the host cannot read it: a GPU's; a FakeTensor
                trailer = n, num_signed, signatures, squares = total[-TRAILER_NUMBERS:].tolist()
                if num_signed * squares != signatures * signatures or n != n:
                    fault = fault_in_total(collective, trailer, error)
        if fault is not None:  # outside of the context, which would say that the collective failed
            raise fault
        return total

    def total(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        payload = sums
        if sums.is_cpu:  # to a GPU the host would have to wait
            s = self.signatures[pass_name, self.dtype]
            payload = torch.cat((sums[:-SIGNATURE_NUMBERS], sums.new_tensor((s != 0, s, s * s))))
        total = self.all_reduce(payload, pass_name, error, by_operator=current_dispatch_mode() is not None)
        looks = pass_name == "forward" and payload.is_cpu and type(payload) is Tensor
        # By lists, as operators would be seen by the mode that watches this call. cat has left the sums as they were.
        if looks and not all(map(math.isfinite, total.tolist())):
            self.warn_unless_finite(sums)
        return total

    def warn_unless_finite(self, sums: Tensor) -> None:
        if not all(map(math.isfinite, sums.tolist())):
            warn_not_finite(self.site, self.other_collective("forward").doing(), self.dtype)

    def leave_out(self, error: BaseException, pass_name: str) -> None:
        site, last = self.site, self.site.rank.last
        came_to_it = (
            isinstance(last, Collective)
            and (last.site, last.call) == (site, self.call)
            and (last.has_failed or last.pass_name == pass_name)
        )  # with create_graph a pass has two, and the first has another name
        if not came_to_it:
            site.rank.leave_out(self.other_collective(pass_name).doing(), error)

    @contextlib.contextmanager
    def telling_errors(self, pass_name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.leave_out(error, pass_name)
            raise

    def other_collective(self, pass_name: str) -> Collective:
        return Collective(self.site, self.call, pass_name)


def reduction_of(spec: groups.SpecOfCall, caller: CallsOnGroups, input: Tensor | None) -> Reduction:
    """The reduction over the ranks that a call synchronises in eager mode; counts the call. See `resolve`."""
    group = dist.group.WORLD if spec is None else groups.existing(spec)
    if group is None and spec is None:
        groups.warn_if_meant_for_several_ranks()
        return ONE_RANK
    site = caller._call_site
    # The site of the last call is used again if it still fits; a guard may bring a group of its own.
    if group is None or site is None or site.group() is not group or site.caller() is not caller or guards:
        group = resolve(spec)
        if group is None:
            return ONE_RANK
        site = new_site(caller, group)
        object.__setattr__(caller, "_call_site", site)  # a layer's own may refuse
    return EagerReduction(group, site, getattr(input, "dtype", None))
