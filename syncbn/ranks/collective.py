"""Sums a payload over the ranks of a group in one collective, and records the collectives in which this rank waits.

gloo's all_reduce is a ring, in which W ranks wait for 2 (W - 1) messages one after another. In an all_to_all_single
each rank sends its payload to all other ranks at once and sums the payloads that it receives in the order of the ranks,
so that all ranks compute the same bits. This sends W / 2 times as many bytes as the ring, so syncbn uses
all_to_all_single only for short payloads on CPU in small groups of gloo, and all_reduce otherwise. If one rank waits in
all_to_all_single and another in all_reduce, for example in that of DistributedDataParallel, both wait until the
timeout: gloo does not detect the mismatch.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.ranks import report
from syncbn.ranks.positions import Position
from syncbn.ranks.sites import Site
from syncbn.texts import warn, warn_once
from syncbn.torch_internals import ALL_REDUCE, ALL_TO_ALL, all_reduce_operator, all_to_all_operator

T = TypeVar("T")

MAX_ALL_TO_ALL_ELEMENTS = 8192  # 64 kB. For longer payloads all_reduce is faster.
IN_CUDA_GRAPH = 0  # placeholder for the call number in a CUDA graph, whose replays run no Python that could count
FIRST_WARNING_SECONDS = 30.0  # waiting time before the first warning; it doubles with each warning
# Magnitudes beyond which squares overflow. GPU kernels may square float32 in float32 (1e19), CPU kernels use float64.
OVERFLOW_THRESHOLDS = {torch.bfloat16: "1e19", torch.float64: "1e154"}


def all_reduce(payload: Tensor, group: dist.ProcessGroup, all_to_all_size: int, use_operator: bool = False) -> Tensor:
    """Return the sum of `payload` over the ranks of the group. May overwrite `payload`.

    `all_to_all_size`: see `torch_internals.all_to_all_size`. `use_operator`: call a functional operator, whose result a
    dispatch mode can save and a compiler can trace.
    """
    if not (all_to_all_size and payload.is_cpu and payload.shape[0] <= MAX_ALL_TO_ALL_ELEMENTS):
        if use_operator:
            return all_reduce_operator(payload, group)
        work = group.allreduce([payload], ALL_REDUCE)
        if work is not None:  # None: the all_reduce is already complete
            work.wait()
        return payload
    sent = payload.repeat(all_to_all_size)
    if use_operator:
        received = all_to_all_operator(sent, group)
    else:
        # If a rank sends fewer elements, gloo aborts that rank alone, and the missing elements stay NaN.
        received = torch.full_like(sent, math.nan)
        group.alltoall_base(received, sent, [], [], ALL_TO_ALL).wait()
    return functools.reduce(torch.add, received.chunk(all_to_all_size))


class Collective:
    """A collective, in which this rank waits for the other ranks.

    `ThisRank.last` keeps this object after the collective, so a Collective must not hold a reference to the group, nor
    to an exception, whose traceback would refer to the group.
    """

    # The number of this collective among those of syncbn on the group, from 1. On a GPU it is set before the collective
    # begins.
    sequence_number = 0
    next_warning_seconds = FIRST_WARNING_SECONDS
    start = math.inf  # the time when the collective has begun, by time.monotonic
    # The class and text of the argument error of this rank, and whether it is a TypeError. None: no error.
    argument_error: tuple[str, bool] | None = None

    def __init__(self, site: Site, call: int, pass_name: str, dtype: torch.dtype | None = None) -> None:
        self.site, self.rank, self.call_number, self.pass_name, self.dtype = site, site.rank, call, pass_name, dtype
        self.layer_label, self.ranks = site.label, site.group_state.ranks

    def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call `function`, in which this rank waits for the other ranks, and return its result.

        **Raises** the errors of `function`; `raise_with_positions` adds to a RuntimeError where all ranks are. This is
        not a context manager: a KeyboardInterrupt may be raised at the entry of any Python function, and at the entry
        of `__exit__` it would leave the collective in `ThisRank.waiting`.
        """
        if not self.sequence_number:
            self.sequence_number = self.site.group_state.num_collectives = self.site.group_state.num_collectives + 1
        self.start = time.monotonic()
        self.rank.last = self
        # Between this statement and the block below no interrupt can be raised.
        self.rank.waiting[self] = None
        try:
            if self.argument_error is not None:  # If the other ranks send another size, gloo may end this process.
                report.record_at_once(self.rank, self.argument_error[0])
            return function(*arguments)
        except RuntimeError as error:
            self.raise_with_positions(error)
            raise
        finally:
            del self.rank.waiting[self]

    def description(self) -> str:
        """Describe this collective, for example as "layer4.1.bn3 forward, call 17"."""
        call = f"call {self.call_number}" if self.call_number else "in a CUDA graph"
        return f"{self.site.name} {self.pass_name}, {call}" if self.site.is_signed else self.site.name

    def position(self) -> Position:
        is_evaluating, lacks_grad = not getattr(self.site.caller(), "training", True), self.site.lacks_grad
        where = self.site.group_state.name, self.sequence_number, self.pass_name, self.description(), self.call_number
        return Position(*where, lacks_grad and self.pass_name == "forward", is_evaluating)

    def to_report(self) -> report.CallReport:
        """Return the report of this collective for the other ranks."""
        site = self.site
        numbers = site.instance_number, site.next_instance_number(), self.call_number
        compared = self.pass_name, site.signatures.settings, str(self.dtype)
        return report.CallReport(self.description(), site.layer, *numbers, *compared, *(self.argument_error or ()))

    def seconds(self) -> float:
        """Return the seconds since this collective began."""
        return time.monotonic() - self.start

    def warn_not_finite(self) -> None:
        """Warn, once for each layer, that the sums of this rank's input are not finite. After the first warning of this
        process, a second one explains it."""
        if not self.site.warned_of_nan:
            self.site.warned_of_nan = True
            warn(f"syncbn: NaN or infinity in the input of {self.description()} on rank {self.rank.rank}.")
            what, dtype = "If the input of a layer has NaN or infinity", self.dtype
            if dtype in OVERFLOW_THRESHOLDS:
                what += f", or {dtype} values beyond about {OVERFLOW_THRESHOLDS[dtype]}, whose squares overflow"
            effect = "the statistics and running statistics of that layer become NaN or infinite on all ranks"
            remedy = "Check the batch of the rank that warned first, then the learning rate and the loss scale"
            hint = "torch.autograd.set_detect_anomaly(True) finds a backward that computes NaN"
            warn_once(f"syncbn: {what}, {effect}. {remedy}; {hint}.")

    def raise_with_positions(self, error: RuntimeError) -> None:
        """**Raises** RuntimeError with the positions of all ranks, unless `error` has them, is a GPU error (which gets
        a note instead) or shows that a backend is missing."""
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            what = f"an earlier kernel failed; its error surfaced in {self.description()}"
            error.add_note(f"syncbn: {what}. With CUDA_LAUNCH_BLOCKING=1 the call that failed raises it.")
        elif "No backend type associated with device type" in str(error):
            what = f"{self.description()} cannot send its sums, which are on the device of the input: {error}"
            remedy = 'Pass a backend for each device, such as init_process_group("cpu:gloo,cuda:nccl").'
            raise RuntimeError(f"syncbn: {what}. {remedy}")
        elif not isinstance(error, report.RanksDifferError):
            where = report.report_positions(self.rank, self, has_failed=True)
            failed = f"syncbn: a collective failed on rank {self.rank.rank} after {self.seconds():.1f} s."
            raise RuntimeError(f"{failed}\n{where}\nThe process group reports: {error}") from error
