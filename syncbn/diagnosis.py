"""Where every rank is: what an all_reduce says that fails, that takes long, or that brings different layers together.

Each rank writes to the store of the default process group, under keys that begin with syncbn/ and its global rank:

    position                its last all_reduce of syncbn, what it has done since, its process, the time; each second
    called/0/layer4.1.bn3   once, that it has called this layer on the group named 0

A write takes 2 to 5 us, as TCPStore waits for no answer. The others' positions are read only when there is something to
say, and fast: torchrun ends the ranks that are left some 0.1 s after the first has failed. A position older than this
process is not read: torchrun may keep a store when it restarts the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from syncbn.callers import Caller

SECONDS_BETWEEN_WRITES = 1e-3  # of a rank, so that they take 2 % of its time at most; what waits writes all the same
SECONDS_PER_WRITE = 10e-6  # of all ranks together: a store takes some 100,000 writes a second
HEARTBEAT = 1.0  # seconds between writes of a rank that does nothing new; with 10,000 ranks a tenth of the store's time
SILENCE = 5.0  # seconds after which that of another host is told; more than hosts' clocks differ
WARNING_RANKS = 4  # of a group; all would say the same
SETTLING = 0.3  # seconds that a rank which has gone is given to say why
READING = 5.0  # seconds, at most
EVALUATES, HAS_LEFT = "is in evaluation mode", "has left"
REMEDY = (
    "Every rank must call the same layers in the same order, all converted and in training mode. SYNCBN_DEBUG=1 makes "
    "the ranks compare before each all_reduce."
)
HAS_ENDED = "has ended"
REMEDY_OF_ENDED = (
    "What ended a process, its own output may say; if it is gloo::EnforceNotMet, the ranks sent different sizes: "
    "SYNCBN_DEBUG=1 tells which."
)


def _start_of_process() -> float:
    """Seconds since 1970; that of this import where it cannot be known."""
    now = time.time()
    try:
        seconds_up = float(Path("/proc/uptime").read_text().split()[0])
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return now
    return min(now, now - seconds_up + start)  # in a container the two may be counted from different times


START = _start_of_process()
first_warning = 30.0  # seconds of waiting; the next when they have doubled
_log = logging.getLogger("syncbn")


class Position(NamedTuple):
    """Where a rank is."""

    group: str  # the name of the process group of its last all_reduce
    number: int  # of that among syncbn's on this group, from 1
    doing: str  # in it: layer4.1.bn3 forward, call 17
    since: str = ""  # EVALUATES, HAS_LEFT and why


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers, or about to be."""

    def __init__(self, where: str) -> None:
        super().__init__(f"syncbn: the ranks are in different layers or calls.\n{where}")


class Waiting:
    """Around an all_reduce: makes known where this rank is and, when it fails, says where all are."""

    def __init__(self, group: dist.ProcessGroup, caller: Caller | None, step: str) -> None:
        self.group = group
        self.caller = caller
        self.step = step
        self.start = time.monotonic()
        self.next_warning = first_warning

    def __enter__(self) -> Self:
        self.rank = _this_rank()
        self.position = self.rank.begin(self)
        return self

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        self.rank.waiting = None
        if isinstance(error, RuntimeError) and not isinstance(error, RanksDifferError):
            raise RuntimeError(
                f"syncbn: a collective failed on rank {self.rank.rank} after {self.seconds():.1f} s.\n"
                f"{self.where_all_are(_one_is_gone)}\nThe process group says: {error}"
            ) from error

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def where_all_are(self, enough: Callable[[list[_Where]], bool] = lambda found: True) -> str:
        """A line for each position, with its ranks; read again for 0.3 s until it is `enough`."""
        tables: list[str] = []

        def read() -> None:
            with contextlib.suppress(RuntimeError, ValueError):  # a store or group that has ended
                tables.append(self.rank.read_all(self, enough))
                self.rank.store_answers = True

        reader = threading.Thread(target=read, daemon=True)  # the host of the store may be stopped and never answer
        reader.start()
        reader.join(READING)
        return tables[0] if tables else self.without_store()

    def without_store(self) -> str:
        """What this rank knows by itself. It does not call the store again before that has answered."""
        self.rank.store_answers = False
        others = [rank for rank in dist.get_process_group_ranks(self.group) if rank != self.rank.rank]
        elsewhere = [rank for rank in others if not _on_this_host(rank)]
        hosts = f" ({in_words(elsewhere)}: on other hosts)" if elsewhere else ""
        return (
            f"rank {self.rank.rank}: in {self.position.doing}\n"
            f"{in_words(others)}: not known, as the process group's store has not answered for {READING:.0f} s{hosts}"
        )


