"""Offers the functional forms: batch norm, its statistics, and its backward."""

from typing import Any

import torch
from torch import Tensor

from syncbn.arguments import Options, Tensors, check_channels, check_input, check_like_input, check_storage
from syncbn.fallback import (
    StaticArguments,
    apply_function,
    evaluate,
    fallback_back_end,
    gradients,
    prepared,
    raise_on_all_ranks,
    sum_over_ranks,
)
from syncbn.inputs import apply_mask, make_dense
from syncbn.kernel_cache import forward_config
from syncbn.kernels.interface import TRAILER_ELEMENTS, ForwardConfig, Layout
from syncbn.kernels.reference import minus_mean
from syncbn.kernels.select import why_forced
from syncbn.ranks.groups import ProcessGroupLike, to_spec
from syncbn.ranks.reduction import ONE_RANK, Reduction, record_ranks, select_reduction
from syncbn.ranks.sites import FunctionCaller
from syncbn.statistics import compute_dtype, pack
from syncbn.step import train
from syncbn.torch_internals import is_compiling, keeps_graph, recorded

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
    r"""Batch norm over all ranks of a process group: F.batch_norm's arguments, and its result for the whole batch.

        y = (x - mean) / sqrt(var + eps) * weight + bias  (+ z)  (then relu)

    With `training`, mean and var (biased) are taken per channel over every dim but `channel_dim` and over all ranks,
    and the running statistics move in place: running = (1 - momentum) * running + momentum * statistic, with the
    unbiased variance. Otherwise mean and var are the running statistics and nothing is communicated: F.batch_norm
    itself. Ioffe & Szegedy 2015, https://arxiv.org/abs/1502.03167.

    Issues one all_reduce of 8 * (2C + 4) bytes in forward and one in backward: a signature in it shows the ranks
    whether they are in the same layer. None with one rank or without a process group. (Among at most 16 ranks of gloo,
    on CPU, one all_to_all_single with as many bytes to each rank makes an all_reduce of up to 64 kB.) Every rank of the
    group must make the same calls in the same order. The gradients of weight and bias are this rank's share; their sum
    over the ranks is the full batch's (DistributedDataParallel averages them).

    Args:
        input: (N, C, ...) or, with `channel_dim=-1`, (N, ..., C); 2 or more dims; float16, bfloat16, float32 or
            float64. N and the other sizes but C may differ between ranks, and be 0. While weight or bias requires grad,
            `requires_grad` of the input may differ too; when neither does, and for second derivatives, it must agree on
            all ranks, else backward waits for a rank that never comes. For a NestedTensor or DTensor the error gives
            the lines that pass its values.
        running_mean, running_var: (C,), any float dtype, both or neither. An all-empty batch leaves them as they are.
        weight, bias: (C,), any float dtype, each optional.
        training: synchronise, and normalise by the statistics of this batch.
        momentum: weight of this batch's statistics, a number or a 0-d tensor.
        eps: added to the variance, > 0; without `training` >= 0.
        process_group: None (the default group), a ProcessGroup, or an int (consecutive ranks per group).
        channel_dim: the dim of the channels; negative counts from the right.
        z: residual of the input's shape, added before the relu; another float dtype is first converted to the input's.
        fuse_relu: apply relu last.
        mask: bool, which values of the input count: (N,), or the input's shape without the channels' dim; a size of 1
            stands for the whole dim. The other values enter no sum, whatever they hold; outputs and gradients there are
            0.

    Returns:
        Tensor of the input's shape and dtype, with F.batch_norm's strides: channels_last for such an input of 4 or 5
        dims, else contiguous.

    In a forward inside a backward, as activation checkpointing recomputes it, the running statistics do not move: they
    moved in the first forward.

    Raises:
        RuntimeError: in eager mode, when the all_reduce fails or times out, with where every rank is: in which layer,
            pass and call. Also when ranks in different layers have met, on a GPU at a later call.
        ValueError, TypeError: a bad argument, before any buffer is changed. In eager mode every rank raises, the others
            (on a GPU at a later call) an error with the faulty ranks' numbers, as long as most of running_mean,
            running_var, weight, bias and the input agree on C; if none of them tells C, the faulty rank raises alone.
            One value per channel in the whole group is a ValueError too, on every rank. Where the host does not read
            the number, in compiled graphs over several ranks and with a mask in a graph or on one GPU, it leaves
            running_var as it is.

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
    if running_mean is None and running_var is None:  # evaluate refuses one of them without the other
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
    r"""The closed form of batch norm's gradient, for those who write their backward by hand.

        mean_dy    = sum dy / n        mean_dy_xmu = sum dy * (x - mean) / n                  (sums over all ranks)
        grad_input = (dy - mean_dy - (x - mean) * invstd^2 * mean_dy_xmu) * invstd * weight
        grad_bias  = sum dy            grad_weight = sum dy * (x - mean) * invstd             (sums over this rank)

    Issues one all_reduce of 8 * (2C + 4) bytes in training (mean_dy, mean_dy_xmu and n together); none with one rank or
    without a process group. With `training=False` the statistics are constants: grad_input = dy *
    invstd * weight, and nothing is communicated.

    Args:
        grad_output, input: dy and x of one shape, (N, C, ...) or as `channel_dim` says; float16, bfloat16, float32 or
            float64.
        mean, invstd: (C,), of the whole batch; in training the same on all ranks. invstd = 1 / sqrt(biased var + eps).
        weight: (C,) or None for 1.
        process_group, channel_dim: as in `sync_batch_norm`.
        training: False where the statistics did not depend on the input.
        output_mask: which of the three gradients to compute; the others are None. The all_reduce happens whatever it
            says.

    Returns:
        (grad_input, grad_weight, grad_bias): the input's shape and dtype; (C,) twice in the dtype of weight, without
        weight in float32 (float64 for float64 input). The result carries no graph: differentiate `sync_batch_norm` for
        a second derivative.

    Raises:
        ValueError, TypeError: a bad argument; in eager mode on every rank, as in `sync_batch_norm`, when mean gives C.
    """
    reduction: Reduction = ONE_RANK
    if training:
        reduction = select_reduction(to_spec(process_group), _BATCH_NORM_BACKWARD, input)
    try:
        needs_input, needs_weight, needs_bias = output_mask
        check_input(input, channel_dim)
        check_like_input("grad_output", grad_output, input)
        per_channel = {"mean": mean, "invstd": invstd} | ({} if weight is None else {"weight": weight})
        check_channels(input, channel_dim, None, per_channel)
        if not is_compiling():
            check_storage((grad_output, input, *per_channel.values()))
        why_forced()
    except Exception as error:  # of any class: a subclass of Tensor may raise it
        tensors = Tensors(input, weight=weight, running_mean=mean, running_var=invstd)
        raise_on_all_ranks(error, tensors, Options(channel_dim=channel_dim), reduction, "backward")

    with torch.no_grad(), reduction.recording_errors():
        layout = Layout.of(input, channel_dim)
        if weight is None:
            weight = torch.ones_like(mean, dtype=compute_dtype(input.dtype))
        mean, invstd = mean.double(), invstd.double()
        num_values = mean.new_full((), layout.sizes[0] * layout.sizes[2])
        # The var is unused, and n is 1 until the ranks have added it up.
        statistics = pack(mean, torch.zeros_like(mean), invstd, mean.new_ones(1))
        config = ForwardConfig(layout, input.dtype, input.device, weight_dtype=weight.dtype, bias_dtype=weight.dtype)
        needed = needs_input and training, needs_weight, needs_bias, False
        saved = input, weight, statistics, None
        grad_input, grad_weight, grad_bias, _ = gradients(
            config, grad_output.to(input.dtype), saved, needed, reduction, num_values
        )
        if needs_input and not training:
            scale = (invstd * weight.double()).to(compute_dtype(input.dtype))[:, None]
            grad_input = layout.unfold(layout.fold(grad_output) * scale, input.shape).to(input.dtype)
    return grad_input, grad_weight, grad_bias


def sync_batch_stats(
    input: Tensor, process_group: ProcessGroupLike = None, *, channel_dim: int = 1, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The mean, the biased variance and the number of values of each channel, over all ranks of a process group.

        forward   n = sum_r n_r      mean = sum_r sum x / n      var = max(0, sum_r sum x^2 / n - mean^2)
        backward  grad_input = (sum_r dmean_r + 2 * (x - mean) * sum_r dvar_r) / n

    For losses and layers that need the batch's statistics themselves. All ranks get the same numbers, bit by bit. They
    are differentiable as often as one likes; each derivative is that of the sum of the ranks' losses. So where every
    rank computes the same loss from them, divide that by the number of ranks, unless DistributedDataParallel averages
    the gradients.

    Issues one all_reduce of 8 * (2C + 4) bytes in forward and one in backward, also with create_graph=True; none with
    one rank or without a process group. Every rank of the group must make the same calls in the same order, and so the
    same backwards: `requires_grad` of the input must agree on all ranks.

    Args:
        input: as in `functional.sync_batch_norm`; a rank may have no values.
        process_group, channel_dim, mask: as in `functional.sync_batch_norm`.

    Returns:
        (mean, var, count): mean and var (C,), float32, or float64 for float64 input; 0 where no rank has a value.
        count (), int64, the number n of values of a channel, without a gradient. The unbiased variance is
        var * count / (count - 1). All are plain tensors.

    Raises:
        RuntimeError: as `functional.sync_batch_norm`.
        ValueError, TypeError: a bad argument. In eager mode every rank raises, the others (on a GPU at a later call) an
            error with the faulty ranks' numbers, as long as the input has a dim `channel_dim`.

    >>> mean, var, count = sync_batch_stats(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))  # (N, C) on the only rank
    >>> mean, var, count
    (tensor([ 2., 20.]), tensor([  1., 100.]), tensor(2))
    """
    options = Options(channel_dim=channel_dim, process_group=to_spec(process_group))
    tensors, options, reduction, _ = prepared(Tensors(input, mask=mask), options, _SYNC_BATCH_STATS)
    with recorded("syncbn.forward"), reduction.recording_errors():
        tensors = make_dense(apply_mask(tensors, channel_dim)[0], options)
        x = tensors.input
        (sums,) = apply_function(_Sums, (forward_config(tensors, options), reduction), x, tensors.num_values)
    record_ranks(_SYNC_BATCH_STATS, reduction)
    count = sums[-TRAILER_ELEMENTS].detach()
    mean, mean_square = (sums[:-TRAILER_ELEMENTS] / count.clamp(min=1)).chunk(2)
    var = mean_square - mean.square()
    var = var + (var.clamp(min=0) - var).detach()  # the clamp must not stop the gradients of a constant channel
    mean, var = (values.to(compute_dtype(x.dtype)) for values in (mean, var))
    return mean, var, count.to(torch.int64)


