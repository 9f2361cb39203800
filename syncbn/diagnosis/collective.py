"""Defines the context of a collective: it keeps this rank's position up to date, and explains a failure."""

import time

import torch
import torch.distributed as dist

from syncbn.diagnosis import failures
from syncbn.diagnosis.positions import Position, Wait
from syncbn.diagnosis.sites import Site

CPU = torch.device("cpu")
IN_CUDA_GRAPH = 0  # as `call`: a replay makes no call of Python


class Collective(Wait):
    """The context of a collective, in which this rank waits for others. It outlives the collective as the rank's last,
    so it does not keep the group.

    **Raises** RuntimeError with the positions of all ranks when the collective fails.
    """

    has_failed = False

    def __init__(
        self, site: Site, call: int, pass_name: str, device: torch.device = CPU, dtype: torch.dtype | None = None
    ) -> None:
        self.site, self.rank, self.call, self.pass_name = site, site.rank, call, pass_name
        self.device, self.dtype = device, dtype  # of what is sent; of the input

    def __enter__(self) -> None:
        self.number = self.site.state.num_collectives = self.site.state.num_collectives + 1
        self.start = time.monotonic()
        self.rank.last = self
        if self.number == 1:
            failures.meet_first(self, self.site, self.device)
        self.rank.waiting[self] = None

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        self.has_failed = error is not None
        try:
            if isinstance(error, RuntimeError):
                failures.explain(self, error)
        finally:  # until then this rank is in the collective
            del self.rank.waiting[self]

    def doing(self) -> str:
        """layer4.1.bn3 forward, call 17."""
        call = f"call {self.call}" if self.call else "in a CUDA graph"
        return f"{self.site.name} {self.pass_name}, {call}" if self.site.is_signed else self.site.name

    def position(self) -> Position:
        return Position(self.site.group_name, self.number, self.pass_name, self.doing())

    def layer(self) -> str:
        return self.site.name if self.site.is_signed else ""

    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.site.require_group())
