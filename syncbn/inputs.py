"""Prepares the tensors of a call for the kernels: unwraps subclasses, sets masked values to 0, makes tensors dense.

If the output must be wrapped or masked too, the functions also return a function that does so.

The output is computed on plain tensors. Afterwards __torch_function__ of the inputs' classes (such as MONAI's
MetaTensor) receives the output, so the classes cannot change which collectives this rank issues.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function

from syncbn.arguments import SUPPORTED_DTYPES, TORCH_DIM_CHECKS, Options, Tensors
from syncbn.kernels.layout import Layout
from syncbn.torch_internals import PLAIN_OR_NONE, is_compiling

OutputWrapper: TypeAlias = Callable[[Tensor], Tensor]


def identity(output: Tensor) -> Tensor:
    return output


def is_plain_subclass(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether this is a Tensor subclass that defines no __torch_dispatch__. Its values are in its storage."""
    if type(tensor) in PLAIN_OR_NONE or not isinstance(tensor, Tensor) or isinstance(tensor, UninitializedTensorMixin):
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def unwrap_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor as a plain torch.Tensor, without calling the __torch_function__ of its subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def unwrap(tensors: Tensors, options: Options) -> tuple[Tensors, Options, OutputWrapper]:
    """Unwrap each tensor that `is_plain_subclass` accepts. Also return a function that passes the output, with the
    original inputs, to `batch_norm`."""
    if is_compiling() or PLAIN_OR_NONE.issuperset(map(type, tensors)):  # Dynamo cannot trace as_subclass.
        return tensors, options, identity
    x, check = tensors.input, options.check_input_dim
    if check not in TORCH_DIM_CHECKS and is_plain_subclass(x):
        # A check of the user may read more than the number of dims, so it gets the original tensor.
        options = replace(options, check_input_dim=lambda layer, _: check(layer, x))
    inputs = x, tensors.running_mean, tensors.running_var, tensors.weight, tensors.bias, tensors.z
    unwrapped = Tensors._make(
        unwrap_tensor(each) if type(each) not in PLAIN_OR_NONE and is_plain_subclass(each) else each for each in tensors
    )
    return unwrapped, options, lambda output: batch_norm(*inputs, output=output)


def batch_norm(*inputs: Tensor | None, output: Tensor) -> Tensor:
    """Let the __torch_function__ of the inputs' classes process `output`, which has been computed already.

    __torch_function__ receives this function as its `func`. It does not receive F.batch_norm, because by default
    __torch_function__ calls `func`, and the batch norm would be computed a second time. If no class has a
    __torch_function__ of its own, `output` is returned unchanged.
    """
    if has_torch_function(inputs):
        return handle_torch_function(batch_norm, inputs, *inputs, output=output)
    return output


def apply_mask(tensors: Tensors, channel_dim: int, wrap: OutputWrapper | None = None) -> tuple[Tensors, OutputWrapper]:
    """Return the checked tensors with x = 0 where the mask is False, and with `num_values` instead of the mask. Also
    return a function that sets the output to 0 where the mask is False, and then calls `wrap`. The gradients become 0
    there too."""
    if tensors.mask is None:
        return tensors, wrap or identity
    x, mask = tensors.input, tensors.mask
    if mask.ndim == 1:
        mask = mask.view(-1, *(1,) * (x.ndim - 2))
    shape = list(x.shape)
    shape[channel_dim] = 1
    mask = mask.unsqueeze(channel_dim % x.ndim).expand(shape)
    masked = tensors._replace(input=torch.where(mask, x, 0), mask=None, num_values=mask.sum())
    if wrap is None:
        return masked, lambda output: torch.where(mask, output, 0)
    return masked, lambda output: wrap(torch.where(mask, output, 0))


def make_dense(tensors: Tensors, channel_dim: int, layout: Layout | None = None) -> Tensors:
    """Return the tensors with x and z non-overlapping and dense in this layout, or in that of x. A floating-point z is
    converted to the dtype of x."""
    resolve_neg = identity if is_compiling() else Tensor.resolve_neg  # Under Dynamo it adds an operator.
    x, z = resolve_neg(tensors.input), tensors.z
    layout = layout or Layout.of(x, channel_dim)
    if z is not None and z.dtype in SUPPORTED_DTYPES:
        z = layout.dense(resolve_neg(z).to(x.dtype))
    return tensors._replace(input=layout.dense(x), z=z)
