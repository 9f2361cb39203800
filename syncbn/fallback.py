"""Runs evaluation, and every training call that cannot take the fast path of step.py.

The fallback uses custom operators that wrap the kernels, or plain torch operations where operators cannot be used.
Training on one rank without a mask uses F.batch_norm. So does evaluation, except with a mask and without running
statistics. Each pass sends the payload of the fast path, so ranks may take different paths. The outputs of the
operators are bit-identical to those of the fast path. The outputs of torch operations are equal up to rounding.
"""

import contextlib
import math
from numbers import Integral
from typing import Any, NoReturn, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parameter import is_lazy

from syncbn.arguments import Options, Tensors, check, check_eps, check_training, require_float64, require_two_values
from syncbn.inputs import (
    OutputWrapper,
    apply_mask,
    is_plain_subclass,
    make_dense,
    refuse_proxies,
    unwrap,
    unwrap_tensor,
)
from syncbn.kernel_cache import backward_config, forward_config
from syncbn.kernels import reference, select
from syncbn.kernels.interface import (
    SIGNATURE_ELEMENTS,
    TRAILER_ELEMENTS,
    BackwardConfig,
    ForwardConfig,
    Layout,
    Needed,
    Saved,
)
from syncbn.ranks.reduction import ONE_RANK, Reduction, record_ranks, select_reduction
from syncbn.ranks.report import WITH_GRAPH
from syncbn.ranks.sites import Caller
from syncbn.statistics import compute_dtype, pack, supports_float64, update_buffers
from syncbn.torch_internals import (
    constant_in_graphs,
    current_backward,
    inside_functorch,
    inside_vmap_or_forward_mode,
    is_batched_gradient,
    is_compiling,
    is_exporting,
    keeps_graph,
    profiler_range,
)

StaticArguments: TypeAlias = tuple[ForwardConfig, Reduction]  # the first argument of an autograd Function
Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # of x, weight, bias, residual


def train(tensors: Tensors, options: Options, caller: Caller) -> tuple[Tensor, Tensor]:
    """Return y and the statistics, like `train` in step.py."""
    tensors, options, reduction, wrap = prepare(tensors, options, caller)
    with profiler_range("syncbn.forward"), reduction.recording_errors():
        if reduction.group is None and not tensors.has_mask():
            y, statistics = train_single_rank(tensors, options)
        else:
            tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
            tensors = make_dense(tensors, options)
            y, statistics = normalize(tensors, options, reduction)
            y = apply_to_output(y)
    # Compiled graphs drop the updates from the recompute of activation checkpointing. In eager mode the recompute runs
    # the same operators as the forward, but does not write the buffers.
    updates = is_compiling() or current_backward() == -1
    buffers = tensors.running_mean, tensors.running_var, tensors.counter
    update_buffers(*buffers, statistics, options.momentum, updates)
    record_ranks(caller, reduction)
    return wrap(y), statistics


def prepare(tensors: Tensors, options: Options, caller: Caller) -> tuple[Tensors, Options, Reduction, OutputWrapper]:
    """Check the arguments. Return unwrapped tensors, the options, the reduction, and a function that wraps the output
    in the classes of the inputs. **Raises** on every rank if the arguments of this rank are invalid."""
    reduction = select_reduction(options.process_group, caller, tensors.input)
    try:
        tensors, options, wrap = unwrap(tensors, options)
        options = check_training(tensors, options, caller)
        if reduction.group is not None or tensors.has_mask():
            require_float64(tensors.input)
        return tensors, options, reduction, wrap
    except Exception as error:  # The _check_input_dim of a subclass may raise any exception.
        raise_on_all_ranks(error, tensors, options, reduction, "forward")


