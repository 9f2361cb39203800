"""Unwraps a jagged NestedTensor: the values of its sequences, one behind another, are normalised."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from syncbn.arguments import Arguments
from syncbn.torch_internals.autograd import ragged_dim


def is_jagged(candidate: Any) -> bool:
    """Whether this is a NestedTensor with layout=torch.jagged whose values have no holes."""
    is_nested = isinstance(candidate, Tensor) and candidate.is_nested and candidate.layout == torch.jagged
    return is_nested and candidate.lengths() is None


def unwrap(arguments: Arguments) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """The arguments with the values (sum of lengths, ...) of the input (N, length, ...), and a function that makes the
    output a NestedTensor with the input's offsets.

    The ragged dim, which may be another than dim 1 as in (N, C, length), becomes the first. z and mask are values, or
    NestedTensors with the input's offsets.
    """
    x: Any = arguments.input
    offsets, jagged_dim = x.offsets(), ragged_dim(x)

    def values(given: Any) -> Any:
        if not is_jagged(given) or given.offsets() is not offsets:
            return given
        return given.values().movedim(ragged_dim(given) - 1, 0)

    def wrap(output: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(output.movedim(0, jagged_dim - 1), offsets, jagged_dim=jagged_dim)

    return replace(arguments, input=values(x), z=values(arguments.z), mask=values(arguments.mask)), wrap
