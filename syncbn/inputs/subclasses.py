"""Unwraps tensors of subclasses that have ordinary memory (MONAI's MetaTensor), and hands the output to their class.

The output is computed first, once, on plain tensors. Only then do the users' classes see it, by __torch_function__:
what they do there cannot change which collectives this rank issues.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function

from syncbn.arguments import CHECKS_OF_DIMS, Options, Tensors
from syncbn.torch_internals.state import PLAIN_OR_NONE


def has_memory(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether this is a tensor of a subclass that changes no operator: its values are in memory, as a Tensor's are."""
    if type(tensor) in PLAIN_OR_NONE or not isinstance(tensor, Tensor) or isinstance(tensor, UninitializedTensorMixin):
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def unwrap(tensors: Tensors, options: Options) -> tuple[Tensors, Options, Callable[[Tensor], Tensor]]:
    """The arguments with plain tensors in place of subclasses that have memory, and a function that hands the output to
    the classes of the tensors which nn.BatchNorm would see."""
    x, check = tensors.input, options.check_input_dim
    if check not in CHECKS_OF_DIMS and has_memory(x):
        options = replace(options, check_input_dim=lambda layer, _: check(layer, x))  # it may look at more than dims
    inputs = x, tensors.running_mean, tensors.running_var, tensors.weight, tensors.bias, tensors.z
    unwrapped = Tensors._make(
        plain(each) if type(each) not in PLAIN_OR_NONE and has_memory(each) else each for each in tensors
    )
    return unwrapped, options, lambda output: batch_norm(*inputs, output=output)


def plain(tensor: Tensor) -> Tensor:
    """The same tensor as a Tensor, without a call of its class's __torch_function__."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def batch_norm(*inputs: Tensor | None, output: Tensor) -> Tensor:
    """The output of a batch norm of these inputs; their classes may add to it. (Not F.batch_norm itself: by default
    __torch_function__ would call that, which normalises this rank's batch alone.)"""
    if has_torch_function(inputs):
        return handle_torch_function(batch_norm, inputs, *inputs, output=output)
    return output
