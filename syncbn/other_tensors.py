"""Takes the arguments of batch norm whose input is no plain tensor for plain ones, and gives the output its kind."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from syncbn import nested
from syncbn.arguments import Arguments


def unwrap(arguments: Arguments) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """These arguments, with plain tensors for those of a NestedTensor, and what makes of the output one of the input's
    kind. Arguments of other kinds stay as they are."""
    if nested.is_jagged(arguments.input):
        return nested.unwrap(arguments)
    return arguments, _as_it_is


def _as_it_is(output: Tensor) -> Tensor:
    return output
