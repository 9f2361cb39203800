"""Replaces an attribute of a module for as long as a tool needs it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Within, this attribute of the module has this value; it may be one of the class, as a method is."""
    attributes = vars(module)
    before = {key: attributes[key] for key in {name} & attributes.keys()}
    attributes[name] = value
    try:
        yield
    finally:
        attributes.pop(name, None)
        attributes.update(before)
