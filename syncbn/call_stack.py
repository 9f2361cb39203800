"""Finds callers, the path of a layer and the user's line on the call stack, and warns there."""

import functools
import itertools
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from syncbn.texts import printable

LIBRARIES = {"torch", "syncbn", *sys.stdlib_module_names}


def callers() -> Iterator[tuple[FrameType, Any]]:
    """The frames above the function that asks, the innermost first, each with its `self`, or None."""
    frame = sys._getframe(1).f_back  # not the function that asks: reading its f_locals would keep its arguments alive
    while frame is not None:
        yield frame, frame.f_locals.get("self")
        frame = frame.f_back


def path_in_model(layer: nn.Module) -> str:
    """The dotted name of a layer in the outermost module that is `self` in a frame of this call; empty without one.

    DistributedDataParallel and the wrapper of torch.compile are left out of the name.
    """
    inner, path = layer, ""
    for _, outer in callers():
        if isinstance(outer, nn.parallel.DistributedDataParallel):
            break
        if isinstance(outer, nn.Module) and outer is not inner:
            below = itertools.chain(outer.named_children(), outer.named_modules())  # most often it is a child
            name = next((name for name, module in below if module is inner), None)
            if name is not None:
                inner, path = outer, f"{name}.{path}"
    return printable(".".join(part for part in path.split(".") if part not in ("", "_orig_mod")))


def line_that_calls_model() -> str:
    """The line in which the program calls the outermost module that is `self` in a frame of this call: train.py:57."""
    frames = [frame for frame, caller in callers() if isinstance(caller, nn.Module)]
    return line_of_program(traceback.walk_stack(frames[-1] if frames else sys._getframe()))


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
