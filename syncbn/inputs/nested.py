"""Unwraps a jagged NestedTensor: the values of its sequences, one behind another, are normalised."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from syncbn.arguments import Tensors
from syncbn.torch_internals.autograd import Jagged, jagged_parts

MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


def unwrap(tensors: Tensors, x: Jagged) -> tuple[Tensors, Callable[[Tensor], Tensor]]:
    """The tensors with the values (sum of lengths, ...) of the input (N, length, ...), whose parts are x, and a
    function that makes the output a NestedTensor with the input's offsets.

    The ragged dim, which may be another than dim 1 as in (N, C, length), becomes the first. z and mask are values, or
    NestedTensors with the input's offsets.
    """

    def values(tensor: MaybeTensor) -> MaybeTensor:
        parts = jagged_parts(tensor)
        if parts is None or parts.offsets is not x.offsets:
            return tensor
        return parts.values.movedim(parts.dim - 1, 0)

    def wrap(output: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(output.movedim(0, x.dim - 1), x.offsets, jagged_dim=x.dim)

    return tensors._replace(input=values(tensors.input), z=values(tensors.z), mask=values(tensors.mask)), wrap
