"""Chooses how a call runs that torch's dispatcher must see: its back end, and whether inside an autograd Function.

Such calls are in a compiled graph, in a transform of torch.func, under a dispatch mode or, on a CPU, under a profiler;
or they have tensors that direct kernels cannot read, or no kernels for their device.
"""

import contextlib

import torch
from torch import Tensor

from syncbn.kernels import reference, select
from syncbn.kernels.interface import BackEnd, BackwardConfig, ForwardConfig
from syncbn.ranks.reduction import Reduction
from syncbn.torch_internals import (
    constant_in_graphs,
    inside_vmap_or_forward_mode,
    is_batched_gradient,
    is_compiling,
    is_exporting,
)


def dispatched_back_end(config: ForwardConfig | BackwardConfig, x: Tensor, *others: Tensor | None) -> BackEnd:
    """Select the back end for a call with the tensors x and `others` that torch's dispatcher must see.

    Tensor subclasses and exported programs get torch operations. Calls under vmap or forward mode also get torch
    operations, because the operators have no rules for these. All other calls get the operators if there are C++ or
    Triton kernels. Compiled graphs get the operators too, because the code that Inductor generates from torch
    operations takes 2 to 12 times as long on CPUs.

    Operators have no gradient, so a call that is differentiated must run them inside an autograd Function. In a graph
    `apply_function` skips the Function if no tensor requires grad. Inside torch.func Dynamo may see no tensor that
    requires grad although the call is differentiated. So a graph gets torch operations if grad mode is on and no tensor
    requires grad. (Inside the forward of a Function grad mode is off. Dynamo of torch 2.11 leaves grad mode on there;
    the rule still holds, because some tensor requires grad.)
    """
    if type(x) is not Tensor or not (x.is_cpu or x.is_cuda):
        return reference
    if is_compiling():
        in_function = not torch.is_grad_enabled() or requires_grad(x, *others)
        if not in_function or is_exporting() or select.reason_unavailable(x.device, compiling=True):
            return reference
    elif is_transformed(x, *others) or select.fast_path_back_end(config) is None:
        return reference
    from syncbn.kernels import operators  # The import registers the operators.

    if is_compiling():
        _register_with_inductor()
    return operators


@constant_in_graphs
def _register_with_inductor() -> None:
    """Register the operators with Inductor. If Inductor's private names have changed, it inserts extra copies."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from syncbn.kernels import inductor

        inductor.register_with_inductor()


def apply_function(
    function: type[torch.autograd.Function], static: object, *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the outputs of an autograd Function whose first argument is not a tensor.

    Under vmap and forward mode, call the forward of the Function directly, because the operations in the forward have
    rules and the Function has none. Also call it directly in a compiled graph in which no tensor requires grad: there
    Dynamo (torch 2.13) would pass a context to the forward, which has no parameter for it.
    """
    if is_compiling():
        differentiates = torch.is_grad_enabled() and requires_grad(*tensors)
    else:
        differentiates = not is_transformed(*tensors)
    run = function.apply if differentiates else function.forward
    outputs: tuple[Tensor, ...] = run(static, *tensors)  # type: ignore[no-untyped-call]
    return outputs


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether vmap or forward mode is active. Only torch operations have rules for them."""
    if inside_vmap_or_forward_mode():
        return True
    return not is_compiling() and any(tensor is not None and is_batched_gradient(tensor) for tensor in tensors)


def requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def refuse_transforms(reduction: Reduction, *tensors: Tensor | None) -> None:
    """**Raises** RuntimeError inside vmap and forward mode over several ranks."""
    if reduction.group is not None and is_transformed(*tensors):
        raise RuntimeError(
            "torch.func.vmap, forward mode (jvp) and is_grads_batched=True are not supported over several ranks; loop "
            "over samples or gradients, use torch.autograd.functional, or set process_group=1"
        )
