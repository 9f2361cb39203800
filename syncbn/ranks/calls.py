"""Runs the pass of a call: local sums, one all_reduce over the ranks, outputs.

A training call of a layer or function is a `Call`: `OneRank`, `EagerCall` for a group in eager mode, or `GraphCall` for
a group in a compiled graph. `Call.forward` and `Call.backward` are the two passes of every training call,
whatever its kernels. Each pass sends one payload, see payload.py. It issues exactly one collective if the group has two
or more ranks, and none otherwise. The collective is an all_reduce, or an all_to_all_single in small groups of gloo, see
collective.py.

On a CPU every rank reads the trailer of the total, which shows whether the ranks are in different layers or a rank has
a bad argument; report.py makes the error that all ranks raise. On a GPU a kernel reads the trailer, and every rank
raises the error some calls later, see status.py.
"""

import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import payload
from syncbn import torch_internals as internals
from syncbn.kernels import interface, select
from syncbn.kernels.interface import BackwardKernels, Buffers, ForwardKernels, Gradients, Inputs, Saved, StatusWords
from syncbn.payload import COUNT, IS_SIGNED, MAX_COUNT, NUM_IDS, NUM_VALUES, SIGNATURE, SQUARE, TRAILER, UNSIGNED
from syncbn.ranks import groups, report
from syncbn.ranks.collective import Collective, all_reduce
from syncbn.ranks.groups import GroupSpec, resolve
from syncbn.ranks.sites import Caller, Site, site_of
from syncbn.ranks.status import StreamStatus, captured_sequence_number, status_of
from syncbn.ranks.watchdog import recorded
from syncbn.texts import ONE_VALUE_PER_CHANNEL, format_error


