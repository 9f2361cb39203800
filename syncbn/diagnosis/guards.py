"""Keeps the guards, which see each all_reduce before it begins, and names the functions that call on process groups."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch.distributed as dist
from torch import Tensor

from syncbn.diagnosis.positions import CallsOnGroups, EagerCall, Site

# The layer whose forward trains in this context, which may call functions such as sync_batch_norm.
layer_in_forward: ContextVar[CallsOnGroups | None] = ContextVar("layer_in_forward", default=None)


class Caller:
    """A function that calls on process groups, as a layer does; a layer has the same two attributes."""

    _call_site: Site | None = None

    def __init__(self, name: str, is_signed: bool = True) -> None:
        self.name, self.is_signed = name, is_signed

    @property
    def _synchronised_ranks(self) -> int | None:
        """That of the layer whose forward calls the function; None outside of such."""
        layer = layer_in_forward.get()
        return None if layer is None else layer._synchronised_ranks

    @_synchronised_ranks.setter
    def _synchronised_ranks(self, num_ranks: int | None) -> None:
        layer = layer_in_forward.get()
        if layer is not None:
            object.__setattr__(layer, "_synchronised_ranks", num_ranks)  # the layer's own may refuse


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