def normalize(tensors: Tensors, options: Options, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Return y and the statistics for checked, plain, dense tensors without a mask."""
    static = forward_config(tensors, options), reduction
    inputs = tensors.input, tensors.weight, tensors.bias, tensors.z, tensors.num_values
    y, statistics = apply_function(SyncBatchNormFunction, static, *inputs)
    return y, statistics


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


def select_back_end(config: ForwardConfig | BackwardConfig, x: Tensor, *others: Tensor | None) -> reference.BackEnd:
    """Select the back end of the fallback for a call with the tensors x and `others`.

    Tensor subclasses and exported programs get torch operations. Calls under vmap or forward mode also get torch
    operations, because the operators have no rules for these. All other calls get the operators if there are kernels.
    Compiled graphs get the operators too, because the code that Inductor generates from torch operations takes 2 to 12
    times as long on CPUs.

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
    elif is_transformed(x, *others):
        return reference
    elif select.fast_path_back_end(config) is None:
        return reference.Chunked
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


def is_transformed(*tensors: Tensor | None) -> bool:
    """Return whether vmap or forward mode is active. Only torch operations have rules for them."""
    if inside_vmap_or_forward_mode():
        return True
    return not is_compiling() and any(tensor is not None and is_batched_gradient(tensor) for tensor in tensors)


def requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


class SyncBatchNormFunction(torch.autograd.Function):
    """Normalise: ((config, reduction), x, weight, bias, residual, num_values) -> y, statistics.

    x is dense; the residual has the dtype, strides and shape of x. num_values, of shape (), is the n of this rank if a
    mask has been applied, else None. The statistics over all ranks, packed as in statistics.py, are not differentiable.

    The tensors saved for backward are those of step._Step. The forward issues one all_reduce, and the backward one, or
    two with create_graph=True.
    """

    @staticmethod
    def forward(
        static: StaticArguments, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        num_values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        config, reduction = static
        kernels = select_back_end(config, x, weight, bias, residual).Forward(config)
        sums = sum_over_ranks(kernels.forward_sums(x), reduction, "forward", num_values)
        # An unmasked x with more than C elements has two or more values per channel on this rank alone.
        if num_values is not None or x.numel() <= config.layout.sizes[1]:
            require_two_values(sums[-TRAILER_ELEMENTS], x)
        return kernels.forward_outputs((x, weight, bias, residual), sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        (ctx.config, ctx.reduction), x, weight, *_ = inputs
        y, statistics = output
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, statistics, y if ctx.config.masks_by_y else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:5]
        if is_compiling() and inside_functorch():  # Dynamo does not know what torch.func differentiates.
            needed = True, True, True, ctx.config.has_residual
        with ctx.reduction.recording_errors():
            return None, *gradients(ctx.config, dy, ctx.saved_tensors, needed, ctx.reduction), None


def gradients(
    config: ForwardConfig, dy: Tensor | None, saved: Saved, needed: Needed, reduction: Reduction,
    num_values: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients, computed from dy and the saved tensors. saved_tensors_hooks may have changed the dtype or
    device of the saved tensors.

    Issues one all_reduce, whichever gradients are needed, or two with create_graph=True. If the n in the saved
    statistics is a placeholder of 1, pass the n of this rank as `num_values`, of shape (). The all_reduce then sums
    `num_values` too. The caller must call `record_error` if this function raises.
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
    dy, needed_config = dense(dy), backward_config(config, dy, weight, needed)
    grad_x = grad_residual = None
    with profiler_range("syncbn.backward"):
        if torch.is_grad_enabled():
            grad_x, grad_weight, grad_bias, grad_residual = _graph_grads(config, needed_config, dy, saved, reduction)
        else:
            kernels = select_back_end(needed_config, *saved, dy).Backward(needed_config)
            sums, grad_weight, grad_bias = kernels.backward_sums(dy, saved)
            sums = sum_over_ranks(sums, reduction, "backward", num_values)
            if num_values is not None:
                sums = sums / sums[-TRAILER_ELEMENTS].clamp(min=1)
            if not (is_compiling() or keeps_graph()):
                reduction.forward_total = None
            if needed_config.needs_x or needed_config.needs_residual:
                grad_x, grad_residual = kernels.backward_outputs(dy, saved, sums)
    return grad_x, grad_weight, grad_bias, grad_residual if y is not None else unmasked_dy


def _graph_grads(
    forward: ForwardConfig, config: BackwardConfig, dy: Tensor, saved: Saved, reduction: Reduction
) -> Gradients:
    """Return gradients that can be differentiated again. Issues two all_reduces.

    The saved statistics are constants to autograd, so mean and variance are computed again from x, with an additional
    all_reduce. This all_reduce has its own pass name, because a rank without create_graph does not issue it.
    """
    x, weight, statistics, y = saved
    kernels, num_values = reference.Forward(forward), statistics[3 * config.layout.sizes[1]].clamp(min=1)
    fold = config.layout.fold
    sums = sum_over_ranks(kernels.forward_sums(x), reduction, WITH_GRAPH)
    mean, mean_square = (sums[:-TRAILER_ELEMENTS] / num_values).chunk(2)
    xmu = reference.subtract_mean(fold(x), mean)
    invstd = ((mean_square - mean.square()).clamp(min=0) + forward.eps).rsqrt()
    dy = reference.apply_relu_mask(config, fold(dy), fold(x), None if y is None else fold(y), statistics)
    wide_dy = dy.double()
    sum_dy, sum_dy_xmu = reference.channel_sums(wide_dy), reference.channel_sums(wide_dy * xmu)
    sums = sum_over_ranks(torch.cat((sum_dy, sum_dy_xmu, sum_dy.new_zeros(TRAILER_ELEMENTS))), reduction, "backward")
    mean_dy, mean_dy_xmu = (sums[:-TRAILER_ELEMENTS] / num_values).chunk(2)
    scale = invstd if weight is None else invstd * weight.double()
    wide_grad_x = (wide_dy - mean_dy[:, None] - xmu * (invstd.square() * mean_dy_xmu)[:, None]) * scale[:, None]
    grad_x, grad_residual = (config.layout.unfold(wide, x.shape).to(x.dtype) for wide in (wide_grad_x, wide_dy))
    weight_dtype, bias_dtype = config.grad_weight_dtype, config.grad_bias_dtype
    return (
        grad_x if config.needs_x else None,
        None if weight_dtype is None else (sum_dy_xmu * invstd).to(weight_dtype),
        None if bias_dtype is None else sum_dy.to(bias_dtype),
        grad_residual if config.needs_residual else None,
    )


def sum_over_ranks(sums: Tensor, reduction: Reduction, pass_name: str, num_values: Tensor | None = None) -> Tensor:
    """Return the sum of `sums` over the ranks, by one all_reduce, which may overwrite `sums`.

    `sums` is float64 and ends in a trailer. `num_values`, of shape (), replaces the n in the trailer unless it is None.
    In eager mode with gradients the result is differentiable any number of times: the gradient of a sum over ranks is
    another sum over ranks, by another all_reduce. **Raises** RuntimeError inside vmap and forward mode.
    """
    if num_values is not None:
        sums = torch.cat((sums[:-TRAILER_ELEMENTS], num_values.double().view(1), sums[-SIGNATURE_ELEMENTS:]))
    if reduction.group is not None and is_transformed(sums):
        raise RuntimeError(
            "torch.func.vmap, forward mode (jvp) and is_grads_batched=True are not supported over several ranks; loop "
            "over samples or gradients, use torch.autograd.functional, or set process_group=1"
        )
    if reduction.group is None or is_compiling() or not torch.is_grad_enabled():
        return reduction.sign_and_all_reduce(sums, pass_name)
    result = _SumOverRanks.apply(sums[:-SIGNATURE_ELEMENTS], reduction, pass_name)  # type: ignore[no-untyped-call]
    n = result[-1:].detach()
    return torch.cat((result[:-1], n, sums.new_zeros(SIGNATURE_ELEMENTS)))


class _SumOverRanks(torch.autograd.Function):
    """Sum over all ranks: (sums, reduction, pass_name) -> total. Its last element is n, or 0 in derivative passes."""

    @staticmethod
    def forward(sums: Tensor, reduction: Reduction, pass_name: str) -> Tensor:
        return reduction.sign_and_all_reduce(F.pad(sums, (0, SIGNATURE_ELEMENTS)), pass_name)[:-SIGNATURE_ELEMENTS]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.reduction, ctx.pass_name = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        pass_name = f"derivative of {ctx.pass_name}"
        return _SumOverRanks.apply(grad_total, ctx.reduction, pass_name), None, None  # type: ignore[no-untyped-call]


def evaluate(tensors: Tensors, options: Options, caller: object = None) -> Tensor:
    """Return y, normalised with the running statistics or, if there are none, with the statistics of this rank's batch.
    `caller` is a layer or None."""
    tensors, options, wrap = unwrap(tensors, options)
    check(tensors, options, caller)
    is_masked_batch = tensors.mask is not None and tensors.running_mean is None
    tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
    if is_masked_batch:  # F.batch_norm cannot leave values out of the statistics.
        check_eps(options.eps, training=True)
        require_float64(tensors.input)
        return wrap(apply_to_output(normalize(make_dense(tensors, options), options, ONE_RANK)[0]))
    return wrap(apply_to_output(_torch_batch_norm(tensors, options, training=tensors.running_mean is None)))


def train_single_rank(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output of F.batch_norm, and the statistics of this rank's batch, packed as in statistics.py. The
    arguments have been checked and have no mask."""
    x = tensors.input
    # With a momentum of 1, F.batch_norm stores the mean and the unbiased variance of the batch in these tensors.
    mean, var = (x.new_zeros(x.shape[options.channel_dim], dtype=compute_dtype(x.dtype)) for _ in range(2))
    y = _torch_batch_norm(tensors._replace(running_mean=mean, running_var=var), options, training=True)
    if supports_float64(x.device):  # In float32, `to_sums` would lose a variance that is small compared with mean^2.
        mean, var = mean.to(torch.float64), var.to(torch.float64)
    n = mean.new_full((1,), x.numel() // max(1, len(mean)))
    var = var * ((n - 1) / n.clamp(min=1))
    return y, pack(mean, var, (var + options.eps).rsqrt(), n)


def _torch_batch_norm(tensors: Tensors, options: Options, training: bool) -> Tensor:
    """Return y, normalised with the running statistics or, in training, with the statistics of the batch."""
    x, eps = tensors.input, options.eps
    mean, var, weight, bias = per_channel = tensors.running_mean, tensors.running_var, tensors.weight, tensors.bias
    if any(tensor is not None and not (tensor.dtype == x.dtype and tensor.is_contiguous()) for tensor in per_channel):
        # F.batch_norm accepts parameters of the input's dtype, or float32 parameters with a 16-bit input. If the input
        # is in channels_last, the backward of torch 2.13 on CPUs reads parameters as if they were contiguous.
        dtype = compute_dtype(x.dtype)
        mean, var, weight, bias = (None if tensor is None else tensor.to(dtype).contiguous() for tensor in per_channel)
    if options.channel_dim in (1, 1 - x.ndim):
        y = plain_batch_norm(x, mean, var, weight, bias, training, 1.0, eps)
    else:
        x = x.contiguous()
        folded = Layout.of(x, options.channel_dim).fold(x)
        y = plain_batch_norm(folded, mean, var, weight, bias, training, 1.0, eps).view_as(x)
    if tensors.z is not None:
        y = y + tensors.z.to(y.dtype)
    if options.relu:
        y = F.relu(y)
    return y


def plain_batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Compute F.batch_norm, including its checks, by an operator, which `ReplaceBatchNormMode` does not replace."""
    check_eps(eps, training)
    if training and input.numel() == input.shape[1] > 0:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    use_cudnn = cudnn_enabled and torch.backends.cudnn.enabled
    arguments = input, weight, bias, running_mean, running_var, training, momentum, eps, use_cudnn
    return torch.ops.aten.batch_norm.default(*arguments)  # type: ignore[no-any-return]


def raise_on_all_ranks(
    error: Exception, tensors: Tensors, options: Options, reduction: Reduction, pass_name: str
) -> NoReturn:
    """Join the all_reduce of the other ranks with n = NaN, so that every rank raises, and raise `error`.

    On GPUs the other ranks raise at a later call. Only this rank raises in a compiled graph, in a trace of torch.fx, on
    a GPU without Triton, or if no argument determines the number of channels. In eager mode the reports of the
    other ranks contain `error` in these cases.
    """
    refuse_proxies(tensors)
    num_channels, device = _likely_channels(tensors, options), _device_of(tensors)
    reads_nan = reduction.reads_trailer and (device.type == "cpu" or select.checks_totals(device))
    if num_channels is None or not reads_nan:
        reduction.record_error(error)
        raise error
    sums = torch.zeros(2 * num_channels + TRAILER_ELEMENTS, dtype=torch.float64, device=device)
    sums[-TRAILER_ELEMENTS] = math.nan
    try:
        with reduction.recording_errors():
            reduction.sign_and_all_reduce(sums, pass_name, error)
        raise AssertionError("internal error: no rank reported the bad argument") from error
    finally:  # The traceback of `error` holds this frame. This reference cycle would keep the group alive.
        del error


def _likely_channels(tensors: Tensors, options: Options) -> int | None:
    """Return the number of channels of most arguments, because one argument may be wrong. Return None if no argument
    has channels."""
    per_channel = [tensor for tensor in tensors.per_channel().values() if isinstance(tensor, Tensor)]
    votes = [tensor.numel() for tensor in per_channel if not is_lazy(tensor)]
    if not votes and isinstance(options.num_channels, Integral) and options.num_channels > 0:
        return options.num_channels
    with contextlib.suppress(Exception):  # The input may not be a tensor, or may not have this dim.
        votes.append(int(tensors.input.shape[options.channel_dim]))
    return max(votes, key=votes.count, default=None)  # In a tie a per-channel tensor wins.


def _device_of(tensors: Tensors) -> torch.device:
    """Return the device of the first argument that is a tensor."""
    arguments = *tensors.per_channel().values(), tensors.input
    return next((tensor.device for tensor in arguments if isinstance(tensor, Tensor)), torch.device("cpu"))