class Call(ABC):
    """A training call: its two passes, and what they need of its group."""

    group: dist.ProcessGroup | None  # None for one rank
    num_ranks: int | None  # None in a compiled graph, where it is unused
    has_begun = False  # whether this rank has begun an all_reduce of this call
    # Whether the ranks, or kernels on their GPUs, read the trailer of a total. Only then may a rank send n = NaN.
    reads_trailer = False
    forward_signature, call_number = UNSIGNED, 0  # what this rank signs in forward, and its count

    def forward(
        self, kernels: ForwardKernels, inputs: Inputs, num_values: Tensor | None,
        buffers: Buffers = interface.NO_BUFFERS, momentum: Any = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return y and the statistics, and update the buffers: local sums, one all_reduce, outputs.

        `num_values`, of shape (), is the n of this rank if a mask has been applied, else None.
        """
        x, (outer, _, inner) = inputs[0], kernels.config.layout.sizes
        status_words = self.status_words("forward", x) if x.is_cuda else None
        sums = kernels.forward_sums(x, self.forward_signature, self.call_number, status_words)
        if num_values is not None:  # Masked values are 0 in the sums, but the kernel has counted them in n.
            sums = payload.with_num_values(sums, num_values)
        total = (self.all_reduce if kernels.is_direct else self.dispatched_all_reduce)(sums, "forward", status_words)
        if outer * inner < 2 or num_values is not None:  # Otherwise this rank has two or more values per channel.
            require_two_values(x, total, outer * inner if self.group is None and num_values is None else None)
        y, statistics, is_finite = kernels.forward_outputs(inputs, total, buffers, momentum, status_words)
        if not is_finite:  # The all_reduce may have overwritten the local sums, so they are computed again.
            self.warn_unless_finite(kernels.forward_sums(x))
        return y, statistics

    def backward(self, kernels: BackwardKernels, dy: Tensor, saved: Saved, num_values: Any = None) -> Gradients:
        """Return the gradients of x, weight, bias and, if a relu follows the residual, of the residual: local sums, one
        all_reduce, outputs. The all_reduce is issued whichever gradients are needed, because another rank may need the
        sums.

        If the n in the saved statistics is a placeholder of 1, `num_values` is the n of this rank, of shape (). The
        total is then divided by the n of all ranks.
        """
        status_words = self.status_words("backward", dy) if dy.is_cuda else None
        signature = self.signature("backward") if self.reads_trailer else (UNSIGNED, None)
        sums, grad_weight, grad_bias = kernels.backward_sums(dy, saved, *signature)
        sums = sums if num_values is None else payload.with_num_values(sums, num_values)
        total = (self.all_reduce if kernels.is_direct else self.dispatched_all_reduce)(sums, "backward", status_words)
        total = total if num_values is None else total / payload.num_values(total).clamp(min=1)
        grad_x, grad_residual = kernels.backward_outputs(dy, saved, total, status_words)
        return grad_x, grad_weight, grad_bias, grad_residual

    @abstractmethod
    def all_reduce(
        self, sent: Tensor, pass_name: str, status_words: StatusWords | None = None, use_operator: bool = False
    ) -> Tensor:
        """Return the total of the payload `sent` over the ranks. `sent` may be overwritten.

        `status_words`: a GPU kernel checks the total; without them the host checks a total on a CPU. `use_operator`:
        see collective.py.

        **Raises** RuntimeError if the all_reduce fails or the ranks are in different layers or passes; ValueError or
        TypeError with the errors of all ranks if a rank has a bad argument.
        """

    def dispatched_all_reduce(self, sent: Tensor, pass_name: str, status_words: StatusWords | None = None) -> Tensor:
        """Return the result of `all_reduce`, and make the checks that direct kernels make themselves: on a GPU those of
        the total; whether the sums of a forward are finite."""
        return self.all_reduce(sent, pass_name)

    def sign_and_all_reduce(self, sent: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        """Sign the payload `sent`, which no kernel has signed, and return the result of `all_reduce`. `error`: the
        argument error of this rank, which sends n = NaN and raises this error after this method, or None."""
        return self.all_reduce(sent, pass_name)

    def signature(self, pass_name: str) -> tuple[int, Tensor | None]:
        """Return what this rank signs in a pass after the forward: its signature, which on a CPU contains the id of the
        call, and on a GPU that id."""
        return UNSIGNED, None

    def status_words(self, pass_name: str, x: Tensor) -> StatusWords | None:
        """Return the status words for an all_reduce on the GPU of x if kernels there check totals, else None.
        **Raises** the fault of an earlier total."""
        return None

    def refuse_transforms(self, *tensors: Tensor | None) -> None:
        """**Raises** RuntimeError inside vmap and forward mode over several ranks."""
        if self.group is not None and internals.is_transformed(*tensors):
            raise RuntimeError(
                "torch.func.vmap, forward mode (jvp) and is_grads_batched=True are not supported over several ranks; "
                "loop over samples or gradients, use torch.autograd.functional, or set process_group=1"
            )

    # The methods below do nothing for one rank and in compiled graphs.

    def warn_unless_finite(self, sums: Tensor) -> None:  # noqa: B027
        """Warn, once for each layer, if these `sums` of this rank's forward contain NaN or infinity."""

    def record_error(self, error: BaseException) -> None:  # noqa: B027
        """Record an error that this rank raises. Ranks that wait for this rank then report the error."""

    def recording_errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that records the error of a pass."""
        return contextlib.nullcontext()


class OneRank(Call):
    """A call over one rank, which sends nothing."""

    group = None
    num_ranks = 1

    def all_reduce(self, sent: Tensor, pass_name: str, *_: object) -> Tensor:
        return sent


ONE_RANK = OneRank()


class EagerCall(Call):
    """A call over a group in eager mode."""

    group: dist.ProcessGroup
    reads_trailer = True
    # The id of the call, see payload.py: on a CPU an int, on a GPU float64 (1,), which a kernel writes. None: no id.
    call_id: int | Tensor | None = None
    argument_error: tuple[str, bool] | None = None  # see `Collective`
    # Set by `status_words`, which passes its sequence number to kernels; cleared when `all_reduce` begins it. GPU only.
    pending_collective: Collective | None = None
    status: StreamStatus  # the status words of the stream, on a GPU

    def __init__(self, group: dist.ProcessGroup, site: Site, input: object, in_backward: bool) -> None:
        dtype, requires_grad = getattr(input, "dtype", None), getattr(input, "requires_grad", True)
        site.num_calls += 1
        site.lacks_grad = not requires_grad and (site.required_grad or site.num_calls == 1)
        site.required_grad |= requires_grad
        self.group, self.site, self.call_number, self.dtype = group, site, site.num_calls, dtype
        self.num_ranks, self.signatures, self.in_backward = site.group_state.num_ranks, site.signatures, in_backward
        self.forward_signature = site.signatures["forward", dtype]

    def signature(self, pass_name: str) -> tuple[int, Tensor | None]:
        if self.call_id is None or self.in_backward:
            return UNSIGNED, None
        signature = self.signatures[pass_name, self.dtype]
        if isinstance(self.call_id, Tensor):
            return signature, self.call_id
        return signature and signature + self.call_id, None

    def status_words(self, pass_name: str, x: Tensor) -> StatusWords | None:
        device = x.device
        if type(x) not in internals.PLAIN_CLASSES or not select.checks_totals(device):  # A FakeTensor has no memory.
            return None
        site, stream = self.site, internals.stream_handle(device)
        status = status_of(site.group_state).streams.get((device, stream))
        if status is None:
            if stream is None:
                return None
            status = StreamStatus(site, device, stream)
        self.status, address = status, 0
        if pass_name == "forward":
            self.call_id = torch.empty(1, dtype=torch.float64, device=device)
            address = self.call_id.data_ptr()
        if stream is None:
            return status.status_words(captured_sequence_number(site, pass_name), address)
        collective, state = self.pending_collective, site.group_state
        # If the last pass raised before its all_reduce, its collective is still pending: the other ranks wait in it.
        if collective is None:
            collective = self.pending_collective = self.new_collective(pass_name)
            collective.sequence_number = state.num_collectives = state.num_collectives + 1
        return status.status_words(collective.sequence_number, address)

    def all_reduce(
        self, sent: Tensor, pass_name: str, status_words: StatusWords | None = None, use_operator: bool = False
    ) -> Tensor:
        collective = self.pending_collective or Collective(self.site, self.call_number, pass_name, self.dtype)
        collective.argument_error = self.argument_error
        self.pending_collective, self.has_begun = None, True
        if self.call_number == 1 and pass_name == "forward":
            self.site.write_call(payload.num_channels(sent))
        if status_words is not None and status_words.sequence_number > 0:
            self.status.recent.append(collective)
        total = collective.run(all_reduce, sent, self.group, self.site.all_to_all_size, use_operator)
        if status_words is None and total.is_cpu and type(total) is Tensor:  # not a FakeTensor, which has no values
            trailer = total[TRAILER].tolist()
            if pass_name == "forward" and 0 < trailer[IS_SIGNED] <= trailer[COUNT] < MAX_COUNT:
                self.call_id = int(trailer[COUNT] // trailer[IS_SIGNED] % NUM_IDS)
            ranks_differ = trailer[IS_SIGNED] * trailer[SQUARE] != trailer[SIGNATURE] * trailer[SIGNATURE]
            if ranks_differ or trailer[NUM_VALUES] != trailer[NUM_VALUES]:
                faults = _diagnose(collective, total, ranks_differ)
                self.signatures = self.site.signatures  # The backward signs with the new instance number.
                if faults:  # The traceback of the fault will refer to this frame, which must not refer to the fault.
                    raise faults.pop()
        return total

    def dispatched_all_reduce(self, sent: Tensor, pass_name: str, status_words: StatusWords | None = None) -> Tensor:
        local = sent.clone()  # because the all_reduce may overwrite `sent`
        is_forward, use_operator = pass_name == "forward", internals.current_dispatch_mode() is not None
        total = self.all_reduce(sent, pass_name, status_words, use_operator)
        if status_words is not None:
            if self.argument_error is not None:  # at once, because this rank may end
                self.status.write_report(status_words.sequence_number)
            needs_two_values = is_forward and self.site.needs_two_values
            select.check_total(total, needs_two_values, status_words, local if is_forward else None)
        # `all_finite` tests a Python list, because a dispatch mode would intercept operators.
        elif is_forward and local.is_cpu and type(local) is Tensor and not all_finite(total):
            self.warn_unless_finite(local)
        return total

    def sign_and_all_reduce(self, sent: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        if error is not None:
            self.argument_error = format_error(error), isinstance(error, TypeError)
        status_words = self.status_words(pass_name, sent) if sent.is_cuda else None
        if pass_name == "forward":
            signed = payload.sign(sent, self.forward_signature, self.call_number)
        else:
            signature, call_id = self.signature(pass_name)
            signed = payload.sign(sent, signature, call_id=call_id)
        return self.dispatched_all_reduce(signed, pass_name, status_words)

    def warn_unless_finite(self, sums: Tensor) -> None:
        if self.argument_error is None and not all_finite(sums):
            self.new_collective("forward").warn_not_finite()

    def record_error(self, error: BaseException) -> None:
        self.site.rank.record_error(format_error(error))

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.record_error(error)
            raise

    def new_collective(self, pass_name: str) -> Collective:
        return Collective(self.site, self.call_number, pass_name, self.dtype)


def require_two_values(x: Tensor, total: Tensor, known: int | None) -> None:
    """**Raises** F.batch_norm's ValueError if there is only one value per channel over all ranks of the group.

    `known` is this number if the shape of x determines it (on one rank without a mask), otherwise None. Then a total on
    a GPU is not checked, because the host would have to wait for the GPU; with several ranks a later call raises, see
    status.py. A total in a compiled graph is not checked, because reading it would break the graph. A FakeTensor or a
    tensor of torch.func is not checked, because it cannot be read.
    """
    if known is None:
        if internals.is_compiling() or not total.is_cpu or type(total) is not Tensor or internals.is_wrapped(total):
            return
        known = int(payload.num_values(total))
    if known == 1:
        raise ValueError(
            f"{ONE_VALUE_PER_CHANNEL} (input size on this rank {tuple(x.shape)}). Use a larger batch or eval()."
        )


def all_finite(sums: Tensor) -> bool:
    return all(map(math.isfinite, sums.tolist()))


def _diagnose(collective: Collective, total: Tensor, ranks_differ: bool) -> list[Exception]:
    """Return a list with the error that this rank raises for a total with a fault. The list is empty if this rank has
    an argument error, unless the ranks also are in different layers or calls.

    If only the instance numbers of the layer differed, let the ranks agree on a new number, and return an empty list.
    """
    site, state, rank = collective.site, collective.site.group_state, collective.rank
    if payload.is_incomplete(total):  # The ranks have sent different lengths, and gloo has aborted a rank.
        where = report.report_positions(rank, collective, has_failed=True)
        return [] if collective.argument_error else [RuntimeError(report.TITLE_LENGTHS + where)]
    # repr gives every NaN the same text.
    key = f"fault/{state.name}/{hashlib.blake2b(repr(total.tolist()).encode(), digest_size=8).hexdigest()}"
    calls = report.gather_calls(rank, state.ranks, key, collective.to_report())
    answers = [call for call in calls if call is not None]
    can_renumber = state.retired_numbers.isdisjoint((call.layer, call.instance_number) for call in answers)
    fault = report.explain(rank, state.ranks, collective, calls, ranks_differ, can_renumber)
    if isinstance(fault, report.RanksDifferError):
        return [fault]
    if len({call.instance_number for call in answers}) > 1:
        # The number of a first call is not retired, because the ranks have not agreed on it yet.
        state.retired_numbers.update((call.layer, call.instance_number) for call in answers if call.call_number > 1)
        site.set_instance_number(max(call.next_instance_number for call in answers))
    return [] if fault is None or collective.argument_error else [fault]


class GraphCall(Call):
    """A call over a group in a compiled graph, where the layer is unknown and no rank reads the trailer."""

    group: dist.ProcessGroup
    num_ranks = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_reduce(self, sent: Tensor, pass_name: str, *_: object) -> Tensor:
        return all_reduce(sent, self.group, internals.all_to_all_size(self.group), use_operator=True)


def select_call(spec: GroupSpec, caller: Caller, input: Tensor | None) -> Call:
    """Begin a call in eager mode or in a compiled graph.

    **Raises** RuntimeError in torch.jit.trace, which cannot record the collectives. The error is raised before
    anything is sent, because often only one rank traces.
    """
    if internals.is_compiling():
        return graph_call(spec)
    if internals.is_jit_tracing():
        what = "torch.jit.trace, which torch.onnx.export(dynamo=False) uses, cannot record batch norm over ranks"
        raise recorded(RuntimeError(f"syncbn: {what}: call syncbn.revert_syncbn_model(model) first, or model.eval()"))
    return eager_call(spec, caller, input, internals.inside_backward())


def eager_call(spec: GroupSpec, caller: Caller, input: object, in_backward: bool = False) -> Call:
    """Begin a call in eager mode, and count it. `in_backward`: whether a backward makes the call, for example in a
    recompute of activation checkpointing. **Raises** the errors of `resolve`."""
    group = dist.group.WORLD if spec is None else groups.lookup(spec)
    if group is None and spec is None:
        if not groups.missing_group_is_known:
            groups.warn_of_missing_group()
        return ONE_RANK
    site = caller._syncbn_site  # the site of the last call
    if group is None or site is None or site.group_state.group() is not group or site.caller() is not caller:
        group = resolve(spec)
        if group is None:
            return ONE_RANK
        site = site_of(caller, group)
        object.__setattr__(caller, "_syncbn_site", site)  # bypasses the __setattr__ of a subclass, which may raise
    return EagerCall(group, site, input, in_backward)


def graph_call(spec: GroupSpec) -> Call:
    """Return a call in a compiled graph. **Raises** the errors of `_check_graph`."""
    internals.note_call(True)
    if spec == groups.THIS_RANK_ALONE:
        return ONE_RANK
    _check_graph(spec)
    # Dynamo guards WORLD, so it recompiles for another default group. In graphs of torch 2.11, however, WORLD is never
    # None, so is_initialized() is tested too, which Dynamo evaluates to a constant without a guard.
    group = groups.lookup(spec) if dist.group.WORLD is not None and dist.is_initialized() else None
    return ONE_RANK if group is None or group.size() == 1 else GraphCall(group)


@internals.constant_in_graphs  # If Dynamo traced a raise, it would break the graph and run the layer in eager mode.
def _check_graph(spec: GroupSpec) -> None:
    """**Raises** the errors of `groups.lookup`; RuntimeError if groups would have to be created, and in an export over
    several ranks."""
    group = groups.lookup(spec)
    if group is None and dist.is_initialized():
        what = f"process_group={spec!r} needs new groups, which cannot be made inside a compiled graph"
        remedy = "construct or convert the layers after torch.distributed.init_process_group()"
        raise RuntimeError(f"{what}; {remedy}")
    if group is not None and group.size() > 1 and internals.is_exporting():
        what = "torch.export cannot record batch norm over several ranks in training"
        raise RuntimeError(f"syncbn: {what}; call model.eval() or syncbn.revert_syncbn_model(model) first")


def record_ranks(caller: Caller, call: Call) -> None:
    """Record on the caller over how many ranks the call was synchronised."""
    if not internals.is_compiling():  # In a compiled graph a change of the attribute would cause a recompilation.
        object.__setattr__(caller, "_synchronised_ranks", call.num_ranks)
