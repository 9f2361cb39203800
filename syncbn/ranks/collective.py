"""Adds up a payload over the ranks of a group in one collective, the same on every path, and records the collectives
in which this rank waits.

gloo's all_reduce is a ring, in which W ranks wait for 2 (W - 1) messages one after another. In an exchange
(all_to_all_single) each rank sends its payload to all others at once and adds up what it receives, in the order of the
ranks, so that all ranks have the same bits. It sends W / 2 times the bytes: small groups of gloo exchange payloads on
CPU that are not long. All others all_reduce. A rank that exchanges waits until the time-out for one that all_reduces,
as for one in a collective of DistributedDataParallel: gloo does not notice.
"""

import functools
import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.ranks import report
from syncbn.ranks.positions import Position
from syncbn.ranks.sites import Site
from syncbn.texts import format_error, warn
from syncbn.torch_internals import ALL_REDUCE, ALL_TO_ALL, all_reduce_operator, all_to_all_operator

MAX_ALL_TO_ALL_ELEMENTS = 8192  # 64 kB; longer payloads take an exchange longer than a ring
IN_CUDA_GRAPH = 0  # as `call`: a replay makes no call of Python
FIRST_WARNING_SECONDS = 30.0  # of waiting; the next when they have doubled
# Finite values of these dtypes whose squares are infinite in the sums; those of the others are added in float64.
OVERFLOW_THRESHOLDS = {torch.bfloat16: "1e19", torch.float64: "1e154"}


def all_reduce(payload: Tensor, group: dist.ProcessGroup, all_to_all_size: int, use_operator: bool = False) -> Tensor:
    """Return the total of `payload`, which may be overwritten.

    `all_to_all_size`: of the group. `use_operator`: by an operator that returns its result, which a dispatch mode can
    save and a compiler can trace.
    """
    if not (all_to_all_size and payload.is_cpu and payload.numel() <= MAX_ALL_TO_ALL_ELEMENTS):
        if use_operator:
            return all_reduce_operator(payload, group)
        work = group.allreduce([payload], ALL_REDUCE)
        if work is not None:  # else the result is there already
            work.wait()
        return payload
    sent = payload.repeat(all_to_all_size)
    if use_operator:
        received = all_to_all_operator(sent, group)
    else:
        received = torch.full_like(
            sent, math.nan
        )  # stays where another rank has sent less: gloo aborts that rank alone
        group.alltoall_base(received, sent, [], [], ALL_TO_ALL).wait()
    return functools.reduce(torch.add, received.chunk(all_to_all_size))


class Collective:
    """The context of a collective, in which this rank waits for others. A rank keeps its last Collective after it has
    ended; so a Collective must not hold the group.

    **Raises** RuntimeError with the positions of all ranks when the collective fails.
    """

    sequence_number = 0  # among syncbn's on the group, from 1; on a GPU a kernel stores it before the collective begins
    next_warning_seconds = FIRST_WARNING_SECONDS

    def __init__(self, site: Site, call: int, pass_name: str, dtype: torch.dtype | None = None) -> None:
        self.site, self.rank, self.call_number, self.pass_name, self.dtype = site, site.rank, call, pass_name, dtype

    def __enter__(self) -> None:
        if not self.sequence_number:
            self.sequence_number = self.site.group_state.num_collectives = self.site.group_state.num_collectives + 1
        self.start = time.monotonic()
        self.rank.last = self
        self.rank.waiting[self] = None

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None and isinstance(error, RuntimeError):
                self._raise_with_positions(error)
        finally:  # until then this rank is in the collective
            del self.rank.waiting[self]

    def description(self) -> str:
        """layer4.1.bn3 forward, call 17."""
        call = f"call {self.call_number}" if self.call_number else "in a CUDA graph"
        return f"{self.site.name} {self.pass_name}, {call}" if self.site.is_signed else self.site.name

    def position(self) -> Position:
        return Position(self.site.group_state.name, self.sequence_number, self.pass_name, self.description())

    def to_report(self, error: Exception | None = None) -> report.CallReport:
        """This collective for the other ranks; `error` is a bad argument of this rank."""
        site, words = self.site, "" if error is None else format_error(error)
        numbers = site.instance_number, site.next_instance_number(), self.call_number
        compared = self.pass_name, site.signatures.settings, str(self.dtype)
        return report.CallReport(
            self.description(), site.layer, *numbers, *compared, words, isinstance(error, TypeError)
        )

    def layer_label(self) -> str:
        return self.site.label if self.site.is_signed else ""

    def ranks(self) -> list[int]:
        return self.site.group_state.ranks

    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self.start

    def warn_not_finite(self) -> None:
        """Warn, once for a layer, that the sums of this rank's input are not finite."""
        if not self.site.warned_of_nan:
            self.site.warned_of_nan = True
            what = f"NaN or infinity in the input of {self.description()} on rank {self.rank.rank}"
            if self.dtype in OVERFLOW_THRESHOLDS:
                what += f", or values beyond about {OVERFLOW_THRESHOLDS[self.dtype]}, whose squares overflow"
            then = "the statistics of all ranks, and so their running statistics, become NaN or infinite"
            look = "Look at this rank's batch first, then at the learning rate and the loss scale"
            by_torch = "torch.autograd.set_detect_anomaly(True) finds a backward that makes NaN."
            warn(f"syncbn: {what}; {then}. {look}; {by_torch}")

    def _raise_with_positions(self, error: RuntimeError) -> None:
        """**Raises** RuntimeError with the positions of all ranks, unless `error` has them or comes from the GPU."""
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            what = f"the GPU's error is older than {self.description()}, where the host has learnt of it"
            error.add_note(f"syncbn: {what}; with CUDA_LAUNCH_BLOCKING=1 it is raised where it happens.")
        elif "No backend type associated with device type" in str(error):
            what = f"syncbn: {self.description()} cannot send its sums: {error} in its process group"
            remedy = 'Name a backend for both, as in init_process_group("cpu:gloo,cuda:nccl").'
            raise RuntimeError(f"{what}, which are on the device of the input. {remedy}")
        elif not isinstance(error, report.RanksDifferError):
            where = report.report_positions(self.rank, self, has_failed=True)
            failed = f"syncbn: a collective failed on rank {self.rank.rank} after {self.seconds():.1f} s."
            raise RuntimeError(f"{failed}\n{where}\nThe process group says: {error}") from error
