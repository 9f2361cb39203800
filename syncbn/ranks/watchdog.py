"""Watches this rank in a thread: writes its position once a second if it has changed, and warns of long waits.

| this rank waits in                 | which is known from                                                           |
|------------------------------------|-------------------------------------------------------------------------------|
| an all_reduce of a layer, on a CPU | the `with` block of its `Collective`                                          |
| an all_reduce of a layer, on a GPU | the GPU's status, see status.py: the host goes on at once                     |

Of the collectives of DistributedDataParallel and of the program one thing is known: the error that ends the program.
The thread then logs where every rank is; errors of the layers say so themselves. Only the rank that fails first is sure
to report, as torchrun ends the others 0.1 s later. Nothing is logged where the program handles the error, and the
positions are lost with the process that holds the store (torchrun keeps it in a process of its own).
"""

import contextlib
import logging
import os
import threading
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch.distributed as dist

from syncbn.ranks import positions, report
from syncbn.ranks.positions import HAS_LEFT, Position, ThisRank, Wait

POLL_SECONDS = 1.0  # between two looks of the thread
EXIT_SECONDS = 1.0  # for which a rank that leaves waits for its own threads
MAX_WARNING_RANKS = 4  # of a group warn, as all would say the same

log = logging.getLogger("syncbn")


_ranks: WeakKeyDictionary[dist.ProcessGroup, ThisRank] = WeakKeyDictionary()  # by the default process group
_starting = threading.RLock()  # the first calls of several threads may meet
_inherited: WeakSet[dist.ProcessGroup] = WeakSet()  # this process was forked from one that made these groups


def this_rank() -> ThisRank:
    """This rank of the default group, watched by a thread that ends with the group. **Raises** RuntimeError in a forked
    process."""
    world = dist.group.WORLD
    assert world is not None
    if world in _inherited:
        what = f"this process ({os.getpid()}) was forked from one whose process group does not work here"
        raise RuntimeError(f'syncbn: {what}. Start it by the method "spawn" instead.')
    with _starting:
        if world not in _ranks:
            rank = _ranks[world] = ThisRank(world)
            thread = threading.Thread(target=_watch, args=[rank, ref(world)], name="syncbn.watchdog", daemon=True)
            finalize(world, _on_group_end, rank, thread)
            thread.start()
        return _ranks[world]


def _after_fork() -> None:
    """This process cannot use the groups of its parent."""
    if dist.group.WORLD is not None:
        _inherited.add(dist.group.WORLD)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _watch(rank: ThisRank, world: ref[dist.ProcessGroup]) -> None:
    """The thread. Between its looks it holds nothing that would keep the group alive."""
    seen, has_warned = None, False
    # Each look holds Python's lock, which the program needs to launch kernels on a GPU.
    while not rank.ended.wait(POLL_SECONDS) and dist.group.WORLD is world():
        try:
            seen = _poll(rank, seen)
        except Exception as error:
            if not has_warned:
                has_warned = True
                text = "syncbn: the watchdog of rank %d has failed once, and goes on: %s: %s"
                log.warning(text, rank.rank, type(error).__name__, error)
    _final_poll(rank)
    rank.ended.wait()  # the program may still hold a destroyed group
    if rank.failed:
        where = report.report_positions(rank, None, has_failed=True, at_exit=True)
        log.error("syncbn: a collective outside of syncbn's layers failed on rank %d.\n%s", rank.rank, where)
    # Layers that have called on the group still know this rank, and must not keep its store.
    rank.store_answers, rank.store = False, dist.HashStore()


def _poll(rank: ThisRank, seen: Position | None) -> Position:
    """One look of the thread, which returns the position of this rank; `seen` is that of the previous look."""
    for watched in [*rank.gpu_statuses]:
        is_last = watched.has_ended()
        if is_last:
            rank.gpu_statuses.discard(watched)
        watched.poll(is_last)
    position = rank.position()
    # A store that grows with each write gets a position only if the position was the same one look ago.
    if not (rank.is_reading() or rank.ended.is_set() or (rank.store_appends and position != seen)):
        rank.write_position()
    on_gpu = [begun for watched in [*rank.gpu_statuses] if (begun := watched.unfinished()) is not None]
    for wait in [*rank.waiting] or sorted(on_gpu, key=lambda begun: begun.start)[:1]:
        _warn_if_long(rank, wait)
    return position


def _final_poll(rank: ThisRank) -> None:
    """Look at the GPUs once more, as the group ends: no later step of the program would raise a fault of the last."""
    while rank.gpu_statuses:
        with contextlib.suppress(Exception):
            rank.gpu_statuses.pop().poll(is_last=True)


def _warn_if_long(rank: ThisRank, wait: Wait) -> None:
    seconds = wait.seconds()
    if seconds < wait.next_warning_seconds:
        return
    wait.next_warning_seconds *= 2
    if wait.ranks().index(rank.rank) < MAX_WARNING_RANKS:
        where = report.report_positions(rank, wait)
        on_gpu = "" if wait in rank.waiting else f", in {wait.position().description} on the GPU; the host may be ahead"
        log.warning("syncbn: rank %d has waited %.0f s for others%s.\n%s", rank.rank, seconds, on_gpu, where)


def _on_group_end(rank: ThisRank, watchdog: threading.Thread) -> None:
    """The default process group, or this program, ends, perhaps because of an exception."""
    if rank.process != os.getpid():  # a forked process, which has no thread
        return
    rank.failed = positions.failed_collective() is not None
    rank.departure = HAS_LEFT + positions.exit_reason()
    if (
        rank.report_thread is not None and rank.report_thread is not threading.current_thread()
    ):  # it may be in a call of a dead store
        rank.report_thread.join(EXIT_SECONDS)
    if not rank.is_reading() and rank.writing.acquire(timeout=EXIT_SECONDS):
        rank.write_position()
        rank.writing.release()
    rank.ended.set()  # the watchdog then releases the store
    if rank.failed or rank.gpu_statuses:
        with contextlib.suppress(RuntimeError):  # this thread itself may let the group go
            watchdog.join(report.READ_SECONDS)
