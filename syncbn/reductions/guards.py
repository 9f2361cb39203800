"""Keeps the guards, which see each all_reduce before it begins."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from syncbn.diagnosis.collective import Collective


class Guard(ABC):
    """before_all_reduce runs before every all_reduce while the guard is in `guards`."""

    # If set, this group replaces every group of as many ranks (syncbn.join, recompute_running_stats).
    joined_group: dist.ProcessGroup | None = None

    @abstractmethod
    def before_all_reduce(self, collective: Collective, payload: Tensor) -> None:
        """This rank is about to add up `payload`; an exception prevents the all_reduce."""


guards: list[Guard] = []


@contextlib.contextmanager
def guarded_by(guard: Guard) -> Iterator[None]:
    """Within, `guard` runs before each all_reduce, after earlier guards."""
    guards.append(guard)
    try:
        yield
    finally:
        guards.remove(guard)


def joined_group() -> dist.ProcessGroup | None:
    """The group of the guard that has one."""
    return next((guard.joined_group for guard in guards if guard.joined_group is not None), None)
