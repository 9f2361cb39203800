"""Says what went wrong in a collective of a layer or function, and names its call site.

`explain` names the ranks that made a collective fail. `fault_in_total` and `require_one_layer` find ranks that are not
in the same pass of one layer. `new_site` names what calls on a group.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from syncbn.call_stack import callers, warn, warn_once
from syncbn.comm.text_exchange import all_gather_json, by_rank, exchange_errors, ranks_in_words
from syncbn.diagnosis import report
from syncbn.diagnosis.guards import Caller, in_debug_mode, joined_group
from syncbn.diagnosis.names import may_be_one_layer, path_in_model
from syncbn.diagnosis.positions import CallsOnGroups, EagerCall, Entry, Group, Site
from syncbn.diagnosis.waits import WaitInLayer
from syncbn.diagnosis.watchdog import log, this_rank
from syncbn.torch_internals.distributed import ddp_that_broadcasts, is_pipeline_stage, timeout_of

# Finite values of these dtypes whose squares are infinite in the sums; those of the others are added in float64.
SQUARES_OVERFLOW = {torch.bfloat16: "1e19", torch.float64: "1e154"}
FIRST_MEETING_SECONDS = 9.0  # that a rank waits for the others before the first collective of a group


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers, or about to be."""

    def __init__(self, where: str, what: str = "are in different layers or calls") -> None:
        super().__init__(f"syncbn: the ranks {what}.\n{where}")


def meet_first(entry: Entry) -> None:
    """This rank enters the first collective of a group. It waits at most 9 s for the others, and then warns.

    gloo aborts ranks that send different sizes, and ranks in different collectives, as if some have not converted their
    model, wait until the time-out. nccl needs no meeting, also beside gloo in a group that has both.
    """
    rank, group = entry.site.rank, entry.site.group()
    assert group is not None
    rank.write_position()
    seconds = min(FIRST_MEETING_SECONDS, timeout_of(group).total_seconds() / 2)
    may_abort = joined_group() is None and f"{entry.device.type}:gloo" in dist.get_backend_config(group)
    if may_abort and not rank.meet("first", group, seconds):
        text = "syncbn: rank %d has waited %g s for others before its first collective with them, and goes on.\n%s"
        log.warning(text, rank.rank, seconds, report.where_all_are(WaitInLayer(entry)))


def explain(entry: Entry, error: RuntimeError) -> None:
    """**Raises** RuntimeError with the positions of all ranks, unless `error` has them or comes from the GPU."""
    wait = WaitInLayer(entry)
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        what = f"the GPU's error is older than {wait.position.doing}, where the host has learnt of it"
        error.add_note(f"syncbn: {what}; with CUDA_LAUNCH_BLOCKING=1 it is raised where it happens.")
    elif "No backend type associated with device type" in str(error):
        what = f"syncbn: {wait.position.doing} cannot send its sums: {error} in its process group"
        why = "the sums are on the input's device, or on the CPU if that has no float64"
        raise RuntimeError(f'{what}; {why}. Name a backend for both, as in init_process_group("cpu:gloo,cuda:nccl").')
    elif not isinstance(error, RanksDifferError):
        where = report.where_all_are(wait, report.a_rank_is_gone)
        failed = f"syncbn: a collective failed on rank {wait.rank.rank} after {wait.seconds():.1f} s."
        raise RuntimeError(f"{failed}\n{where}\nThe process group says: {error}") from error


def fault_in_total(call: EagerCall, entry: Entry, trailer: list[float], error: Exception | None) -> Exception | None:
    """What this rank is to raise if a rank has a fault; `error` is this rank's, or None.

    `trailer` is the last four numbers of the total, n and the signature. **Raises** RuntimeError if they show that
    ranks in different layers or passes have met, unless the ranks only have different names for one layer.
    """
    site, wait = call.site, WaitInLayer(entry)
    num_values, num_signed, total, squares = trailer
    has_fault, all_sign = math.isnan(num_values), num_signed == site.num_ranks
    if num_signed * squares != total * total:
        if not (site.is_signed and all_sign):  # some ranks would not take part in an all_gather
            raise RanksDifferError(report.where_all_are(wait))
        parts = all_gather_json(described(call, entry.pass_name), call.group)
        require_one_layer(site, parts, () if has_fault else ("dtype",))  # the fault may be the dtype
    if not has_fault:
        return None
    # Ranks in a compiled graph sign nothing and would not take part in an all_gather; joined ranks do.
    if site.is_signed and not all_sign and joined_group() is None:
        where = report.where_all_are(wait)
        return error or RuntimeError(f"syncbn: another rank has a bad argument, and says which.\n{where}")
    return exchange_errors(error, call.group, f" in {wait.position.doing}")


def warn_not_finite(call: EagerCall) -> None:
    """Warn, once for a layer, that the sums of this rank's input are not finite."""
    site = call.site
    if not (site.warned_of_nan or in_debug_mode()):  # debug mode warns by itself
        site.warned_of_nan = True
        what = f"NaN or infinity in the input of {site.doing(call.call, 'forward')} on rank {site.rank.rank}"
        if call.dtype in SQUARES_OVERFLOW:
            what += f", or values beyond about {SQUARES_OVERFLOW[call.dtype]}, whose squares overflow"
        then = "the statistics of all ranks, and so their running statistics, become NaN or infinite"
        look = "Look at this rank's batch first, then at the learning rate and the loss scale"
        by_torch = "torch.autograd.set_detect_anomaly(True) finds a backward that makes NaN."
        warn(f"syncbn: {what}; {then}. {look}; {by_torch}")


