"""Observes the collectives of layers and functions: names them, and explains their failures."""

import math
import os
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from syncbn.diagnosis import report
from syncbn.diagnosis.layer_names import may_be_one_layer
from syncbn.diagnosis.this_rank import Group, Site
from syncbn.diagnosis.waiting import Waiting
from syncbn.diagnosis.watchdog import WatchedRank, log
from syncbn.kernels.plans import RANKS_DIFFER, status_of
from syncbn.program import callers, warn, warn_once
from syncbn.ranks import reductions
from syncbn.ranks.reductions import Collective, EagerReduction
from syncbn.ranks.text_exchange import all_gather_json, by_rank, exchange_errors, ranks_in_words
from syncbn.torch_internals.distributed import ddp_that_broadcasts, is_pipeline_stage, timeout_of

FIRST_MEETING_SECONDS = 9.0  # that a rank waits for the others before the first collective of a group


class Observer:
    """Watches every collective; reduction.py calls it."""

    def new_site(self, caller: Any, group: dist.ProcessGroup) -> Site:
        """The call site of a layer or function, which may not have called on this group before.

        **Raises** ValueError where the first call of a layer shows that it is in a stage of a pipeline over these
        ranks, RuntimeError in a forked process.
        """
        rank = this_rank()
        of_group = rank.groups.setdefault(group, Group())
        site = of_group.sites.get(caller)
        if site is None:
            _require_one_stage(group)
            _warn_of_broadcast(caller, group)
            site = of_group.sites[caller] = Site(caller, group, rank, of_group)
            rank.write(f"called/{site.group_name}/{site.name}", "")
        return site

    def announce(self, collective: Collective) -> None:
        """This rank enters the first collective of a group. It waits at most 9 s for the others, and then warns.

        gloo aborts ranks that meet in different collectives, for example if some have not converted their model, and
        an aborted rank says nothing."""
        rank, group = collective.site.rank, collective.site.group()
        rank.write_position()
        seconds = min(FIRST_MEETING_SECONDS, timeout_of(group).total_seconds() / 2)
        may_abort = reductions.joined_group() is None and "gloo" in dist.get_backend_config(group)
        if may_abort and not rank.meet("first", group, seconds):
            where = report.where_all_are(Waiting(collective))
            text = "syncbn: rank %d has waited %g s for others before its first collective with them, and goes on.\n%s"
            log.warning(text, rank.rank, seconds, where)

    def explain_failure(self, collective: Collective, error: RuntimeError) -> None:
        """**Raises** RuntimeError with the positions of all ranks, unless `error` has them or comes from the GPU."""
        wait = Waiting(collective)
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            error.add_note(
                f"syncbn: the GPU's error is older than {wait.position.doing}, where the host has learnt of it; with "
                "CUDA_LAUNCH_BLOCKING=1 it is raised where it happens."
            )
        elif not isinstance(error, report.RanksDifferError):
            where = report.where_all_are(wait, report.one_is_gone)
            failed = f"syncbn: a collective failed on rank {wait.rank.rank} after {wait.seconds():.1f} s."
            raise RuntimeError(f"{failed}\n{where}\nThe process group says: {error}") from error

    def explain_total(self, called: EagerReduction, behind: list[float], error: Exception | None) -> Exception | None:
        """`behind` are the numbers behind the sums of a total: they say that ranks in different layers or passes have
        met, or that a rank has a fault. **Raises** RuntimeError in the first case, unless the ranks have different
        names for one layer. In the second returns what this rank is to raise; `error` is its own, or None."""
        site, wait = called.site, Waiting(called.collective)
        has_fault, all_sign = math.isnan(behind[0]), behind[1] == site.num_ranks
        if status_of(behind) == RANKS_DIFFER:
            if not (site.counts and all_sign):  # some ranks would not take part in an all_gather
                raise report.RanksDifferError(report.where_all_are(wait))
            gathered = all_gather_json(described(called, called.collective.pass_name), called.group)
            require_one_layer(site, gathered, () if has_fault else ("dtype",))  # the fault may be the dtype
        if has_fault:
            # Ranks in a compiled graph sign nothing and would not take part in an all_gather; joined ranks do.
            if site.counts and not all_sign and reductions.joined_group() is None:
                where = report.where_all_are(wait)
                return error or RuntimeError(f"syncbn: another rank has a bad argument, and says which.\n{where}")
            return exchange_errors(error, called.group, f" in {wait.position.doing}")
        return None

    def warn_not_finite(self, collective: Collective) -> None:
        """Warn, once for a layer, that this rank's input has NaN or infinity."""
        site = collective.site
        if not (site.warned_of_nan or reductions.in_debug_mode()):  # debug mode warns by itself
            site.warned_of_nan = True
            warn(
                f"syncbn: NaN or infinity in the input of {site.doing(collective.call, collective.pass_name)} on rank "
                f"{site.rank.rank}; the statistics of all ranks, and so their running statistics, become NaN. "
                f"{report.REMEDY_OF_NAN}"
            )


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
        "first call": f"first called at {site.first_line}, as layer number {site.order} of its group",
    }


