"""Observes the collectives of layers and functions: names them, and says what is known when one fails."""

from __future__ import annotations

import logging
import os
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from syncbn.diagnosis import pipeline_check, process_state, report
from syncbn.diagnosis.layer_names import may_be_one_layer
from syncbn.diagnosis.report import REMEDY_OF_DTYPES, RanksDifferError
from syncbn.diagnosis.this_rank import Group, Site
from syncbn.diagnosis.waiting import Waiting
from syncbn.diagnosis.watchdog import WatchedRank
from syncbn.distributed import reduction
from syncbn.distributed.reduction import Collective, EagerReduction
from syncbn.distributed.text_exchange import all_gather_json, by_rank, raise_faults
from syncbn.program import warn
from syncbn.torch_private import timeout_of

FIRST_MEETING_SECONDS = 9.0  # that a rank waits for the others before the first collective of a group

_log = logging.getLogger("syncbn")


class Observer:
    """Watches every collective; reduction.py calls it."""

    def new_site(self, caller: Any, group: dist.ProcessGroup) -> Site:
        """The call site of a layer or function, which may not have called on this group before.

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
        """This rank enters the first collective of a group. It waits at most 9 s for the others, and then warns.

        gloo aborts ranks that meet in different collectives, as where some have not converted their model: after the
        abort nobody could say where they are."""
        rank, group = collective.site.rank, collective.site.group()
        rank.write_position()
        seconds = min(FIRST_MEETING_SECONDS, timeout_of(group).total_seconds() / 2)
        may_abort = reduction.joined_group() is None and "gloo" in dist.get_backend_config(group)
        if may_abort and not rank.meet("first", group, seconds):
            _log.warning(
                "syncbn: rank %d has waited %g s for others before its first collective with them, and goes on.\n%s",
                rank.rank, seconds, report.where_all_are(Waiting(collective)),
            )  # fmt: skip

    def explain_failure(self, collective: Collective, error: RuntimeError) -> None:
        """**Raises** RuntimeError with the positions of all ranks, unless `error` has them or comes from the GPU."""
        if isinstance(error, RanksDifferError):
            return
        wait = Waiting(collective)
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            error.add_note(
                f"syncbn: the GPU's error is older than {wait.position.doing}, where the host has learnt of it; with "
                "CUDA_LAUNCH_BLOCKING=1 it is raised where it happens."
            )
            return
        raise RuntimeError(
            f"syncbn: a collective failed on rank {wait.rank.rank} after {wait.seconds():.1f} s.\n"
            f"{report.where_all_are(wait, report.one_is_gone)}\nThe process group says: {error}"
        ) from error

    def explain_total(self, called: EagerReduction, num_signed: float, is_sound: bool) -> None:
        """Signatures differ. **Raises** RuntimeError unless the ranks have different names for one layer. Unless
        `is_sound`, a rank has a fault, perhaps the dtype of its input."""
        site = called.site
        if not site.counts or num_signed != site.num_ranks:  # some ranks would not take part in an all_gather
            raise RanksDifferError(report.where_all_are(Waiting(called.collective)))
        local = described(called, called.collective.pass_name)
        require_one_layer(site, all_gather_json(local, called.group), compares_dtypes=is_sound)

    def warn_not_finite(self, collective: Collective) -> None:
        """NaN or infinity is in this rank's input: warns, once for a layer."""
        site = collective.site
        if not (site.said_not_finite or report.in_debug_mode()):  # debug mode warns by itself
            site.said_not_finite = True
            warn(
                f"syncbn: NaN or infinity in the input of {site.doing(collective.call, collective.pass_name)} on rank "
                f"{site.rank.rank}; the statistics of all ranks, and so their running statistics, become NaN"
            )

    def raise_faults(self, collective: Collective, num_signed: float, error: Exception | None) -> None:
        """**Raises** the errors of all faulty ranks, on every rank; `error` is this rank's, or None."""
        site, wait = collective.site, Waiting(collective)
        group = site.group()
        # Ranks in a compiled graph sign nothing and would not take part in an all_gather; ranks that have joined do.
        if num_signed != site.num_ranks and site.counts and reduction.joined_group() is None:
            where = f"syncbn: another rank has a bad argument, and says which.\n{report.where_all_are(wait)}"
            raise error or RuntimeError(where)
        raise_faults(error, group, f"{wait.position.doing}:\n")


def described(called: EagerReduction, pass_name: str) -> dict[str, Any]:
    """This rank's part in a collective of a layer, for `require_one_layer`."""
    site = called.site
    return {
        "path": site.path,
        "order": site.order,
        "identity": site.signatures.identity,
        "call": called.call,
        "pass": pass_name,
        "dtype": str(called.dtype),
        "doing": site.doing(called.call, pass_name),
        "first call": site.first_call(),
    }


def require_one_layer(site: Site, gathered: list[dict[str, Any]], compares_dtypes: bool = True) -> None:
    """**Raises** RuntimeError, the same on every rank, unless the ranks are in the same pass of one layer, with inputs
    of one dtype. Where they have different names for it they agree on one."""

    def all_have(key: str) -> bool:
        return len({one[key] for one in gathered}) == 1

    group = site.group()
    ranks, paths = dist.get_process_group_ranks(group), [one["path"] for one in gathered]
    where = [f"in {one['doing']}" for one in gathered]
    # In its first call on a rank a layer may have another name there, or be another model's as well.
    has_one_name = all_have("identity") or (may_be_one_layer(paths) and any(one["call"] == 1 for one in gathered))
    if not (has_one_name and all_have("pass")):
        if all_have("doing"):  # layers of one path, in two models
            where = [f"{doing}; {one['first call']}" for doing, one in zip(where, gathered, strict=True)]
        remedy = report.remedy() if all_have("pass") else report.REMEDY_OF_PASSES
        raise RanksDifferError(f"{by_rank(ranks, where)}\n{remedy}")
    if compares_dtypes and not all_have("dtype"):
        where = [f"{doing}, with an input of {one['dtype']}" for doing, one in zip(where, gathered, strict=True)]
        raise RanksDifferError(f"{by_rank(ranks, where)}\n{REMEDY_OF_DTYPES}", "have inputs of different dtypes")
    site.sign_as(max(paths, key=len), max(one["order"] for one in gathered))


def note_evaluation() -> None:
    """This rank calls a layer in evaluation mode, which waits for nobody."""
    world = dist.group.WORLD
    if world is not None and world.size() > 1 and world not in process_state.inherited_groups:
        rank = this_rank()
        rank.evaluated_after = rank.last


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
reduction.register(Observer())
