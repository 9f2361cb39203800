"""Computes what torch's dispatcher must see: in compiled graphs, in torch.func, under dispatch modes and profilers.

Direct kernels access the memory of plain tensors past the dispatcher. Everything in this file uses kernels that consist
of operators instead: those of operators.py, which wrap the direct kernels, or the torch operations of reference.py. The
pass is the same for both: `Call.forward` and `Call.backward`.

    dispatched_back_end   chooses between operators.py and reference.py
    normalize             runs a forward inside an autograd Function, `_DispatchedStep`: a compiler, torch.func and
                          forward mode must see the Function before its operations. In eager mode that node would take
                          10 to 20 us more than `_Step` of step.py, which gets a y that has been computed already.
    gradients             computes the backward of `_DispatchedStep`; of `_Step`, where direct kernels cannot be used;
                          and of `functional.batch_norm_backward`
"""

import contextlib
from typing import Any, TypeAlias

import torch
from torch import Tensor

from syncbn import second_derivatives
from syncbn import torch_internals as internals
from syncbn.arguments import Options, Tensors
from syncbn.inputs import is_plain_subclass, unwrap_tensor
from syncbn.kernel_cache import backward_config, forward_config
from syncbn.kernels import interface, reference, select
from syncbn.kernels.interface import BackEnd, ForwardConfig, Gradients, Needed, Saved
from syncbn.ranks.calls import Call

StaticArguments: TypeAlias = tuple[ForwardConfig, Call]  # the first argument of a Function


def dispatched_back_end(config: ForwardConfig | interface.BackwardConfig, x: Tensor, *others: Tensor | None) -> BackEnd:
    """Select operators.py or reference.py for a call with the tensors x and `others`.

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
    if internals.is_compiling():
        in_function = not torch.is_grad_enabled() or requires_grad(x, *others)
        if not in_function or internals.is_exporting() or select.reason_unavailable(x.device, compiling=True):
            return reference
    elif internals.is_transformed(x, *others) or select.fast_path_back_end(config) is None:
        return reference
    from syncbn.kernels import operators  # The import registers the operators.

    if internals.is_compiling():
        _register_with_inductor()
    return operators


@internals.constant_in_graphs
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
    if internals.is_compiling():
        differentiates = torch.is_grad_enabled() and requires_grad(*tensors)
    else:
        differentiates = not internals.is_transformed(*tensors)
    run = function.apply if differentiates else function.forward
    outputs: tuple[Tensor, ...] = run(static, *tensors)  # type: ignore[no-untyped-call]
    return outputs


def requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def normalize(tensors: Tensors, options: Options, call: Call) -> tuple[Tensor, Tensor]:
    """Return y and the statistics for checked, plain, dense tensors without a mask. No buffers are updated."""
    call.refuse_transforms(tensors.input)
    static = forward_config(tensors, options), call
    y, statistics = apply_function(_DispatchedStep, static, *tensors.differentiable(), tensors.num_values)
    return y, statistics


def gradients(
    config: ForwardConfig, dy: Tensor | None, saved: Saved, needed: Needed, call: Call,
    num_values: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients, computed from dy and the saved tensors, whose dtype or device saved_tensors_hooks may have
    changed.

    If the n in the saved statistics is a placeholder of 1, pass the n of this rank as `num_values`, of shape (). With
    create_graph=True two all_reduces are issued. The caller must call `record_error` if this function raises.
    """
    x, weight, statistics, y = saved
    dy = torch.zeros_like(x) if dy is None else dy
    # Without a relu the gradient of the residual is dy itself. It must not be a view of dy, because autograd may add
    # another gradient to the view in place, which would change dy.
    unmasked_dy = dy if needed[3] and y is None else None
    if is_plain_subclass(dy):
        dy = unwrap_tensor(dy)

    def dense(tensor: Tensor) -> Tensor:  # If a graph reads the strides of dy, Dynamo makes dy contiguous.
        return tensor if internals.is_compiling() else config.layout.dense(tensor)

    y = None if y is None else dense(y.to(dy.dtype))
    saved = dense(x.to(dy.dtype)), weight, statistics.double().contiguous(), y
    dy, of_backward = dense(dy), backward_config(config, dy, weight, needed)
    with internals.profiler_range("syncbn.backward"):
        if torch.is_grad_enabled():
            grads = second_derivatives.graph_gradients(config, of_backward, dy, saved, call)
        else:
            call.refuse_transforms(dy)
            kernels = dispatched_back_end(of_backward, *saved, dy).Backward(of_backward)
            grads = call.backward(kernels, dy, saved, num_values)
    return grads if unmasked_dy is None else (*grads[:3], unmasked_dy)


class _DispatchedStep(torch.autograd.Function):
    """Normalise: ((config, call), x, weight, bias, residual, num_values) -> y, statistics.

    The statistics over all ranks are an output, because torch.func saves only inputs and outputs. They are not
    differentiable. The tensors saved for backward are those of `_Step` in step.py.
    """

    @staticmethod
    def forward(
        static: StaticArguments, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        num_values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        config, call = static
        kernels = dispatched_back_end(config, x, weight, bias, residual).Forward(config)
        return call.forward(kernels, (x, weight, bias, residual), num_values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        (ctx.config, ctx.call), x, weight, *_ = inputs
        y, statistics = output
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, statistics, y if ctx.config.relu_mask is interface.ReluMask.FROM_Y else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:5]
        # Dynamo does not know what torch.func differentiates.
        if internals.is_compiling() and internals.inside_functorch():
            needed = True, True, True, ctx.config.has_residual
        with ctx.call.recording_errors():
            return None, *gradients(ctx.config, dy, ctx.saved_tensors, needed, ctx.call), None
