"""Unwraps inputs that are NestedTensors or DTensors, and wraps the output again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from syncbn import torch_state
from syncbn.arguments import Arguments
from syncbn.roads import dtensors, nested


def unwrap(arguments: Arguments, synchronises: bool = True) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """The arguments with plain tensors in place of NestedTensors or DTensors, and a function that wraps the output as
    the input was. Arguments with any other input are returned themselves."""
    if type(arguments.input) in torch_state.PLAIN_CLASSES:
        return arguments, _as_it_is
    if nested.is_jagged(arguments.input):
        return nested.unwrap(arguments)
    if dtensors.is_dtensor(arguments.input):
        return dtensors.unwrap(arguments, synchronises)
    return arguments, _as_it_is


def _as_it_is(output: Tensor) -> Tensor:
    return output
