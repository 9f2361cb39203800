"""Trains: the one pipeline of a training call, forward and backward.

Symbols: C channels; n values per channel over all ranks r; x, y and dy of any shape with a dim of size C.

    forward   mean = sum_r sum x / n                    var = max(0, sum_r sum x^2 / n - mean^2)
              y = (x - mean) / sqrt(var + eps) * weight + bias (+ residual) (then relu)
    backward  mean_dy = sum_r sum dy / n                mean_dy_xmu = sum_r sum dy * (x - mean) / n
              grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
              grad_weight = sum dy * (x - mean) * invstd,  grad_bias = sum dy
                            (sums over this rank: DistributedDataParallel averages them)

Each pass computes local sums, issues one all_reduce and writes outputs: `Reduction.forward` and `Reduction.backward`.
All calls go through these two. They differ in what comes before, and in the kernels:

    the call                                                   kernels                         autograd Function
    eager, with plain tensors                                  direct, cached by their shapes  _Step
    eager, under a dispatch mode or, on a CPU, a profiler;     operators.py, or reference.py   _Step
      with tensors that direct kernels cannot read; or on      without C++ or Triton kernels;
      a device without direct kernels                          F.batch_norm on one rank
    in a compiled graph, in torch.func, in forward mode        the same                        _TracedStep
    second derivatives                                         second_derivatives.py           either

Before, tensor subclasses are unwrapped, masked values are set to 0, and an input or residual is copied unless it is
non-overlapping and dense. A bad argument raises on every rank, see bad_argument.py.
"""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from syncbn import second_derivatives
from syncbn.arguments import Options, Tensors, check_masked, check_training, require_float64
from syncbn.bad_argument import check_on_all_ranks, raise_on_all_ranks
from syncbn.dispatched import apply_function, dispatched_back_end, refuse_transforms
from syncbn.inputs import OutputWrapper, apply_mask, is_plain_subclass, make_dense, unwrap, unwrap_tensor
from syncbn.kernel_cache import backward_cache, backward_config, forward_cache, forward_config
from syncbn.kernels.interface import ForwardConfig, ForwardKernels, Gradients, Needed, ReluMask, Saved
from syncbn.ranks.reduction import ONE_RANK, Reduction, eager_reduction, record_ranks, select_reduction
from syncbn.ranks.sites import Caller
from syncbn.statistics import update_buffers
from syncbn.torch_batch_norm import train_one_rank
from syncbn.torch_internals import (
    PLAIN_OR_NONE,
    current_backward,
    direct_apply,
    inside_functorch,
    is_compiling,
    is_eager,
    is_traced,
    profiler_range,
)

StaticArguments: TypeAlias = tuple[ForwardConfig, Reduction]  # the first argument of a traced Function


