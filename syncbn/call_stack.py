"""Walks up the call stack: to the objects that called, and to the line of the user's program, where it warns."""

import functools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any


def callers() -> Iterator[tuple[FrameType, Any]]:
    """The frames of this call from the innermost on, each with its `self`, or None."""
    frame = sys._getframe(1).f_back  # not the function that asks: reading its f_locals would keep its arguments alive
    while frame is not None:
        yield frame, frame.f_locals.get("self")
        frame = frame.f_back


def line_of_program(frame: FrameType) -> str:
    """The file and line of the innermost frame outside of torch and syncbn, from this frame on: train.py:57."""
    frame = _frame_of_program(frame)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def warn(message: str) -> None:
    """Warns, with the line from which the program called torch or syncbn."""
    frame = _frame_of_program(sys._getframe())
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno)


@functools.cache
def warn_once(message: str) -> None:
    """Warns, unless this process has given this warning already."""
    warn(message)


def _frame_of_program(frame: FrameType) -> FrameType:
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "syncbn.")):
        frame = frame.f_back
    return frame
