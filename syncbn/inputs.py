"""Makes a call ordinary: unwraps its tensors, sets masked values to 0 and copies tensors with gaps.

Where the output must be wrapped or masked too, a function of the output is returned beside the tensors.

The classes of users' tensors (MONAI's MetaTensor) see the output, by __torch_function__, once it has been computed on
plain tensors: what they do there cannot change which collectives this rank issues.

Calls that are being recorded cannot be made ordinary: torch.fx gets a leaf where it can, other recorders an error with
the remedy. torch.fx.Tracer takes the layers of torch.nn for leaves (`is_leaf_module`) and traces through all others, so
a layer of ours makes its leaf itself, in its forward. Nothing here waits for other ranks: often one rank alone records.
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

LEAF_TRACER = "trace with a torch.fx.Tracer whose is_leaf_module is True for it"
REVERT = "call syncbn.revert_syncbn_model(model) first"


def identity(output: Tensor) -> Tensor:
    """The output itself."""
    return output


def unwrap_and_mask(tensors: Tensors, options: Options) -> tuple[Tensors, Options, OutputWrapper]:
    """As `unwrap`, with the mask applied. **Raises** TypeError where tensors of other classes are left, and whatever
    bad arguments may raise; the general road explains it."""
    tensors, options, wrap = unwrap(tensors, options)
    if not PLAIN_OR_NONE.issuperset(map(type, tensors)):
        raise TypeError("a tensor is not plain")
    if tensors.mask is None:
        return tensors, options, wrap
    check_saved(tensors)  # a plan does not check the mask
    require_storage([tensor for tensor in tensors if tensor is not None])
    tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
    return tensors, options, lambda output: wrap(apply_to_output(output))


def has_plain_storage(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether this is a tensor of a subclass that changes no operator: its values are in memory, as a Tensor's are."""
    if type(tensor) in PLAIN_OR_NONE or not isinstance(tensor, Tensor) or isinstance(tensor, UninitializedTensorMixin):
        return False
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def plain(tensor: Tensor) -> Tensor:
    """The same tensor as a Tensor, without a call of its class's __torch_function__."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def unwrap(tensors: Tensors, options: Options) -> tuple[Tensors, Options, OutputWrapper]:
    """Return the arguments with plain tensors in place of subclasses that have memory, and a function that hands the
    output to the classes of the tensors which nn.BatchNorm would see."""
    if is_compiling() or PLAIN_OR_NONE.issuperset(map(type, tensors)):  # Dynamo cannot trace x.as_subclass(Tensor)
        return tensors, options, identity
    x, check = tensors.input, options.check_input_dim
    if check not in TORCH_DIM_CHECKS and has_plain_storage(x):
        options = replace(options, check_input_dim=lambda layer, _: check(layer, x))  # it may look at more than dims
    inputs = x, tensors.running_mean, tensors.running_var, tensors.weight, tensors.bias, tensors.z
    unwrapped = Tensors._make(
        plain(each) if type(each) not in PLAIN_OR_NONE and has_plain_storage(each) else each for each in tensors
    )
    return unwrapped, options, lambda output: batch_norm(*inputs, output=output)


def batch_norm(*inputs: Tensor | None, output: Tensor) -> Tensor:
    """The output of a batch norm of these inputs; their classes may add to it. (Not F.batch_norm itself: by default
    __torch_function__ would call that, which normalises this rank's batch alone.)"""
    if has_torch_function(inputs):
        return handle_torch_function(batch_norm, inputs, *inputs, output=output)
    return output


def apply_mask(tensors: Tensors, channel_dim: int) -> tuple[Tensors, OutputWrapper]:
    """The tensors with x = 0 where the mask is False, and `num_values` in place of the mask; and a function that sets
    the output to 0 there. Both set the gradients there to 0. **Raises** as `check_mask`."""
    if tensors.mask is None:
        return tensors, identity
    mask = expand_mask(tensors.mask, tensors.input, channel_dim)
    masked = tensors._replace(input=torch.where(mask, tensors.input, 0), mask=None, num_values=mask.sum())
    return masked, lambda output: torch.where(mask, output, 0)


def expand_mask(mask: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """The mask as a view of the shape of x with one channel. **Raises** as `check_mask`."""
    check_mask(mask, x, channel_dim)
    if mask.ndim == 1:
        mask = mask.view(-1, *(1,) * (x.ndim - 2))
    shape = list(x.shape)
    shape[channel_dim] = 1
    return mask.unsqueeze(channel_dim % x.ndim).expand(shape)


def make_dense(tensors: Tensors, options: Options) -> Tensors:
    """The tensors with x and z in one layout without gaps, z in the dtype of x if it is of floats."""
    x, z = tensors.input, tensors.z
    if not is_compiling():  # where it would only add an operator to the graph
        x = x.resolve_neg()
    layout = Layout.of(x, options.channel_dim)
    if z is not None and z.dtype in SUPPORTED_DTYPES:
        z = layout.dense(z.to(x.dtype) if is_compiling() else z.resolve_neg().to(x.dtype))
    return tensors._replace(input=layout.dense(x), z=z)


def create_leaf(layer: nn.Module, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The Proxy of a node `call_module`, which stands for this call of `layer` in the graph.

    **Raises** TraceError where the call runs more than syncbn's own forward: what is around it is traced, as
    `super().forward(x) * 2`, and the leaf would run it again.
    """
    path, reason = tracer.path_of_module(layer) if isinstance(tracer, Tracer) else "", None
    forward = getattr(layer.forward, "__func__", None)
    if not path:
        reason = "torch.fx asks is_leaf_module only of modules inside the one that is traced; trace one that holds it"
    elif not getattr(forward, "__module__", "").startswith("syncbn."):
        reason = f"it has a forward around syncbn's, which would run twice; {LEAF_TRACER}"
    elif has_forward_hooks(layer):
        reason = f"it has forward hooks, which would run twice; {LEAF_TRACER}"
    if reason is not None:
        raise TraceError(f"syncbn: {path or 'the layer'} ({type(layer).__name__}) cannot be a leaf here: {reason}")
    return tracer.create_proxy("call_module", path, args, kwargs)


def refuse_proxies(tensors: Tensors) -> None:
    """**Raises** TraceError where torch.fx traces through this call."""
    proxies = [name for name, tensor in tensors._asdict().items() if isinstance(tensor, Proxy)]
    if proxies:
        raise TraceError(
            f"syncbn: torch.fx cannot trace through batch norm of all ranks ({', '.join(proxies)}: Proxy). For a "
            "layer use a Tracer whose is_leaf_module is True for it; for the function call "
            'torch.fx.wrap("sync_batch_norm") in your module.'
        )


def refuse_script(layer: nn.Module) -> NoReturn:
    """**Raises** RuntimeError: torch.jit.script cannot compile the layer."""
    remedy = REVERT
    if "_original_class" not in vars(layer):  # revert_syncbn_model leaves such a layer
        remedy = "load its state_dict into a model that is built with nn.BatchNorm"
    elif vars(layer)["_original_class"] is nn.SyncBatchNorm:  # torch.jit.script cannot compile it either
        remedy = REVERT.replace("(model)", "(model, nn.BatchNorm2d)") + ", or 1d or 3d as your model has them"
    raise RuntimeError(f"syncbn: torch.jit.script cannot compile {type(layer).__name__}: {remedy}")