def train(tensors: Tensors, options: Options, caller: Caller) -> tuple[Tensor, Tensor]:
    """Return y, and the statistics over all ranks, packed as in statistics.py. `caller` is a layer or `FunctionCaller`.

    Updates the running statistics and the counter. **Raises** on every rank if the arguments of any rank are invalid;
    see `raise_on_all_ranks`.
    """
    is_unwatched = may_be_direct = is_eager()
    if not is_unwatched:
        if is_traced():
            return _train_traced(tensors, options, caller)
        may_be_direct = is_eager(tensors.input)  # A profiler also sees the kernels that a GPU launches.
    wrap: OutputWrapper | None = None
    if not PLAIN_OR_NONE.issuperset(map(type, tensors)):
        tensors, options, wrap = unwrap(tensors, options)
        may_be_direct = may_be_direct and PLAIN_OR_NONE.issuperset(map(type, tensors))
    if may_be_direct and current_backward() != -1:  # A recompute must not update the running statistics a second time.
        tensors = tensors.without_running_stats()
    kernels, needs_copy = None, False
    try:
        if may_be_direct:
            if tensors.mask is not None:
                check_masked(tensors, options)
                tensors, wrap = apply_mask(tensors, options.channel_dim, wrap)
            kernels, needs_copy = forward_cache.get(options.cache_key, tensors, options) or (None, False)
    except Exception as error:  # No kernels are cached for these arguments, and they are invalid.
        reduction = eager_reduction(options.process_group, caller, tensors.input)
        raise_on_all_ranks(error, tensors, options, reduction, "forward")
    reduction = eager_reduction(options.process_group, caller, tensors.input)
    try:
        if kernels is None:
            options = check_training(tensors, options, caller)
            if reduction.group is None and not tensors.has_mask():
                return _train_one_rank(tensors, options, caller, wrap)
            require_float64(tensors.input)
            tensors, wrap = apply_mask(tensors, options.channel_dim, wrap)
        if kernels is None or needs_copy:
            tensors = make_dense(tensors, options)
        x, z, weight, bias, running_mean, running_var, counter, _, num_values = tensors
        if kernels is None:
            config = forward_config(tensors, options)
            kernels = dispatched_back_end(config, x, weight, bias, z).Forward(config)
        elif reduction.group is None and num_values is None:  # The local sums are the total, unchanged.
            kernels = kernels.for_single_rank or kernels
        inputs, buffers = (x, weight, bias, z), (running_mean, running_var, counter)
        if kernels.is_direct and is_unwatched:
            y, statistics = reduction.forward(kernels, inputs, num_values, buffers, options.momentum)
        else:
            with torch.no_grad(), profiler_range("syncbn.forward"):
                y, statistics = reduction.forward(kernels, inputs, num_values, buffers, options.momentum)
    except Exception as error:  # of any class: a check by a subclass, a kernel that cannot be compiled, the all_reduce
        raise_on_all_ranks(error, tensors, options, reduction, "forward")
    if caller._synchronised_ranks != reduction.num_ranks:
        record_ranks(caller, reduction)
    y = _apply(x, weight, bias, z, (y, statistics, kernels, reduction))
    return y if wrap is None else wrap(y), statistics


def _train_one_rank(
    tensors: Tensors, options: Options, caller: Caller, wrap: OutputWrapper | None
) -> tuple[Tensor, Tensor]:
    """Train on one rank without a mask and without direct kernels. F.batch_norm has its own node in the graph."""
    with profiler_range("syncbn.forward"):
        y, statistics = train_one_rank(tensors, options)
    record_ranks(caller, ONE_RANK)
    return y if wrap is None else wrap(y), statistics


def _train_traced(tensors: Tensors, options: Options, caller: Caller) -> tuple[Tensor, Tensor]:
    """Train in a compiled graph, in a transform of torch.func or in forward mode. There the forward must run inside an
    autograd Function, and updates the running statistics outside of it."""
    reduction = select_reduction(options.process_group, caller, tensors.input)
    tensors, options, wrap = unwrap(tensors, options)
    calls_torch = reduction.group is None and not tensors.has_mask()
    options = check_on_all_ranks(tensors, options, caller, reduction, needs_float64=not calls_torch)
    with profiler_range("syncbn.forward"), reduction.recording_errors():
        if calls_torch:
            y, statistics = train_one_rank(tensors, options)
        else:
            tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
            y, statistics = normalize(make_dense(tensors, options), options, reduction)
            y = apply_to_output(y)
            buffers = tensors.running_mean, tensors.running_var, tensors.counter
            update_buffers(*buffers, statistics, options.momentum)
    record_ranks(caller, reduction)
    return wrap(y), statistics


