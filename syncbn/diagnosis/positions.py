"""Keeps the position of this rank: the collective in which it waits, the call that made it, and what it did since.

Each rank writes to the store of the default process group, under keys that begin with syncbn/ and its global rank:

    position                its last all_reduce of syncbn, and what it has done since
    called/0/1/layer4.1.bn3 once, with how many channels and over which ranks it has called this layer of the group 0/1
    met/0/1                 once, that it has come to the first collective of the group 0/1
    met/0/1/all             once, by the first rank of the group, that the ranks need not wait for others there

The group 0/1 has the name 1 beside the first default group of its ranks, 1/1 beside the second.

A write takes 5 us in a loop and 25 to 120 us after a pause, so a thread (watchdog.py) writes the position, soon after
it has changed and each second: a rank that is killed may have gone 0.05 s further than its position says. The others'
positions are read (report.py) only when there is something to say, and fast: torchrun ends the ranks that are left some
0.1 s after the first has failed. What is older than this process is not read: torchrun may keep a store when it
restarts the ranks.
"""

import contextlib
import itertools
import json
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from syncbn.diagnosis import processes
from syncbn.texts import in_words
from syncbn.torch_internals.distributed import default_store

if TYPE_CHECKING:  # upwards, for the type of what the watchdog looks at
    from syncbn.reductions.faults import Box

HAS_LEFT = "has left"
IN_COLLECTIVE = "in "  # how `Position.blocked` begins for a collective
WITH_GRAPH = "backward with create_graph or torch.func"  # the first all_reduce of such a backward
FIRST_WARNING_SECONDS = 30.0  # of waiting; the next when they have doubled
CLOCKS_DIFFER_SECONDS = 5.0  # at most, of two hosts
SECONDS_BETWEEN_WRITES = 0.05  # of a rank, at least
SECONDS_PER_WRITE = 10e-6  # of all ranks together: a store takes some 100,000 writes a second


class Position(NamedTuple):
    """The position of a rank: its last all_reduce of syncbn, and what it has done since. The store has it as JSON."""

    group: str = ""  # the process group: 0/1
    number: int = 0  # of the all_reduce among syncbn's on the group, from 1
    pass_name: str = ""  # of the all_reduce: forward, backward, WITH_GRAPH, or a derivative of these
    doing: str = ""  # layer4.1.bn3 forward, call 17
    evaluated: str = ""  # that it has called a layer in evaluation mode since
    left: str = ""  # HAS_LEFT, and why
    blocked: str = ""  # where its main thread is blocked since: in all_reduce at train.py:57
    left_out: str = ""  # the all_reduce that it has left out since, and its error
    # What the rank that reads the position adds to it.
    state: str = ""  # its process has ended or is stopped, or it is not heard of
    unseen: str = ""  # it has not been seen in the layer in which the reader waits
    called: str = ""  # how it has called that layer, where ranks differ in this


class Written(NamedTuple):
    """What a rank has written to the store, when, and its process and host."""

    value: Any = None
    time: float = 0.0
    process: int = 0
    host: str = ""

    def is_old(self) -> bool:
        """Whether it was there before this process: torchrun may keep the store and start the ranks again."""
        allowed = 0.0 if self.host == processes.host() else CLOCKS_DIFFER_SECONDS
        return self.time < processes.start_of_this() - allowed


class Wait(ABC):
    """A wait of this rank for others."""

    rank: "ThisRank"
    number: int  # a rank whose position has this number or more has arrived
    start: float  # by time.monotonic
    next_warning_seconds = FIRST_WARNING_SECONDS

    @abstractmethod
    def position(self) -> Position:
        """The position of this rank in it."""

    def layer(self) -> str:
        """The name of the layer that the others may not have called; empty without one."""
        return ""

    def ranks(self) -> list[int]:
        """The global ranks that wait for one another."""
        return list(range(self.rank.num_ranks))

    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self.start

    def has_arrived(self, position: Position) -> bool:
        """Whether a rank of this position has come to what this rank waits in."""
        return position.group == self.position().group and position.number >= self.number


_lives = itertools.count()  # of a process with default groups, which may use one store