class _Sums(torch.autograd.Function):
    """((config, reduction), x, num_values) -> the sums over all ranks, packed as in statistics.py.

    The arguments are those of fallback.SyncBatchNormFunction. Saved for backward: x and the sums. Collectives: one
    all_reduce each way. The gradient is d sum + 2 x d sum of squares; x is taken as center + (x - center), by any
    constant center, so that second derivatives need no other.
    """

    @staticmethod
    def forward(call: StaticArguments, x: Tensor, num_values: Tensor | None) -> tuple[Tensor]:
        config, reduction = call
        sums = fallback_back_end(config, x).Forward(config).forward_sums(x)
        return (sum_over_ranks(sums, reduction, "forward", num_values),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor]) -> None:
        (ctx.config, ctx.reduction), x, _ = inputs
        ctx.save_for_backward(x, *output)

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[None, Tensor, None]:
        num_channels = ctx.config.layout.sizes[1]
        with recorded("syncbn.backward"), ctx.reduction.recording_errors():
            x, sums = ctx.saved_tensors
            center = sums.detach()[:num_channels] / sums[-TRAILER_ELEMENTS].detach().clamp(min=1)
            grad_sum, grad_square = sum_over_ranks(grad_sums, ctx.reduction, "backward")[:-TRAILER_ELEMENTS].chunk(2)
            at_center, slope = grad_sum + 2 * grad_square * center, 2 * grad_square
            if torch.is_grad_enabled():
                layout = ctx.config.layout
                wide_grad_x = at_center[:, None] + slope[:, None] * minus_mean(layout.fold(x), center)
                return None, layout.unfold(wide_grad_x, x.shape).to(x.dtype), None
            if not (is_compiling() or keeps_graph()):
                ctx.reduction.forward_total = None
            # The same as the output of a batch norm: sums of squares 0 and eps 1 make the variance 0 and invstd 1.
            config = ctx.config._replace(eps=1.0, weight_dtype=torch.float64, bias_dtype=torch.float64)
            x = config.layout.dense(x.to(config.dtype))  # saved_tensors_hooks may have rounded or moved it
            sums = torch.cat((center, torch.zeros_like(center), center.new_ones(TRAILER_ELEMENTS)))
            inputs = x, slope, at_center, None
            return None, fallback_back_end(config, x, slope).Forward(config).forward_outputs(inputs, sums)[0], None