class _Where(NamedTuple):
    """A rank, from the point of view of one that waits."""

    words: str
    gone: bool
    ended: bool = False  # without a word


def _one_is_gone(found: list[_Where]) -> bool:
    return any(one.gone for one in found)


class _Rank:
    """This rank of a default process group."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank()
        self.process = os.getpid()
        self.store = _store()  # the default one may later be another group's
        self.store_answers = True
        self.writing = threading.RLock()  # the program and the thread write positions
        self.numbers: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
        self.position = Position("", 0, "")
        self.written, self.written_position = -math.inf, self.position
        interval = max(SECONDS_BETWEEN_WRITES, world.size() * SECONDS_PER_WRITE)
        self.interval = interval if _forgets(self.store) else math.inf
        self.waiting: Waiting | None = None
        self.ended = threading.Event()
        weakref.finalize(world, self.leave)
        self.write_position()
        threading.Thread(target=self.watch, args=[weakref.ref(world)], name="syncbn.diagnosis", daemon=True).start()

    def begin(self, waiting: Waiting) -> Position:
        """This rank enters an all_reduce."""
        group, caller = waiting.group, waiting.caller
        number = self.numbers[group] = self.numbers.get(group, 0) + 1
        doing = "a step of others, out of data" if caller is None else caller.words(waiting.step)
        self.position = Position(group.group_name, number, doing)
        if number == 1:
            self.write_position()
        else:
            self.write_position_now_and_then(waiting.start)
        if caller is not None and caller.call == 1:
            self.write(f"called/{group.group_name}/{caller.place.name}", "")
        self.waiting = waiting
        return self.position

    def evaluate(self) -> None:
        """This rank calls a layer in evaluation mode."""
        if self.position.since != EVALUATES:
            self.position = self.position._replace(since=EVALUATES)
            self.write_position_now_and_then(time.monotonic())

    def leave(self) -> None:
        """The default process group, or this program, ends: because of an exception, perhaps."""
        handled, last = sys.exc_info()[1], getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        error = handled or last
        why = "" if error is None else f" {'while handling' if handled else 'with'} {type(error).__name__}: {error}"
        since = "; ".join(filter(None, (self.position.since, HAS_LEFT + why.partition("\n")[0][:200])))
        self.ended.set()
        if self.process == os.getpid() and self.writing.acquire(
            timeout=SETTLING
        ):  # the thread may be in a call of a dead store
            self.position = self.position._replace(since=since)
            self.write_position()
            self.writing.release()

    def write_position_now_and_then(self, now: float) -> None:
        if now - self.written >= self.interval:
            self.write_position()

    def write_position(self) -> None:
        with self.writing:
            self.written, self.written_position = time.monotonic(), self.position
            lines = (*self.position, time.time(), f"{self.process} {_host()}")
            self.write("position", "\n".join(map(str, lines)))

    def write(self, key: str, text: str) -> None:
        if not self.store_answers:
            return
        with contextlib.suppress(RuntimeError, ValueError):  # a store that has ended
            self.store.set(f"syncbn/{self.rank}/{key}", text)

    def watch(self, world: weakref.ref[dist.ProcessGroup]) -> None:
        """The thread, which ends with the group; between its looks it holds nothing that would keep the group alive."""
        while not self.ended.wait(HEARTBEAT) and dist.group.WORLD is world():
            self.look()

    def look(self) -> None:
        """A sign of life; warn while this rank waits long. (In nccl's all_reduce the host does not.)"""
        waiting = self.waiting
        with self.writing:
            unwritten = waiting is not None and self.written_position is not self.position
            if (self.interval < math.inf or unwritten) and not self.ended.is_set():
                self.write_position()
        if waiting is None or waiting.seconds() < waiting.next_warning:
            return
        waiting.next_warning *= 2
        if dist.get_rank(waiting.group) < WARNING_RANKS:
            where = waiting.where_all_are()
            _log.warning("syncbn: rank %d has waited %.0f s for others.\n%s", self.rank, waiting.seconds(), where)

    def read_all(self, waiting: Waiting, enough: Callable[[list[_Where]], bool]) -> str:
        self.write_position()
        deadline = time.monotonic() + SETTLING
        ranks = dist.get_process_group_ranks(waiting.group)
        while not enough(found := self.read(ranks, waiting)) and time.monotonic() < deadline:
            time.sleep(0.02)
        places = table(ranks, [where.words for where in found])
        if any(where.ended for where in found):
            return f"{places}\n{REMEDY_OF_ENDED}"
        return places if _one_is_gone(found) else f"{places}\n{REMEDY}"

    def read(self, ranks: list[int], waiting: Waiting) -> list[_Where]:
        keys = [f"syncbn/{rank}/position" for rank in ranks]
        texts: list[bytes | None]
        if self.store.has_extended_api() and self.store.check(keys):  # type: ignore[attr-defined]
            texts = [*self.store.multi_get(keys)]  # two round trips in all
        else:
            texts = [self.store.get(key) if self.store.check([key]) else None for key in keys]
        return [self.where(rank, _parsed(text), waiting) for rank, text in zip(ranks, texts, strict=True)]

    def where(self, rank: int, there: _Written, waiting: Waiting) -> _Where:
        own, position = waiting.position, there.position
        arrived = position.group == own.group and position.number >= own.number
        words = []
        if position.doing:
            elsewhere = " on another process group" * (position.group != own.group)
            words.append(f"{'in' if arrived else 'after'} {position.doing}{elsewhere}")
        if not arrived and waiting.caller is not None:
            layer = waiting.caller.place.name
            if not position.doing or not self.store.check([f"syncbn/{rank}/called/{own.group}/{layer}"]):
                words.append(f"has not been seen in {layer}")
        if position.since:
            words.append(position.since)
        gone = HAS_LEFT in position.since
        state = "" if gone or rank == self.rank else self.state(there)
        if state:
            words.append(state)
        return _Where("; ".join(words) or "has not been seen", gone or bool(state), state.endswith(HAS_ENDED))

    def state(self, there: _Written) -> str:
        """What is wrong with the process of another rank, as far as can be seen from here."""
        process, _, host = there.process.partition(" ")
        if host == _host():
            return _state_of_process(process)
        silence = time.time() - there.time
        # A store that keeps all that is written is not written to every second.
        return f"not heard of for {silence:.0f} s" if SILENCE < silence < math.inf and self.interval < math.inf else ""


def evaluates() -> None:
    """This rank calls a layer in evaluation mode, which waits for nobody."""
    world = dist.group.WORLD
    if world is not None and world.size() > 1 and not torch.compiler.is_compiling() and world not in _inherited:
        _this_rank().evaluate()


_ranks: WeakKeyDictionary[dist.ProcessGroup, _Rank] = WeakKeyDictionary()  # by the default process group
_inherited: WeakSet[dist.ProcessGroup] = WeakSet()  # by a process that was forked from one of the ranks


def _inherit() -> None:
    if dist.group.WORLD is not None:
        _inherited.add(dist.group.WORLD)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inherit)


