"""Writes where this rank is, in a thread, when that changes and each second; warns while the rank waits long."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from syncbn.diagnosis import report

if TYPE_CHECKING:
    from syncbn.diagnosis.positions import ThisRank

HEARTBEAT_SECONDS = 1.0  # between writes of a rank that does nothing new; with 10,000 ranks a tenth of the store's time
WARNING_RANKS = 4  # of a group; all would say the same

_log = logging.getLogger("syncbn")


def start(rank: ThisRank, world: weakref.ref[dist.ProcessGroup]) -> None:
    """Start the thread, which ends with the group of all ranks."""
    threading.Thread(target=_watch, args=[rank, world], name="syncbn.watchdog", daemon=True).start()


def _watch(rank: ThisRank, world: weakref.ref[dist.ProcessGroup]) -> None:
    # Between its looks it holds nothing that would keep the group alive.
    while not rank.ended.wait(min(rank.interval, HEARTBEAT_SECONDS)) and dist.group.WORLD is world():
        _look(rank)


def _look(rank: ThisRank) -> None:
    """Write the position if it is new or old; warn of a long wait. (In nccl's all_reduce the host does not wait.)"""
    waiting = rank.waiting
    with rank.writing:
        if rank.beats():
            due = time.monotonic() - rank.written >= HEARTBEAT_SECONDS or rank.written_position is not rank.position
        else:
            due = waiting is not None and rank.written_position is not rank.position
        if due and not rank.ended.is_set():
            rank.write_position()
    if waiting is None or waiting.seconds() < waiting.next_warning_seconds:
        return
    waiting.next_warning_seconds *= 2
    if dist.get_rank(waiting.group) < WARNING_RANKS:
        where = report.where_all_are(waiting)
        _log.warning("syncbn: rank %d has waited %.0f s for others.\n%s", rank.rank, waiting.seconds(), where)
