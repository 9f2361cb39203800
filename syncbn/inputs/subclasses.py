"""Unwraps tensors of subclasses that have ordinary memory, as MONAI's MetaTensor, and hands the output to their class.

The output is computed first, once, on plain tensors. Only then do the users' classes see it, by __torch_function__:
what they do there cannot change which collectives this rank issues.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function

from syncbn.arguments import CHECKS_OF_DIMS, TENSORS, Arguments
from syncbn.torch_internals.state import PLAIN_OR_NONE


def has_memory(tensor: Tensor) -> bool:
    """Whether this is a tensor of a subclass that changes no operator: its values are in memory, as a Tensor's are."""
    own_class = type(tensor)
    if own_class in PLAIN_OR_NONE or not isinstance(tensor, Tensor) or isinstance(tensor, UninitializedTensorMixin):
        return False
    return own_class.__torch_dispatch__ is Tensor.__torch_dispatch__


def unwrap(arguments: Arguments) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """The arguments with plain tensors in place of subclasses that have memory, and a function that hands the output to
    the classes of the tensors which nn.BatchNorm would see."""
    unwrapped, check = replace(arguments), arguments.check_input_dim
    if check is not None and has_memory(arguments.input) and getattr(check, "__func__", check) not in CHECKS_OF_DIMS:
        unwrapped.check_input_dim = lambda _: check(arguments.input)  # it may look at more than the dims
    for name in TENSORS:
        tensor = getattr(arguments, name)
        if type(tensor) not in PLAIN_OR_NONE and has_memory(tensor):
            setattr(unwrapped, name, plain(tensor))
    inputs = (
        arguments.input, arguments.running_mean, arguments.running_var, arguments.weight, arguments.bias, arguments.z
    )  # fmt: skip
    return unwrapped, lambda output: batch_norm(*inputs, output=output)


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


def unchanged(output: Tensor) -> Tensor:
    """The output itself."""
    return output
