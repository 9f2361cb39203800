"""Sums payloads over the ranks of a call, with one all_reduce in each pass.

A `Reduction` is selected once for each call: `OneRank`, `EagerReduction` for a group in eager mode, or `GraphReduction`
for a group in a compiled graph. fallback.py wraps `sign_and_all_reduce` in a Function with derivatives.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | elements | received by every rank    |
|----------|---------------------------------------------|----------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, trailer         | 2C + 4   | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean), trailer        | 2C + 4   | their sums over all ranks |

All elements are float64, and the sums are not centred, so uneven and empty ranks are not special cases. Each pass
issues exactly one collective if the group has two or more ranks, and none otherwise. The collective is an all_reduce,
or an all_to_all_single in small groups of gloo, see collective.py. A rank with a bad argument cannot compute its sums
but must not leave the other ranks waiting: it joins the all_reduce of the forward with zeros and n_r = NaN, so every
rank receives n = NaN.

The trailer has four elements: n in forward and 0 in backward, and a signature, see sites.py. On CPU every rank reads
the trailer of the total, which shows whether the ranks are in different layers; report.py makes the error that all
ranks raise. On a GPU a kernel reads the trailer, and every rank raises the error some calls later, see status.py.
"""

import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

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
from syncbn.ranks.watchdog import recorded
from syncbn.torch_internals import (
    constant_in_graphs,
    current_dispatch_mode,
    is_compiling,
    is_exporting,
    is_jit_tracing,
    note_call,
    stream_handle,
)


