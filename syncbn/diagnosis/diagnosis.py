"""Watches the collectives of layers and functions: names them, and says what is known when one fails."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from syncbn.diagnosis import pipeline_check, process_state, report
from syncbn.diagnosis.layer_names import may_be_one_layer
from syncbn.diagnosis.report import REMEDY, RanksDifferError
from syncbn.diagnosis.this_rank import EVALUATES, Group, Site
from syncbn.diagnosis.waiting import Waiting
from syncbn.diagnosis.watchdog import WatchedRank
from syncbn.distributed import reduction
from syncbn.distributed.reduction import Collective
from syncbn.distributed.text_exchange import all_gather_json, by_rank, raise_faults


class Diagnosis:
    """What watches every collective; reduction.py calls it."""

    def new_site(self, caller: Any, group: dist.ProcessGroup) -> Site:
        """That of a layer or function that may not have called on this group before.

        **Raises** ValueError where the first call of a layer shows that it is in a stage of a pipeline over these
        ranks, RuntimeError in a forked process.
        """
        rank = this_rank()
        of_group = rank.groups.get(group)
        if of_group is None:
            of_group = rank.groups[group] = Group()
        site = of_group.sites.get(caller)
        if site is None:
            pipeline_check.require_one_stage(group)
            site = of_group.sites[caller] = Site(caller, group, rank, of_group)
            rank.write(f"called/{site.group_name}/{site.name}", "")
        return site

    def announce(self, collective: Collective) -> None:
        """This rank enters the first collective of a group, in which it may be aborted."""
        rank = collective.site.rank
        assert isinstance(rank, WatchedRank)
        rank.write_position()

    def explain_failure(self, collective: Collective, error: RuntimeError) -> None:
        """**Raises** RuntimeError with where all ranks are, unless `error` says it already."""
        if isinstance(error, RanksDifferError):
            return
        wait = Waiting(collective)
        raise RuntimeError(
            f"syncbn: a collective failed on rank {wait.rank.rank} after {wait.seconds():.1f} s.\n"
            f"{report.where_all_are(wait, report.one_is_gone)}\nThe process group says: {error}"
        ) from error

    def explain_total(self, collective: Collective, num_signed: float) -> None:
        """Signatures differ. **Raises** RuntimeError unless the ranks have other names for one layer."""
        site, wait = collective.site, Waiting(collective)
        assert isinstance(site, Site)
        group = site.group()
        assert group is not None
        if not site.counts or num_signed != site.num_ranks:  # there are ranks that would not take part in an all_gather
            raise RanksDifferError(report.where_all_are(wait))
        doing = wait.position.doing
        gathered = all_gather_json((site.path, site.order, collective.call, collective.pass_name, doing), group)
        paths, orders, calls, pass_names, doings = zip(*gathered, strict=True)
        # In its first call on a rank a layer may have another name there, or be another model's as well.
        if len({*pass_names}) > 1 or 1 not in calls or not may_be_one_layer(paths):
            where = [f"in {doing}" for doing in doings]
            if len({*doings}) == 1:  # layers of one path, in two models
                where = [
                    f"{one}, of the layer that was number {order} to call"
                    for one, order in zip(where, orders, strict=True)
                ]
            raise RanksDifferError(by_rank(dist.get_process_group_ranks(group), where) + f"\n{REMEDY}")
        site.sign_as(max(paths, key=len), max(orders))

    def raise_faults(self, collective: Collective, num_signed: float, error: Exception | None) -> None:
        """**Raises** what the ranks with a fault tell, on every rank; `error` is this rank's."""
        site, wait = collective.site, Waiting(collective)
        assert isinstance(site, Site)
        group = site.group()
        assert group is not None
        # Ranks in a compiled graph sign nothing and would not take part in an all_gather; ranks that have joined do.
        if num_signed != site.num_ranks and site.counts and reduction.joined_group() is None:
            where = f"syncbn: another rank has a bad argument, and says which.\n{report.where_all_are(wait)}"
            raise error or RuntimeError(where)
        raise_faults(error, group, f"{wait.position.doing}:\n")


def note_evaluation() -> None:
    """This rank calls a layer in evaluation mode, which waits for nobody."""
    world = dist.group.WORLD
    if world is not None and world.size() > 1 and world not in process_state.inherited_groups:
        this_rank().add_since(EVALUATES)


_ranks: WeakKeyDictionary[dist.ProcessGroup, WatchedRank] = WeakKeyDictionary()  # by the default process group


def this_rank() -> WatchedRank:
    """This rank of the default group. **Raises** RuntimeError in a forked process."""
    world = dist.group.WORLD
    assert world is not None
    if world in process_state.inherited_groups:
        process_state.refuse_inherited_group()
    rank = _ranks.get(world)
    if rank is None:
        rank = _ranks[world] = WatchedRank(world)
    return rank


def _forget_groups() -> None:
    """A forked process has none: layers must look theirs up again, and are refused."""
    for rank in _ranks.values():
        for of_group in rank.groups.values():
            for site in of_group.sites.values():
                site.forget_group()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_groups)
reduction.register(Diagnosis())
