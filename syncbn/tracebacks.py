"""Ends the tracebacks of users' faults in the function or layer that the user called."""

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from syncbn.torch_internals.state import is_compiling

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# The modules that check what users pass, and where other ranks raise what one of them has found.
CHECKS = (
    "syncbn.arguments",
    "syncbn.checks",
    "syncbn.raising",
    "syncbn.inputs.",
    "syncbn.comm.",
    "syncbn.diagnosis.",
    "syncbn.reductions.",
    __name__,
)


def hide_checks(error: Exception) -> None:
    """Drops the traceback so far of a fault that a check has raised: so it ends in the function that the user called,
    which raises `error` again. Other errors, such as one of torch or of a user's own check, keep theirs."""
    if isinstance(error, (TypeError, ValueError)) and not is_compiling():
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if (frame.f_globals.get("__name__") or "").startswith(CHECKS):
            error.__traceback__, error.__suppress_context__ = None, True


def hides_checks(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes `function` a door: the traceback of a fault that a check has raised ends there."""

    @functools.wraps(function)
    def door(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            hide_checks(error)
            raise error

    return door
