"""Defines the functions that users call: batch norm, its backward, and its statistics."""

from typing import Any

import torch
from torch import Tensor

from syncbn import arguments, payload
from syncbn.arguments import Options, Tensors, check_channels, check_input, check_like_input, check_storage
from syncbn.bad_argument import check_on_all_ranks, raise_on_all_ranks
from syncbn.dispatched import StaticArguments, apply_function, dispatched_back_end, gradients
from syncbn.inputs import apply_mask, make_dense, unwrap
from syncbn.kernel_cache import forward_config
from syncbn.kernels.interface import ForwardConfig
from syncbn.kernels.layout import Layout
from syncbn.kernels.reference import subtract_mean
from syncbn.kernels.select import reason_forced
from syncbn.ranks.calls import ONE_RANK, Call, record_ranks, select_call
from syncbn.ranks.groups import ProcessGroupLike, to_spec
from syncbn.ranks.sites import FunctionCaller, to_bool, validate_environment
from syncbn.second_derivatives import sum_over_ranks
from syncbn.statistics import compute_dtype, pack
from syncbn.step import train
from syncbn.torch_batch_norm import evaluate
from syncbn.torch_internals import is_compiling, profiler_range

_SYNC_BATCH_NORM = FunctionCaller("sync_batch_norm")
_BATCH_NORM_BACKWARD = FunctionCaller("batch_norm_backward")
_SYNC_BATCH_STATS = FunctionCaller("sync_batch_stats", needs_two_values=False)


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    process_group: ProcessGroupLike = None,
    *,
    channel_dim: int = 1,
    z: Tensor | None = None,
    fuse_relu: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    r"""Compute F.batch_norm over the joint batch of all ranks of a process group.

        y = (x - mean) / sqrt(var + eps) * weight + bias  (+ z)  (then relu)

    With `training`, mean and the biased var are taken per channel over every dim except `channel_dim`, and over all
    ranks (Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167). The running statistics are updated in place, with
    the unbiased variance: running = (1 - momentum) * running + momentum * statistic. Without `training`, the function
    computes F.batch_norm with the running statistics, and does not communicate.

    Issues one all_reduce of 8 * (2C + 5) bytes in forward and one in backward. With one rank or without a process group
    it issues none. The bytes contain a signature, by which ranks detect that they are in different layers. (Up to 16
    ranks and 64 kB, gloo on CPU uses one all_to_all_single instead, in which each rank sends these bytes to every other
    rank.) Every rank of the group must make the same calls in the same order. The gradients of weight and bias are this
    rank's share: their sum over the ranks is the gradient of the full batch (DistributedDataParallel averages them).

    Args:
        input: (N, C, ...) or, with `channel_dim=-1`, (N, ..., C), of float16, bfloat16, float32 or float64, with at
            least 2 dims. All sizes except C may differ between ranks and be 0. `input.requires_grad` must be equal on
            all ranks for second derivatives, and if neither weight nor bias requires grad; otherwise backward hangs. In
            all other cases it may differ. For a NestedTensor or DTensor the error shows what to pass instead.
        running_mean, running_var: (C,), of any float dtype, both or neither. If no rank has a value, the running
            statistics do not change.
        weight, bias: (C,), of any float dtype, each optional.
        training: synchronise, and normalise with the statistics of this batch.
        momentum: weight of this batch in the running statistics, a number or a 0-d tensor.
        eps: constant added to the variance, > 0, or >= 0 without `training`.
        process_group: None (the default group), a ProcessGroup, or an int (groups of that many consecutive ranks).
        channel_dim: dim of the channels; a negative dim counts from the last.
        z: residual of the input's shape, added before the relu. It is first converted to the input's dtype.
        fuse_relu: apply relu last.
        mask: bool, True for each value of the input that counts: (N,), or the input's shape without the channel dim,
            where a size of 1 is broadcast. Where the mask is False, the input may be anything, including NaN, and the
            output and the gradients are 0.

    Returns:
        Tensor of the input's shape and dtype. It has the strides of F.batch_norm's output: channels_last for a 4-D or
        5-D input in channels_last, otherwise contiguous.

    When activation checkpointing recomputes a forward in a backward, the running statistics are not updated again.

    Raises:
        RuntimeError: in eager mode, the all_reduce has failed or timed out, or ranks are in different layers (raised on
            GPUs at a later call). The error lists the layer, pass and call of every rank.
        ValueError, TypeError: an argument is invalid. No buffer is changed. In eager mode every rank raises. The other
            ranks' error names the faulty ranks; on GPUs it is raised at a later call. To join the all_reduce, the
            faulty rank needs C: it takes the value that most of running_mean, running_var, weight, bias and the input
            have. If none has a C, only the faulty rank raises.
        ValueError: there is only one value per channel over all ranks. Compiled graphs over several ranks, and calls
            with a mask in a graph or on one GPU, do not raise this error. They leave running_var unchanged.

    >>> x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])  # (N, C) on the only rank
    >>> sync_batch_norm(x, None, None, training=True)
    tensor([[-1.0000, -1.0000],
            [ 1.0000,  1.0000]])
    """
    spec = to_spec(process_group) if training else None
    tensors = Tensors(input, z, weight, bias, running_mean, running_var, mask=mask)
    options = Options(momentum, eps, channel_dim, fuse_relu, process_group=spec)
    if training:
        return train(tensors, options, _SYNC_BATCH_NORM)[0]
    if running_mean is None and running_var is None:  # `evaluate` refuses one of the two without the other.
        raise ValueError("running_mean must be defined in evaluation mode; or pass training=True")
    return evaluate(tensors, options)


