"""Adds up over the ranks that a call synchronises, by one all_reduce each pass. A reduction is chosen once for a call.

There are three: `OneRank`, `EagerReduction` for a group in eager mode, and `GraphReduction` for one in a compiled
graph. Calls in the fallback add up by `total` of fallback.py, whose results have derivatives.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | numbers | received everywhere       |
|----------|---------------------------------------------|---------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, trailer         | 2C + 4  | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean), trailer        | 2C + 4  | their sums over all ranks |

All numbers are float64, and the sums are not centred, so that uneven and empty ranks need no special case. Each pass is
exactly one collective when the group has two or more ranks, and none otherwise: an all_reduce, which small groups of
gloo make by an exchange, see collective.py. A rank with bad arguments cannot compute its sums but must not leave
the others waiting: it joins the forward all_reduce with zeros and n_r = NaN, which every rank sees in the total.

Each payload ends in a trailer of four numbers: n in forward and 0 in backward, and a signature, see sites.py. On CPU
every rank reads the total's trailer, and sees there whether ranks in different layers have met; report.py has what they
then raise. On a GPU a kernel reads it, and every rank raises some calls later, see status.py.
"""

import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.kernels import reference, select
from syncbn.kernels.interface import SIGNATURE_ELEMENTS, TRAILER_ELEMENTS, UNSIGNED, StatusWords
from syncbn.ranks import groups, report
from syncbn.ranks.collective import Collective, all_reduce
from syncbn.ranks.groups import GroupSpec, all_to_all_size
from syncbn.ranks.sites import Caller, FunctionCaller, Signatures, Site, call_site
from syncbn.ranks.status import StreamStatus, captured_sequence_number, status_of
from syncbn.torch_internals import (
    constant_in_graphs,
    current_dispatch_mode,
    is_compiling,
    is_exporting,
    is_jit_tracing,
    stream_handle,
)

NO_SIGNATURES = Signatures(1)  # a site without an identity sends zeros