# What ranks in one layer must have in common: how the error begins, what it says of each rank, and the remedy.
IN_COMMON = {
    "dtype": ("have inputs of different dtypes", "with an input of {dtype}", report.REMEDY_OF_DTYPES),
    "channels": ("have different numbers of channels", "with {channels} channels", "Build the same model everywhere."),
    "ranks": ("have different process groups", "over {ranks}", "Give the layer the same process_group on every rank."),
}


def require_one_layer(site: Site, gathered: list[dict[str, Any]], in_common: Iterable[str] = IN_COMMON) -> None:
    """**Raises** RuntimeError, the same on every rank, unless the ranks are in the same pass of one layer, and have
    these things `in_common`. Where they have different names for it they agree on one."""

    def all_have(key: str) -> bool:
        return len({one[key] for one in gathered}) == 1

    def by_their_rank(text: str) -> str:
        return by_rank(dist.get_process_group_ranks(site.group()), [text.format(**one) for one in gathered])

    paths = [one["path"] for one in gathered]
    # In its first call on a rank a layer may have another name there, or be another model's as well.
    has_one_name = all_have("identity") or (may_be_one_layer(paths) and any(one["call"] == 1 for one in gathered))
    if not (has_one_name and all_have("pass")):
        # Layers of two models may have the same path.
        where = by_their_rank("in {doing}; {first call}" if all_have("doing") else "in {doing}")
        remedy = report.or_debug(report.REMEDY) if all_have("pass") else report.REMEDY_OF_PASSES
        raise report.RanksDifferError(f"{where}\n{remedy}")
    for key in in_common:
        if not all_have(key):
            what, of_each, remedy = IN_COMMON[key]
            raise report.RanksDifferError(f"{by_their_rank('in {doing}, ' + of_each)}\n{remedy}", what)
    site.sign_as(max(paths, key=len), max(one["order"] for one in gathered))


def _require_one_stage(group: dist.ProcessGroup) -> None:
    """**Raises** ValueError where a layer that synchronises over `group` is called in a stage of a pipeline of
    torch.distributed.pipelining, and the group has several ranks of that pipeline.

    They would wait for each other: one in batch norm, the next for the output of the stage before it.
    """
    stage = next((caller for _, caller in callers() if is_pipeline_stage(caller)), None)
    if stage is None:
        return
    ranks, pipeline = (dist.get_process_group_ranks(one) for one in (group, stage.group or dist.group.WORLD))
    if len({*ranks} & {*pipeline}) > 1:
        raise ValueError(
            f"the layer is in stage {stage.stage_index} of a pipeline over {ranks_in_words(pipeline)}, which hold "
            f"other stages, and synchronises over {ranks_in_words(ranks)}; convert the stage with the group of the "
            "ranks that hold the same stage, or with process_group=1 where that is one rank"
        )


def _warn_of_broadcast(layer: Any, group: dist.ProcessGroup) -> None:
    """Warn where DistributedDataParallel gives the running statistics of its first rank to ranks of other groups."""
    ddp = ddp_that_broadcasts(getattr(layer, "running_mean", None))
    ranks = dist.get_process_group_ranks(group)
    if ddp is not None and not {*ranks}.issuperset(dist.get_process_group_ranks(ddp.process_group)):
        warn_once(
            f"syncbn: layers share their statistics over {ranks_in_words(ranks)} alone, but DistributedDataParallel "
            "copies the running statistics of its first rank to all of its ranks before forwards. Pass it "
            "forward_sync_buffers=False (broadcast_buffers=False before torch 2.13)."
        )


def note_evaluation() -> None:
    """This rank calls a layer in evaluation mode, which waits for nobody."""
    world = dist.group.WORLD
    if world is not None and world.size() > 1 and world not in _inherited:
        rank = this_rank()
        rank.evaluated_after = rank.last


_ranks: WeakKeyDictionary[dist.ProcessGroup, WatchedRank] = WeakKeyDictionary()  # by the default process group
_inherited: WeakSet[dist.ProcessGroup] = WeakSet()  # this process was forked from one that made these groups


def this_rank() -> WatchedRank:
    """This rank of the default group. **Raises** RuntimeError in a forked process."""
    world = dist.group.WORLD
    assert world is not None
    if world in _inherited:
        raise RuntimeError(
            f"syncbn: this process ({os.getpid()}) was forked from one whose process group does not work here. "
            'Start it by the method "spawn" instead.'
        )
    if world not in _ranks:
        _ranks[world] = WatchedRank(world)
    return _ranks[world]


def _after_fork() -> None:
    """This process cannot use the groups of its parent: layers must look theirs up again, and are refused."""
    if dist.group.WORLD is not None:
        _inherited.add(dist.group.WORLD)
    for rank in _ranks.values():
        for of_group in rank.groups.values():
            for site in of_group.sites.values():
                site.group = lambda: None  # type: ignore[assignment]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
reductions.observer = Observer()
