"""Prepares the tensors of a call for the kernels: unwraps subclasses, sets masked values to 0, makes tensors dense.

If the output must be wrapped or masked too, the functions also return a function that does so.

The output is computed on plain tensors. Afterwards __torch_function__ of the inputs' classes (such as MONAI's
MetaTensor) receives the output, so the classes cannot change which collectives this rank issues.

A call inside torch.fx becomes a leaf of the graph if possible. torch.fx.Tracer traces through modules from outside of
torch.nn (`is_leaf_module`), so the forward of a synchronised layer creates the leaf itself. Other tracers get an error
with a remedy. Tracing does not communicate, because often only one rank traces.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Proxy, Tracer
from torch.fx.proxy import TraceError
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import handle_torch_function, has_torch_function

from syncbn.arguments import SUPPORTED_DTYPES, TORCH_DIM_CHECKS, Options, Tensors, check_mask, check_saved
from syncbn.kernels.interface import Layout
from syncbn.torch_internals import PLAIN_OR_NONE, has_forward_hooks, is_compiling, require_storage

OutputWrapper: TypeAlias = Callable[[Tensor], Tensor]

LEAF_TRACER = "trace with a torch.fx.Tracer whose is_leaf_module is True for this layer"


def identity(output: Tensor) -> Tensor:
    return output


def unwrap_and_mask(tensors: Tensors, options: Options) -> tuple[Tensors, Options, OutputWrapper]:
    """Unwrap the tensors, see `unwrap`, and apply the mask. **Raises** TypeError if a tensor cannot be unwrapped, and
    any exception for a bad argument. After an exception the fallback takes the call and raises a clear error."""
    tensors, options, wrap = unwrap(tensors, options)
    if not PLAIN_OR_NONE.issuperset(map(type, tensors)):
        raise TypeError("a tensor is not plain")
    if tensors.mask is None:
        return tensors, options, wrap
    check_saved(tensors)  # The kernel cache does not check the mask.
    require_storage([tensor for tensor in tensors if tensor is not None])
    tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
    return tensors, options, lambda output: wrap(apply_to_output(output))


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


def apply_mask(tensors: Tensors, channel_dim: int) -> tuple[Tensors, OutputWrapper]:
    """Return the tensors with x = 0 where the mask is False, and with `num_values` instead of the mask. Also return a
    function that sets the output to 0 where the mask is False. The gradients become 0 there too. **Raises** the errors
    of `check_mask`."""
    if tensors.mask is None:
        return tensors, identity
    x, mask = tensors.input, tensors.mask
    check_mask(mask, x, channel_dim)
    if mask.ndim == 1:
        mask = mask.view(-1, *(1,) * (x.ndim - 2))
    shape = list(x.shape)
    shape[channel_dim] = 1
    mask = mask.unsqueeze(channel_dim % x.ndim).expand(shape)
    masked = tensors._replace(input=torch.where(mask, x, 0), mask=None, num_values=mask.sum())
    return masked, lambda output: torch.where(mask, output, 0)


def make_dense(tensors: Tensors, options: Options) -> Tensors:
    """Return the tensors with x and z non-overlapping and dense in one layout. A floating-point z is converted
    to the dtype of x."""
    resolve_neg = identity if is_compiling() else Tensor.resolve_neg  # Under Dynamo it adds an operator.
    x, z = resolve_neg(tensors.input), tensors.z
    layout = Layout.of(x, options.channel_dim)
    if z is not None and z.dtype in SUPPORTED_DTYPES:
        z = layout.dense(resolve_neg(z).to(x.dtype))
    return tensors._replace(input=layout.dense(x), z=z)


def create_leaf(layer: nn.Module, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a node `call_module` for this call of `layer` to the graph, and return the Proxy of the node.

    **Raises** TraceError if the call runs more than syncbn's own forward. Code around that forward, such as
    `super().forward(x) * 2`, is traced too, and the leaf would run that code a second time.
    """
    path, reason = tracer.path_of_module(layer) if isinstance(tracer, Tracer) else "", None
    forward = getattr(layer.forward, "__func__", None)
    if not path:
        reason = "only a submodule of the traced module can be a leaf; trace a module that contains this layer"
    elif not getattr(forward, "__module__", "").startswith("syncbn."):
        reason = f"it has a forward that wraps syncbn's and would run twice; {LEAF_TRACER}"
    elif has_forward_hooks(layer):
        reason = f"it has forward hooks, which would run twice; {LEAF_TRACER}"
    if reason is not None:
        raise TraceError(f"syncbn: {path or 'the layer'} ({type(layer).__name__}) cannot be a leaf here: {reason}")
    return tracer.create_proxy("call_module", path, args, kwargs)


def refuse_proxies(tensors: Tensors) -> None:
    """**Raises** TraceError if an argument is a Proxy of torch.fx."""
    proxies = [name for name, tensor in tensors._asdict().items() if isinstance(tensor, Proxy)]
    if proxies:
        raise TraceError(
            f"syncbn: torch.fx cannot trace through synchronised batch norm ({', '.join(proxies)}: Proxy). For a "
            "layer, use a Tracer whose is_leaf_module is True for the layer. For a function, call "
            'torch.fx.wrap("sync_batch_norm") in the module that calls the function.'
        )


def refuse_script(layer: nn.Module) -> NoReturn:
    """**Raises** RuntimeError, because torch.jit.script cannot compile the layer."""
    original, remedy = vars(layer).get("_original_class"), "call syncbn.revert_syncbn_model(model) first"
    if original is None:  # revert_syncbn_model does not change a layer that was never converted.
        remedy = "load its state_dict into a model that is built with nn.BatchNorm"
    elif original is nn.SyncBatchNorm:  # torch.jit.script cannot compile nn.SyncBatchNorm either.
        remedy = remedy.replace("(model)", "(model, nn.BatchNorm2d)") + ", or with nn.BatchNorm1d or nn.BatchNorm3d"
    raise RuntimeError(f"syncbn: torch.jit.script cannot compile {type(layer).__name__}: {remedy}")