class Reduction(ABC):
    """Adds the sums of one call over the ranks of its group."""

    group: dist.ProcessGroup | None  # None for one rank
    num_ranks: int | None  # None in a compiled graph, where it is unused
    signatures: Signatures
    # The total of the forward; None for one rank. It is set to None after a backward without retain_graph: a loss that
    # the program stores would otherwise keep the total alive.
    forward_total: Tensor | None = None
    # Whether the ranks, or kernels on their GPUs, read the trailer of a total. Only then may a rank send n = NaN.
    reads_trailer = False

    @abstractmethod
    def all_reduce(self, payload: Tensor, pass_name: str, status_words: StatusWords | None = None) -> Tensor:
        """Return the sum of `payload` over the ranks. `payload` ends in a trailer and may be overwritten. With
        `status_words` a GPU kernel checks the total; without them the host checks a total on a CPU.

        **Raises** RuntimeError if the all_reduce fails or the ranks are in different layers or passes; ValueError or
        TypeError with the errors of all ranks if a rank has a bad argument.
        """

    def sign_and_all_reduce(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        """Sign the trailer of the float64 `sums`, and return the result of `all_reduce`. A rank with an `error` sends
        NaN instead of n, and raises this error."""
        return self.all_reduce(sums, pass_name)

    def status_words(self, pass_name: str, device: torch.device) -> StatusWords | None:
        """Return the status words for an all_reduce on a GPU, else None. **Raises** the fault of an earlier total."""
        return None

    # The methods below do nothing for one rank and in compiled graphs.

    def warn_unless_finite(self, sums: Tensor) -> None:  # noqa: B027
        """Warn, once for each layer, if these `sums` of this rank's forward contain NaN or infinity."""

    def record_error(self, error: BaseException) -> None:  # noqa: B027
        """Record an error that this rank raises. Ranks that wait for this rank then report the error."""

    def recording_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that records the error of a pass."""
        return contextlib.nullcontext()


class OneRank(Reduction):
    """Reduction of a call over one rank, which sends nothing."""

    group = None
    num_ranks = 1
    signatures = Signatures(1)  # all UNSIGNED, because they have no identity

    def all_reduce(self, payload: Tensor, pass_name: str, status_words: StatusWords | None = None) -> Tensor:
        return payload


ONE_RANK = OneRank()


class EagerReduction(Reduction):
    """Reduction over a group in eager mode."""

    group: dist.ProcessGroup
    reads_trailer = True
    # Set by `status_words`, which passes its sequence number to kernels; cleared when `all_reduce` begins it. GPU only.
    pending_collective: Collective | None = None
    status: StreamStatus  # the status words of the stream, on a GPU

    def __init__(self, group: dist.ProcessGroup, site: Site, dtype: torch.dtype | None, requires_grad: bool) -> None:
        site.num_calls += 1
        site.lacks_grad = not requires_grad and (site.required_grad or site.num_calls == 1)
        site.required_grad |= requires_grad
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
        # If the last pass raised before its all_reduce, its collective is still pending: the other ranks wait in it.
        if collective is None:
            collective = self.pending_collective = self.new_collective(pass_name)
            collective.sequence_number = state.num_collectives = state.num_collectives + 1
        return status.status_words(collective.sequence_number)

    def all_reduce(
        self, payload: Tensor, pass_name: str, status_words: StatusWords | None = None, error: Exception | None = None,
        use_operator: bool = False,
    ) -> Tensor:  # fmt: skip
        """See `Reduction`. `error`: the argument error of this rank, or None. `use_operator`: see
        `collective.all_reduce`."""
        collective = self.pending_collective or Collective(self.site, self.call_number, pass_name, self.dtype)
        self.pending_collective = fault = None
        if self.call_number == 1 and pass_name == "forward":
            self.site.write_call((len(payload) - TRAILER_ELEMENTS) // 2)
        collective.begin()
        try:
            if status_words is not None and status_words.sequence_number > 0:
                self.status.recent.append(collective)
            if error is not None:  # If the other ranks send sums of another size, gloo may end this process.
                report.record_at_once(self.site.rank, error)
            total = all_reduce(payload, self.group, self.site.all_to_all_size, use_operator)
            if status_words is None and total.is_cpu and type(total) is Tensor:  # not a FakeTensor, which has no values
                n, num_signed, signatures, squares = total[-TRAILER_ELEMENTS:].tolist()
                ranks_differ = num_signed * squares != signatures * signatures
                if ranks_differ or n != n:
                    fault = _diagnose(collective, total, ranks_differ, error)
                    self.signatures = self.site.signatures  # The backward signs with the number on which ranks agreed.
        except RuntimeError as failure:
            collective.raise_with_positions(failure)
            raise
        finally:
            del collective.rank.waiting[collective]
        if pass_name == "forward":
            self.forward_total = total
        if fault is None:
            return total
        try:  # outside of the block above, which would report a failed collective
            raise fault
        finally:  # The traceback refers to this frame. The reference cycle would keep the group and gloo's threads.
            del fault, error

    def sign_and_all_reduce(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        is_forward, status_words, s = pass_name == "forward", None, UNSIGNED
        if type(sums) is Tensor and sums.is_cuda and select.checks_totals(sums.device):
            status_words = self.status_words(pass_name, sums.device)
        if sums.is_cpu or status_words is not None:
            s = self.signatures[pass_name, self.dtype]
        is_signed, signature = (sums.new_full((1,), number) for number in (s != UNSIGNED, s))
        if s != UNSIGNED and not is_forward and type(self.forward_total) is Tensor:
            signature = reference.signature_of_call(s, self.forward_total)
        payload = torch.cat((sums[:-SIGNATURE_ELEMENTS], is_signed, signature, signature.square()))
        use_operator = current_dispatch_mode() is not None
        try:
            total = self.all_reduce(payload, pass_name, status_words, error, use_operator)
        except Exception:
            del error  # see `all_reduce`
            raise
        if status_words is not None:
            if error is not None:
                self.status.write_report(status_words.sequence_number, error)
            needs_two_values = is_forward and self.site.needs_two_values
            select.check_total(total, needs_two_values, status_words, sums if is_forward else None)
            if error is not None:
                try:
                    raise error
                finally:
                    del error
        # `all_finite` tests a Python list, because a dispatch mode would intercept operators. `sums` are still those of
        # this rank, because torch.cat has copied them.
        elif is_forward and payload.is_cpu and type(payload) is Tensor and not all_finite(total):
            self.warn_unless_finite(sums)
        return total

    def warn_unless_finite(self, sums: Tensor) -> None:
        if not all_finite(sums):
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


def all_finite(sums: Tensor) -> bool:
    return all(map(math.isfinite, sums.tolist()))


def _diagnose(collective: Collective, total: Tensor, ranks_differ: bool, error: Exception | None) -> Exception | None:
    """Return the error that this rank raises for a total with a fault. `error`: the argument error of this rank, or
    None.

    If only the instance numbers of the layer differed, let the ranks agree on a new number, and return None.
    """
    site, state, rank = collective.site, collective.site.group_state, collective.rank
    if math.isnan(total[-1]):  # The ranks have sent different lengths, and gloo has aborted a rank.
        where = report.report_positions(rank, collective, has_failed=True)
        return error or RuntimeError(report.TITLE_LENGTHS + where)
    # repr gives every NaN the same text.
    key = f"fault/{state.name}/{hashlib.blake2b(repr(total.tolist()).encode(), digest_size=8).hexdigest()}"
    calls = report.gather_calls(rank, state.ranks, key, collective.to_report(error))
    answers = [call for call in calls if call is not None]
    can_renumber = state.retired_numbers.isdisjoint((call.layer, call.instance_number) for call in answers)
    fault = report.explain(rank, state.ranks, collective, calls, ranks_differ, can_renumber)
    if isinstance(fault, report.RanksDifferError):
        return fault
    if len({call.instance_number for call in answers}) > 1:
        # In its first call a layer has a number on which the ranks have not agreed yet.
        state.retired_numbers.update((call.layer, call.instance_number) for call in answers if call.call_number > 1)
        site.set_instance_number(max(call.next_instance_number for call in answers))
    return error or fault


class GraphReduction(Reduction):
    """Reduction over a group in a compiled graph, where the layer is unknown and no rank reads the trailer."""

    group: dist.ProcessGroup
    num_ranks = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, payload: Tensor, pass_name: str, status_words: StatusWords | None = None) -> Tensor:
        return all_reduce(payload, self.group, all_to_all_size(self.group), use_operator=True)


def select_reduction(spec: GroupSpec, caller: Caller, input: Tensor | None) -> Reduction:
    """Return the reduction of a call.

    **Raises** RuntimeError in torch.jit.trace, which cannot record the collectives. The error is raised before
    anything is sent, because often only one rank traces.
    """
    if is_compiling():
        return graph_reduction(spec)
    if is_jit_tracing():
        what = (
            "syncbn: torch.jit.trace, which torch.onnx.export(dynamo=False) uses, cannot record batch norm over ranks"
        )
        raise recorded(RuntimeError(f"{what}: call syncbn.revert_syncbn_model(model) first, or model.eval()"))
    return eager_reduction(spec, caller, getattr(input, "dtype", None), getattr(input, "requires_grad", True))


def eager_reduction(spec: GroupSpec, caller: Caller, dtype: torch.dtype | None, grad: bool = True) -> Reduction:
    """Return the reduction of a call in eager mode, and count the call. `grad`: whether the input requires a gradient.
    **Raises** the errors of `resolve`."""
    group = dist.group.WORLD if spec is None else groups.lookup(spec)
    if group is None and spec is None:
        groups.warn_of_missing_group()
        return ONE_RANK
    site = caller._call_site  # the site of the last call
    if group is None or site is None or site.group_state.group() is not group or site.caller() is not caller:
        group = resolve(spec)
        if group is None:
            return ONE_RANK
        site = call_site(caller, group)
        object.__setattr__(caller, "_call_site", site)  # bypasses the __setattr__ of a subclass, which may raise
    return EagerReduction(group, site, dtype, grad)


def graph_reduction(spec: GroupSpec) -> Reduction:
    """Return the reduction of a call in a compiled graph. **Raises** the errors of `_check_graph`."""
    note_call(True)
    if spec == groups.THIS_RANK_ALONE:
        return ONE_RANK
    _check_graph(spec)
    # Dynamo guards WORLD, so it recompiles for another default group. In graphs of torch 2.11, however, WORLD is never
    # None, so is_initialized() is tested too, which Dynamo evaluates to a constant without a guard.
    group = groups.lookup(spec) if dist.group.WORLD is not None and dist.is_initialized() else None
    return ONE_RANK if group is None or group.size() == 1 else GraphReduction(group)


@constant_in_graphs  # If Dynamo traced a raise, it would break the graph and run the layer in eager mode.
def _check_graph(spec: GroupSpec) -> None:
    """**Raises** the errors of `groups.lookup`; RuntimeError if groups would have to be created, and in an export over
    several ranks."""
    group = groups.lookup(spec)
    if group is None and dist.is_initialized():
        what = f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph"
        remedy = "construct or convert the layers after torch.distributed.init_process_group()"
        raise RuntimeError(f"{what}; {remedy}")
    if group is not None and group.size() > 1 and is_exporting():
        what = "torch.export cannot record batch norm over several ranks in training"
        raise RuntimeError(f"syncbn: {what}; call model.eval() or syncbn.revert_syncbn_model(model) first")


def record_ranks(caller: Caller, reduction: Reduction) -> None:
    """Record on the caller over how many ranks the call was synchronised."""
    if not is_compiling():  # In a compiled graph a change of the attribute would cause a recompilation.
        object.__setattr__(caller, "_synchronised_ranks", reduction.num_ranks)


def resolve(spec: GroupSpec) -> dist.ProcessGroup | None:
    """Return the group of `spec`, or None for a group of one rank and before init_process_group.

    The first call with an int above 1 creates the groups. **Raises** the errors of `groups.lookup` and `make_groups`.
    """
    if spec == groups.THIS_RANK_ALONE:
        return None
    make_groups(spec)
    group = groups.lookup(spec)
    if not dist.is_initialized():
        groups.warn_of_missing_group()
    return None if group is None or group.size() == 1 else group


def make_groups(spec: GroupSpec) -> None:
    """If `spec` is an int above 1, create its groups unless they exist. **Raises** the errors of `_make_groups`."""
    if isinstance(spec, int) and spec != groups.THIS_RANK_ALONE:
        _make_groups(spec)


def _make_groups(spec: int) -> None:
    """Create the groups of `spec` ranks each, unless they exist. This is a collective over ALL ranks of the default
    group; reports of positions show it. **Raises** the errors of `groups.make`."""
    default_group = dist.group.WORLD
    if default_group is not None and groups.lookup(spec) is None:
        caller = FunctionCaller(f"the creation of groups for process_group={spec!r}", is_signed=False)
        collective = Collective(call_site(caller, default_group), 1, "creation")
        collective.begin()
        try:
            groups.make(spec, default_group)
        except RuntimeError as error:
            collective.raise_with_positions(error)
            raise
        finally:
            del collective.rank.waiting[collective]


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Return this rank's group of `group_size` consecutive ranks, like apex's function of the same name. Return None,
    which stands for the default group, if `group_size` is 0.

    The first call with each size is a collective over all ranks of the default group.

    **Raises** ValueError if `group_size` is not an int or is negative, or if the number of ranks is not a multiple of
    it; RuntimeError before init_process_group.
    """
    if group_size == 0:
        return None
    if not isinstance(group_size, int) or group_size < 0:
        raise recorded(ValueError(f"group_size must be an int that is not negative, got {group_size!r}"))
    if dist.group.WORLD is None:
        raise RuntimeError("create_syncbn_process_group needs torch.distributed.init_process_group() first")
    _make_groups(group_size)
    return groups.lookup(group_size)