class Reduction(ABC):
    """The ranks that a call synchronises."""

    group: dist.ProcessGroup | None  # None for one rank
    num_ranks: int | None  # None in a graph, where it is unused
    signatures: Signatures
    # The total of this call's forward; None for one rank. A backward that does not keep its graph sets it to None: the
    # loss may be kept, and with it this reduction.
    forward_total: Tensor | None = None
    reads_trailer = False  # whether ranks or their GPUs read the trailer of a total: only then may a rank send NaN in n

    @abstractmethod
    def all_reduce(self, payload: Tensor, pass_name: str, status_words: StatusWords | None = None) -> Tensor:
        """The total of `payload`, which it may overwrite, and which ends in a trailer. With
        `status_words` GPU kernels check the total.

        **Raises** RuntimeError when the all_reduce fails, and where ranks in different layers or passes have met; if a
        rank has a fault, a ValueError or TypeError with the texts of the faulty ranks.
        """

    def sign_and_all_reduce(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        """`all_reduce` of float64 `sums` whose trailer is not signed yet. A rank with an `error` has NaN in the place
        of n, and raises this error."""
        return self.all_reduce(sums, pass_name)

    def status_words(self, pass_name: str, device: torch.device) -> StatusWords | None:
        """The status_words of the next all_reduce, on a GPU. **Raises** what kernels have seen in an earlier total."""
        return None

    # One rank tells nobody, and a graph cannot: in these the rest does nothing.

    def warn_unless_finite(self, sums: Tensor) -> None:  # noqa: B027
        """A total of forward has NaN or infinity. Warns, once for a layer, if these `sums` of this rank have."""

    def record_error(self, error: BaseException) -> None:  # noqa: B027
        """This rank is about to raise `error`, perhaps without the all_reduce for which the others wait. Their reports
        have the error."""

    def recording_errors(self) -> contextlib.AbstractContextManager[None]:
        """The context of a pass. Calls `record_error` if the pass raises."""
        return contextlib.nullcontext()


class OneRank(Reduction):
    """One rank: there is nothing to add up."""

    group = None
    num_ranks = 1
    signatures = NO_SIGNATURES

    def all_reduce(self, payload: Tensor, pass_name: str, status_words: StatusWords | None = None) -> Tensor:
        return payload


ONE_RANK = OneRank()


class EagerReduction(Reduction):
    """The ranks of a group, in eager mode."""

    group: dist.ProcessGroup
    reads_trailer = True
    # Of the pass, on a GPU: the collective that is about to begin, whose number kernels have, and what these note.
    pending_collective: Collective | None = None
    status: StreamStatus

    def __init__(self, group: dist.ProcessGroup, site: Site, dtype: torch.dtype | None) -> None:
        site.num_calls += 1
        self.group, self.site, self.call_number, self.dtype = group, site, site.num_calls, dtype
        self.num_ranks, self.signatures = site.group_state.num_ranks, site.signatures

    def status_words(self, pass_name: str, device: torch.device) -> StatusWords | None:
        site, stream = self.site, stream_handle(device)
        status = status_of(site.group_state).streams.get((device, stream))
        if status is None:
            if stream is None:
                return None
            status = StreamStatus(site, device, stream)
        self.status = status
        if stream is None:
            return status.status_words(captured_sequence_number(site, pass_name))
        collective, state = self.pending_collective, site.group_state
        if collective is None:  # else an error has ended the pass before its all_reduce, where others wait
            collective = self.pending_collective = self.new_collective(pass_name)
            collective.sequence_number = state.num_collectives = state.num_collectives + 1
        return status.status_words(collective.sequence_number)

    def all_reduce(
        self, payload: Tensor, pass_name: str, status_words: StatusWords | None = None, error: Exception | None = None,
        use_operator: bool = False,
    ) -> Tensor:  # fmt: skip
        """The total, see `Reduction`; `use_operator` by one that a dispatch mode can save."""
        collective, fault = (
            self.pending_collective or Collective(self.site, self.call_number, pass_name, self.dtype),
            None,
        )
        self.pending_collective = None
        if self.call_number == 1 and pass_name == "forward":
            self.site.write_call((len(payload) - TRAILER_ELEMENTS) // 2)
        with collective:
            if status_words is not None and status_words.sequence_number > 0:
                self.status.recent.append(collective)
            total = all_reduce(payload, self.group, self.site.all_to_all_size, use_operator)
            if (
                status_words is None and total.is_cpu and type(total) is Tensor
            ):  # else the host cannot read it: a FakeTensor
                n, num_signed, signatures, squares = total[-TRAILER_ELEMENTS:].tolist()
                ranks_differ = num_signed * squares != signatures * signatures
                if ranks_differ or n != n:
                    fault = _diagnose(collective, total, ranks_differ, error)
        if pass_name == "forward":
            self.forward_total = total
        if fault is None:
            return total
        try:  # outside of the context, which would report that the collective failed
            raise fault
        finally:  # Its traceback has this frame. A cycle would keep the group, and gloo's threads until the end.
            del fault, error

    def sign_and_all_reduce(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        is_real = type(sums) is Tensor
        has_status = is_real and sums.is_cuda and select.checks_totals(sums.device)
        status_words = self.status_words(pass_name, sums.device) if has_status else None
        reads_trailer = sums.is_cpu or status_words is not None
        s = self.signatures[pass_name, self.dtype] if reads_trailer else UNSIGNED
        is_signed, signature = (sums.new_full((1,), number) for number in (s != UNSIGNED, s))
        if s != UNSIGNED and pass_name != "forward" and type(self.forward_total) is Tensor:
            signature = reference.signature_of_call(s, self.forward_total)
        payload = torch.cat((sums[:-SIGNATURE_ELEMENTS], is_signed, signature, signature.square()))
        use_operator = current_dispatch_mode() is not None
        try:
            total = self.all_reduce(payload, pass_name, status_words, error, use_operator)
        except Exception:
            del error  # as in `all_reduce`
            raise
        if status_words is not None:
            if error is not None:
                self.status.write_report(status_words.sequence_number, error)
            is_forward = pass_name == "forward"
            needs_two_values = is_forward and self.site.needs_two_values
            select.check_total(total, needs_two_values, status_words, sums if is_forward else None)
            if error is not None:
                try:
                    raise error
                finally:
                    del error
        looks = pass_name == "forward" and status_words is None and payload.is_cpu and type(payload) is Tensor
        # By lists, as operators would be seen by the mode that watches this call. cat has left the sums as they were.
        if looks and not all(map(math.isfinite, total.tolist())):
            self.warn_unless_finite(sums)
        return total

    def warn_unless_finite(self, sums: Tensor) -> None:
        if not all(map(math.isfinite, sums.tolist())):
            self.new_collective("forward").warn_not_finite()

    def record_error(self, error: BaseException) -> None:
        self.site.rank.record_error(error)

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.record_error(error)
            raise

    def new_collective(self, pass_name: str) -> Collective:
        return Collective(self.site, self.call_number, pass_name, self.dtype)


def _diagnose(collective: Collective, total: Tensor, ranks_differ: bool, error: Exception | None) -> Exception | None:
    """Return what this rank raises if the trailer of a total shows a fault; `error` is its bad argument, or None.

    Returns None if the layer only had different numbers: all ranks now use a number that none has used.
    """
    site, state, rank = collective.site, collective.site.group_state, collective.rank
    if math.isnan(total[-1]):  # the ranks have sent different lengths, and gloo has aborted one of them
        where = report.report_positions(rank, collective, has_failed=True)
        return error or RuntimeError(report.DIFFERENT_LENGTHS + where)
    # repr has one text for every NaN.
    key = f"fault/{state.name}/{hashlib.blake2b(repr(total.tolist()).encode(), digest_size=8).hexdigest()}"
    call = collective.to_report(error)
    calls = report.gather_calls(rank, state.ranks, key, call)
    fault = report.explain(rank, state.ranks, collective, calls, ranks_differ, can_renumber=True)
    answers = [other for other in calls if other is not None]
    if len({other.instance_number for other in answers}) > 1 and not isinstance(fault, report.RanksDifferError):
        site.set_instance_number(max(other.next_instance_number for other in answers))
    is_own = error is not None and not isinstance(fault, report.RanksDifferError)
    return error if is_own else fault


class GraphReduction(Reduction):
    """The ranks of a group in a compiled graph, which cannot tell its layer. The total is not read there."""

    group: dist.ProcessGroup
    num_ranks = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, payload: Tensor, pass_name: str, status_words: StatusWords | None = None) -> Tensor:
        return all_reduce(payload, self.group, all_to_all_size(self.group), use_operator=True)


def select_reduction(spec: GroupSpec, caller: Caller, input: Tensor | None) -> Reduction:
    """The ranks that a call synchronises. **Raises** RuntimeError in torch.jit.trace, which cannot record them, before
    anything is sent: often one rank alone records."""
    if is_compiling():
        return graph_reduction(spec)
    if is_jit_tracing():
        raise RuntimeError(
            "syncbn: torch.jit.trace, which torch.onnx.export(dynamo=False) uses, cannot record batch norm of all "
            "ranks: call syncbn.revert_syncbn_model(model) first, or model.eval()"
        )
    return eager_reduction(spec, caller, getattr(input, "dtype", None))


def eager_reduction(spec: GroupSpec, caller: Caller, dtype: torch.dtype | None) -> Reduction:
    """The reduction over the ranks that a call synchronises in eager mode; counts the call. See `resolve`."""
    group = dist.group.WORLD if spec is None else groups.lookup(spec)
    if group is None and spec is None:
        groups.warn_of_missing_group()
        return ONE_RANK
    site = caller._call_site
    # The site of the last call is used again if it still fits.
    if group is None or site is None or site.group_state.group() is not group or site.caller() is not caller:
        group = resolve(spec)
        if group is None:
            return ONE_RANK
        site = call_site(caller, group)
        object.__setattr__(caller, "_call_site", site)  # a layer's own may refuse
    return EagerReduction(group, site, dtype)


def graph_reduction(spec: GroupSpec) -> Reduction:
    """**Raises** RuntimeError where new groups would have to be made, and in an export over several ranks."""
    # Dynamo guards WORLD, so it compiles again for another default group; it folds is_initialized() without a guard. In
    # graphs of torch 2.11 WORLD itself is never None.
    if spec == groups.THIS_RANK_ALONE or dist.group.WORLD is None or not dist.is_initialized():
        return ONE_RANK
    group = groups.lookup(spec)
    if group is None:
        what = f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph"
        remedy = "construct or convert the layers after torch.distributed.init_process_group()"
        _raise_in_graph(f"{what}; {remedy}")
    if group.size() == 1:
        return ONE_RANK
    if is_exporting():
        what = "torch.export cannot record batch norm over several ranks in training"
        _raise_in_graph(f"syncbn: {what}; call model.eval() or syncbn.revert_syncbn_model(model) first")
    return GraphReduction(group)


@constant_in_graphs  # At an error that Dynamo traces it would break the graph, and run the layer in eager mode.
def _raise_in_graph(message: str) -> NoReturn:
    raise RuntimeError(message)


def record_ranks(caller: Caller, reduction: Reduction) -> None:
    """Note over how many ranks the caller was synchronised."""
    if not is_compiling():  # where an attribute that changes would compile a graph again
        object.__setattr__(caller, "_synchronised_ranks", reduction.num_ranks)  # a layer's own may refuse


def resolve(spec: GroupSpec) -> dist.ProcessGroup | None:
    """The group to synchronise over now; None for a group of one rank, and when there is no process group.

    The first call with an int above 1 makes the groups. **Raises** as `groups.lookup`.
    """
    if spec == groups.THIS_RANK_ALONE:
        return None
    make_groups(spec)
    group = groups.lookup(spec)
    if not dist.is_initialized():
        groups.warn_of_missing_group()
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
    if default_group is not None and groups.lookup(spec) is None:
        caller = FunctionCaller(f"the making of groups for process_group={spec!r}", is_signed=False)
        with Collective(call_site(caller, default_group), 1, "making"):
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
    return groups.lookup(group_size)
