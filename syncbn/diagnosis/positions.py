"""Keeps the position of this rank: the collective in which it waits, the call that made it, and what it did since.

Each rank writes to the store of the default process group, under keys that begin with syncbn/ and its global rank:

    position                its last all_reduce of syncbn, what it has done since, its process, the time
    called/0/layer4.1.bn3   once, that it has called this layer on the group named 0

A write takes 5 us in a loop and 25 to 120 us after a pause, so a thread (watchdog.py) writes the position, soon after
it has changed and each second: a rank that is killed may have gone 0.05 s further than its position says. The others'
positions are read (report.py) only when there is something to say, and fast: torchrun ends the ranks that are left some
0.1 s after the first has failed. A position older than this process is not read: torchrun may keep a store when it
restarts the ranks.

Each rank also signs what it sends on CPU, so that ranks which have met in different layers or passes see it in the
total. The signature s of a call site and a pass is a positive number. It is computed from the path of the layer, from
its order (1 for the first layer that trained on this group; it separates two models with equal paths) and from the
dtype of the input. Rank r sends 1, s_r and s_r^2 behind its sums. By Cauchy and Schwarz sum 1 * sum s^2 = (sum s)^2
only where all s are equal. Two signatures of W ranks are equal by chance in W of 2^26 cases. A rank that cannot tell
its layer, as in a compiled graph, sends zeros and is not counted.
"""

import contextlib
import json
import math
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from syncbn.comm.all_reduce import exchanges
from syncbn.diagnosis import processes
from syncbn.diagnosis.names import line_that_calls_model, quoted
from syncbn.kernels.interface import UNSIGNED
from syncbn.texts import in_words
from syncbn.torch_internals.distributed import default_store, name_of
from syncbn.torch_internals.state import constant_in_graphs

HAS_LEFT = "has left"
WITH_GRAPH = "backward with create_graph or torch.func"  # the first all_reduce of such a backward
SECONDS_BETWEEN_WRITES = 0.05  # of a rank, at least
SECONDS_PER_WRITE = 10e-6  # of all ranks together: a store takes some 100,000 writes a second


@constant_in_graphs
def _hash_of(text: str) -> int:
    return zlib.crc32(text.encode())


def largest_signature(num_ranks: int) -> int:
    """The largest signature in a group of this size: their total is below 2^26, and its square exact in float64."""
    return 2**26 // num_ranks - 1


class Signatures(dict[tuple[str, torch.dtype | None], int]):
    """The signatures of a call site by pass and dtype of the input; UNSIGNED as long as the site has no identity."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.identity, self.num_ranks = "", num_ranks

    def __missing__(self, key: tuple[str, torch.dtype | None]) -> int:
        pass_name, dtype = key
        text = f"{self.identity} {pass_name} {dtype}"
        s = 1 + _hash_of(text) % largest_signature(self.num_ranks)
        self[key] = signature = s if self.identity else UNSIGNED
        return signature


class CallsOnGroups(Protocol):
    """A layer, or a `Caller` for a function."""

    _call_site: "Site | None"  # of its last call
    _synchronised_ranks: int | None  # by its last training step in eager mode; None before the first


class Position(NamedTuple):
    """The position of a rank: its last all_reduce of syncbn, and what it has done since. The store has it as JSON, with
    the time, the process and its host."""

    group: str = ""  # the name of the process group
    number: int = 0  # of the all_reduce among syncbn's on the group, from 1
    pass_name: str = ""  # of the all_reduce: forward, backward, WITH_GRAPH, or a derivative or tangent of these
    doing: str = ""  # layer4.1.bn3 forward, call 17
    has_evaluated: bool = False  # the rank has called a layer in evaluation mode since
    left: str = ""  # HAS_LEFT, and why
    blocked: str = ""  # where its main thread is blocked since: in all_reduce at train.py:57
    left_out: str = ""  # the all_reduce that it has left out since, and its error


class Group:
    """The layers and functions that call on a group, and the number of its collectives."""

    def __init__(self) -> None:
        self.sites: WeakKeyDictionary[CallsOnGroups, Site] = WeakKeyDictionary()
        self.last_order = 0  # of a site
        self.num_collectives = 0


class Site:
    """A layer or function that calls on a group, by its name. References to both are weak."""

    def __init__(
        self, caller: CallsOnGroups, path: str, is_signed: bool, group: dist.ProcessGroup, rank: "ThisRank"
    ) -> None:
        self.caller, self.rank, self.state = ref(caller), rank, rank.groups[group]
        self.group: Callable[[], dist.ProcessGroup | None] = ref(group)
        self.group_name, self.num_ranks, self.num_calls = name_of(group), group.size(), 0
        self.exchanges = exchanges(group)
        self.path = path  # the dotted name in the model, or the function's name; empty for a layer without a model
        self.first_line = line_that_calls_model()
        self.name = quoted(path) or type(caller).__name__
        self.is_signed, self.warned_of_nan = is_signed, False
        self.signatures, self.order = Signatures(self.num_ranks), 0
        if is_signed:
            self.sign_as(path, self.state.last_order + 1)

    def sign_as(self, path: str, order: int) -> None:
        """Sign from now on as the layer of this path and order."""
        self.order, self.state.last_order = order, max(order, self.state.last_order)
        self.signatures.identity = f"{order} {path}"
        self.signatures.clear()

    def doing(self, call: int, pass_name: str) -> str:
        """layer4.1.bn3 forward, call 17."""
        return f"{self.name} {pass_name}, call {call}" if self.is_signed else self.name


class EagerCall(Protocol):
    """A call of a layer or function on a group, in eager mode."""

    group: dist.ProcessGroup
    site: Site
    call: int  # the number of the call, from 1
    dtype: torch.dtype | None  # of the input


class Entry(Protocol):
    """This rank's entry into a collective, see `Collective`."""

    site: Site
    call: int  # the number of the call, from 1
    pass_name: str
    number: int  # of the collective among syncbn's on the group, from 1
    start: float  # by time.monotonic
    device: torch.device  # of what is sent
    has_failed: bool


