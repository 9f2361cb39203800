"""Writes where this rank is, in a thread, when that changes and each second; warns while the rank waits long.

When a collective outside of the layers fails, and the program by it, the thread says where every rank is: errors of the
layers say so themselves. Only the rank that fails first can speak for sure, as torchrun ends the others 0.1 s later; a
program that handles the error itself says nothing; and a store inside a rank that has ended is lost (torchrun keeps it
in a process of its own).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref

import torch
import torch.distributed as dist

from syncbn.diagnosis import process_state, report
from syncbn.diagnosis.this_rank import HAS_LEFT, ThisRank
from syncbn.diagnosis.waiting import Elsewhere, OnGpu, Waiting, elsewhere, event_behind, is_long
from syncbn.distributed.reduction import Collective

HEARTBEAT_SECONDS = 1.0  # between writes of a rank that does nothing new; with 10,000 ranks a tenth of the store's time
LEAVE_SECONDS = 0.3  # for which a rank that leaves waits for its own heartbeat
WARNING_RANKS = 4  # of a group; all would say the same

_log = logging.getLogger("syncbn")


class WatchedRank(ThisRank):
    """This rank with the thread, which ends with the group of all ranks."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        super().__init__(world)
        self.on_gpu = OnGpu()
        weakref.finalize(world, _leave, self)
        self.watchdog = threading.Thread(
            target=_watch, args=[self, weakref.ref(world)], name="syncbn.watchdog", daemon=True
        )
        self.watchdog.start()

    def left_to_gpu(self, collective: Collective, device: torch.device) -> None:
        self.on_gpu.add(Waiting(collective), event_behind(device))


def _watch(rank: WatchedRank, world: weakref.ref[dist.ProcessGroup]) -> None:
    # Between its looks it holds nothing that would keep the group alive.
    last = None
    while not rank.ended.wait(min(rank.interval, HEARTBEAT_SECONDS)) and dist.group.WORLD is world():
        last = _look(rank, last)
    rank.on_gpu.clear()
    rank.ended.wait()  # a group that is destroyed may be held, and the program end later
    if rank.failed:
        where = report.where_all_were(Elsewhere(rank))
        _log.error("syncbn: a collective outside of syncbn's layers failed on rank %d.\n%s", rank.rank, where)
    rank.forget_store()


def _look(rank: WatchedRank, last: Elsewhere | None) -> Elsewhere | None:
    """Write the position if it is new or old; warn of a long wait. The wait outside of the layers, if it is that."""
    collective = rank.waiting
    waiting = rank.on_gpu.oldest() if collective is None else Waiting(collective)
    with rank.writing:
        if rank.beats():
            due = time.monotonic() - rank.written >= HEARTBEAT_SECONDS or rank.written_state != rank.state()
        else:
            due = waiting is not None and rank.written_state != rank.state()
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


def _leave(rank: WatchedRank) -> None:
    """The default process group, or this program, ends: because of an exception, perhaps."""
    here = rank.process == os.getpid()  # a forked process has no thread
    rank.failed = here and process_state.a_collective_failed()
    rank.ended.set()
    # The heartbeat may be in a call of a dead store.
    if here and rank.writing.acquire(timeout=LEAVE_SECONDS):
        rank.left = HAS_LEFT + process_state.why_it_ends()
        rank.write_position()
        rank.writing.release()
    if rank.failed:
        with contextlib.suppress(RuntimeError):  # it is this thread that lets the group go
            rank.watchdog.join(report.READ_SECONDS)
