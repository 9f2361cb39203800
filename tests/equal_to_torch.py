"""Helpers that compare a layer with torch's, empty the caches of kernels, and make tensors that kernels cannot read."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from subclasses import Image, class_and_metadata, plain
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import syncbn
from syncbn import kernel_cache
from syncbn.kernels.interface import BackwardKernels, ForwardKernels

Layer = nn.BatchNorm2d | syncbn.SyncBatchNorm2d


def clear_kernel_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the test with empty caches of kernels."""
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


def assert_values_close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Compare nested tensors like torch.testing.assert_close. Tensor subclasses may differ."""
    tensors = (tree_map_only(Tensor, plain, tree) for tree in (actual, expected))
    torch.testing.assert_close(*tensors, rtol=rtol, atol=atol)


def compare_with_torch(run: Callable[[Any], Any], layer_class: Any = nn.BatchNorm2d, rtol: float = 1e-5) -> None:
    """Call `run` with a layer of torch and with a converted copy, and require equal values, classes and metadata."""
    expected, actual = map(run, layer_pair(layer_class))
    assert_values_close(actual, expected, rtol)
    assert [*map(class_and_metadata, tree_leaves(actual))] == [*map(class_and_metadata, tree_leaves(expected))]


def strided_copy(tensor: Tensor) -> Tensor:
    """Return the same values at every second element of memory, so the copy is not dense."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def escaped(tensor: Tensor) -> Tensor:
    """Return a wrapper of torch.func.grad that has outlived the transform. The wrapper has no memory of its own."""
    wrappers: list[Tensor] = []

    def function(tensor: Tensor) -> Tensor:
        wrappers.append(tensor * 1)
        return tensor.sum()

    torch.func.grad(function)(tensor.detach())
    return wrappers[0]


def unreadable_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return tensors with the same values, or zeros, that direct kernels cannot read without a conversion."""
    return {
        "non-dense": strided_copy(tensor),
        "negative view": torch._neg_view(-tensor),
        "zero tensor": torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),  # torch allocates no memory.
        "wrapper": escaped(tensor),
        "subclass": tensor.as_subclass(Image),
    }
