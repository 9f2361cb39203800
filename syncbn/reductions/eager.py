"""Adds up over the ranks of a group in eager mode, where the total is read on CPU and errors come to all ranks."""

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.comm.all_reduce import all_reduce
from syncbn.diagnosis.collective import Collective
from syncbn.diagnosis.sites import Site
from syncbn.kernels import reference, select
from syncbn.kernels.interface import FAULT, SIGNATURE_NUMBERS, TRAILER_NUMBERS, UNSIGNED, Mailbox
from syncbn.reductions.agreement import fault_in_total
from syncbn.reductions.faults import Box, agree_on_name, captured_tag
from syncbn.reductions.interface import NO_SIGNATURES, Reduction
from syncbn.torch_internals.autograd import keeps_graph
from syncbn.torch_internals.distributed import stream_of
from syncbn.torch_internals.state import current_dispatch_mode


class EagerReduction(Reduction):
    """The ranks of a group, in eager mode."""

    group: dist.ProcessGroup
    is_read = True
    box: Box  # of the pass, on a GPU

    def __init__(self, group: dist.ProcessGroup, site: Site, dtype: torch.dtype | None) -> None:
        site.num_calls += 1
        self.group, self.site, self.call, self.dtype = group, site, site.num_calls, dtype
        self.num_ranks, self.signatures = site.state.num_ranks, site.signatures

    def mailbox(self, pass_name: str, device: torch.device) -> Mailbox | None:
        site, state, stream = self.site, self.site.state, stream_of(device)
        if not site.is_agreed:
            agree_on_name(site)
            self.signatures = site.signatures if site.is_agreed else NO_SIGNATURES
        box = state.boxes.get((device, stream))
        if box is None:
            if stream is None:
                return None
            box = Box(site, device, stream)
        if state.fault is not None or box.words[FAULT]:
            raise box.error()
        self.box = box
        tag = captured_tag(site, pass_name) if stream is None else state.num_collectives + 1
        return Mailbox(box.host, box.state, tag)

    def all_reduce(
        self, payload: Tensor, pass_name: str, mailbox: Mailbox | None = None, error: Exception | None = None,
        by_operator: bool = False,
    ) -> Tensor:  # fmt: skip
        """The total, see `Reduction`; `by_operator` by one that a dispatch mode can save."""
        collective, fault = Collective(self.site, self.call, pass_name, self.dtype), None
        if self.call == 1 and pass_name == "forward":
            self.site.tell_call((len(payload) - TRAILER_NUMBERS) // 2)
        with collective:
            if mailbox is not None and mailbox.tag > 0:
                self.box.begun.append(collective)
            total = all_reduce(payload, self.group, self.site.exchanges, by_operator)
            if mailbox is None and total.is_cpu and type(total) is Tensor:  # else the host cannot read it: a FakeTensor
                trailer = n, num_signed, signatures, squares = total[-TRAILER_NUMBERS:].tolist()
                if num_signed * squares != signatures * signatures or n != n:
                    fault = fault_in_total(collective, self.group, trailer, error)
        if pass_name == "forward":
            self.forward_total = total
        if fault is not None:  # outside of the context, which would say that the collective failed
            raise fault
        return total

    def total(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        is_real = type(sums) is Tensor
        has_mailbox = is_real and sums.is_cuda and select.looks_at_totals(sums.device)
        mailbox = self.mailbox(pass_name, sums.device) if has_mailbox else None
        is_read = sums.is_cpu or mailbox is not None
        s = self.signatures[pass_name, self.dtype] if is_read else UNSIGNED
        is_signed, signature = (sums.new_full((1,), number) for number in (s != UNSIGNED, s))
        if s != UNSIGNED and pass_name != "forward" and type(self.forward_total) is Tensor:
            signature = reference.signature_of_call(s, self.forward_total)
        payload = torch.cat((sums[:-SIGNATURE_NUMBERS], is_signed, signature, signature.square()))
        by_operator = current_dispatch_mode() is not None
        total = self.all_reduce(payload, pass_name, mailbox, error, by_operator)
        if mailbox is not None:
            if error is not None:
                self.box.tell(mailbox.tag, error)
            is_forward = pass_name == "forward"
            needs_two_values = is_forward and self.site.needs_two_values
            select.look_at_total(total, needs_two_values, mailbox, sums if is_forward else None)
            if error is not None:
                raise error
        looks = pass_name == "forward" and mailbox is None and payload.is_cpu and type(payload) is Tensor
        # By lists, as operators would be seen by the mode that watches this call. cat has left the sums as they were.
        if looks and not all(map(math.isfinite, total.tolist())):
            self.warn_unless_finite(sums)
        return total

    def end_backward(self) -> None:
        if not keeps_graph():  # the loss may be kept, and with it this reduction
            self.forward_total = None

    def warn_unless_finite(self, sums: Tensor) -> None:
        if not all(map(math.isfinite, sums.tolist())):
            self.other_collective("forward").warn_not_finite()

    def note_error(self, error: BaseException) -> None:
        self.site.rank.note_error(error)

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.note_error(error)
            raise

    def other_collective(self, pass_name: str) -> Collective:
        return Collective(self.site, self.call, pass_name, self.dtype)
