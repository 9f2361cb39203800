"""Replaces an attribute of a module for as long as a tool needs it."""

import contextlib
from typing import Any

from torch import nn


def replace(module: nn.Module, name: str, value: Any, undo: contextlib.ExitStack) -> None:
    """Gives an attribute of the module this value until `undo` ends. It may hide one of the class, as a method is."""
    attributes = vars(module)
    if name in attributes:
        undo.callback(attributes.update, {name: attributes[name]})
    else:
        undo.callback(attributes.pop, name, None)
    attributes[name] = value
