"""Trains: the pipeline of a training call, forward and backward.

Symbols: C channels; n values per channel over all ranks r; x, y and dy of any shape with a dim of size C.

    forward   mean = sum_r sum x / n                    var = max(0, sum_r sum x^2 / n - mean^2)
              y = (x - mean) / sqrt(var + eps) * weight + bias (+ residual) (then relu)
    backward  mean_dy = sum_r sum dy / n                mean_dy_xmu = sum_r sum dy * (x - mean) / n
              grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
              grad_weight = sum dy * (x - mean) * invstd,  grad_bias = sum dy
                            (sums over this rank: DistributedDataParallel averages them)

Each pass computes local sums, issues one all_reduce and computes outputs: `Call.forward` and `Call.backward`,
for every training call. Calls differ in what comes before the pass, and in the kernels:

    call                                                       way                  kernels              Function
    eager, with tensors that direct kernels can read: the      train                direct, cached by    _Step
      fast path                                                                     tensors' metadata
    eager, under a dispatch mode or, on a CPU, a profiler; or  _train_dispatched    operators.py or      _Step
      with tensors that direct kernels cannot read                                  reference.py
    in a compiled graph, in torch.func, in forward mode        _train_traced        the same             _DispatchedStep
    without a mask on one rank, instead of reference.py, and   torch_batch_norm.py  F.batch_norm         torch's
      in a graph, in torch.func and in forward mode

Before the pass, tensor subclasses are unwrapped, masked values are set to 0, and an input or residual is copied unless
it is non-overlapping and dense. An argument error raises on every rank, see bad_argument.py.

Direct kernels receive data pointers. They cannot read the tensors of a call with a momentum in a tensor, with a
non-contiguous weight, bias or buffer, with a subclass that defines __torch_dispatch__, or with an option of an unusual
type, and there are none for some devices.
"""

from typing import Any

import torch
from torch import Tensor

from syncbn import torch_internals as internals
from syncbn.arguments import Options, Tensors, check_training, require_float64
from syncbn.bad_argument import check_on_all_ranks, raise_on_all_ranks
from syncbn.dispatched import dispatched_back_end, gradients, normalize
from syncbn.inputs import apply_mask, make_dense, unwrap
from syncbn.kernel_cache import backward_cache, forward_cache, forward_config
from syncbn.kernels import reference
from syncbn.ranks.calls import eager_call, record_ranks, select_call
from syncbn.ranks.sites import Caller
from syncbn.statistics import update_buffers
from syncbn.torch_batch_norm import train_one_rank
from syncbn.torch_internals import PLAIN_OR_NONE, current_backward, direct_apply, is_eager, is_traced, profiler_range


def train(tensors: Tensors, options: Options, caller: Caller, in_profiler_range: bool = False) -> tuple[Tensor, Tensor]:
    """Return y, and the statistics over all ranks, packed as in statistics.py. `caller` is a layer or `FunctionCaller`.

    Updates the running statistics and the counter. `in_profiler_range` is True once the profiler's range for this call
    is open. **Raises** on every rank if the arguments of any rank are invalid; see `raise_on_all_ranks`.
    """
    if not (in_profiler_range or is_eager()):
        return _train_watched(tensors, options, caller)
    arguments, in_backward = (tensors, options, caller), current_backward() != -1  # `inside_backward`, inlined
    wrap = found = call = None
    try:
        if not {*map(type, tensors)} <= PLAIN_OR_NONE:
            tensors, options, wrap = unwrap(tensors, options)
        if in_backward:  # A recompute must not update the running statistics a second time.
            tensors = tensors.without_running_stats()
        if wrap is None or PLAIN_OR_NONE.issuperset(map(type, tensors)):
            found = forward_cache.get(options.cache_key, tensors, options)
        if found is not None:
            kernels, needs_copy = found
            if tensors.mask is not None:
                tensors, wrap = apply_mask(tensors, options.channel_dim, wrap)
            if needs_copy:
                tensors = make_dense(tensors, options.channel_dim, kernels.config.layout)
            call = eager_call(options.process_group, caller, tensors.input, in_backward)
            x, z, weight, bias, running_mean, running_var, counter, _, num_values = tensors
            if call.group is None and num_values is None:  # The local sums are the total, unchanged.
                kernels = kernels.for_single_rank or kernels
            inputs, buffers = (x, weight, bias, z), (running_mean, running_var, counter)
            y, statistics = call.forward(kernels, inputs, num_values, buffers, options.momentum)
    except Exception as error:  # of any class: by a Tensor subclass, or because a kernel cannot be compiled
        raise_on_all_ranks(error, tensors, options, caller, call)
    if call is None:  # There are no direct kernels for these tensors.
        return _train_dispatched(*arguments)
    if caller._synchronised_ranks != call.num_ranks:
        record_ranks(caller, call)
    y = _apply(x, weight, bias, z, (y, statistics, kernels, call))
    return y if wrap is None else wrap(y), statistics