def position_in(entry: Entry | None) -> Position:
    """The position of a rank in this collective."""
    if entry is None:
        return Position()
    site, pass_name = entry.site, entry.pass_name
    return Position(site.group_name, entry.number, pass_name, site.doing(entry.call, pass_name))


class ThisRank:
    """This rank of a default process group."""

    last: Entry | None = None  # the last that this rank has begun
    waiting: Entry | None = None  # the same, until it has ended on the host

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
        self.evaluated_after: Entry | bool | None = False  # `last` at a call in evaluation mode; False: no such call
        self.blocked_after: tuple[Entry | None, str] = (None, "")  # `last` when its main thread was blocked; where
        self.left_out_after: tuple[Entry | None, str] = (None, "")  # `last` when an error prevented the next; the error
        self.left = ""
        self.ended = threading.Event()
        self.failed_at = ""  # where a collective outside of the layers failed, which ends this rank
        self.write_position()

    def left_to_gpu(self, entry: Entry, device: torch.device) -> None:
        """The host has left a collective that the GPU has not ended."""

    def position(self) -> Position:
        """The last all_reduce of this rank, and what it has done since."""
        last, (before, blocked) = self.last, self.blocked_after  # other threads may begin the next
        blocked = self.failed_at or (blocked if before is last and not self.left else "")
        before, left_out = self.left_out_after
        return position_in(last)._replace(
            has_evaluated=self.evaluated_after is last, left=self.left, blocked=blocked,
            left_out=left_out if before is last else "",
        )  # fmt: skip

    def leave_out(self, doing: str, error: BaseException) -> None:
        """Write that an error of this rank alone prevents its next all_reduce: the others wait for it."""
        text = f"left out {doing}, because of {in_words(error)}"
        self.left_out_after = self.last, text.partition("\n")[0][:300]
        self.write_position()

    def write_position(self) -> None:
        with self.writing:
            position = self.written_position = self.position()
            self.written = time.monotonic()
            self.write("position", json.dumps((position, time.time(), self.process, processes.host())))

    def meet(self, name: str, group: dist.ProcessGroup, seconds: float) -> bool:
        """Wait until all ranks of a group have come to its meeting of this name, equally often. False: one is late.

        Ranks meet by the store and not by a collective, so that other threads go on and a missing rank harms nobody.
        """
        if not (self.beats and self.store_answers):
            return True
        ranks = dist.get_process_group_ranks(group)
        name = f"syncbn/met/{name}/{zlib.crc32(str(ranks).encode())}"
        self.meetings[name] += 1
        meeting, deadline = f"{name}/{self.meetings[name]}", time.monotonic() + seconds
        with self.using_store():
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
            with self.using_store():
                self.store.set(f"syncbn/{self.rank}/{key}", text)

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
