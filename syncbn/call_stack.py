"""Finds a module of torch on the call stack, and warns with the line of the user's program."""

import functools
import sys
import traceback
import warnings
from types import FrameType

LIBRARIES = {"torch", "syncbn", *sys.stdlib_module_names}


def frame_in(module: str) -> FrameType | None:
    """The innermost frame of this call that runs code of this module, or None. Reads no local variables: Python 3.11
    and 3.12 would keep their values alive as long as the function runs."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((frame for frame in frames if frame.f_globals.get("__name__") == module), None)


def warn(message: str) -> None:
    """Warn, with the line from which the program called torch or syncbn."""
    for frame, line in traceback.walk_stack(sys._getframe()):  # noqa: B007, as the last is used if none is the program's
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            break
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, line)


@functools.cache
def warn_once(message: str) -> None:
    """Warn, unless this process has given this warning already."""
    warn(message)
