"""Replaces a method of one layer for as long as a tool needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from syncbn.arguments import Arguments
from syncbn.layer import SyncBatchNorm

Train = Callable[[Arguments, SyncBatchNorm], tuple[Tensor, Tensor]]  # _train_over_ranks: y, statistics, as step.train


@contextlib.contextmanager
def replaced(layer: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within, `function` is the method of this name of the layer."""
    before = vars(layer).copy()
    setattr(layer, name, function)
    try:
        yield
    finally:
        vars(layer).pop(name, None)
        if name in before:
            setattr(layer, name, before[name])
