"""Adds up over the ranks: one all_reduce each pass, by a reduction that is chosen once for a call.

There are three reductions: for one rank, for a group in eager mode, and, in graph_reduction.py, for a group in a
compiled graph. Calls that are not ordinary add up by `total` or `totals` of
totals.py, whose results have derivatives and may be batched.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | numbers | received everywhere       |
|----------|---------------------------------------------|---------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, trailer         | 2C + 4  | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean), trailer        | 2C + 4  | their sums over all ranks |

All numbers are float64, and the sums are not centred, so that uneven and empty ranks need no special case. Each pass is
exactly one collective when the group has two or more ranks, and none otherwise: an all_reduce, which small groups of
gloo make by an exchange, see all_reduce.py. A rank with bad arguments cannot compute its sums but must not leave the
others waiting: it joins the forward all_reduce with zeros and n_r = NaN, which every rank sees in the total.

Each payload ends in a trailer of four numbers: n in forward and 0 in backward, and a signature, see
diagnosis/positions.py. On CPU every rank reads the total's trailer, and sees there whether ranks in different layers
have met. On a GPU the host would have to wait.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.comm import groups
from syncbn.comm.all_reduce import all_reduce
from syncbn.diagnosis import failures
from syncbn.diagnosis.collective import Collective
from syncbn.diagnosis.guards import guards
from syncbn.diagnosis.positions import CallsOnGroups, Signatures, Site
from syncbn.kernels.interface import SIGNATURE_NUMBERS, TRAILER_NUMBERS
from syncbn.torch_internals.state import current_dispatch_mode

TRANSFORMED_GRAPH = "A compiled graph cannot all_reduce inside vmap or forward mode: compile without fullgraph=True."


class Reduction:
    """The ranks that a call synchronises; in this base class one rank, so there is nothing to add up."""

    group: dist.ProcessGroup | None = None
    num_ranks: int | None = 1
    signatures = Signatures(1)
    is_read = False  # whether ranks read the total, and so the marks of others in it

    def all_reduce(self, payload: Tensor, pass_name: str) -> Tensor:
        """The total of `payload`, which it may overwrite, and which ends in a trailer.

        **Raises** RuntimeError when the all_reduce fails, and where ranks in different layers or passes have met; if a
        rank has a fault, a ValueError or TypeError with the texts of the faulty ranks.
        """
        return payload

    def total(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        """The totals of float64 `sums` with a trailer, which it signs and may overwrite. A rank with an `error` has NaN
        in the place of n, and raises this error. **Raises** as all_reduce."""
        return sums

    def warn_unless_finite(self, sums: Tensor) -> None:
        """A total of forward has NaN or infinity. Warns, once for a layer, if these `sums` of this rank have."""

    def leave_out(self, error: BaseException, pass_name: str) -> None:
        """This rank is about to raise `error`. Tells the others if it has not come to the all_reduce of the pass."""

    def telling_errors(self, pass_name: str) -> contextlib.AbstractContextManager[None]:
        """The context for a pass, from whose errors it calls `leave_out`."""
        return contextlib.nullcontext()

    def other_collective(self, pass_name: str) -> contextlib.AbstractContextManager[Collective | None]:
        """The context for a collective of this call that is no all_reduce of sums."""
        return contextlib.nullcontext()


ONE_RANK = Reduction()


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
        for guard in guards:
            guard.before_all_reduce(self, payload, pass_name)
        fault = None
        with Collective(self.site, self.call, pass_name, payload.device) as collective:
            total = all_reduce(payload, self.group, self.site.exchanges, by_operator)
            if total.is_cuda and not by_operator:
                self.site.rank.left_to_gpu(collective, total.device)
            if total.is_cpu and type(total) is Tensor:  # else the host cannot read it: a GPU's; a FakeTensor
                trailer = n, num_signed, signatures, squares = total[-TRAILER_NUMBERS:].tolist()
                if num_signed * squares != signatures * signatures or n != n:
                    fault = failures.fault_in_total(self, collective, trailer, error)
        if fault is not None:  # outside of the context, which would say that the collective failed
            raise fault
        return total

    def total(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        payload = sums
        if sums.is_cpu:  # to a GPU the host would have to wait
            s = self.signatures[pass_name, self.dtype]
            payload = torch.cat((sums[:-SIGNATURE_NUMBERS], sums.new_tensor((s != 0, s, s * s))))
        total = self.all_reduce(payload, pass_name, error, by_operator=current_dispatch_mode() is not None)
        is_read = pass_name == "forward" and payload.is_cpu and type(payload) is Tensor
        # By lists, as operators would be seen by the mode that watches this call. cat has left the sums as they were.
        if is_read and not all(map(math.isfinite, total.tolist())):
            self.warn_unless_finite(sums)
        return total

    def warn_unless_finite(self, sums: Tensor) -> None:
        if not all(map(math.isfinite, sums.tolist())):
            failures.warn_not_finite(self)

    def leave_out(self, error: BaseException, pass_name: str) -> None:
        site, last = self.site, self.site.rank.last
        came_to_it = (
            last is not None
            and (last.site, last.call) == (site, self.call)
            and (last.has_failed or last.pass_name == pass_name)
        )  # with create_graph a pass has two, and the first has another name
        if not came_to_it:
            site.rank.leave_out(site.doing(self.call, pass_name), error)

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
    """The reduction over the ranks that a call synchronises in eager mode; counts the call. See `groups.resolve`."""
    group = dist.group.WORLD if spec is None else groups.existing(spec)
    if group is None and spec is None:
        groups.warn_if_meant_for_several_ranks()
        return ONE_RANK
    site = caller._call_site
    # The site of the last call is used again if it still fits; a guard may bring a group of its own.
    if group is None or site is None or site.group() is not group or site.caller() is not caller or guards:
        group = groups.resolve(spec)
        if group is None:
            return ONE_RANK
        site = failures.new_site(caller, group)
        object.__setattr__(caller, "_call_site", site)  # a layer's own may refuse
    return EagerReduction(group, site, getattr(input, "dtype", None))