def normalize(tensors: Tensors, options: Options, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Return y and the statistics for checked, plain, dense tensors without a mask, by a traced Function."""
    refuse_transforms(reduction, tensors.input)
    static = forward_config(tensors, options), reduction
    y, statistics = apply_function(_TracedStep, static, *tensors.differentiable(), tensors.num_values)
    return y, statistics


def gradients(
    config: ForwardConfig, dy: Tensor | None, saved: Saved, needed: Needed, reduction: Reduction,
    num_values: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients, computed through torch's dispatcher from dy and the saved tensors.

    saved_tensors_hooks may have changed the dtype or device of the saved tensors. `num_values` is that of
    `Reduction.backward`. With create_graph=True two all_reduces are issued. The caller must call `record_error` if this
    function raises.
    """
    x, weight, statistics, y = saved
    dy = torch.zeros_like(x) if dy is None else dy
    # Without a relu the gradient of the residual is dy itself. It must not be a view of dy, because autograd may add
    # another gradient to the view in place, which would change dy.
    unmasked_dy = dy if needed[3] and y is None else None
    if is_plain_subclass(dy):
        dy = unwrap_tensor(dy)

    def dense(tensor: Tensor) -> Tensor:  # If a graph reads the strides of dy, Dynamo makes dy contiguous.
        return tensor if is_compiling() else config.layout.dense(tensor)

    y = None if y is None else dense(y.to(dy.dtype))
    saved = dense(x.to(dy.dtype)), weight, statistics.double().contiguous(), y
    dy, of_backward = dense(dy), backward_config(config, dy, weight, needed)
    with profiler_range("syncbn.backward"):
        if torch.is_grad_enabled():
            grads = second_derivatives.graph_gradients(config, of_backward, dy, saved, reduction)
        else:
            refuse_transforms(reduction, dy)
            kernels = dispatched_back_end(of_backward, *saved, dy).Backward(of_backward)
            grads = reduction.backward(kernels, dy, saved, num_values)
    return grads if unmasked_dy is None else (*grads[:3], unmasked_dy)


class _Step(torch.autograd.Function):
    """The eager node of the autograd graph: (x, weight, bias, residual, computed) -> y. `train` has computed y already.

    The tensors in `computed` are wrapped in a tuple, because autograd treats each tensor argument as an input.

    Saved for backward are x, weight, the statistics and, if relu is fused after a residual, y. The forward issues no
    collective.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        computed: tuple[Tensor, Tensor, ForwardKernels, Reduction],
    ) -> Tensor:  # fmt: skip
        y, statistics, ctx.kernels, ctx.reduction = computed
        saves_y = residual is not None and ctx.kernels.config.relu  # ReluMask.FROM_Y
        ctx.save_for_backward(x, weight, statistics, y if saves_y else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        reduction, config, kernels = ctx.reduction, ctx.kernels.config, None
        needed = _, _, _, needs_residual = ctx.needs_input_grad[:4]
        try:
            x, _, _, y = saved = ctx.saved_tensors  # saved_tensors_hooks and activation checkpointing run here.
            # A profiler shows this node as _StepBackward, so no range is opened.
            if ctx.kernels.is_direct and is_eager(dy) and not torch.is_grad_enabled():
                if dy.stride() != x.stride():
                    dy = config.layout.dense(dy)
                kernels = backward_cache.get((ctx.kernels, needed), (dy, *saved), config, needed)
            if kernels is None:
                return *gradients(config, dy, saved, needed, reduction), None
            grad_x, grad_weight, grad_bias, grad_residual = reduction.backward(kernels, dy, saved)
        except Exception as error:
            reduction.record_error(error)
            raise
        # Without a relu the gradient of the residual is dy.
        return grad_x, grad_weight, grad_bias, dy if needs_residual and y is None else grad_residual, None


_apply = direct_apply(_Step)


class _TracedStep(torch.autograd.Function):
    """The same where torch must trace the forward: ((config, reduction), x, weight, bias, residual, num_values) -> y,
    statistics. In eager mode this node would take 10 to 20 us more than `_Step`.

    The statistics over all ranks are an output, because torch.func saves only inputs and outputs. They are not
    differentiable.
    """

    @staticmethod
    def forward(
        static: StaticArguments, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        num_values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        config, reduction = static
        kernels = dispatched_back_end(config, x, weight, bias, residual).Forward(config)
        return reduction.forward(kernels, (x, weight, bias, residual), num_values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        (ctx.config, ctx.reduction), x, weight, *_ = inputs
        y, statistics = output
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, statistics, y if ctx.config.relu_mask is ReluMask.FROM_Y else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:5]
        if is_compiling() and inside_functorch():  # Dynamo does not know what torch.func differentiates.
            needed = True, True, True, ctx.config.has_residual
        with ctx.reduction.recording_errors():
            return None, *gradients(ctx.config, dy, ctx.saved_tensors, needed, ctx.reduction), None
