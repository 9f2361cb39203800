"""Adds up over the ranks: one all_reduce each pass, by a reduction that is chosen once for a call.

This file has the reductions of the ordinary road: this rank alone, and a group in eager mode.
side_reductions.py has one more, for compiled graphs.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | numbers | received everywhere       |
|----------|---------------------------------------------|---------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, n_r             | 2C + 1  | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean)                 | 2C      | their sums over all ranks |

All numbers are float64, and the sums are not centred, so that uneven and empty ranks need no special case. Each pass is
exactly one all_reduce when the group has two or more ranks, and none otherwise. A rank with bad arguments cannot
compute its sums but must not leave the others waiting: it joins the forward all_reduce with zeros and n_r = NaN, which
every rank sees in the total.

On CPU the payload ends in a signature, three numbers (and 0 for n in backward, so that both passes send 2C + 4), in
which every rank sees whether ranks in different layers have met: see kernels/plans.py and diagnosis/signatures.py. On a
GPU the host would have to wait to read it.
"""

import contextlib
import functools
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncbn.kernels.plans import FAULT, NUM_SIGNED, RANKS_DIFFER, UNSIGNED, Signature, status_of
from syncbn.program import callers, warn, warn_once
from syncbn.ranks import groups
from syncbn.torch_internals.distributed import all_reduce_operator
from syncbn.torch_internals.state import current_dispatch_mode


class Caller:
    """A function that calls on process groups, as a layer does; a layer has the same two attributes."""

    _call_site: Any = None
    _synchronised_ranks: int | None = None

    def __init__(self, name: str, signs: bool = True) -> None:
        self.name, self.signs = name, signs


class Guard:
    """Is asked before each all_reduce while it is on the list `guards`."""

    # If set, this group replaces every group of as many ranks (syncbn.join, recompute_running_stats).
    joined_group: dist.ProcessGroup | None = None
    compares_ranks = False  # whether it compares what the ranks do

    def before_all_reduce(self, reduction: "EagerReduction", payload: Tensor, pass_name: str) -> None:
        """This rank is about to add up `payload`; an exception leaves it out."""


TRANSFORMED_GRAPH = "compiled graphs with vmap or forward mode over ranks: compile without fullgraph=True"

guards: list[Guard] = []
# The signatures of calls that do not sign, by the name of the pass and the dtype of the input.
NO_SIGNATURES: defaultdict[tuple[str, torch.dtype | None], Signature] = defaultdict(lambda: UNSIGNED)
# Names the callers, and says what is known when a collective fails; diagnosis/observer.py sets it when it is imported.
observer: Any = None


@contextlib.contextmanager
def guarded_by(guard: Guard) -> Iterator[None]:
    """Within, `guard` is asked before each all_reduce, after earlier guards."""
    guards.append(guard)
    try:
        yield
    finally:
        guards.remove(guard)


def joined_group() -> dist.ProcessGroup | None:
    """The group of the guard that has one."""
    return next((one.joined_group for one in guards if one.joined_group is not None), None)


def in_debug_mode() -> bool:
    """Whether the ranks compare what they do before each all_reduce."""
    return any(one.compares_ranks for one in guards)


class Collective:
    """The context of a collective, in which this rank waits for others. It may be entered again."""

    __slots__ = ("call", "number", "pass_name", "site", "start")

    def __init__(self, site: Any, call: int, pass_name: str) -> None:
        site.state.num_collectives += 1
        self.site, self.call, self.pass_name, self.number = site, call, pass_name, site.state.num_collectives
        self.start = time.monotonic()

    def __enter__(self) -> Self:
        self.site.rank.last = self.site.rank.waiting = self
        if self.number == 1:
            observer.announce(self)
        return self

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        self.site.rank.waiting = None
        if isinstance(error, RuntimeError):
            observer.explain_failure(self, error)


class NoReduction:
    """This rank alone: there is nothing to add up."""

    group: dist.ProcessGroup | None = None
    num_ranks: int = 1
    signatures = NO_SIGNATURES

    def all_reduce(self, payload: Tensor, pass_name: str) -> None:
        """Nothing."""

    def explain(self, payload: Tensor, error: Exception | None = None) -> None:
        """Nothing."""

    def warn_not_finite(self, is_local: bool) -> None:
        """Nothing."""

    def total(self, sums: Tensor, pass_name: str, counted: bool = False, error: Exception | None = None) -> Tensor:
        """The sums themselves."""
        return sums

    def other_collective(self, pass_name: str) -> contextlib.AbstractContextManager[Collective | None]:
        """Nothing."""
        return contextlib.nullcontext()


ONE_RANK = NoReduction()


