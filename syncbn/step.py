"""Trains on the fast path, forward and backward.

Symbols: C channels; n values per channel over all ranks r; x, y and dy of any shape with a dim of size C.

    forward   mean = sum_r sum x / n                    var = max(0, sum_r sum x^2 / n - mean^2)
              y = (x - mean) / sqrt(var + eps) * weight + bias (+ residual) (then relu)
    backward  mean_dy = sum_r sum dy / n                mean_dy_xmu = sum_r sum dy * (x - mean) / n
              grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
              grad_weight = sum dy * (x - mean) * invstd,  grad_bias = sum dy
                            (sums over this rank: DistributedDataParallel averages them)

Each pass computes local sums, issues one all_reduce and runs one elementwise kernel. Kernels receive data pointers, so
they need plain, dense tensors. Tensor subclasses are unwrapped first, masked values are set to 0, and an input or
residual is copied unless it is non-overlapping and dense. These calls take the fallback, fallback.py:

- inside a compiled graph; while a dispatch mode, a transform of torch.func or, on a CPU, a profiler is active;
- with a momentum in a tensor, a non-contiguous weight, bias or buffer, a subclass that defines __torch_dispatch__, an
  option of an unusual type, or a bad argument;
- on a device for which there are no kernels.
"""

from typing import Any

import torch
from torch import Tensor

from syncbn import fallback
from syncbn.arguments import Options, Tensors, require_two_values
from syncbn.inputs import OutputWrapper, make_dense, unwrap_and_mask
from syncbn.kernel_cache import backward_cache, forward_cache
from syncbn.kernels.interface import TRAILER_ELEMENTS, ForwardKernels
from syncbn.ranks.reduction import Reduction, eager_reduction
from syncbn.ranks.sites import Caller
from syncbn.torch_internals import PLAIN_OR_NONE, current_backward, direct_apply, is_eager, keeps_graph, profiler_range


def train(tensors: Tensors, options: Options, caller: Caller, in_profiler_range: bool = False) -> tuple[Tensor, Tensor]:
    """Return y, and the statistics over all ranks, packed as in statistics.py. `caller` is a layer or `FunctionCaller`.

    Updates the running statistics and the counter. `in_profiler_range` is True once the profiler's range for this call
    is open. **Raises** on every rank if the arguments of any rank are invalid; see `raise_on_all_ranks`.
    """
    if not (in_profiler_range or is_eager()):
        if not is_eager(tensors.input):
            return fallback.train(tensors, options, caller)
        with profiler_range("syncbn.forward"):
            return train(tensors, options, caller, in_profiler_range=True)
    if current_backward() != -1:  # A recompute must not update the running statistics a second time.
        tensors = tensors.without_running_stats()
    wrap: OutputWrapper | None = None
    try:
        if tensors.mask is not None or not PLAIN_OR_NONE.issuperset(map(type, tensors)):
            tensors, options, wrap = unwrap_and_mask(tensors, options)
        kernels, needs_copy = forward_cache.get(options.cache_key, tensors, options) or (None, False)
        if needs_copy:
            tensors = make_dense(tensors, options)
    except Exception:  # A bad argument may raise anything here. The fallback raises its error on all ranks.
        kernels = None
    if kernels is None:
        y, statistics = fallback.train(tensors, options, caller)
        return y if wrap is None else wrap(y), statistics

    x, z, weight, bias, running_mean, running_var, counter, _, num_values = tensors
    reduction = eager_reduction(options.process_group, caller, x.dtype, x.requires_grad)
    single_rank = reduction.group is None and num_values is None  # The local sums are the total, unchanged.
    kernels = kernels.for_single_rank if single_rank else kernels
    outer, _, inner = kernels.config.layout.sizes
    try:
        status_words = reduction.status_words("forward", x.device) if x.is_cuda else None
        sums = kernels.forward_sums(x, reduction.signatures["forward", x.dtype], status_words)
        if num_values is not None:  # Masked values are 0 in the sums, but the kernel has counted them in n.
            sums[-TRAILER_ELEMENTS] = num_values
    except Exception as error:  # The first call of a kernel may compile it, which may raise anything.
        fallback.raise_on_all_ranks(error, tensors, options, reduction, "forward")
    total = reduction.all_reduce(sums, "forward", status_words)
    if outer * inner < 2 or num_values is not None:  # Otherwise this rank has two or more values per channel.
        require_two_values(outer * inner if single_rank else total[-TRAILER_ELEMENTS], x)
    momentum: Any = options.momentum  # This is a number or None: a tensor momentum takes the fallback.
    buffers = running_mean, running_var, counter
    y, statistics, is_finite = kernels.forward_outputs((x, weight, bias, z), total, buffers, momentum, status_words)
    if not is_finite:  # The all_reduce may have overwritten the local sums, so they are computed again.
        reduction.warn_unless_finite(kernels.forward_sums(x))
    if caller._synchronised_ranks != reduction.num_ranks:
        object.__setattr__(caller, "_synchronised_ranks", reduction.num_ranks)
    y = _apply(x, weight, bias, z, (y, statistics, kernels, reduction))
    return y if wrap is None else wrap(y), statistics


class _Step(torch.autograd.Function):
    """The node of the autograd graph: (x, weight, bias, residual, computed) -> y. `train` has computed y already.

    The tensors in `computed` are wrapped in a tuple, because autograd treats each tensor argument as an input.

    Saved for backward are x, weight, the statistics and, if relu is fused after a residual, y. The forward issues no
    collective. The backward issues one all_reduce, or two with create_graph=True; with one rank it issues none. The
    all_reduce is issued whatever needs_input_grad is, because another rank may need the sums.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        computed: tuple[Tensor, Tensor, ForwardKernels, Reduction],
    ) -> Tensor:  # fmt: skip
        y, statistics, ctx.kernels, ctx.reduction = computed
        masks_by_y = residual is not None and ctx.kernels.config.relu
        ctx.save_for_backward(x, weight, statistics, y if masks_by_y else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        reduction, forward_config, kernels = ctx.reduction, ctx.kernels.config, None
        needed = _, _, _, needs_residual = ctx.needs_input_grad[:4]
        try:
            x, _, _, y = saved = ctx.saved_tensors  # saved_tensors_hooks and activation checkpointing run here.
            # A profiler shows this node as _StepBackward, so no range is opened.
            if is_eager(dy) and not torch.is_grad_enabled():
                if dy.stride() != x.stride():
                    dy = forward_config.layout.dense(dy)
                kernels = backward_cache.get((ctx.kernels, needed), (dy, *saved), forward_config, needed)
            if kernels is None:
                return *fallback.gradients(forward_config, dy, saved, needed, reduction), None

            status_words = reduction.status_words("backward", x.device) if x.is_cuda else None
            signature = reduction.signatures["backward", x.dtype]
            sums, *parameter_grads = kernels.backward_sums(dy, saved, signature, reduction.forward_total)
        except Exception as error:
            reduction.record_error(error)
            raise
        total = reduction.all_reduce(sums, "backward", status_words)
        if reduction.forward_total is not None and not keeps_graph():  # No other backward follows; release the total.
            reduction.forward_total = None
        grad_x, grad_residual = kernels.backward_outputs(dy, saved, total, status_words)
        # Without a relu the gradient of the residual is dy.
        return grad_x, *parameter_grads, dy if needs_residual and y is None else grad_residual, None


_apply = direct_apply(_Step)
