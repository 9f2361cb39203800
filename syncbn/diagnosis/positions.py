"""Keeps known where this rank is: in which all-reduce it waits, and what it has done since.

Each rank writes to the store of the default process group, under keys that begin with syncbn/ and its global rank:

    position                its last all_reduce of syncbn, what it has done since, its process, the time
    called/0/layer4.1.bn3   once, that it has called this layer on the group named 0

A write takes 5 us in a loop and 25 to 120 us after a pause, so a thread (watchdog.py) writes the position, soon after
it has changed and each second: a rank that is killed may have gone 0.05 s further than its position says. The others'
positions are read (report.py) only when there is something to say, and fast: torchrun ends the ranks that are left some
0.1 s after the first has failed. A position older than this process is not read: torchrun may keep a store when it
restarts the ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from typing import Self
from weakref import WeakKeyDictionary

import torch.distributed as dist

from syncbn import torch_private
from syncbn.diagnosis import processes, report, watchdog
from syncbn.diagnosis.call_sites import LayerCall
from syncbn.diagnosis.report import EVALUATES, Position, RanksDifferError
from syncbn.diagnosis.waits import FIRST_WARNING_SECONDS, OnGpu, Wait


class Waiting(Wait):
    """Around an all_reduce: makes known where this rank is and, when it fails, says where all are."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        call: LayerCall | None,
        pass_name: str,
        first_warning_seconds: float = FIRST_WARNING_SECONDS,
    ) -> None:
        self.group = group
        self.call = call
        self.doing = "a step of others, out of data"
        if call is not None:
            self.layer = call.site.name
            self.doing = f"{self.layer} {pass_name}, call {call.number}"
        self.start = time.monotonic()
        self.next_warning_seconds = first_warning_seconds

    def __enter__(self) -> Self:
        self.rank = _this_rank()
        self.position = self.rank.begin(self)
        self.number = self.position.number
        return self

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        self.rank.waiting = None
        if isinstance(error, RuntimeError) and not isinstance(error, RanksDifferError):
            raise RuntimeError(
                f"syncbn: a collective failed on rank {self.rank.rank} after {self.seconds():.1f} s.\n"
                f"{report.where_all_are(self, report.one_is_gone)}\nThe process group says: {error}"
            ) from error

    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)


class ThisRank:
    """This rank of a default process group."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank, self.process = dist.get_rank(), os.getpid()
        self.process_and_host = f"{self.process} {processes.host()}"
        self.store = torch_private.default_store()  # the default one may later be another group's
        self.store_answers = True
        self.writing = threading.RLock()  # the program and the heartbeat write positions
        self.numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
        self.position = Position("", 0, "")
        self.written, self.written_position = -math.inf, self.position
        self.num_ranks = world.size()
        self.interval = watchdog.interval(self.store, self.num_ranks)
        self.waiting: Waiting | None = None  # on the host
        self.on_gpu = OnGpu()
        self.ended = threading.Event()
        self.failed = False  # it ends as a collective outside of the layers failed
        self.write_position()
        self.watchdog = watchdog.start(self, world)

    def beats(self) -> bool:
        """Whether it writes every second."""
        return self.interval < math.inf

    def begin(self, waiting: Waiting) -> Position:
        """This rank enters an all_reduce."""
        group, call = waiting.group, waiting.call
        number = self.numbers[group] = self.numbers.get(group, 0) + 1
        self.position = Position(group.group_name, number, waiting.doing)
        if number == 1:
            self.write_position()
        if call is not None and call.number == 1:
            self.write(f"called/{group.group_name}/{call.site.name}", "")
        self.waiting = waiting
        return self.position

    def evaluate(self) -> None:
        """This rank calls a layer in evaluation mode."""
        if self.position.since != EVALUATES:
            self.position = self.position._replace(since=EVALUATES)

    def write_position(self) -> None:
        with self.writing:
            position = self.position
            self.written, self.written_position = time.monotonic(), position
            self.write("position", "\n".join(map(str, (*position, time.time(), self.process_and_host))))

    def write(self, key: str, text: str) -> None:
        if self.store_answers:
            with contextlib.suppress(RuntimeError, ValueError):  # a store that has ended
                self.store.set(f"syncbn/{self.rank}/{key}", text)


def note_evaluation() -> None:
    """This rank calls a layer in evaluation mode, which waits for nobody."""
    world = dist.group.WORLD
    if (
        world is not None
        and world.size() > 1
        and not torch_private.is_compiling()
        and world not in processes.inherited_groups
    ):
        _this_rank().evaluate()


_ranks: WeakKeyDictionary[dist.ProcessGroup, ThisRank] = WeakKeyDictionary()  # by the default process group


def _this_rank() -> ThisRank:
    world = dist.group.WORLD
    assert world is not None
    if world in processes.inherited_groups:
        processes.refuse_inherited_group()
    rank = _ranks.get(world)
    if rank is None:
        rank = _ranks[world] = ThisRank(world)
    return rank
