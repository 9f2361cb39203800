"""Finds the waits of this rank that no `with` block shows: for a GPU's all_reduce, and outside of the layers.

| it waits in                        | which is known from                                                           |
|------------------------------------|-------------------------------------------------------------------------------|
| an all_reduce of a layer, on a CPU | the `with` block of its `Collective`                                          |
| an all_reduce of a layer, on a GPU | a mailbox, see mailbox.py: the host goes on at once                           |
| a collective outside of the layers | the main thread is blocked, in a function that waits for other ranks          |

The main thread is blocked if its CPU time has not changed since the previous look. The position says where, also if it
is not known to wait for other ranks, as in `work.wait()` or while it loads data.

Collectives outside of the layers are DistributedDataParallel's, the data loader's or the program's. Such a wait is seen
while the host waits without spinning, as with gloo. Under nccl the host most often goes on, and waits later, if at all.
"""

import threading
import time
from collections.abc import Iterable
from types import FrameType

from syncbn.call_stack import frames_of, line_of_program
from syncbn.comm import text_exchange
from syncbn.diagnosis import processes
from syncbn.diagnosis.positions import IN_COLLECTIVE, Position, ThisRank, Wait
from syncbn.torch_internals.distributed import collective_in


def place_of(frames_and_lines: Iterable[tuple[FrameType, int]], unknown: str = "") -> str:
    """Where a thread is, from its frames and their lines, the innermost first: "in all_reduce at train.py:57", or "at
    train.py:57" if that is not known to wait for other ranks; an `unknown` collective is called so."""
    frames_and_lines = [*frames_and_lines]
    frames = [frame for frame, _ in frames_and_lines]
    is_exchange = frames[0].f_globals is vars(text_exchange)
    collective = frames[0].f_code.co_name if is_exchange else collective_in(frames) or unknown
    line = f"at {line_of_program(frames_and_lines)}"
    return f"{IN_COLLECTIVE}{collective} {line}" if collective else line


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

    def is_in_collective(self) -> bool:
        """Whether it is known to wait for other ranks."""
        return self.blocked.startswith(IN_COLLECTIVE)


def look_outside(rank: ThisRank, previous: WaitOutside | None) -> WaitOutside | None:
    """The place of the main thread outside of the layers; `previous` is what the previous look found.

    The first look records the CPU time of the main thread. If it is the same at the next, the thread is blocked, and
    the position of this rank says where.
    """
    seconds = processes.main_thread_seconds()
    if previous is not None and previous.cpu_seconds == seconds:
        frames = [] if previous.blocked else frames_of(threading.main_thread().ident or 0)
        if frames:
            previous.blocked = place_of((frame, frame.f_lineno) for frame in frames)
        rank.blocked_after = previous.last, previous.blocked
        return previous
    rank.blocked_after = None, ""
    return None if seconds is None else WaitOutside(rank, cpu_seconds=seconds)
