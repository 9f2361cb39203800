"""Keeps the position of this rank: its last collective of syncbn, and the events on this rank since.

These classes show where a rank is:

    Collective     collective.py   a collective of syncbn, in which this rank waits for the other ranks: an all_reduce
                                   of a layer or function, or the creation of groups
    Wait           here            what this file and report.py, which cannot import collective.py, know of a Collective
    Position       here            the last Collective of a rank, and what has happened to the rank since: an error, or
                                   that it has left. Written once a second, and read for a report of a wait or failure
    CallReport     report.py       what a rank compares with the other ranks: layer, call, settings, dtype, argument
                                   error. Written and read only after an all_reduce whose total shows a fault
    ThisRank       here            this rank of a default group: the Collectives in which it waits, its Position, and
                                   the store
    StreamStatus   status.py       the all_reduces that the host has begun on a GPU, and how far the GPU is
    GpuStatus      here            what the watchdog knows of a StreamStatus

Each rank writes to the store of the default process group. A key is "syncbn/", the number of restarts by torchrun
(which may keep the store across restarts), the global rank, and one of

    position                the position of this rank
    called/bn3 in ResNet    written in a layer's first call: its group, instance number, number of channels and ranks
    fault/0/4f2a...         the rank's report of a collective in which the ranks differ, see report.py
    fault/0                 the rank's report of the first fault on a GPU, see status.py

Each value begins with the process that wrote it, and with the number of the default group among those of the process.
A reader ignores a value that does not begin like the position of the same rank, because an earlier process or default
group has written it. The key fault/0/4f2a.../readers contains no rank: it counts the ranks that have read the reports.

A write takes tens of microseconds, so a thread (watchdog.py) writes the position, once a second if it has changed. The
other ranks' positions are read (report.py) only for a report, and without delay, because torchrun ends the remaining
ranks about 0.1 s after the first failure. A position may come from an earlier default group, or from a process that has
ended. A report therefore gives the age of each position, which is wrong if the clocks of hosts differ. No decision
depends on a clock.
"""

import contextlib
import functools
import itertools
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
MAY_HAVE_LEFT = "has left this or an earlier default group"
HAS_ENDED = "has ended"
# Matches torch's errors that follow from another rank's end or absence. Most errors of gloo name a source file of gloo.
FAILED_COLLECTIVE = re.compile(
    r"\b([\w.]+\.)?(Dist(Backend|Network|Store|)Error: |"
    r"RuntimeError: .*(/gloo/[\w/]+\.(cc|h):\d+|caused pair closure|monitoredBarrier|Operation timed out!))",
    re.DOTALL,
)


class Position(NamedTuple):
    """The position of a rank. Written as JSON."""

    group: str = ""  # the name of the process group, such as "0"
    sequence_number: int = 0  # the number of the collective among those of syncbn on the group, from 1
    pass_name: str = ""  # the pass of the collective, such as "forward", "backward" or `WITH_GRAPH`
    description: str = ""  # the collective, such as "layer4.1.bn3 forward, call 17"
    call_number: int = 0  # the number of the call of the layer, such as 17
    # Whether the input of this forward requires no gradient, although an earlier one did or this is the first forward.
    lacks_grad: bool = False
    is_evaluating: bool = False  # whether the layer is in evaluation mode now
    error: str = ""  # the error that a layer has raised on this rank since that collective
    departure: str = ""  # `HAS_LEFT` and the reason, if the rank has left the group
    process: int = 0
    default_group: int = 0  # the number of the default group among those of the process
    host: str = ""
    time: float = 0.0  # when the position was written, by the host's clock
    # The rank that reads a position sets these fields.
    process_state: str = ""  # a text if the process has ended or is stopped
    layer_call: str = ""  # how the rank has called the layer in which the reader waits, if the calls differ


