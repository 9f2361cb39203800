"""Defines the context of a collective: keeps this rank's position up to date, and explains why a collective fails."""

import time

import torch

from syncbn.call_stack import warn
from syncbn.diagnosis import report
from syncbn.diagnosis.positions import Position
from syncbn.diagnosis.sites import Site

IN_CUDA_GRAPH = 0  # as `call`: a replay makes no call of Python
FIRST_WARNING_SECONDS = 30.0  # of waiting; the next when they have doubled
# Finite values of these dtypes whose squares are infinite in the sums; those of the others are added in float64.
SQUARES_OVERFLOW = {torch.bfloat16: "1e19", torch.float64: "1e154"}


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers or calls, or in different states there."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{report.FALSE_ALARM}"


class Collective:
    """The context of a collective, in which this rank waits for others. It outlives the collective as the rank's last,
    so it does not keep the group.

    **Raises** RuntimeError with the positions of all ranks when the collective fails.
    """

    number = 0  # among syncbn's on the group, from 1
    next_warning_seconds = FIRST_WARNING_SECONDS

    def __init__(self, site: Site, call: int, pass_name: str, dtype: torch.dtype | None = None) -> None:
        self.site, self.rank, self.call, self.pass_name, self.dtype = site, site.rank, call, pass_name, dtype

    def __enter__(self) -> None:
        self.number = self.site.state.num_collectives = self.site.state.num_collectives + 1
        self.start = time.monotonic()
        self.rank.last = self
        self.rank.waiting[self] = None

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None and isinstance(error, RuntimeError):
                self._explain(error)
        finally:  # until then this rank is in the collective
            del self.rank.waiting[self]

    def doing(self) -> str:
        """layer4.1.bn3 forward, call 17."""
        call = f"call {self.call}" if self.call else "in a CUDA graph"
        return f"{self.site.name} {self.pass_name}, {call}" if self.site.is_signed else self.site.name

    def position(self) -> Position:
        return Position(self.site.state.name, self.number, self.pass_name, self.doing())

    def layer(self) -> str:
        return self.site.name if self.site.is_signed else ""

    def ranks(self) -> list[int]:
        return self.site.state.ranks

    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self.start

    def warn_not_finite(self) -> None:
        """Warn, once for a layer, that the sums of this rank's input are not finite."""
        if not self.site.warned_of_nan:
            self.site.warned_of_nan = True
            what = f"NaN or infinity in the input of {self.doing()} on rank {self.rank.rank}"
            if self.dtype in SQUARES_OVERFLOW:
                what += f", or values beyond about {SQUARES_OVERFLOW[self.dtype]}, whose squares overflow"
            then = "the statistics of all ranks, and so their running statistics, become NaN or infinite"
            look = "Look at this rank's batch first, then at the learning rate and the loss scale"
            by_torch = "torch.autograd.set_detect_anomaly(True) finds a backward that makes NaN."
            warn(f"syncbn: {what}; {then}. {look}; {by_torch}")

    def _explain(self, error: RuntimeError) -> None:
        """**Raises** RuntimeError with the positions of all ranks, unless `error` has them or comes from the GPU."""
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            what = f"the GPU's error is older than {self.doing()}, where the host has learnt of it"
            error.add_note(f"syncbn: {what}; with CUDA_LAUNCH_BLOCKING=1 it is raised where it happens.")
        elif "No backend type associated with device type" in str(error):
            what = f"syncbn: {self.doing()} cannot send its sums: {error} in its process group"
            remedy = 'Name a backend for both, as in init_process_group("cpu:gloo,cuda:nccl").'
            raise RuntimeError(f"{what}, which are on the device of the input. {remedy}")
        elif not isinstance(error, RanksDifferError):
            where = report.where_all_are(self.rank, self, has_failed=True)
            failed = f"syncbn: a collective failed on rank {self.rank.rank} after {self.seconds():.1f} s."
            raise RuntimeError(f"{failed}\n{where}\nThe process group says: {error}") from error
