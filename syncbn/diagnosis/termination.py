"""Learns that an exception of C++ is about to end this process, which waits meanwhile: see termination.cpp.

Without the compiled library, or on another system than Linux, no termination is noticed.
"""

import ctypes
import functools
from pathlib import Path

UNWATCHED, WATCHED, TERMINATING = range(3)


@functools.cache
def _state() -> ctypes.c_int:
    """The state that the terminate handler, installed here, shares. Without the library nobody else changes it."""
    try:
        install = ctypes.CDLL(str(Path(__file__).with_name("_termination.so"))).syncbn_install_terminate_handler
    except (AttributeError, OSError):
        return ctypes.c_int(UNWATCHED)
    install.restype = ctypes.POINTER(ctypes.c_int)
    state: ctypes.c_int = install().contents
    return state


def watch() -> None:
    """From now on a termination waits until `ignore` is called, for at most 3 s; a thread must ask `has_begun`."""
    _state().value = WATCHED


def has_begun() -> bool:
    """Whether a thread is terminating the process, and waits."""
    return _state().value == TERMINATING


def ignore() -> None:
    """Let terminations go on at once, also one that waits."""
    _state().value = UNWATCHED
