"""Walks up the call stack: to the objects that called, and to the line of the user's program, where it warns."""

import functools
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

LIBRARIES = {"torch", "syncbn", *sys.stdlib_module_names}


def callers() -> Iterator[tuple[FrameType, Any]]:
    """The frames of this call from the innermost on, each with its `self`, or None."""
    frame = sys._getframe(1).f_back  # not the function that asks: reading its f_locals would keep its arguments alive
    while frame is not None:
        yield frame, frame.f_locals.get("self")
        frame = frame.f_back


def line_of_program(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The file and line of the first of these frames with their lines that is outside of torch, syncbn and Python's own
    library: train.py:57."""
    frame, line = _first_of_program(frames)
    return f"{Path(frame.f_code.co_filename).name}:{line}"


def warn(message: str) -> None:
    """Warns, with the line from which the program called torch or syncbn."""
    frame, line = _first_of_program(traceback.walk_stack(sys._getframe()))
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, line)


@functools.cache
def warn_once(message: str) -> None:
    """Warns, unless this process has given this warning already."""
    warn(message)


def _first_of_program(frames: Iterable[tuple[FrameType, int]]) -> tuple[FrameType, int]:
    """The first frame of the program; the last of all frames if there is none."""
    for frame, line in frames:  # noqa: B007, as the last is returned
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            break
    return frame, line
