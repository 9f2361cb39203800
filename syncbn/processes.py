"""Finds out about the processes of ranks: when this one began, on which host it is, and whether another has ended."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from pathlib import Path

HAS_ENDED = "has ended"


@functools.cache
def start_of_this() -> float:
    """When this process began, in seconds since 1970; the time of the first call where that cannot be known."""
    now = time.time()
    try:
        seconds_up = float(Path("/proc/uptime").read_text().split()[0])
        start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    except OSError:
        return now
    return min(now, now - seconds_up + start)  # in a container the two may be counted from different times


@functools.cache
def host() -> str:
    """A name of this host, the same for processes that see one another."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (boot.exists() and namespace.exists()):
        return socket.gethostname()
    return f"{socket.gethostname()} {boot.read_text().strip()} {namespace.stat().st_ino}"


def state_of(process: str) -> str:
    """What is wrong with the process of this number on this host, in words; empty where nothing can be seen."""
    if not Path("/proc/self/stat").exists():
        return ""
    state = "X"
    with contextlib.suppress(OSError, IndexError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    if state in "XZ":
        return f"its process ({process}) {HAS_ENDED}"
    return f"its process ({process}) is stopped" if state in "Tt" else ""


def on_this_host(rank: int) -> bool:
    """Whether this global rank is on this host, as torchrun numbers them; True where that is not known."""
    try:
        first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
        return first <= rank < first + int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return True
