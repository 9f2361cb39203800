"""Writes names, values, settings and exceptions as text that every store, log file and terminal takes."""

import contextlib
import numbers
import traceback

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

ONE_VALUE_PER_CHANNEL = "Expected more than 1 value per channel when training, got 1 over all ranks"
SHOWN_CHARACTERS = 60  # of a value in an error


def printable(text: str) -> str:
    """The text with surrogates escaped: UTF-8 has none. (Python puts them into file names that are not UTF-8.)"""
    return text.encode(errors="backslashreplace").decode()


def quoted(path: str) -> str:
    """The path of a layer, or `layer '1'` for one that would read as a number."""
    return f"layer '{path}'" if path.replace(".", "").isdecimal() else path


def in_words(error: BaseException) -> str:
    """The class and the text, as in the last line of a traceback, also if the exception's __str__ raises."""
    return printable("".join(traceback.format_exception_only(error)).strip())


def in_short(value: object) -> str:
    """repr(value), shortened."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4,300 digits
        text = f"a large {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def settings_of(caller: object) -> dict[str, str]:
    """The settings of a layer that must be the same on all ranks; a function has none."""
    if not isinstance(caller, _BatchNorm):
        return {}
    names = "channel_last", "fuse_relu", "track_running_stats"
    flags = {name: str(bool(getattr(caller, name, False))) for name in names}
    return {"eps": _number_in_words(caller.eps), "momentum": _number_in_words(caller.momentum)} | flags


def _number_in_words(setting: object) -> str:
    """The same for equal numbers of all classes, and for all tensors."""
    if isinstance(setting, Tensor):
        return "a tensor"
    if isinstance(setting, numbers.Real):
        with contextlib.suppress(OverflowError):
            return repr(float(setting))
    return in_short(setting)
