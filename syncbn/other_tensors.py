"""Takes the arguments of batch norm whose input is no plain tensor for plain ones, and gives the output its kind."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from syncbn import nested
from syncbn.arguments import Arguments
from syncbn.distributed import dtensors


def unwrap(arguments: Arguments) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """These arguments, with plain tensors for NestedTensors or DTensors, and what makes of the output one of the
    input's kind. Arguments with an input of another kind stay as they are."""
    if nested.is_jagged(arguments.input):
        return nested.unwrap(arguments)
    if dtensors.is_dtensor(arguments.input):
        return dtensors.unwrap(arguments)
    return arguments, _as_it_is


def _as_it_is(output: Tensor) -> Tensor:
    return output
