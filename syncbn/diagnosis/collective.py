"""Defines the context of a collective: it keeps this rank's position up to date, and explains a failure."""

import time

import torch

from syncbn.diagnosis import failures
from syncbn.diagnosis.positions import Site

CPU = torch.device("cpu")


class Collective:
    """The context of a collective, in which this rank waits for others. It outlives the collective as the rank's last
    entry, so it does not keep the group.

    **Raises** RuntimeError with the positions of all ranks when the collective fails.
    """

    has_failed = False

    def __init__(self, site: Site, call: int, pass_name: str, device: torch.device = CPU) -> None:
        site.state.num_collectives += 1
        self.site, self.call, self.pass_name, self.number = site, call, pass_name, site.state.num_collectives
        self.device = device  # of what is sent
        self.start = time.monotonic()

    def __enter__(self) -> "Collective":
        self.site.rank.last = self.site.rank.waiting = self
        if self.number == 1:
            failures.meet_first(self)
        return self

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        self.has_failed = error is not None
        try:
            if isinstance(error, RuntimeError):
                failures.explain(self, error)
        finally:  # until then this rank is in the collective
            self.site.rank.waiting = None
