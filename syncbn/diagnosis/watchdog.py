"""Writes where this rank is, in a thread, when that changes and each second; warns while the rank waits long.

When a collective outside of the layers fails, and the program by it, the thread says where every rank is: errors of the
layers say so themselves. Only the rank that fails first can speak for sure, as torchrun ends the others 0.1 s later; a
program that handles the error itself says nothing; and a store inside a rank that has ended is lost (torchrun keeps it
in a process of its own).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from syncbn.diagnosis import processes, report
from syncbn.diagnosis.report import HAS_LEFT
from syncbn.diagnosis.waits import Elsewhere, elsewhere, is_long

if TYPE_CHECKING:
    from syncbn.diagnosis.positions import ThisRank

SECONDS_BETWEEN_WRITES = 0.05  # of a rank, at least
SECONDS_PER_WRITE = 10e-6  # of all ranks together: a store takes some 100,000 writes a second
HEARTBEAT_SECONDS = 1.0  # between writes of a rank that does nothing new; with 10,000 ranks a tenth of the store's time
LEAVE_SECONDS = 0.3  # for which a rank that leaves waits for its own heartbeat
WARNING_RANKS = 4  # of a group; all would say the same

_log = logging.getLogger("syncbn")


def start(rank: ThisRank, world: dist.ProcessGroup) -> threading.Thread:
    """Start the thread, which ends with the group of all ranks."""
    weakref.finalize(world, _leave, rank)
    thread = threading.Thread(target=_watch, args=[rank, weakref.ref(world)], name="syncbn.watchdog", daemon=True)
    thread.start()
    return thread


def interval(store: dist.Store, num_ranks: int) -> float:
    """Seconds between the writes of a rank; infinite for a store in which a write does not replace the last one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return math.inf if isinstance(store, dist.FileStore) else max(SECONDS_BETWEEN_WRITES, num_ranks * SECONDS_PER_WRITE)


def _watch(rank: ThisRank, world: weakref.ref[dist.ProcessGroup]) -> None:
    # Between its looks it holds nothing that would keep the group alive.
    last = None
    while not rank.ended.wait(min(rank.interval, HEARTBEAT_SECONDS)) and dist.group.WORLD is world():
        last = _look(rank, last)
    rank.on_gpu.clear()
    rank.ended.wait()  # a group that is destroyed may be held, and the program end later
    if rank.failed:
        where = report.where_all_were(Elsewhere(rank))
        _log.error("syncbn: a collective outside of syncbn's layers failed on rank %d.\n%s", rank.rank, where)


def _look(rank: ThisRank, last: Elsewhere | None) -> Elsewhere | None:
    """Write the position if it is new or old; warn of a long wait. The wait outside of the layers, if it is that."""
    waiting = rank.waiting or rank.on_gpu.oldest()
    with rank.writing:
        if rank.beats():
            due = time.monotonic() - rank.written >= HEARTBEAT_SECONDS or rank.written_position is not rank.position
        else:
            due = waiting is not None and rank.written_position is not rank.position
        if due and not rank.ended.is_set():
            rank.write_position()
    outside = elsewhere(rank, last) if waiting is None else None
    wait = waiting or outside
    if wait is None or not is_long(wait):
        return outside
    seconds = wait.seconds()
    wait.next_warning_seconds *= 2
    with contextlib.suppress(ValueError):  # a group that has ended
        if wait.ranks().index(rank.rank) < WARNING_RANKS:
            where = report.where_all_are(wait)
            _log.warning("syncbn: rank %d has waited %.0f s for others%s.\n%s", rank.rank, seconds, wait.place, where)
    return outside


def _leave(rank: ThisRank) -> None:
    """The default process group, or this program, ends: because of an exception, perhaps."""
    since = "; ".join(filter(None, (rank.position.since, HAS_LEFT + processes.why_it_ends())))
    here = rank.process == os.getpid()  # a forked process has no thread
    rank.failed = here and processes.a_collective_failed()
    rank.ended.set()
    # The heartbeat may be in a call of a dead store.
    if here and rank.writing.acquire(timeout=LEAVE_SECONDS):
        rank.position = rank.position._replace(since=since)
        rank.write_position()
        rank.writing.release()
    if rank.failed:
        with contextlib.suppress(RuntimeError):  # it is this thread that lets the group go
            rank.watchdog.join(report.READ_SECONDS)
