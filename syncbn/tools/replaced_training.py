"""Replaces what a layer does in training, for as long as a tool needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor

from syncbn.arguments import Arguments
from syncbn.layer import SyncBatchNorm

NAME = "_train_over_ranks"
Train = Callable[[Arguments, SyncBatchNorm], tuple[Tensor, Tensor]]


@contextlib.contextmanager
def trained_by(layer: SyncBatchNorm, train: Train) -> Iterator[None]:
    """Within, `train` runs the layer in training: (arguments, layer) -> y, statistics, as step.train."""
    before = vars(layer).get(NAME)
    setattr(layer, NAME, train)
    try:
        yield
    finally:
        del vars(layer)[NAME]
        if before is not None:
            setattr(layer, NAME, before)