def batch_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None = None,
    process_group: ProcessGroupLike = None,
    *,
    channel_dim: int = 1,
    training: bool = True,
    output_mask: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    r"""Return the gradients of batch norm in closed form, for a backward that is written by hand.

        mean_dy    = sum dy / n        mean_dy_xmu = sum dy * (x - mean) / n                  (sums over all ranks)
        grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
        grad_bias  = sum dy            grad_weight = sum dy * (x - mean) * invstd             (sums over this rank)

    In training, issues one all_reduce of 8 * (2C + 5) bytes: sum dy, sum dy * (x - mean), and n. With one rank or
    without a process group it issues none. With `training=False` the statistics are constants, so
    grad_input = dy * invstd * weight, without communication.

    Args:
        grad_output, input: dy and x, of the same shape: (N, C, ...), or with the channels in `channel_dim`. Each is
            float16, bfloat16, float32 or float64.
        mean, invstd: (C,), the statistics of the whole batch, in training the same on all ranks;
            invstd = 1 / sqrt(biased var + eps).
        weight: (C,), or None for 1.
        process_group, channel_dim: as in `sync_batch_norm`.
        training: False if the statistics did not depend on the input.
        output_mask: which of the three gradients to compute; the others are None. The all_reduce is issued in any case.

    Returns:
        (grad_input, grad_weight, grad_bias): grad_input has the shape and dtype of the input. grad_weight and grad_bias
        are (C,), in the dtype of weight or, without weight, in float32 (float64 for a float64 input). The results
        have no graph: for second derivatives differentiate `sync_batch_norm`.

    Raises:
        RuntimeError: as in `sync_batch_norm`.
        ValueError, TypeError: an argument is invalid. In eager mode the other ranks raise too if `mean` has shape (C,).
    """
    call: Call = ONE_RANK
    if training:
        call = select_call(to_spec(process_group), _BATCH_NORM_BACKWARD, input)
    try:
        needs: tuple[bool, ...] = (*output_mask,) if hasattr(output_mask, "__iter__") else ()
        if [*map(type, map(to_bool, needs))] != [bool] * 3:
            raise ValueError(f"output_mask must be three bools, for input, weight and bias, got {output_mask!r}")
        needs_input, needs_weight, needs_bias = needs
        check_input(input, channel_dim)
        check_like_input("grad_output", grad_output, input)
        per_channel = {"mean": mean, "invstd": invstd} | ({} if weight is None else {"weight": weight})
        check_channels(input, channel_dim, None, per_channel)
        arguments.require_float64(input)
        if not is_compiling():
            check_storage((grad_output, input, *per_channel.values()))
        reason_forced()  # checks SYNCBN_KERNELS
        validate_environment()
    except Exception as error:  # The code of a Tensor subclass may raise any exception.
        tensors = Tensors(input, weight=weight, running_mean=mean, running_var=invstd)
        options = Options(channel_dim=channel_dim)
        raise_on_all_ranks(error, tensors, options, _BATCH_NORM_BACKWARD, call, "backward")

    with torch.no_grad(), call.recording_errors():
        layout = Layout.of(input, channel_dim)
        if weight is None:
            weight = torch.ones_like(mean, dtype=compute_dtype(input.dtype))
        mean, invstd = mean.double(), invstd.double()
        num_values = mean.new_full((), layout.sizes[0] * layout.sizes[2])
        # The variance is not used. n = 1 is a placeholder: `gradients` divides by the sum of `num_values` itself.
        statistics = pack(mean, torch.zeros_like(mean), invstd, mean.new_ones(1))
        config = ForwardConfig(layout, input.dtype, input.device, weight_dtype=weight.dtype, bias_dtype=weight.dtype)
        needed = needs_input and training, needs_weight, needs_bias, False
        dy, saved = grad_output.to(input.dtype), (input, weight, statistics, None)
        grad_input, grad_weight, grad_bias, _ = gradients(config, dy, saved, needed, call, num_values)
        if needs_input and not training:
            scale = (invstd * weight.double()).to(compute_dtype(input.dtype))[:, None]
            grad_input = layout.unfold(layout.fold(grad_output) * scale, input.shape).to(input.dtype)
    return grad_input, grad_weight, grad_bias


