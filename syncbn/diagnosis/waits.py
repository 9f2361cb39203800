"""Finds the waits of this rank that no `with` block shows: for a GPU's all_reduce, and outside of the layers.

| it waits in                        | which is known from                                                           |
|------------------------------------|-------------------------------------------------------------------------------|
| an all_reduce of a layer, on a CPU | the `with` block of its `Collective`                                          |
| an all_reduce of a layer, on a GPU | an event behind it on the GPU's stream: the host goes on at once              |
| a collective outside of the layers | the main thread is blocked, in a function that waits for other ranks          |

The main thread is blocked if its CPU time has not changed since the previous look. The position says where, also if it
is not known to wait for other ranks, as in `work.wait()` or while it loads data.

Collectives outside of the layers are DistributedDataParallel's, the data loader's or the program's. Such a wait is seen
while the host waits without spinning, as with gloo. Under nccl the host most often goes on, and waits later, if at all.
"""

import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from types import FrameType

import torch

from syncbn.call_stack import line_of_program
from syncbn.comm import text_exchange
from syncbn.diagnosis import processes
from syncbn.diagnosis.positions import IN_COLLECTIVE, Position, ThisRank, Wait
from syncbn.torch_internals.distributed import beside_captures, collective_in
from syncbn.torch_internals.state import is_capturing

QUERY_SECONDS = 1.0  # between queries of the GPU by the watchdog, and the longest time that they may take
MOST_UNQUERIED = 1000  # all_reduces on a GPU, some ten steps of a ResNet-50; from then on the program queries too


def place_of(frames: Iterable[tuple[FrameType, int]], unknown: str = "") -> str:
    """Where a thread is, from its frames and their lines, the innermost first: "in all_reduce at train.py:57", or "at
    train.py:57" if that is not known to wait for other ranks; an `unknown` collective is called so."""
    frames = [*frames]
    innermost = frames[0][0]
    is_exchange = innermost.f_globals is vars(text_exchange)
    collective = innermost.f_code.co_name if is_exchange else collective_in(innermost) or unknown
    line = f"at {line_of_program(frames)}"
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
    the position of this rank says where. Only then are its frames walked: those of a running thread may be half made.
    """
    seconds = processes.main_thread_seconds()
    if previous is not None and previous.cpu_seconds == seconds:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is not None and not previous.blocked:
            previous.blocked = place_of(traceback.walk_stack(frame))
        rank.blocked_after = previous.last, previous.blocked
        return previous
    rank.blocked_after = None, ""
    return None if seconds is None else WaitOutside(rank, cpu_seconds=seconds)


class EventOn:
    """An event behind an all_reduce on a GPU's stream, queried while that GPU is current, else CUDA makes a context of
    0.5 GB on GPU 0 (torchcomms#777 saw 534 MiB); the query does not fail a graph that another thread captures."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.event = device, torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(device))

    def query(self) -> bool:
        """Whether the GPU has come to it. The host does not wait."""
        with torch.cuda.device(self.device), beside_captures():
            return bool(self.event.query())


def event_behind(device: torch.device) -> EventOn | None:
    """An event at the end of the current stream of this GPU; None while that stream captures a graph."""
    return None if is_capturing(device) else EventOn(device)


class OnGpu:
    """The all_reduces that the GPU may not have finished.

    The watchdog queries their events each second, and when a warning is due; the program only where the list is long,
    as a query costs it some microseconds. While a CUDA graph is captured the list is cleared: events may not be queried
    then.
    """

    def __init__(self) -> None:
        self._unfinished: deque[tuple[Wait, EventOn]] = deque()
        self._next_query = 0.0  # of the watchdog, by time.monotonic
        self._querying = threading.Lock()  # held by the one thread that queries

    def add(self, wait: Wait, event: EventOn | None) -> None:
        """Add an all_reduce that the host has left. It ends with the event; None while a graph is captured."""
        if event is None:
            self.clear()
            return
        self._unfinished.append((wait, event))
        if len(self._unfinished) > MOST_UNQUERIED:
            self._forget_finished()

    def oldest(self) -> Wait | None:
        """The first of them. The watchdog's query.

        In a thread of its own, for 1 s at most: while nccl fails a query may itself wait (seen on an H100, nccl 2.28).
        """
        oldest, now = self._oldest(), time.monotonic()
        if oldest is None or (now < self._next_query and not oldest.is_long()):
            return oldest
        self._next_query = now + QUERY_SECONDS
        errors: list[Exception] = []
        thread = threading.Thread(target=self._forget_finished, args=[errors], daemon=True)
        thread.start()
        thread.join(QUERY_SECONDS)
        if errors:
            raise errors[0]
        return self._oldest()

    def clear(self) -> None:
        """Forget all, and so their groups."""
        self._unfinished.clear()

    def _oldest(self) -> Wait | None:
        with contextlib.suppress(IndexError):  # other threads may forget the last
            return self._unfinished[0][0]
        return None

    def _forget_finished(self, errors: list[Exception] | None = None) -> None:
        """Unless another thread is about to. An error of the query is raised, or added to `errors`."""
        if not self._querying.acquire(blocking=False):
            return
        try:
            while self._unfinished and self._unfinished[0][1].query():
                self._unfinished.popleft()
                if self._unfinished:  # until now the GPU may have been behind
                    self._unfinished[0][0].start = time.monotonic()
        except IndexError:  # cleared meanwhile
            pass
        except Exception as error:
            if errors is None:
                raise
            errors.append(error)
        finally:
            self._querying.release()
