"""Makes known where this rank is: in which collective it waits, and what it has done since.

Each rank writes to the store of the default process group, under keys that begin with syncbn/ and its global rank:

    position                its last all_reduce of syncbn, what it has done since, its process, the time
    called/0/layer4.1.bn3   once, that it has called this layer on the group named 0

A write takes 5 us in a loop and 25 to 120 us after a pause, so a thread (watchdog.py) writes the position, soon after
it has changed and each second: a rank that is killed may have gone 0.05 s further than its position says. The others'
positions are read (report.py) only when there is something to say, and fast: torchrun ends the ranks that are left some
0.1 s after the first has failed. A position older than this process is not read: torchrun may keep a store when it
restarts the ranks.
"""

import contextlib
import json
import math
import os
import threading
import time
import zlib
from collections import Counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from syncbn.diagnosis import process_state
from syncbn.diagnosis.layer_names import line_that_calls_model, path_in_model, quoted
from syncbn.diagnosis.signatures import Signatures
from syncbn.ranks.reductions import NO_SIGNATURES, Caller, Collective
from syncbn.torch_internals.distributed import default_store

HAS_LEFT = "has left"
SECONDS_BETWEEN_WRITES = 0.05  # of a rank, at least
SECONDS_PER_WRITE = 10e-6  # of all ranks together: a store takes some 100,000 writes a second


class Position(NamedTuple):
    """The position of a rank: its last all_reduce of syncbn, and what it has done since. The store has it as JSON, with
    the time, the process and its host."""

    group: str = ""  # the name of the process group
    number: int = 0  # of the all_reduce among syncbn's on the group, from 1
    pass_name: str = ""  # of the all_reduce: forward, backward
    doing: str = ""  # layer4.1.bn3 forward, call 17
    has_evaluated: bool = False  # the rank has called a layer in evaluation mode since
    left: str = ""  # HAS_LEFT, and why


class Group:
    """The layers and functions that call on a group."""

    def __init__(self) -> None:
        self.sites: WeakKeyDictionary[Any, Site] = WeakKeyDictionary()
        self.last_order = 0  # of a site
        self.num_collectives = 0


class Site:
    """A layer or function that calls on a group, by its name. It holds neither the one nor the other."""

    def __init__(self, caller: Any, group: dist.ProcessGroup, rank: "ThisRank", state: Group) -> None:
        self.caller, self.group, self.rank, self.state = ref(caller), ref(group), rank, state
        self.group_name, self.num_ranks, self.num_calls = group.group_name, group.size(), 0
        is_function = isinstance(caller, Caller)
        # The dotted name in the model, or the function's name; empty for a layer without a model.
        self.path = caller.name if is_function else path_in_model(caller)
        self.first_line = "" if is_function else line_that_calls_model()
        self.name = quoted(self.path) or type(caller).__name__
        self.counts = not is_function or caller.signs
        self.warned_of_nan = False
        self.signatures: Any = Signatures(self.num_ranks) if self.counts else NO_SIGNATURES
        if self.counts:
            self.sign_as(self.path, state.last_order + 1)

    def sign_as(self, path: str, order: int) -> None:
        """Sign from now on as the layer of this path which was the order-th to call on the group."""
        self.order, self.state.last_order = order, max(order, self.state.last_order)
        self.signatures.sign_as(f"{order} {path}")

    def doing(self, call: int, pass_name: str) -> str:
        """layer4.1.bn3 forward, call 17."""
        return f"{self.name} {pass_name}, call {call}" if self.counts else self.name


class ThisRank:
    """This rank of a default process group."""

    last: Collective | None = None  # the last that this rank has begun
    waiting: Collective | None = None  # the same, until it has ended on the host

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank, self.process = dist.get_rank(), os.getpid()
        self.store: dist.Store = default_store()  # the default one may later be another group's
        self.store_answers = True
        self.writing = threading.RLock()  # the program and the heartbeat write positions
        self.groups: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
        self.num_ranks = world.size()
        self.meetings: Counter[str] = Counter()  # how often this rank has come to the meeting of a name
        self.interval = _interval(self.store, self.num_ranks)
        self.beats = self.interval < math.inf  # whether it writes every second
        self.evaluated_after: object = False  # the last collective before a call in evaluation mode; False: none yet
        self.left = ""
        self.ended = threading.Event()
        self.failed = False  # a collective outside of the layers failed, and ends this rank
        self.write_position()

    def position(self) -> Position:
        """The last all_reduce of this rank, and what it has done since."""
        last = self.last  # other threads may begin the next
        return position_in(last)._replace(has_evaluated=self.evaluated_after is last, left=self.left)

    def write_position(self) -> None:
        with self.writing:
            position = self.written_position = self.position()
            self.written = time.monotonic()
            self.write("position", json.dumps((position, time.time(), self.process, process_state.host())))

    def meet(self, name: str, group: dist.ProcessGroup, seconds: float) -> bool:
        """Wait until all ranks of a group have come to its meeting of this name, equally often. False: one is late.

        Ranks meet by the store and not by a collective, so that other threads go on and a missing rank harms nobody.
        """
        if not self.beats:
            return True
        ranks = dist.get_process_group_ranks(group)
        name = f"syncbn/met/{name}/{zlib.crc32(str(ranks).encode())}"
        self.meetings[name] += 1
        meeting, deadline = f"{name}/{self.meetings[name]}", time.monotonic() + seconds
        with contextlib.suppress(RuntimeError, ValueError):  # a store that has ended
            if self.store.add(meeting, 1) == len(ranks):
                self.store.set(f"{meeting}/all", "")
            pause = SECONDS_BETWEEN_WRITES / 50
            while not self.store.check([f"{meeting}/all"]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, self.interval)
        return True

    def write(self, key: str, text: str) -> None:
        if self.store_answers:
            with contextlib.suppress(RuntimeError, ValueError):  # a store that has ended
                self.store.set(f"syncbn/{self.rank}/{key}", text)


def position_in(collective: Collective | None) -> Position:
    """The position of a rank in this collective."""
    if collective is None:
        return Position()
    site, pass_name = collective.site, collective.pass_name
    return Position(site.group_name, collective.number, pass_name, site.doing(collective.call, pass_name))


def _interval(store: dist.Store, num_ranks: int) -> float:
    """Seconds between the writes of a rank; infinite for a store in which a write does not replace the last one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return math.inf if isinstance(store, dist.FileStore) else max(SECONDS_BETWEEN_WRITES, num_ranks * SECONDS_PER_WRITE)
