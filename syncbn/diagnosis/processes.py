"""Finds out about the processes of ranks: when and where this one began, why it ends, and whether others have ended."""

import contextlib
import functools
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

from syncbn.texts import in_words

HAS_ENDED = "has ended"
# Class and text of torch's errors that follow from another rank's end or absence. gloo's mostly name a file of gloo's.
FAILED_COLLECTIVE = re.compile(
    r"\b([\w.]+\.)?(Dist(Backend|Network|Store|)Error: |"
    r"RuntimeError: .*(/gloo/[\w/]+\.(cc|h):\d+|caused pair closure|monitoredBarrier|Operation timed out!))",
    re.DOTALL,
)


@functools.cache
def start_of_this() -> float:
    """The start of this process in seconds since 1970; the time of the first call where it cannot be known."""
    now = time.time()
    try:
        seconds_up = float(Path("/proc/uptime").read_text().split()[0])
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return now
    return min(now, now - seconds_up + start)  # in a container the two may be counted from different times


@functools.cache
def host() -> str:
    """Host, boot and pid namespace: equal if /proc of one shows the other."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return socket.gethostname()
    return f"{socket.gethostname()} {boot.read_text().strip()} {namespace.stat().st_ino}"


def state_of(process: int) -> str:
    """'its process (123) has ended' or '... is stopped', for a process of this host; else empty."""
    if not Path("/proc/self/stat").exists():
        return ""
    state = "X"
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    if state in "XZ":
        return f"its process ({process}) {HAS_ENDED}"
    return f"its process ({process}) is stopped" if state in "Tt" else ""


def on_this_host(rank: int) -> bool:
    """Whether this global rank is on this host, as torchrun numbers ranks; True where that is not known."""
    try:
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        return first <= rank < first + int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return True


def main_thread_seconds() -> float | None:
    """Seconds of processor time that the main thread has used; None where they cannot be known (macOS, Windows)."""
    main = threading.main_thread()
    if main.ident is None or not main.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
        return None
    return time.clock_gettime(time.pthread_getcpuclockid(main.ident))


def why_it_ends() -> str:
    """The first line of the exception that ends this program, or a part of it; empty without an exception."""
    handled, error = sys.exc_info()[1], _last_error()
    why = "" if error is None else f" {'while handling' if handled else 'with'} {in_words(error)}"
    return why.partition("\n")[0][:200]


def failure_of_collective() -> BaseException | None:
    """The exception of a collective outside of syncbn that ends this program, or None. (syncbn's own errors say where
    the ranks are.)"""
    error = _last_error()
    while error is not None and "syncbn: " not in (words := in_words(error)):
        if error.__traceback__ and FAILED_COLLECTIVE.match(words):
            return error
        error = error.__cause__ or error.__context__
    return None


def _last_error() -> BaseException | None:
    """The current exception, else the last uncaught one."""
    return sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
