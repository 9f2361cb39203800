"""Sees which passes leave the ordinary road, and makes tensors for which they must be copied or leave it."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from syncbn import gradients, ordinary, training


@contextlib.contextmanager
def general_road() -> Iterator[list[str]]:
    """The passes that take the general road within, by their names: forward, backward."""
    taken: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            taken.append(name)
            return function(*arguments)

        return note

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_train_generally", noted("forward", training._train_generally))
        of_step = SimpleNamespace(gradients=noted("backward", gradients.gradients))
        patch.setattr(ordinary, "gradients", of_step)
        yield taken


def with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack((tensor, tensor), -1)[..., 0]


def escaped(tensor: Tensor) -> Tensor:
    """From torch.func.grad: a wrapper around the same values, which has no memory of its own."""
    kept: list[Tensor] = []

    def function(tensor: Tensor) -> Tensor:
        kept.append(tensor * 1)
        return tensor.sum()

    torch.func.grad(function)(tensor.detach())
    return kept[0]
