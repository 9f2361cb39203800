"""Keeps the position of this rank: its last collective of syncbn, and what the rank did since.

Each rank writes to the store of the default process group, under keys that begin with syncbn/, the number of restarts
by torchrun, which may keep the store, and the global rank. (The number of the ranks that have read an explanation,
fault/0/4f2a.../readers, has no rank in its key.)

    position                its last collective of syncbn, and what it has done since
    called/0/layer4.1.bn3   at a layer's first call: with how many channels, and over which ranks of the group 0
    fault/0/4f2a...         what the rank does in a collective in which ranks differ, see report.py
    fault/0                 the same on a GPU, see status.py

A write takes 25 to 120 us, so a thread (watchdog.py) writes the position, once a second if it has changed. The other
ranks' positions are read (report.py) only for a report, and fast: torchrun ends the ranks that are left some 0.1 s
after the first has failed. A position may be that of an earlier default group, or of a process that has ended: a report
gives its age, by the clock of the host that wrote it. No decision depends on a clock.
"""

import contextlib
import functools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from syncbn.texts import format_error
from syncbn.torch_internals import default_store

HAS_LEFT = "has left"
HAS_ENDED = "has ended"
# Class and text of torch's errors that follow from another rank's end or absence. gloo's mostly name a file of gloo's.
FAILED_COLLECTIVE = re.compile(
    r"\b([\w.]+\.)?(Dist(Backend|Network|Store|)Error: |"
    r"RuntimeError: .*(/gloo/[\w/]+\.(cc|h):\d+|caused pair closure|monitoredBarrier|Operation timed out!))",
    re.DOTALL,
)


class Position(NamedTuple):
    """The position of a rank: its last collective of syncbn, and what it did since. The store has it as JSON."""

    group: str = ""  # the process group: 0
    sequence_number: int = 0  # of the collective among syncbn's on the group, from 1
    pass_name: str = ""  # of the collective: forward, backward, WITH_GRAPH, or a derivative of these
    description: str = ""  # layer4.1.bn3 forward, call 17
    error: str = ""  # that a layer has raised since, on this rank
    departure: str = ""  # HAS_LEFT, and why
    process: int = 0
    host: str = ""
    time: float = 0.0  # when it was written, by the host's clock
    # What the rank that reads the position adds to it.
    process_state: str = ""  # its process has ended or is stopped
    layer_call: str = ""  # how it has called the layer in which the reader waits, where ranks differ in this


class Wait(Protocol):
    """A wait of this rank for others, in a collective of syncbn."""

    sequence_number: int  # a rank whose position has this number or more has arrived
    start: float  # by time.monotonic
    next_warning_seconds: float  # of waiting

    def position(self) -> Position: ...
    def layer_label(self) -> str: ...
    def ranks(self) -> list[int]: ...
    def seconds(self) -> float: ...


class GpuStatus(Protocol):
    """What the watchdog looks at on a GPU: see status.py."""

    def has_ended(self) -> bool: ...
    def poll(self, is_last: bool = False) -> None: ...
    def unfinished(self) -> Wait | None: ...