def _this_rank() -> _Rank:
    world = dist.group.WORLD
    assert world is not None
    if world in _inherited:
        raise RuntimeError(
            f"syncbn: this process ({os.getpid()}) was forked from one whose process group does not work here. "
            'Start it by the method "spawn" instead.'
        )
    rank = _ranks.get(world)
    if rank is None:
        rank = _ranks[world] = _Rank(world)
    return rank


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()


def _forgets(store: Store) -> bool:
    """Whether a write replaces the last one; a FileStore keeps them all."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return not isinstance(store, FileStore)


class _Written(NamedTuple):
    """What a rank has last written."""

    position: Position
    time: float  # seconds since 1970, by its host's clock
    process: str  # and its host


def _parsed(text: bytes | None) -> _Written:
    """Nothing where there is no text, or one from before this process, of a rank that torchrun has started again."""
    if text is not None:
        group, number, doing, since, written, process = text.decode().split("\n")
        allowed = 0.0 if process.partition(" ")[2] == _host() else SILENCE  # clocks differ
        if float(written) >= START - allowed:
            return _Written(Position(group, int(number), doing, since), float(written), process)
    return _Written(Position("", 0, ""), -math.inf, "")


def _on_this_host(rank: int) -> bool:
    """As torchrun numbers them; without it, as far as is known."""
    try:
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        return first <= rank < first + int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return True


@functools.cache
def _host() -> str:
    """The same for processes that see one another."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return socket.gethostname()
    return f"{socket.gethostname()} {boot.read_text().strip()} {namespace.stat().st_ino}"


def _state_of_process(process: str) -> str:
    """What is wrong with it, where that can be seen."""
    if not Path("/proc/self/stat").exists():
        return ""
    state = "X"
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    if state in "XZ":
        return f"its process ({process}) {HAS_ENDED}"
    return f"its process ({process}) is stopped" if state in "Tt" else ""


def table(ranks: list[int], words: list[str]) -> str:
    """A line for each of the words, with its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, words_of_rank in zip(ranks, words, strict=True):
        ranks_of.setdefault(words_of_rank, []).append(rank)
    return "\n".join(f"{in_words(ranks)}: {words}" for words, ranks in ranks_of.items())


def in_words(ranks: list[int]) -> str:
    """ranks 0-2, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