class EagerReduction:
    """The ranks of a group, in eager mode."""

    __slots__ = ("call", "collective", "dtype", "group", "num_ranks", "signatures", "site")

    def __init__(self, group: dist.ProcessGroup, site: Any, dtype: torch.dtype | None) -> None:
        site.num_calls += 1
        self.group, self.site, self.call, self.dtype = group, site, site.num_calls, dtype
        self.num_ranks, self.signatures = site.num_ranks, site.signatures

    def all_reduce(self, payload: Tensor, pass_name: str) -> None:
        """Make of `payload` its total over the ranks. **Raises** RuntimeError on every rank when it fails."""
        if torch.compiler.is_dynamo_compiling():  # after the graph of a caller was broken
            raise RuntimeError(TRANSFORMED_GRAPH)
        for guard in guards:
            guard.before_all_reduce(self, payload, pass_name)
        with Collective(self.site, self.call, pass_name) as self.collective:
            dist.all_reduce(payload, group=self.group)
            if payload.is_cuda:
                self.site.rank.left_to_gpu(self.collective, payload.device)

    def explain(self, payload: Tensor, error: Exception | None = None) -> None:
        """Say what is wrong with a total on CPU. **Raises** RuntimeError where ranks in different layers or passes have
        met; where ranks have errors, this rank's `error`, or without one an error with the texts of the others."""
        with self.collective:
            fault = observer.explain_total(self, payload[-1 - NUM_SIGNED :].tolist(), error)
        if fault is not None:
            raise fault

    def warn_not_finite(self, is_local: bool) -> None:
        """A total has NaN or infinity. Warns, once for a layer, if they are in this rank's x (`is_local`)."""
        if is_local:
            observer.warn_not_finite(self.collective)

    def check(self, payload: Tensor, error: Exception | None = None) -> None:
        """Read a total on CPU; **raises** as `explain`."""
        if _has_values(payload) and status_of(payload[-1 - NUM_SIGNED :].tolist()) in (RANKS_DIFFER, FAULT):
            self.explain(payload, error)

    def total(self, sums: Tensor, pass_name: str, counted: bool = False, error: Exception | None = None) -> Tensor:
        """The totals of float64 `sums`, which it may overwrite, for the side roads; `counted` when the last is n. A
        rank with an `error` has NaN in the place of n. **Raises** as all_reduce and explain."""
        behind = (0.0, *self.signatures[pass_name, self.dtype])[counted:]  # 0 where the sums end without a count
        payload = torch.cat((sums, sums.new_tensor(behind))) if sums.is_cpu else sums
        local = sums if counted and pass_name == "forward" and _has_values(payload) else None  # cat has copied them
        if current_dispatch_mode() is None:
            self.all_reduce(payload, pass_name)
        else:
            for guard in guards:
                guard.before_all_reduce(self, payload, pass_name)
            with Collective(self.site, self.call, pass_name) as self.collective:
                payload = all_reduce_operator(payload, self.group)
        self.check(payload, error)
        # By lists, as operators would be seen by the mode that watches this call.
        if not (local is None or all(map(math.isfinite, payload.tolist()))):
            self.warn_not_finite(not all(map(math.isfinite, local.tolist())))
        return payload[: len(sums)]

    def other_collective(self, pass_name: str) -> Collective:
        """The context for a collective of this call that is no all_reduce of sums."""
        return Collective(self.site, self.call, pass_name)


def reduction_of(spec: groups.GroupSpec | groups.OfMesh, caller: Any, input: Any) -> NoReduction | EagerReduction:
    """The reduction over the ranks that a call synchronises in eager mode; counts the call. `caller` is a layer or a
    `Caller`. See `resolve`."""
    group = dist.group.WORLD if spec is None else groups.existing(spec)
    if group is None and spec is None:
        _warn_if_meant_for_several_ranks()
        return ONE_RANK
    site = caller._call_site
    # The site of the last call is used again if it still fits; a guard may bring a group of its own.
    if group is None or site is None or site.group() is not group or site.caller() is not caller or guards:
        group = resolve(spec)
        if group is None:
            return ONE_RANK
        site = caller._call_site = observer.new_site(caller, group)
    assert group is not None
    return EagerReduction(group, site, getattr(input, "dtype", None))


def resolve(spec: groups.GroupSpec | groups.OfMesh) -> dist.ProcessGroup | None:
    """The group to synchronise over now; None for a group of one rank, and when there is no process group.

    The first call with an int or "node" makes the groups. **Raises** ValueError for a part of the ranks inside
    syncbn.join; and as `groups.existing`.
    """
    make_groups(spec)
    group = groups.existing(spec)
    if not (dist.is_initialized() or isinstance(spec, groups.OfMesh)):
        _warn_if_meant_for_several_ranks()
    if group is None or group.size() == 1:
        return None
    joined = joined_group()
    if joined is not None and group.size() < joined.size():
        raise ValueError(
            f"inside syncbn.join and recompute_running_stats every layer must synchronise over all {joined.size()} "
            f"ranks, not over {group.size()} (process_group={spec!r}); set process_group=None"
        )
    return joined or group


def make_groups(spec: groups.GroupSpec | groups.OfMesh) -> None:
    """Make the groups that an int or "node" needs, see groups.make; the others are told where this rank waits."""
    world = dist.group.WORLD
    if world is not None and isinstance(spec, (int, str)) and groups.existing(spec) is None:
        caller = Caller(f"the making of groups for process_group={spec!r}", signs=False)
        with EagerReduction(world, observer.new_site(caller, world), None).other_collective("making"):
            groups.make(spec)


def _has_values(payload: Tensor) -> bool:
    """Whether the host can read it: not on a GPU, nor of a subclass such as FakeTensor."""
    return payload.is_cpu and type(payload) is Tensor


@functools.cache
def _warn_if_meant_for_several_ranks() -> None:
    """Warns in the first call without a process group."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        warn(
            f"syncbn is not synchronising: WORLD_SIZE is {world_size} but torch.distributed has no process group. "
            "Call torch.distributed.init_process_group() before the first training step."
        )
    if any(isinstance(caller, nn.DataParallel) for _, caller in callers()):
        warn_in_data_parallel()


def warn_in_data_parallel() -> None:
    warn_once(
        "syncbn is not synchronising: the layer runs in nn.DataParallel, which has threads but no ranks. Use "
        "DistributedDataParallel, launched by torchrun."
    )