class ThisRank:
    """This rank of a default process group, its position, and the store to which it writes that."""

    last: Wait | None = None  # the last collective that this rank has begun

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank, self.process = dist.get_rank(), os.getpid()
        self.store: dist.Store = default_store()  # the default one may later be another group's
        self.store_answers = True
        self.waiting: dict[Wait, None] = {}  # the collectives that have not ended on the host, of all threads
        self.boxes: set[Box] = set()  # the mailboxes of this rank's GPUs
        self.writing = threading.RLock()  # the program and the heartbeat write positions
        self.num_ranks = world.size()
        self.life = next(_lives)
        self.interval = _interval(self.store, self.num_ranks)
        self.beats = self.interval < math.inf  # whether it writes every second
        # What it has done since its last all_reduce: for fields of Position the text, and `last` when it was noted.
        self.since: dict[str, tuple[str, Wait | None]] = {}
        self.left = ""
        self.ended = threading.Event()
        self.failed_at = ""  # where a collective outside of the layers failed, which ends this rank
        self.write_position()

    def position(self, wait: Wait | None = None) -> Position:
        """The last all_reduce of this rank, and what it has done since. While threads wait, the collective of the one
        that waits longest; or `wait`, if that is one of them."""
        waiting = [*self.waiting]  # other threads may begin and end some
        last = wait if wait in waiting else next(iter(waiting), self.last)
        since: dict[str, Any] = {field: text for field, (text, before) in self.since.copy().items() if before is last}
        if self.left or self.failed_at:
            since["blocked"] = self.failed_at
        return (Position() if last is None else last.position())._replace(left=self.left, **since)

    def leave_out(self, doing: str, error: BaseException) -> None:
        """Write that an error of this rank alone prevents its next all_reduce: the others wait for it."""
        text = f"left out {doing}, because of {in_words(error)}"
        self.since["left_out"] = text.partition("\n")[0][:300], self.last
        self.write_position()

    def write_position(self) -> None:
        with self.writing:
            position = self.written_position = self.position()
            self.written = time.monotonic()
            self.write("position", position)

    def meet(self, group: str, ranks: list[int], seconds: float) -> bool:
        """Wait until all ranks of a group have come, once for a group. False: one is late.

        The first rank waits for all others, and these for the first to go on, so that there are few calls of the store.
        Ranks meet by the store and not by a collective, so that other threads go on and a missing rank harms nobody.
        """
        if not (self.beats and self.store_answers):
            return True
        key = f"met/{group}"
        self.write(key, True)
        if ranks[0] == self.rank:
            written = self.wait_for(ranks, key, seconds)
            self.write(f"{key}/all", True)
        else:
            written = self.wait_for(ranks[:1], f"{key}/all", seconds)
        return Written() not in written or not self.store_answers

    def write(self, key: str, value: object) -> None:
        if self.store_answers:
            with self.using_store():
                written = Written(value, time.time(), self.process, processes.host())
                self.store.set(f"syncbn/{self.rank}/{key}", json.dumps(written))

    def read(self, ranks: Sequence[int], key: str) -> list[Written]:
        """What these ranks have written under the key; `Written()` for nothing that counts."""
        store, keys = self.store, [f"syncbn/{rank}/{key}" for rank in ranks]
        if store.has_extended_api() and store.check(keys):  # type: ignore[attr-defined]
            texts = store.multi_get(keys)  # one request for all ranks
        else:
            texts = [store.get(key) if store.check([key]) else b"[]" for key in keys]
        values = [Written(*json.loads(text)) for text in texts]
        return [Written() if written.is_old() else written for written in values]

    def wait_for(self, ranks: Sequence[int], key: str, seconds: float) -> list[Written]:
        """What `read` gives, as soon as all of these ranks have written, and at the latest after these seconds."""
        deadline, pause, written = time.monotonic() + seconds, SECONDS_BETWEEN_WRITES / 50, [Written()] * len(ranks)
        with self.using_store():
            while self.store_answers:
                written = self.read(ranks, key)
                if Written() not in written or time.monotonic() >= deadline:
                    break
                time.sleep(pause)
                pause = min(2 * pause, self.interval)
        return written

    @contextlib.contextmanager
    def using_store(self) -> Iterator[None]:
        """Within, the store is called. After an error it is taken as gone, and not called again: torch prints a
        backtrace of C++ for each call that fails."""
        try:
            yield
        except (RuntimeError, ValueError):
            self.store_answers = False


def _interval(store: dist.Store, num_ranks: int) -> float:
    """Seconds between the writes of a rank; infinite for a store in which a write does not replace the last one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return math.inf if isinstance(store, dist.FileStore) else max(SECONDS_BETWEEN_WRITES, num_ranks * SECONDS_PER_WRITE)