Part: TypeAlias = dict[str, str | int]  # a rank's part in a collective of a layer


def described(call: EagerCall, pass_name: str) -> Part:
    """This rank's part in a collective of a layer, for `require_one_layer`."""
    site = call.site
    return {
        "path": site.path,
        "order": site.order,
        "identity": site.signatures.identity,
        "call": call.call,
        "pass": pass_name,
        "dtype": str(call.dtype),
        "doing": site.doing(call.call, pass_name),
        "first call": f"first called at {site.first_line}, as layer number {site.order} of its group",
    }


# What ranks in one layer must have in common: how the error begins, what it says of each rank, and the remedy.
IN_COMMON = {
    "dtype": ("have inputs of different dtypes", "with an input of {dtype}", report.REMEDY_OF_DTYPES),
    "channels": ("have different numbers of channels", "with {channels} channels", "Build the same model everywhere."),
    "ranks": ("have different process groups", "over {ranks}", "Give the layer the same process_group on every rank."),
}


def require_one_layer(site: Site, parts: Sequence[Part], in_common: Iterable[str] = IN_COMMON) -> None:
    """**Raises** RuntimeError, the same on every rank, unless the ranks are in the same pass of one layer, and have
    these things `in_common`. Where they have different names for it they agree on one."""

    def all_have(key: str) -> bool:
        return len({part[key] for part in parts}) == 1

    def by_their_rank(text: str) -> str:
        return by_rank(dist.get_process_group_ranks(site.group()), [text.format(**part) for part in parts])

    paths = [str(part["path"]) for part in parts]
    # In its first call on a rank a layer may have another name there, or be another model's as well.
    has_one_name = all_have("identity") or (may_be_one_layer(paths) and any(part["call"] == 1 for part in parts))
    if not (has_one_name and all_have("pass")):
        passes = {str(part["pass"]) for part in parts}
        # Layers of two models may have the same path.
        where = by_their_rank("in {doing}; {first call}" if all_have("doing") else "in {doing}")
        remedy = report.or_debug(report.REMEDY) if all_have("pass") else report.remedy_of_passes(passes)
        raise RanksDifferError(f"{where}\n{remedy}")
    for key in in_common:
        if not all_have(key):
            what, of_each, remedy = IN_COMMON[key]
            raise RanksDifferError(f"{by_their_rank('in {doing}, ' + of_each)}\n{remedy}", what)
    site.sign_as(max(paths, key=len), max(int(part["order"]) for part in parts))


def new_site(caller: CallsOnGroups, group: dist.ProcessGroup) -> Site:
    """The call site of a layer or function, which may not have called on this group before.

    **Raises** ValueError where the first call of a layer shows that it is in a stage of a pipeline over these ranks,
    RuntimeError in a forked process.
    """
    rank = this_rank()
    of_group = rank.groups.setdefault(group, Group())
    site = of_group.sites.get(caller)
    if site is None:
        _require_one_stage(group)
        if isinstance(caller, Caller):
            site = Site(caller, caller.name, caller.is_signed, group, rank)
        else:
            assert isinstance(caller, torch.nn.Module)
            _warn_of_broadcast(caller, group)
            site = Site(caller, path_in_model(caller), True, group, rank)
        of_group.sites[caller] = site
        rank.write(f"called/{site.group_name}/{site.name}", "")
    return site


def _require_one_stage(group: dist.ProcessGroup) -> None:
    """**Raises** ValueError where a layer that synchronises over `group` is called in a stage of a pipeline of
    torch.distributed.pipelining, and the group has several ranks of that pipeline.

    They would wait for each other: one in batch norm, the next for the output of the stage before it.
    """
    stage = next((caller for _, caller in callers() if is_pipeline_stage(caller)), None)
    if stage is None:
        return
    ranks, pipeline = map(dist.get_process_group_ranks, (group, stage.group or dist.group.WORLD))
    if len({*ranks} & {*pipeline}) > 1:
        of_stage = f"stage {stage.stage_index} of a pipeline over {ranks_in_words(pipeline)}, which hold other stages"
        remedy = "with the group of the ranks that hold the same stage, or with process_group=1 where that is one rank"
        what = f"the layer is in {of_stage}, and synchronises over {ranks_in_words(ranks)}"
        raise ValueError(f"{what}; convert the stage {remedy}")


def _warn_of_broadcast(layer: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Warn where DistributedDataParallel gives the running statistics of its first rank to ranks of other groups."""
    ddp = ddp_that_broadcasts(getattr(layer, "running_mean", None))
    ranks = dist.get_process_group_ranks(group)
    if ddp is not None and not {*ranks}.issuperset(dist.get_process_group_ranks(ddp.process_group)):
        what = f"layers share their statistics over {ranks_in_words(ranks)} alone, but DistributedDataParallel"
        copies = "copies the running statistics of its first rank to all of its ranks before forwards"
        remedy = "Pass it forward_sync_buffers=False (broadcast_buffers=False before torch 2.13)."
        warn_once(f"syncbn: {what} {copies}. {remedy}")
