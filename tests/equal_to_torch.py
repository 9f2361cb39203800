"""Compare a layer with torch's, clear the caches of kernels, and create tensors that kernels must copy."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_subclasses import class_and_metadata, plain
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import syncbn
from syncbn import kernel_cache
from syncbn.kernels.interface import BackwardKernels, ForwardKernels

Layer = nn.BatchNorm2d | syncbn.SyncBatchNorm2d


def clear_kernel_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the caches of kernels be empty at the start of a test."""
    for kernels in (ForwardKernels, BackwardKernels):
        kernels.cached.cache_clear()
    for cache in (kernel_cache.forward_cache, kernel_cache.backward_cache):
        monkeypatch.setattr(cache, "entries", {})


def layer_pair(layer_class: type[nn.BatchNorm2d] = nn.BatchNorm2d) -> tuple[Any, Any]:
    """Return a layer of torch with 3 channels and random parameters, and a converted copy."""
    expected = layer_class(3)
    for parameter in expected.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    return expected, syncbn.convert_syncbn_model(copy.deepcopy(expected))


def close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-5, **options: Any) -> None:
    """Compare values, not classes."""
    tensors = (tree_map_only(Tensor, plain, tree) for tree in (actual, expected))
    torch.testing.assert_close(*tensors, rtol=rtol, atol=atol, **options)


def compare_with_torch(run: Callable[[Any], Any], layer_class: Any = nn.BatchNorm2d, **tolerance: Any) -> Any:
    """Call `run` with a layer of torch and with a converted copy, require equal values, classes and metadata, and
    return the result of the copy."""
    expected, actual = map(run, layer_pair(layer_class))
    close(actual, expected, **tolerance)
    assert [*map(class_and_metadata, tree_leaves(actual))] == [*map(class_and_metadata, tree_leaves(expected))]
    return actual


def strided_copy(tensor: Tensor) -> Tensor:
    """Return the same values in memory that is not dense."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def escaped(tensor: Tensor) -> Tensor:
    """Return a wrapper of torch.func.grad around the same values. The wrapper has no memory of its own."""
    kept: list[Tensor] = []

    def function(tensor: Tensor) -> Tensor:
        kept.append(tensor * 1)
        return tensor.sum()

    torch.func.grad(function)(tensor.detach())
    return kept[0]
