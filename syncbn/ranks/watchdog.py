"""Watches this rank in a thread: writes its position once a second if it has changed, and warns of long waits.

| this rank waits in                 | the thread knows it from                                      |
|------------------------------------|---------------------------------------------------------------|
| an all_reduce of a layer, on a CPU | `ThisRank.waiting`                                            |
| an all_reduce of a layer, on a GPU | the status words, see status.py, as the host does not wait    |

Collectives of DistributedDataParallel and of the program are not tracked. If the error of such a collective ends the
program, the thread logs the positions of all ranks; errors raised in layers already contain these positions. Only the
rank that fails first is sure to report, because torchrun ends the other ranks 0.1 s later. Nothing is logged if the
program handles the error.
The positions are lost with the process that holds the store (torchrun keeps the store in a process of its own).
"""

import contextlib
import logging
import os
import threading
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch.distributed as dist

from syncbn.ranks import positions, report
from syncbn.ranks.positions import HAS_LEFT, Position, ThisRank, Wait
from syncbn.texts import format_error
from syncbn.torch_internals import is_compiling

POLL_SECONDS = 1.0  # time between two polls of the thread
EXIT_SECONDS = 1.0  # at exit: the longest wait for the thread of a report, and for the lock of the position
MAX_WARNING_RANKS = 4  # Only the first ranks of a group warn, as the warnings of all ranks would be equal.

log = logging.getLogger("syncbn")


_ranks: WeakKeyDictionary[dist.ProcessGroup, ThisRank] = WeakKeyDictionary()  # keyed by the default process group
_starting = threading.RLock()  # held while a thread of the program makes a ThisRank
_inherited: WeakSet[dist.ProcessGroup] = WeakSet()  # default groups of the process from which this process was forked


def this_rank() -> ThisRank:
    """Return this rank of the default group. A thread watches the rank until the group ends.

    **Raises** RuntimeError in a forked process.
    """
    world = dist.group.WORLD
    assert world is not None
    if world in _inherited:
        what = f"this process ({os.getpid()}) was forked from a process whose process group does not work here"
        raise RuntimeError(f'syncbn: {what}. Start it by the method "spawn" instead.')
    with _starting:
        if world not in _ranks:
            rank = _ranks[world] = ThisRank(world)
            thread = threading.Thread(target=_watch, args=[rank, ref(world)], name="syncbn.watchdog", daemon=True)
            finalize(world, _on_group_end, rank, thread)
            thread.start()
        return _ranks[world]


def recorded(error: Exception) -> Exception:
    """Record `error` at once, and return it. Use it for an error that this rank raises before it can join the
    all_reduce of the other ranks."""
    world = dist.group.WORLD
    if not (is_compiling() or world is None or world in _inherited):
        with contextlib.suppress(RuntimeError, ValueError):  # of the store, or of a thread that cannot start
            report.record_at_once(this_rank(), format_error(error))
    return error


def after_fork() -> None:
    """Mark the default group of the parent process. Later calls of `this_rank` then raise."""
    if dist.group.WORLD is not None:
        _inherited.add(dist.group.WORLD)


def _watch(rank: ThisRank, world: ref[dist.ProcessGroup]) -> None:
    """Run the thread. Between two polls it holds no reference that would keep the group alive."""
    previous, has_warned = None, False
    # Each poll holds the GIL, which the program needs to launch kernels on a GPU.
    while not rank.ended.wait(POLL_SECONDS) and dist.group.WORLD is world():
        try:
            previous = _poll(rank, previous)
        except Exception as error:
            if not has_warned:
                has_warned = True
                text = "syncbn: the watchdog of rank %d has failed once, and goes on: %s: %s"
                log.warning(text, rank.rank, type(error).__name__, error)
    while rank.gpu_statuses:  # Log faults of the last step, which no later step can raise.
        with contextlib.suppress(Exception):
            rank.gpu_statuses.pop().poll(is_last=True)
    rank.ended.wait()  # until the group is released: the program may still hold it
    if rank.failed:
        where = report.report_positions(rank, None, has_failed=True)
        log.error("syncbn: a collective outside of syncbn's layers failed on rank %d.\n%s", rank.rank, where)
    # Layers that have used the group still refer to `rank`. Release its store, which they would otherwise keep alive.
    rank.store_answers, rank.store = False, dist.HashStore()


def _poll(rank: ThisRank, previous: Position | None) -> Position:
    """Poll the GPUs, write the position of this rank and warn of long waits. Return the position; `previous` is the
    position at the previous poll."""
    for status in [*rank.gpu_statuses]:
        status.poll()
    position = rank.position()
    # A store that grows with each write (FileStore) gets a position only if it was the same at the previous poll.
    if rank.wait_for_report() and not (rank.ended.is_set() or (rank.store_appends and position != previous)):
        rank.write_position()
    on_gpu = [wait for status in [*rank.gpu_statuses] if (wait := status.unfinished()) is not None]
    for wait in [*rank.waiting] or sorted(on_gpu, key=lambda wait: wait.start)[:1]:
        _warn_if_long(rank, wait)
    return position


def _warn_if_long(rank: ThisRank, wait: Wait) -> None:
    seconds = wait.seconds()
    if seconds < wait.next_warning_seconds:
        return
    wait.next_warning_seconds *= 2
    if wait.ranks.index(rank.rank) < MAX_WARNING_RANKS:
        # The wait may end while the report waits for the store, so `waiting` is read first.
        on_gpu = "" if wait in rank.waiting else f", in {wait.position().description} on the GPU; the host may be ahead"
        where = report.report_positions(rank, wait)
        log.warning("syncbn: rank %d has waited %.0f s for others%s.\n%s", rank.rank, seconds, on_gpu, where)


def _on_group_end(rank: ThisRank, watchdog: threading.Thread) -> None:
    """Write that this rank leaves, and with which exception. Called when the default group or the program ends."""
    if rank.process != os.getpid():  # a forked process, which has no watchdog
        return
    rank.failed = positions.failed_collective() is not None
    rank.departure = HAS_LEFT + positions.exit_reason()
    # All default groups write to one key, so the late end of an old group must not overwrite the newest position.
    is_newest = all(other.default_group <= rank.default_group for other in [*_ranks.values()])
    if is_newest and rank.wait_for_report(EXIT_SECONDS) and rank.writing.acquire(timeout=EXIT_SECONDS):
        rank.write_position()
        rank.writing.release()
    rank.ended.set()  # The watchdog then releases the store.
    if rank.failed or rank.gpu_statuses:
        with contextlib.suppress(RuntimeError):  # The watchdog itself may release the group, and cannot join itself.
            watchdog.join(report.READ_SECONDS)
