"""Formats names, values, ranks and errors as text that is safe to write to a c10d Store or a terminal, and issues
warnings at the line of the user's program."""

import functools
import itertools
import sys
import traceback
import warnings
from collections.abc import Iterable
from types import FrameType

ONE_VALUE_PER_CHANNEL = "Expected more than 1 value per channel when training, got 1 over all ranks"
MAX_REPR_LENGTH = 60  # characters of a value in an error message
LIBRARIES = {"torch", "syncbn", *sys.stdlib_module_names}


def escape_surrogates(text: str) -> str:
    """Return the text with lone surrogates escaped. UTF-8 cannot encode lone surrogates; Python uses them for bytes
    of file names that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def quote_path(path: str) -> str:
    """Return the dotted name of a layer, or for a name of digits, such as 1, the text "layer '1'"."""
    return f"layer '{path}'" if path.replace(".", "").isdecimal() else path


def format_error(error: BaseException) -> str:
    """Return the class and message of an exception, as in the last line of a traceback, even if its __str__ raises."""
    return escape_surrogates("".join(traceback.format_exception_only(error)).strip())


def shorten(value: object) -> str:
    """Return the repr of a value, cut after `MAX_REPR_LENGTH` characters."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4,300 digits
        text = f"a large {type(value).__name__}"
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[:MAX_REPR_LENGTH]}..."


def format_by_rank(ranks: Iterable[int], texts: Iterable[str]) -> str:
    """Return a line for each different text that is not empty, such as "ranks 0-2, 5: in bn1 forward, call 3"."""
    lines: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        lines.setdefault(text, []).append(rank)
    return "\n".join(f"{format_ranks(ranks)}: {text}" for text, ranks in lines.items() if text)


def format_ranks(ranks: list[int]) -> str:
    """Format a list of ranks, for example as "ranks 0-2, 5"."""
    index = itertools.count()  # The difference rank - index is constant in a run of consecutive ranks.
    runs = [[*run] for _, run in itertools.groupby(ranks, lambda rank: rank - next(index))]
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"


def find_frame(module: str) -> FrameType | None:
    """Return the innermost frame on the stack that runs code of the module named `module`, or None.

    Local variables are not read: on Python 3.11 and 3.12 reading them would keep their values alive until the function
    of the frame returns.
    """
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((frame for frame in frames if frame.f_globals.get("__name__") == module), None)


def warn(message: str) -> None:
    """Issue a warning at the innermost frame outside of `LIBRARIES`, or at the outermost frame if there is none."""
    for frame, line in traceback.walk_stack(sys._getframe()):  # noqa: B007
        if frame.f_globals.get("__name__", "").partition(".")[0] not in LIBRARIES:
            break
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, line)


@functools.cache
def warn_once(message: str) -> None:
    """Warn unless this process has already issued this message."""
    warn(message)