class ThisRank:
    """This rank of a default process group, its position, and the store to which it writes that."""

    last: Wait | None = None  # the last collective that this rank has begun
    written_position: Position | None = None  # without the time
    report_thread: threading.Thread | None = None  # of the last report; it waits for a store that is slow

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks, self.process = dist.get_rank(), world.size(), os.getpid()
        self.store: dist.Store = default_store()  # the default one may later be another group's
        self.store_answers, self.store_appends = True, _appends(self.store)
        self.prefix = f"syncbn/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.waiting: dict[Wait, None] = {}  # the collectives that have not ended on the host, of all threads
        self.gpu_statuses: set[GpuStatus] = set()
        self.writing = threading.RLock()  # the program and the threads write positions
        self.error: tuple[str, Wait | None] = "", None  # that a layer has raised, and `last` at that time
        self.departure = ""
        self.ended = threading.Event()
        self.failed = False  # by a collective that is not syncbn's, whose error ends this program
        self.write_position()

    def position(self, wait: Wait | None = None) -> Position:
        """The last collective of this rank, and what it did since. While threads wait, the collective of the one that
        waits longest; or `wait`, if that is one of them."""
        waiting = [*self.waiting]  # other threads may begin and end some
        last = wait if wait in waiting else next(iter(waiting), self.last)
        error, before = self.error
        position = Position() if last is None else last.position()
        return position._replace(
            error=error if before is last else "", departure=self.departure, process=self.process, host=this_host()
        )

    def record_error(self, error: BaseException) -> None:
        """Record an error that a layer raises on this rank: other ranks may already wait in the next collective."""
        self.error = f"has raised {format_error(error)}".partition("\n")[0][:300], self.last

    def is_reading(self) -> bool:
        """Whether a report waits for the store: a further call would wait, too."""
        return self.report_thread is not None and self.report_thread.is_alive()

    def write_position(self) -> None:
        """Write the position if it has changed."""
        with self.writing:
            position = self.position()
            if position != self.written_position and self.write("position", position._replace(time=time.time())):
                self.written_position = position

    def write(self, key: str, value: object) -> bool:
        """Write a value that JSON can hold, and return whether the store has it."""
        if self.store_answers:
            with self.using_store():
                self.store.set(self._key(self.rank, key), json.dumps(value))
                return True
        return False

    def erase(self, key: str) -> None:
        """Remove what this rank has written under the key."""
        self._poll_store(lambda: self.store.delete_key(self._key(self.rank, key)), 0.0)

    def read(self, ranks: Sequence[int], key: str) -> list[Any]:
        """What these ranks have written under the key; None for nothing."""
        store, keys = self.store, [self._key(rank, key) for rank in ranks]
        if store.check(keys):
            at_once = store.has_extended_api()  # type: ignore[attr-defined]
            return [*map(json.loads, store.multi_get(keys) if at_once else map(store.get, keys))]
        half = len(ranks) // 2  # few requests find the ranks that have written nothing
        return [*self.read(ranks[:half], key), *self.read(ranks[half:], key)] if half else [None]

    def gather(self, ranks: Sequence[int], key: str, seconds: float) -> list[Any]:
        """What these ranks have written under the key, as soon as all have, and at the latest after these seconds; None
        for nothing.

        The first rank leaves last, as its process may hold the store, and deletes what was written.
        """
        values, readers = [None] * len(ranks), f"{self.prefix}/{key}/readers"
        written = [self._key(rank, key) for rank in ranks]

        def read() -> bool:
            values[:] = self.read(ranks, key)
            return self.store.add(readers, 1) > 0

        all_answered = self._poll_store(lambda: self.store.check(written), seconds)
        self._poll_store(read, 0.0)
        num_answers = len(ranks) - values.count(None)
        if self.rank == ranks[0] and self._poll_store(lambda: self.store.add(readers, 0) >= num_answers, seconds):
            unused = [*written, readers] if all_answered else [readers]
            self._poll_store(lambda: all(map(self.store.delete_key, unused)), 0.0)
        return values

    def _poll_store(self, ask: Callable[[], bool], seconds: float) -> bool:
        """Ask the store until the answer is True, for these seconds, at least once. False: it never was."""
        deadline, pause = time.monotonic() + seconds, 0.001
        while self.store_answers:
            with self.using_store():
                if ask():
                    return True
            if time.monotonic() >= deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return False

    def _key(self, rank: int, key: str) -> str:
        return f"{self.prefix}/{rank}/{key}"

    @contextlib.contextmanager
    def using_store(self) -> Iterator[None]:
        """Within, the store is called. Once its connection is broken, it is not called again: torch prints a backtrace
        of C++ for each call that fails. A store that is only slow may answer the next call."""
        try:
            yield
        except dist.DistStoreError:
            pass
        except (RuntimeError, ValueError):
            self.store_answers = False


def _appends(store: dist.Store) -> bool:
    """Whether a write does not replace the last one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


@functools.cache
def this_host() -> str:
    """Host, boot and pid namespace: equal if /proc of one shows the other."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return socket.gethostname()
    return f"{socket.gethostname()} {boot.read_text().strip()} {namespace.stat().st_ino}"


def process_state(process: int) -> str:
    """'its process (123) has ended' or '... is stopped', for a process of this host; else empty."""
    if not Path("/proc/self/stat").exists():
        return ""
    state = "X"
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    if state in "XZ":
        return f"its process ({process}) {HAS_ENDED}"
    return f"its process ({process}) is stopped" if state in "Tt" else ""


def exit_reason() -> str:
    """The first line of the exception that ends this program, or a part of it; empty without an exception."""
    handled, error = sys.exc_info()[1], _last_error()
    why = "" if error is None else f" {'while handling' if handled else 'with'} {format_error(error)}"
    return why.partition("\n")[0][:200]


def failed_collective() -> BaseException | None:
    """The exception of a collective outside of syncbn that ends this program, or None. (syncbn's own errors say where
    the ranks are.)"""
    error = _last_error()
    while error is not None and "syncbn: " not in (words := format_error(error)):
        if error.__traceback__ and FAILED_COLLECTIVE.match(words):
            return error
        error = error.__cause__ or error.__context__
    return None


def _last_error() -> BaseException | None:
    """The current exception, else the last uncaught one."""
    return sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
