"""Keeps the guards, which see each all_reduce before it begins, and names the functions that call on process groups."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from syncbn.diagnosis.positions import EagerCall, Site


class Caller:
    """A function that calls on process groups, as a layer does; a layer has the same two attributes."""

    _call_site: Site | None = None
    _synchronised_ranks: int | None = None

    def __init__(self, name: str, is_signed: bool = True) -> None:
        self.name, self.is_signed = name, is_signed


class Guard:
    """Base class: before_all_reduce runs before every all_reduce while the guard is in `guards`."""

    # If set, this group replaces every group of as many ranks (syncbn.join, recompute_running_stats).
    joined_group: dist.ProcessGroup | None = None
    compares_ranks = False  # whether it compares what the ranks do

    def before_all_reduce(self, call: EagerCall, payload: Tensor, pass_name: str) -> None:
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


def in_debug_mode() -> bool:
    """Whether the ranks compare what they do before each all_reduce."""
    return any(guard.compares_ranks for guard in guards)
