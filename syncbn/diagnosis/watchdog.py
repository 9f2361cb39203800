"""Watches this rank in a thread: writes its position when that changes (on a GPU once a second), and warns of long
waits.

| this rank waits in                 | which is known from                                                           |
|------------------------------------|-------------------------------------------------------------------------------|
| an all_reduce of a layer, on a CPU | the `with` block of its `Collective`                                          |
| an all_reduce of a layer, on a GPU | a mailbox, see reductions/faults.py: the host goes on at once                 |
| a collective outside of the layers | the main thread is blocked, in a function that waits for other ranks          |

The main thread is blocked if its CPU time has not changed since the previous look. The position says where, also if it
is not known to wait for other ranks, as in `work.wait()` or while it loads data.

Collectives outside of the layers are DistributedDataParallel's, the data loader's or the program's. Such a wait is seen
while the host waits without spinning, as with gloo. Under nccl the host most often goes on, and waits later, if at all.
When one fails and ends the program, the thread logs where every rank is; errors of the layers say so themselves. Only
the rank that fails first is sure to report, as torchrun ends the others 0.1 s later. Nothing is logged where the
program handles the error, and the positions are lost with the process that holds the store (torchrun keeps it in a
process of its own).
"""

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterable
from types import FrameType
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch.distributed as dist

from syncbn.call_stack import frames_of, line_of_program
from syncbn.comm import text_exchange
from syncbn.diagnosis import processes, report
from syncbn.diagnosis.positions import HAS_LEFT, IN_COLLECTIVE, Position, ThisRank, Wait
from syncbn.torch_internals.distributed import collective_in

HEARTBEAT_SECONDS = 1.0  # between writes of an unchanged position; with 10,000 ranks a tenth of the store's time
LEAVE_SECONDS = 1.0  # for which a rank that leaves waits for its own heartbeat
WARNING_RANKS = 4  # of a group warn, as all would say the same

log = logging.getLogger("syncbn")


class WaitOutside(Wait):
    """The main thread is outside of the layers, after their last all_reduce. In a collective it waits for any rank."""

    def __init__(self, rank: ThisRank, cpu_seconds: float | None = None) -> None:
        self.rank, self.last, self.start = rank, rank.last, time.monotonic()
        self.position_at_start = rank.position()
        self.number = self.position_at_start.number + 1
        self.cpu_seconds = cpu_seconds  # of the main thread when it was first seen there
        self.blocked = ""  # where it is, once it is known to be blocked

    def position(self) -> Position:
        return self.position_at_start


_ranks: WeakKeyDictionary[dist.ProcessGroup, ThisRank] = WeakKeyDictionary()  # by the default process group
_inherited: WeakSet[dist.ProcessGroup] = WeakSet()  # this process was forked from one that made these groups


def this_rank() -> ThisRank:
    """This rank of the default group, watched by a thread that ends with the group. **Raises** RuntimeError in a forked
    process."""
    world = dist.group.WORLD
    assert world is not None
    if world in _inherited:
        what = f"this process ({os.getpid()}) was forked from one whose process group does not work here"
        raise RuntimeError(f'syncbn: {what}. Start it by the method "spawn" instead.')
    if world not in _ranks:
        rank = _ranks[world] = ThisRank(world)
        thread = threading.Thread(target=_watch, args=[rank, ref(world)], name="syncbn.watchdog", daemon=True)
        finalize(world, _leave, rank, thread)
        thread.start()
    return _ranks[world]


def note_evaluation() -> None:
    """Note that this rank calls a layer in evaluation mode, which waits for nobody."""
    world = dist.group.WORLD
    if world is not None and world.size() > 1 and world not in _inherited:
        rank = this_rank()
        rank.since["evaluated"] = "has called a layer in evaluation mode", rank.last


def _after_fork() -> None:
    """This process cannot use the groups of its parent."""
    if dist.group.WORLD is not None:
        _inherited.add(dist.group.WORLD)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _watch(rank: ThisRank, world: ref[dist.ProcessGroup]) -> None:
    """The thread. Between its looks it holds nothing that would keep the group alive."""
    waits: dict[Wait, str] = {}
    outside: WaitOutside | None = None
    has_complained, interval = False, min(rank.interval, HEARTBEAT_SECONDS)
    # Each look holds Python's lock, which the program needs to launch kernels on a GPU.
    while not rank.ended.wait(HEARTBEAT_SECONDS if rank.boxes else interval) and dist.group.WORLD is world():
        try:
            for box in [*rank.boxes]:
                box.look()
            _beat(rank, is_waiting=bool(waits))
            if not rank.waiting:
                outside = _look_outside(rank, outside)
            waits = _current_waits(rank, outside)
            for wait, place in waits.items():
                _warn_if_long(rank, wait, place)
        except Exception as error:
            waits = {}
            if not has_complained:
                has_complained = True
                text = "syncbn: the watchdog of rank %d has failed once, and goes on: %s: %s"
                log.warning(text, rank.rank, type(error).__name__, error)
    rank.boxes.clear()
    rank.ended.wait()  # a group that is destroyed may be held, and the program end later
    if rank.failed_at:
        where = report.where_all_are(WaitOutside(rank), has_failed=True, at_exit=True)
        log.error("syncbn: a collective outside of syncbn's layers failed on rank %d.\n%s", rank.rank, where)
    # Layers that have called on the group still know this rank, and must not keep its store.
    rank.store_answers, rank.store = False, dist.HashStore()