def _train_watched(tensors: Tensors, options: Options, caller: Caller) -> tuple[Tensor, Tensor]:
    """Train under a compiler, transform, dispatch mode or profiler."""
    if is_traced():
        return _train_traced(tensors, options, caller)
    if not is_eager(tensors.input):
        return _train_dispatched(tensors, options, caller)
    with profiler_range("syncbn.forward"):  # The profiler of a GPU also sees launches of direct kernels.
        return train(tensors, options, caller, in_profiler_range=True)


def _train_dispatched(tensors: Tensors, options: Options, caller: Caller) -> tuple[Tensor, Tensor]:
    """Train with kernels that torch's dispatcher sees, or with F.batch_norm on one rank without such kernels."""
    call = None
    try:
        tensors, options, wrap = unwrap(tensors, options)
        call = eager_call(options.process_group, caller, tensors.input, internals.inside_backward())
        options = check_training(tensors, options, caller)
        config = forward_config(tensors, options)
        back_end = dispatched_back_end(config, *tensors.differentiable())
        calls_torch = back_end is reference and call.group is None and not tensors.has_mask()
        with profiler_range("syncbn.forward"):
            if calls_torch:
                y, statistics = train_one_rank(tensors, options)
            else:
                require_float64(tensors.input)
                tensors, wrap = apply_mask(tensors, options.channel_dim, wrap)
                tensors = make_dense(tensors, options.channel_dim)
                kernels, inputs = back_end.Forward(forward_config(tensors, options)), tensors.differentiable()
                with torch.no_grad():
                    y, statistics = call.forward(
                        kernels, inputs, tensors.num_values, tensors.buffers(), options.momentum
                    )
    except Exception as error:
        raise_on_all_ranks(error, tensors, options, caller, call)
    record_ranks(caller, call)
    if not calls_torch:
        y = _apply(*inputs, (y, statistics, kernels, call))
    return wrap(y), statistics


def _train_traced(tensors: Tensors, options: Options, caller: Caller) -> tuple[Tensor, Tensor]:
    """Train in a compiled graph, in a transform of torch.func or in forward mode. The forward runs inside of an
    autograd Function, and the running statistics are updated outside of it."""
    call = select_call(options.process_group, caller, tensors.input)
    tensors, options, wrap = unwrap(tensors, options)
    calls_torch = call.group is None and not tensors.has_mask()
    options = check_on_all_ranks(tensors, options, caller, call, needs_float64=not calls_torch)
    with profiler_range("syncbn.forward"), call.recording_errors():
        if calls_torch:
            y, statistics = train_one_rank(tensors, options)
        else:
            tensors, wrap = apply_mask(tensors, options.channel_dim, wrap)
            y, statistics = normalize(make_dense(tensors, options.channel_dim), options, call)
            update_buffers(*tensors.buffers(), statistics, options.momentum)
    record_ranks(caller, call)
    return wrap(y), statistics


class _Step(torch.autograd.Function):
    """The node of the autograd graph: (x, weight, bias, residual, computed) -> y.

    `computed` is (y, statistics, kernels, call): autograd does not treat tensors in a tuple as inputs.

    Saved for backward are x, weight, the statistics and, if relu is fused after a residual, y. The forward issues no
    collective. The backward issues one all_reduce, or two with create_graph=True; with one rank it issues none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Any, residual: Tensor | None, computed: Any) -> Any:
        y, statistics, ctx.kernels, ctx.call = computed
        # y is saved for `ReluMask.FROM_Y`.
        ctx.save_for_backward(x, weight, statistics, y if residual is not None and ctx.kernels.config.relu else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, config, kernels = ctx.call, ctx.kernels.config, None
        needed = _, _, _, needs_residual = ctx.needs_input_grad[:4]
        try:
            x, _, _, y = saved = ctx.saved_tensors  # saved_tensors_hooks and activation checkpointing run here.
            # A profiler shows this node as _StepBackward, so no range is opened.
            if ctx.kernels.is_direct and is_eager(dy) and not torch.is_grad_enabled():
                dy = dy if dy.stride() == x.stride() else config.layout.dense(dy)
                kernels = backward_cache.get((ctx.kernels, needed), (dy, *saved), config, needed)
            if kernels is None:
                return *gradients(config, dy, saved, needed, call), None
            grad_x, grad_weight, grad_bias, grad_residual = call.backward(kernels, dy, saved)
        except Exception as error:
            call.record_error(error)
            raise
        # Without a relu the gradient of the residual is dy.
        return grad_x, grad_weight, grad_bias, dy if needs_residual and y is None else grad_residual, None


_apply = direct_apply(_Step)
