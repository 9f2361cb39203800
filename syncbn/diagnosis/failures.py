"""Says what went wrong in a collective: where every rank is, if it fails or does not begin; NaN in a rank's input."""

import torch
import torch.distributed as dist

from syncbn.call_stack import warn
from syncbn.diagnosis import report
from syncbn.diagnosis.positions import Wait
from syncbn.diagnosis.sites import Site
from syncbn.diagnosis.watchdog import log
from syncbn.torch_internals.distributed import timeout_of

FIRST_MEETING_SECONDS = 9.0  # that a rank waits for the others before the first collective of a group
# Finite values of these dtypes whose squares are infinite in the sums; those of the others are added in float64.
SQUARES_OVERFLOW = {torch.bfloat16: "1e19", torch.float64: "1e154"}


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers, or about to be."""

    def __init__(self, where: str, what: str = "are in different layers or calls") -> None:
        super().__init__(f"syncbn: the ranks {what}.\n{where}")


def meet_first(wait: Wait, site: Site, device: torch.device) -> None:
    """This rank enters the first collective of a group. It waits at most 9 s for the others, and then warns.

    gloo aborts ranks that send different sizes, and ranks in different collectives, as if some have not converted their
    model, wait until the time-out. nccl needs no meeting, also beside gloo in a group that has both.
    """
    rank, group = site.rank, site.require_group()
    rank.write_position()
    seconds = min(FIRST_MEETING_SECONDS, timeout_of(group).total_seconds() / 2)
    may_abort = site.state.meets_first and f"{device.type}:gloo" in dist.get_backend_config(group)
    if may_abort and not rank.meet(group, seconds):
        text = "syncbn: rank %d has waited %g s for others before its first collective with them, and goes on.\n%s"
        log.warning(text, rank.rank, seconds, report.where_all_are(wait))


def explain(wait: Wait, error: RuntimeError) -> None:
    """**Raises** RuntimeError with the positions of all ranks, unless `error` has them or comes from the GPU."""
    doing = wait.position().doing
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        what = f"the GPU's error is older than {doing}, where the host has learnt of it"
        error.add_note(f"syncbn: {what}; with CUDA_LAUNCH_BLOCKING=1 it is raised where it happens.")
    elif "No backend type associated with device type" in str(error):
        what = f"syncbn: {doing} cannot send its sums: {error} in its process group"
        why = "the sums are on the input's device, or on the CPU if that has no float64"
        raise RuntimeError(f'{what}; {why}. Name a backend for both, as in init_process_group("cpu:gloo,cuda:nccl").')
    elif not isinstance(error, RanksDifferError):
        where = report.where_all_are(wait, has_failed=True)
        failed = f"syncbn: a collective failed on rank {wait.rank.rank} after {wait.seconds():.1f} s."
        raise RuntimeError(f"{failed}\n{where}\nThe process group says: {error}") from error


def warn_not_finite(site: Site, doing: str, dtype: torch.dtype | None) -> None:
    """Warn, once for a layer, that the sums of this rank's input are not finite."""
    if not site.warned_of_nan:
        site.warned_of_nan = True
        what = f"NaN or infinity in the input of {doing} on rank {site.rank.rank}"
        if dtype in SQUARES_OVERFLOW:
            what += f", or values beyond about {SQUARES_OVERFLOW[dtype]}, whose squares overflow"
        then = "the statistics of all ranks, and so their running statistics, become NaN or infinite"
        look = "Look at this rank's batch first, then at the learning rate and the loss scale"
        by_torch = "torch.autograd.set_detect_anomaly(True) finds a backward that makes NaN."
        warn(f"syncbn: {what}; {then}. {look}; {by_torch}")