def _beat(rank: ThisRank, is_waiting: bool) -> None:
    """Write the position if it is new or old; `is_waiting` is what the previous look found."""
    with rank.writing:
        is_new = rank.position() != rank.written_position
        is_old = time.monotonic() - rank.written >= HEARTBEAT_SECONDS
        due = is_new or is_old if rank.beats else is_new and is_waiting
        if due and not rank.ended.is_set():
            rank.write_position()


def _warn_if_long(rank: ThisRank, wait: Wait, place: str) -> None:
    seconds = wait.seconds()
    if seconds < wait.next_warning_seconds:
        return
    wait.next_warning_seconds *= 2
    if wait.ranks().index(rank.rank) < WARNING_RANKS:
        where = report.where_all_are(wait)
        log.warning("syncbn: rank %d has waited %.0f s for others%s.\n%s", rank.rank, seconds, place, where)


def _current_waits(rank: ThisRank, outside: WaitOutside | None) -> dict[Wait, str]:
    """The waits that this rank is in, each with what its position does not tell in words."""
    if waiting := [*rank.waiting]:
        return dict.fromkeys(waiting, "")
    unfinished = [wait for box in [*rank.boxes] if (wait := box.unfinished()) is not None]
    if unfinished:
        on_gpu = min(unfinished, key=lambda wait: wait.start)
        return {on_gpu: f", in {on_gpu.position().doing} on the GPU, beside which the hosts may go on"}
    if outside is not None and outside.blocked.startswith(IN_COLLECTIVE):
        return {outside: ", in a collective outside of syncbn's layers"}
    return {}


def _look_outside(rank: ThisRank, previous: WaitOutside | None) -> WaitOutside | None:
    """The place of the main thread outside of the layers; `previous` is what the previous look found.

    The first look records the CPU time of the main thread. If it is the same at the next, the thread is blocked, and
    the position of this rank says where.
    """
    seconds = processes.main_thread_seconds()
    if previous is not None and previous.cpu_seconds == seconds:
        frames = [] if previous.blocked else frames_of(threading.main_thread().ident or 0)
        if frames:
            previous.blocked = _place_of((frame, frame.f_lineno) for frame in frames)
        rank.since["blocked"] = previous.blocked, previous.last
        return previous
    rank.since.pop("blocked", None)
    return None if seconds is None else WaitOutside(rank, cpu_seconds=seconds)


def _place_of(frames_and_lines: Iterable[tuple[FrameType, int]], unknown: str = "") -> str:
    """Where a thread is, from its frames and their lines, the innermost first: "in all_reduce at train.py:57", or "at
    train.py:57" if that is not known to wait for other ranks; an `unknown` collective is called so."""
    frames_and_lines = [*frames_and_lines]
    frames = [frame for frame, _ in frames_and_lines]
    is_exchange = frames[0].f_globals is vars(text_exchange)
    collective = frames[0].f_code.co_name if is_exchange else collective_in(frames) or unknown
    line = f"at {line_of_program(frames_and_lines)}"
    return f"{IN_COLLECTIVE}{collective} {line}" if collective else line


def _leave(rank: ThisRank, watchdog: threading.Thread) -> None:
    """The default process group, or this program, ends, perhaps because of an exception."""
    here = rank.process == os.getpid()  # a forked process has no thread
    error = processes.failure_of_collective() if here else None
    if error is not None:
        rank.failed_at = _place_of(reversed([*traceback.walk_tb(error.__traceback__)]), unknown="a collective")
    rank.ended.set()
    # The heartbeat may be in a call of a dead store.
    if here and rank.writing.acquire(timeout=LEAVE_SECONDS):
        rank.left = HAS_LEFT + processes.why_it_ends()
        rank.write_position()
        rank.writing.release()
    if rank.failed_at:
        with contextlib.suppress(RuntimeError):  # this thread itself may let the group go
            watchdog.join(report.READ_SECONDS)
