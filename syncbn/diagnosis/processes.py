"""Finds out about the processes of ranks: where this one runs, why it ends, and whether others have ended."""

import contextlib
import functools
import re
import socket
import sys
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
