"""Uses private names of torch about tensors and autograd."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from syncbn.torch_internals.state import is_compiling

# Whether the tensor stands for a stack of gradients, by the vmap of is_grads_batched=True, which is not torch.func's.
is_batched_gradient: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor

# Whether a transform of torch.func has wrapped this tensor, which may have outlived it.
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor

# Whether the tensor has no memory, as torch makes up its zeros.
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor

# Tells autograd that code has written to these tensors past the dispatcher. torch.autograd.graph.increment_version does
# the same with three calls more.
increment_version: Callable[[Collection[Tensor]], None] = torch._C._increment_version


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the 20 calls that serve torch.func; only where none of its transforms is active."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def apply_to_stack(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """function(tensor); a batched gradient is passed as its whole stack (B, ...)."""
    if is_compiling() or not is_batched_gradient(tensor):
        return function(tensor)
    return torch._add_batch_dim(function(torch._remove_batch_dim(tensor, 1, 0, 0)), 0, 1)


def innermost(tensor: Tensor) -> Tensor:
    """The tensor inside the wrappers of torch.func's transforms; vmap's stacks are dims of it, anywhere."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def ragged_dim(nested: Tensor) -> int:
    """The dim of a jagged NestedTensor in which its sequences differ in length, counted with the batch's dim."""
    return nested._ragged_idx  # type: ignore[attr-defined, no-any-return]
