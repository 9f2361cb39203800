"""Compares, in debug mode, what the ranks of a group are about to do, before each all-reduce."""

import contextlib
import functools
import os
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from syncbn.call_stack import warn
from syncbn.comm.text_exchange import all_gather_json, ranks_in_words
from syncbn.diagnosis.collective import Collective
from syncbn.diagnosis.positions import ThisRank
from syncbn.kernels.interface import TRAILER_NUMBERS
from syncbn.reductions.agreement import IN_COMMON, part_in, require_one_layer
from syncbn.reductions.guards import Guard, guarded_by, guards, joined_group
from syncbn.torch_internals.distributed import default_store, name_of, timeout_of

# For each group a gloo group of the same ranks, for comparisons alone. An entry goes with its group.
_side_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo]" = WeakKeyDictionary()


@contextlib.contextmanager
def debug() -> Iterator[None]:
    """Find out why ranks disagree, within the context; the environment variable SYNCBN_DEBUG=1 does so everywhere.

        with syncbn.debug():
            loss = criterion(ddp_model(images), labels)
            loss.backward()

    Before each all_reduce the ranks of its group exchange, over gloo, the layer, the pass (forward, backward), the
    number of channels, the dtype of the input and the ranks of the group. Where they differ, every rank raises the same
    error, before anything is mixed; without debug mode ranks on CPU notice only different layers and dtypes, and
    different numbers of channels abort gloo. A rank with NaN or infinity among its values is named in a warning, on
    every rank. A rank that waits for more than 3 s says, as a warning of the logger "syncbn", where all ranks are.

    All ranks must enter and leave it at the same place. Compiled modules run uncompiled inside, and with SYNCBN_DEBUG=1
    once a layer has been made, converted or loaded (torch.compiler.set_stance); inside `syncbn.join` nothing is
    compared. An all_reduce takes some ms more.

    Raises:
        RuntimeError: raised by a layer where the ranks differ; it says what each of them was about to do.
    """
    with torch.compiler.set_stance("force_eager"), guarded_by(_Comparison()):
        yield


class _Exchange(Collective):
    """The exchange of what the ranks are about to do."""

    next_warning_seconds = 3.0


class _Comparison(Guard):
    """Compares the ranks before each all_reduce."""

    def before_all_reduce(self, collective: Collective, payload: torch.Tensor) -> None:
        site, group = collective.site, collective.site.require_group()
        if not site.is_signed or joined_group() is not None:
            return
        members = dist.get_process_group_ranks(group)
        sums, num_values = payload[:-TRAILER_NUMBERS], payload[-TRAILER_NUMBERS]
        part = part_in(collective) | {"channels": len(sums) // 2, "ranks": ranks_in_words(members)}
        with _Exchange(site, collective.call, collective.pass_name):
            part |= {"is finite": bool(sums.isfinite().all()), "has fault": bool(num_values.isnan())}
            parts = all_gather_json(part, _side_group(group, site.rank))
            require_one_layer(collective, parts, () if any(part["has fault"] for part in parts) else IN_COMMON)
        bad = [rank for rank, part in zip(members, parts, strict=True) if not part["is finite"]]
        if bad:
            warn(f"syncbn: NaN or infinity in {collective.doing()} on {ranks_in_words(bad)}")


def _side_group(group: dist.ProcessGroup, this_rank: ThisRank) -> "dist.ProcessGroupGloo":
    # dist.new_group would name the group by the number of a rank's groups, which may differ, and would keep it.
    if group not in _side_groups:
        store = dist.PrefixStore(f"syncbn/debug/{name_of(group)}", default_store())
        rank, timeout = dist.get_rank(group), timeout_of(group)
        # Ranks wait for each other here, where other threads run, and not in the constructor, where none does.
        if not this_rank.meet("debug", group, timeout.total_seconds()):
            raise RuntimeError(f"not all ranks have come to the first comparison within {timeout.total_seconds():g} s")
        _side_groups[group] = dist.ProcessGroupGloo(store, rank, group.size(), timeout)
    return _side_groups[group]


_WANTED = os.environ.get("SYNCBN_DEBUG") or "0"  # for the whole program
if _WANTED not in ("0", "1"):
    raise ValueError(f"SYNCBN_DEBUG must be 1, 0 or not set, got {_WANTED!r}")
if _WANTED == "1":
    guards.append(_Comparison())


@functools.cache
def run_uncompiled_where_wanted() -> None:
    """With SYNCBN_DEBUG=1, let compiled modules run uncompiled from now on: guards do not run in a graph.

    The first layer calls this, as an import must change nothing of torch's.
    """
    if _WANTED == "1":
        torch.compiler.set_stance("force_eager")