class Wait(Protocol):
    """The interface of a Collective."""

    sequence_number: int  # A rank whose position has this number or a larger one has reached the collective.
    start: float  # the time when the collective began, by time.monotonic
    next_warning_seconds: float  # waiting time at which the watchdog warns

    layer_label: str  # `Site.label`
    ranks: list[int]  # the global ranks of the group

    def position(self) -> Position: ...
    def seconds(self) -> float: ...


class GpuStatus(Protocol):
    """The interface of a StreamStatus."""

    def poll(self, is_last: bool = False) -> None: ...
    def unfinished(self) -> Wait | None: ...


_default_groups = itertools.count(1)  # counts the default groups of this process in which a layer has been called


class ThisRank:
    """This rank of a default process group: its position, and the store to which the position is written."""

    last: Wait | None = None  # the last collective that this rank has begun
    written_position: Position | None = None  # the last position that was written, with time 0
    report_thread: threading.Thread | None = None  # the thread of the last report, which may wait for a slow store

    def __init__(self, world: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks, self.process = dist.get_rank(), world.size(), os.getpid()
        self.store: dist.Store = default_store()  # kept, because default_store() may later return another store
        self.store_answers, self.store_appends = True, _appends(self.store)
        self.default_group = next(_default_groups)
        self.prefix = f"syncbn/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.waiting: dict[Wait, None] = {}  # the unfinished collectives of all threads
        self.gpu_statuses: set[GpuStatus] = set()
        self.writing = threading.RLock()  # The program and several threads write positions.
        self.error: tuple[str, Wait | None] = "", None  # the error of a layer, and `last` when it was raised
        self.departure = ""
        self.ended = threading.Event()
        self.failed = False  # whether the error of a collective outside of syncbn ends the program
        self.write_position()

    def position(self, wait: Wait | None = None) -> Position:
        """Return the position of this rank, with time 0. If this rank waits in several collectives, the position is in
        `wait` if this is one of them, otherwise in the oldest collective."""
        waiting = [*self.waiting]  # a copy, because other threads change the dict
        last = wait if wait in waiting else next(iter(waiting), self.last)
        text, before = self.error
        position = Position() if last is None else last.position()
        position = position._replace(error=text * (before is last), departure=self.departure, host=this_host())
        return position._replace(process=self.process, default_group=self.default_group)

    def record_error(self, error: str) -> None:
        """Record the class and text of an error that a layer raises on this rank, because other ranks may wait in the
        next collective."""
        self.error = f"has raised {error}".partition("\n")[0][:300], self.last

    def wait_for_report(self, seconds: float = 0.0) -> bool:
        """Wait up to `seconds` for the thread of the last report. Return False if it still waits for the store: another
        call to the store would wait, too."""
        thread = self.report_thread
        if thread is None or not thread.is_alive():
            return True
        if thread is not threading.current_thread():
            thread.join(seconds)
        return not thread.is_alive()

    def write_position(self) -> None:
        """Write the position if it has changed."""
        with self.writing:
            position = self.position()
            if position != self.written_position and self.write("position", position._replace(time=time.time())):
                self.written_position = position

    def write(self, key: str, value: object) -> bool:
        """Write a value as JSON, and return whether the store accepted it."""
        if self.store_answers:
            with self.suppressing_store_errors():
                self.store.set(self._key(self.rank, key), json.dumps([[self.process, self.default_group], value]))
                return True
        return False

    def erase(self, key: str) -> None:
        """Delete the value that this rank has written under the key."""
        self._poll_store(lambda: self.store.delete_key(self._key(self.rank, key)), 0.0)

    def read(self, ranks: Sequence[int], key: str) -> list[Any]:
        """Return the value of each of these ranks under the key. Return None for a rank without a value, and for a
        value that another process or default group has written than the position of the rank."""
        written = self._read(ranks, key)
        positions = written if key == "position" else self._read(ranks, "position")
        pairs = zip(written, positions, strict=True)
        return [value[1] if value and position and value[0] == position[0] else None for value, position in pairs]

    def _read(self, ranks: Sequence[int], key: str) -> list[Any]:
        """Return the writer and the value of each of these ranks under the key, or None for a rank without a value."""
        store, keys = self.store, [self._key(rank, key) for rank in ranks]
        if store.check(keys):
            has_multi_get = store.has_extended_api()  # type: ignore[attr-defined]
            return [*map(json.loads, store.multi_get(keys) if has_multi_get else map(store.get, keys))]
        half = len(ranks) // 2  # Bisection needs few requests to find the ranks that have written nothing.
        return [*self._read(ranks[:half], key), *self._read(ranks[half:], key)] if half else [None]

    def gather(self, ranks: Sequence[int], key: str, seconds: float) -> list[Any]:
        """Wait up to `seconds` until all of these ranks have written a value under the key. Return the values, with
        None for a rank without a value.

        The first rank, whose process may hold the store, waits until the other ranks have read the values, and then
        deletes them.
        """
        values, readers = [None] * len(ranks), f"{self.prefix}/{key}/readers"
        written = [self._key(rank, key) for rank in ranks]

        def read() -> bool:
            values[:] = self.read(ranks, key)
            return self.store.add(readers, 1) > 0

        answered = self._poll_store(lambda: self.store.check(written) and None not in self.read(ranks, key), seconds)
        self._poll_store(read, 0.0)
        num_answers = len(ranks) - values.count(None)
        if self.rank == ranks[0] and self._poll_store(lambda: self.store.add(readers, 0) >= num_answers, seconds):
            unused = [*written, readers] if answered else [readers]
            self._poll_store(lambda: all(map(self.store.delete_key, unused)), 0.0)
        return values

    def _poll_store(self, ask: Callable[[], bool], seconds: float) -> bool:
        """Call `ask` until it returns True, `seconds` elapse or the store fails. Return whether `ask` returned True."""
        deadline, pause = time.monotonic() + seconds, 0.001
        while self.store_answers:
            with self.suppressing_store_errors():
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
    def suppressing_store_errors(self) -> Iterator[None]:
        """Suppress errors of the store in this context. A timeout is only suppressed. Any other error, such as a broken
        connection, also stops all later calls to the store, because torch prints a C++ backtrace for each."""
        try:
            yield
        except dist.DistStoreError:
            pass
        except (RuntimeError, ValueError):
            self.store_answers = False


def _appends(store: dist.Store) -> bool:
    """Return whether each write makes the store larger."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


@functools.cache
def this_host() -> str:
    """Return an identifier of the host, boot and PID namespace. Processes with equal identifiers share one /proc."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return socket.gethostname()
    return f"{socket.gethostname()} {boot.read_text().strip()} {namespace.stat().st_ino}"


def process_state(process: int) -> str:
    """Return "its process (123) has ended" or "its process (123) is stopped" for a process of this host, else ""."""
    if not Path("/proc/self/stat").exists():
        return ""
    state = "X"
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    if state in "XZ":
        return f"its process ({process}) {HAS_ENDED}"
    return f"its process ({process}) is stopped" if state in "Tt" else ""


def exit_reason() -> str:
    """Return how this program ends, such as " with KeyError: 1" or " while handling KeyError: 1", in at most 200
    characters of one line; "" without an exception."""
    handled, error = sys.exc_info()[1], _last_error()
    why = "" if error is None else f" {'while handling' if handled else 'with'} {format_error(error)}"
    return why.partition("\n")[0][:200]


def failed_collective() -> BaseException | None:
    """Return the exception of a collective outside of syncbn that ends this program, or None. (The errors of syncbn
    already contain the positions of the ranks.)"""
    error = _last_error()
    while error is not None and "syncbn: " not in (text := format_error(error)):
        if error.__traceback__ and FAILED_COLLECTIVE.match(text):
            return error
        error = error.__cause__ or error.__context__
    return None


def _last_error() -> BaseException | None:
    """Return the exception that is being handled, else the last uncaught exception, else None."""
    return sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
