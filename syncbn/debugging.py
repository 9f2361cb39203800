"""Debug mode: before each all_reduce the ranks of the group compare what they are about to do."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from syncbn import callers, collectives, diagnosis, groups
from syncbn.diagnosis import in_words

FIRST_WARNING = 3.0  # seconds of waiting
ENABLED = {None: False, "": False, "0": False, "1": True}

# For each group one of gloo with the same ranks, on which nothing else happens. They go with the group.
_side_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = WeakKeyDictionary()


@contextlib.contextmanager
def debug() -> Iterator[None]:
    """Within the context, as everywhere with the environment variable SYNCBN_DEBUG=1, find out why ranks disagree.

        with syncbn.debug():
            loss = criterion(ddp_model(images), labels)
            loss.backward()

    Before each all_reduce the ranks of its group exchange, over gloo, the layer, the step (forward, backward), the
    number of channels, the dtype of the input and the ranks of the group. Where they differ, every rank raises the same
    error, before anything is mixed; without debug mode ranks on CPU notice only that they are in different layers, and
    others numbers of channels abort gloo. A rank with NaN or infinity among its values is named in a warning, on every
    rank. A rank that waits for more than 3 s says, as a warning of the logger "syncbn", where all ranks are.

    All ranks must enter and leave it at the same place. Compiled modules run uncompiled inside
    (torch.compiler.set_stance); inside `syncbn.join` nothing is compared. An all_reduce takes some ms more.

    Raises:
        RuntimeError: by the layers: the ranks differ, with what each of them was about to do.
    """
    before = collectives.compare, diagnosis.first_warning
    with torch.compiler.set_stance("force_eager"):
        collectives.compare, diagnosis.first_warning = _compare, FIRST_WARNING
        try:
            yield
        finally:
            collectives.compare, diagnosis.first_warning = before


def _compare(packed: Tensor, waiting: diagnosis.Waiting) -> None:
    group, caller = waiting.group, waiting.caller
    assert caller is not None
    ranks = dist.get_process_group_ranks(group)
    doing = f"{waiting.position.doing}: {len(packed) // 2} channels, {caller.dtype}, over {in_words(ranks)}"
    same = waiting.step, len(packed), str(caller.dtype), ranks
    own = {"same": same, "path": caller.place.path, "doing": doing, "finite": bool(packed.isfinite().all())}
    told = [json.loads(text) for text in collectives.all_gather_text(json.dumps(own), _side_group(group))]
    if any(one["same"] != told[0]["same"] for one in told) or not callers.may_be_one([one["path"] for one in told]):
        doings = diagnosis.table(ranks, [one["doing"] for one in told])
        raise diagnosis.RanksDifferError(f"{doings}\nNone of this was done.")
    bad = [rank for rank, one in zip(ranks, told, strict=True) if not one["finite"]]
    if bad:
        warnings.warn(f"syncbn: NaN or infinity in {waiting.position.doing} on {in_words(bad)}", stacklevel=2)


def _side_group(group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    # Not by dist.new_group, which names it by how many groups a rank is in, and would keep it.
    if group not in _side_groups:
        store = PrefixStore(f"syncbn/debug/{group.group_name}", dist.distributed_c10d._get_default_store())
        rank, timeout = dist.get_rank(group), groups.timeout_of(group)
        _side_groups[group] = dist.ProcessGroupGloo(store, rank, group.size(), timeout)
    return _side_groups[group]


def _enable_where_wanted() -> None:
    wanted = os.environ.get("SYNCBN_DEBUG")
    if wanted not in ENABLED:
        raise ValueError(f"SYNCBN_DEBUG must be 1, 0 or not set, got {wanted!r}")
    if ENABLED[wanted]:
        torch.compiler.set_stance("force_eager")
        collectives.compare, diagnosis.first_warning = _compare, FIRST_WARNING


_enable_where_wanted()