def sync_batch_stats(
    input: Tensor, process_group: ProcessGroupLike = None, *, channel_dim: int = 1, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the mean, the biased variance and the number of values per channel, over all ranks of a group.

        forward   n = sum_r n_r      mean = sum_r sum x / n      var = max(0, sum_r sum x^2 / n - mean^2)
        backward  grad_input = (sum_r dmean_r + 2 * (x - mean) * sum_r dvar_r) / n

    This is for losses and layers that need the statistics of the batch. The results are bit-identical on all ranks and
    differentiable any number of times. The gradients are those of the sum of the losses of all ranks. If every rank
    computes the same loss from the results, divide the loss by the number of ranks, unless DistributedDataParallel
    averages the gradients.

    Issues one all_reduce of 8 * (2C + 5) bytes in forward and one in backward, also with create_graph=True. With one
    rank or without a process group it issues none. Every rank of the group must make the same calls in the same order,
    also in backward, so `requires_grad` of the input must agree on all ranks.

    Args:
        input, process_group, channel_dim, mask: as in `sync_batch_norm`. One value per channel is not an error.

    Returns:
        (mean, var, count): mean and var are (C,), in float32 (float64 for a float64 input), and 0 if no rank has a
        value. count is n, an int64 tensor of shape () without a gradient. The unbiased variance is
        var * count / (count - 1). All three are plain tensors.

    Raises:
        RuntimeError: as in `sync_batch_norm`.
        ValueError, TypeError: an argument is invalid. In eager mode the other ranks raise too if the input has the dim
            `channel_dim`.

    >>> mean, var, count = sync_batch_stats(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))  # (N, C) on the only rank
    >>> mean, var, count
    (tensor([ 2., 20.]), tensor([  1., 100.]), tensor(2))
    """
    options = Options(channel_dim=channel_dim, process_group=to_spec(process_group))
    tensors, options, _ = unwrap(Tensors(input, mask=mask), options)
    call = select_call(options.process_group, _SYNC_BATCH_STATS, tensors.input)
    options = check_on_all_ranks(tensors, options, _SYNC_BATCH_STATS, call, needs_float64=True)
    with profiler_range("syncbn.forward"), call.recording_errors():
        tensors = make_dense(apply_mask(tensors, channel_dim)[0], channel_dim)
        x = tensors.input
        (total,) = apply_function(_Sums, (forward_config(tensors, options), call), x, tensors.num_values)
    record_ranks(_SYNC_BATCH_STATS, call)
    count = payload.num_values(total).detach()
    mean, mean_square = (payload.sums(total) / count.clamp(min=1)).chunk(2)
    var = mean_square - mean.square()
    var = var + (var.clamp(min=0) - var).detach()  # The clamp must not stop the gradients of a constant channel.
    mean, var = (values.to(compute_dtype(x.dtype)) for values in (mean, var))
    return mean, var, count.to(torch.int64)


class _Sums(torch.autograd.Function):
    """Sum over all ranks: ((config, call), x, num_values) -> the total of the payload, see payload.py.

    The arguments are those of dispatched._DispatchedStep. x and the total are saved for backward. Forward and backward
    issue one all_reduce each. The gradient is d(sum x) + 2 x d(sum x^2), with x computed as center + (x - center). The
    constant center changes neither the gradient nor its derivatives.
    """

    @staticmethod
    def forward(static: StaticArguments, x: Tensor, num_values: Tensor | None) -> tuple[Tensor]:
        config, call = static
        sent = dispatched_back_end(config, x).Forward(config).forward_sums(x)
        if num_values is not None:
            sent = payload.with_num_values(sent, num_values)
        return (sum_over_ranks(sent, call, "forward"),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor]) -> None:
        (ctx.config, ctx.call), x, _ = inputs
        ctx.save_for_backward(x, *output)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[None, Tensor, None]:
        num_channels = ctx.config.layout.sizes[1]
        with profiler_range("syncbn.backward"), ctx.call.recording_errors():
            x, total = ctx.saved_tensors
            total = total.detach()
            center = payload.sums(total)[:num_channels] / payload.num_values(total).clamp(min=1)
            sent = payload.from_sums(payload.sums(grad_total))
            grad_sum, grad_square = payload.sums(sum_over_ranks(sent, ctx.call, "backward")).chunk(2)
            at_center, slope = grad_sum + 2 * grad_square * center, 2 * grad_square
            if torch.is_grad_enabled():
                layout = ctx.config.layout
                wide_grad_x = at_center[:, None] + slope[:, None] * subtract_mean(layout.fold(x), center)
                return None, layout.unfold(wide_grad_x, x.shape).to(x.dtype), None
            # at_center + slope * (x - center) is the output of a batch norm with mean `center`, variance 0 and eps 1.
            config = ctx.config._replace(eps=1.0, weight_dtype=torch.float64, bias_dtype=torch.float64)
            x = config.layout.dense(x.to(config.dtype))  # saved_tensors_hooks may have changed x.
            mean_and_zeros = payload.from_sums(torch.cat((center, torch.zeros_like(center))), 1.0)
            kernels = dispatched_back_end(config, x, slope).Forward(config)
            return None, kernels.forward_outputs((x, slope, at_center, None), mean_and_zeros)[0], None
