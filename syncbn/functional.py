"""The functional forms, and the border where a fault in one rank's arguments is raised on all (see collectives.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from syncbn import arguments, autograd, callers, collectives, groups, kernels, many, moments
from syncbn.backward import batch_norm_backward
from syncbn.layout import Layout, dense, laid_out_as

if TYPE_CHECKING:
    from syncbn.groups import ProcessGroupLike

__all__ = ["batch_norm_backward", "sync_batch_norm", "sync_batch_norm_many"]

# What running_stats.py does with a batch's statistics (and the running mean that they are for, and whether it is to
# move) in place of moving the running statistics. Returns whether it has.
collect: Callable[[Tensor, Tensor, bool], bool] | None = None


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

    One all_reduce of 8 * (2C + 1) bytes in forward and one of 16 * C bytes in backward (on CPU 8 * (2C + 4) bytes each,
    by which the ranks see that they are in the same layer); none with one rank or no process group. Every rank of the
    group must make the same calls in the same order. The gradients of weight and bias are this rank's share; their sum
    over the ranks is the full batch's (DistributedDataParallel averages them).

    Args:
        input: (N, C, ...) or, with `channel_dim=-1`, (N, ..., C); 2 or more dims; float16, bfloat16, float32 or
            float64. N and the other sizes but C may differ between ranks, and be 0. While weight or bias requires grad,
            `requires_grad` of the input may differ too; when neither does, and for second derivatives, it must agree on
            all ranks, else backward waits for a rank that never comes.
        running_mean, running_var: (C,), any float dtype, both or neither. An all-empty batch leaves them as they are.
        weight, bias: (C,), any float dtype, each optional.
        training: synchronise, and normalise by the statistics of this batch.
        momentum: weight of this batch's statistics, a number or a 0-d tensor.
        eps: added to the variance, > 0.
        process_group: None (the default group), a ProcessGroup, an int (consecutive ranks per group), "node" or a 1-D
            DeviceMesh.
        channel_dim: the dim of the channels; negative counts from the right.
        z: residual of the input's shape, added before the relu; another float dtype is first converted to the input's.
        fuse_relu: apply relu last.
        mask: bool, which values of the input count: (N,), or the input's shape without the channels' dim, where sizes
            of 1 stand for all. The others enter no sum, whatever they hold; outputs and gradients there are 0.

    Returns:
        Tensor of the input's shape, dtype and memory format.

    In a forward that runs inside a backward, as activation checkpointing's recompute does, the running statistics do
    not move: they did in the first.

    Raises:
        RuntimeError: in eager mode, when the all_reduce fails or times out, with where every rank is: in which layer,
            pass and call. On CPU also when ranks in different layers have met.
        ValueError, TypeError: a bad argument, before any buffer is changed. On CPU in eager mode a fault of any rank is
            raised on every rank with the faulty ranks' numbers, as long as most of running_mean, running_var, weight,
            bias and the input agree on C (without a per-channel argument the faulty rank raises alone). One value per
            channel in the whole group is a ValueError too, on every rank; on a GPU and in compiled graphs it leaves
            running_var as it is.

    >>> x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])  # (N, C) on the only rank
    >>> sync_batch_norm(x, None, None, training=True)
    tensor([[-1.0000, -1.0000],
            [ 1.0000,  1.0000]])
    """
    if training:
        group = groups.resolve(groups.specification(process_group))
        return train(
            input,
            running_mean,
            running_var,
            weight,
            bias,
            momentum,
            eps,
            group,
            channel_dim,
            z,
            fuse_relu,
            mask,
            num_channels=None,
        )
    arguments.require_running_stats(running_mean, running_var)
    return evaluate(input, running_mean, running_var, weight, bias, eps, channel_dim, z, fuse_relu, mask, None)


def sync_batch_norm_many(
    inputs: Iterable[Tensor],
    running_means: Iterable[Tensor | None] | None = None,
    running_vars: Iterable[Tensor | None] | None = None,
    weights: Iterable[Tensor | None] | None = None,
    biases: Iterable[Tensor | None] | None = None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    process_group: ProcessGroupLike = None,
    *,
    channel_dim: int = 1,
) -> list[Tensor]:
    r"""`sync_batch_norm` of each of k independent inputs, with one all_reduce for all of them each way.

    For detection heads over several pyramid levels, siamese views and the like: equal to k calls, each input with
    statistics, buffers and parameters of its own. The all_reduces carry the sum of k calls' bytes: latency is what is
    saved. None in evaluation, with one rank or no process group. Every rank must pass as many inputs.

    Args:
        inputs: k tensors as `sync_batch_norm` takes them, on one device; their shapes and channels may differ.
        running_means, running_vars, weights, biases: k tensors (C,) or None each; None for none at all.
        training, momentum, eps, process_group, channel_dim: as in `sync_batch_norm`, for all inputs.

    Returns:
        k tensors of the inputs' shapes, dtypes and memory formats.

    Raises:
        ValueError, TypeError: as `sync_batch_norm`, with the index of the input. (A number of inputs that differs
            between ranks cannot be told: gloo aborts.)

    >>> levels = [torch.tensor([[1.0], [3.0]]), torch.tensor([[10.0, 0.0], [30.0, 0.0]])]
    >>> sync_batch_norm_many(levels)[1]
    tensor([[-1.0000,  0.0000],
            [ 1.0000,  0.0000]])
    """
    given = {"running_means": running_means, "running_vars": running_vars, "weights": weights, "biases": biases}
    inputs = arguments.as_list("inputs", inputs)
    roles = {name: [None] * len(inputs) if one is None else arguments.as_list(name, one) for name, one in given.items()}
    group = groups.resolve(groups.specification(process_group)) if training else None
    caller = callers.new_call("sync_batch_norm_many", group, inputs[0] if inputs else None)
    faulty, at_fault = None, ""
    try:
        for name, role in roles.items():
            if len(role) != len(inputs):
                raise ValueError(f"expected {len(inputs)} {name}, one for each input, got {len(role)}")
        for index, (x, mean, var, weight, bias) in enumerate(zip(inputs, *roles.values(), strict=True)):
            faulty, at_fault = index, f"inputs[{index}]: "
            arguments.check_all(x, mean, var, weight, bias, channel_dim, None, None, None, None)
            if x.device != inputs[0].device:
                raise ValueError(f"the input is on {x.device} but inputs[0] on {inputs[0].device}; move one")
            if not training:
                arguments.require_running_stats(mean, var)
        faulty, at_fault = None, ""
        arguments.check_momentum(momentum)
        arguments.check_eps(eps)
    except (TypeError, ValueError) as fault:
        error = type(fault)(at_fault + str(fault))
        channels = []
        for index, (x, *per_channel) in enumerate(itertools.zip_longest(inputs, *roles.values())):
            likely = arguments.likely_channels(x, channel_dim, *per_channel)
            channels.append(arguments.channels_of(x, channel_dim) if likely is None and index != faulty else likely)
        known = [num for num in channels[: len(inputs)] if num is not None]
        if not training or len(known) < len(inputs):
            raise error from fault
        device = arguments.device_of(*itertools.chain(*roles.values()), *inputs)
        collectives.raise_on_all_ranks(error, sum(known), device, group, caller, len(inputs))

    if not inputs:
        return []
    means, variances, scales, shifts = roles.values()
    if not training:
        of_inputs = zip(inputs, means, variances, scales, shifts, strict=True)
        return [sync_batch_norm(*of_input, eps=eps, channel_dim=channel_dim) for of_input in of_inputs]
    xs = [dense(x, channel_dim % x.ndim) for x in inputs]
    apply: Callable[..., tuple[Tensor, ...]] = many.SyncBatchNormManyFunction.apply
    if torch.compiler.is_compiling() and not _builds_graph(*inputs, *scales, *shifts):
        # Without gradients Dynamo (torch 2.13) hands a forward with *args a context, which it does not take.
        apply = many.SyncBatchNormManyFunction.forward
    output = apply(channel_dim, eps, group, caller, len(inputs), *xs, *scales, *shifts)
    ys, statistics = many.by_role(output, len(inputs))
    for of_input in zip(means, variances, statistics, strict=True):
        _move_running_stats(*of_input, momentum)
    return list(ys)


def train(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | Tensor,
    eps: float,
    group: dist.ProcessGroup | None,
    channel_dim: int,
    z: Tensor | None,
    fuse_relu: bool,
    mask: Tensor | None,
    num_channels: int | None,
    check_input_dim: Callable[[Tensor], Any] | None = None,
    layer: nn.Module | None = None,
) -> Tensor:
    """`sync_batch_norm` in training, over a resolved group; None synchronises nothing.

    `num_channels` is the layer's, None when only the arguments tell; `check_input_dim` is torch's check of a numbered
    layer.
    """
    caller = callers.new_call("sync_batch_norm" if layer is None else layer, group, input)
    try:
        arguments.check_all(
            input, running_mean, running_var, weight, bias, channel_dim, z, mask, num_channels, check_input_dim
        )
        arguments.check_momentum(momentum)
        arguments.check_eps(eps)
    except Exception as error:  # of whatever class a subclass's _check_input_dim raises
        if num_channels is None:
            num_channels = arguments.likely_channels(input, channel_dim, running_mean, running_var, weight, bias)
        if num_channels is None:
            raise
        device = arguments.device_of(running_mean, running_var, weight, bias, input)
        collectives.raise_on_all_ranks(error, num_channels, device, group, caller)

    channel_dim %= input.ndim
    x, num_values = input, None
    if mask is not None:
        mask, num_values = _with_channels(mask, input, channel_dim)
        x = torch.where(mask, input, 0)
    x = dense(x, channel_dim)
    residual = None if z is None else laid_out_as(x, z.to(input.dtype), channel_dim)
    y, statistics = autograd.apply(x, weight, bias, residual, num_values, channel_dim, eps, fuse_relu, group, caller)
    _move_running_stats(running_mean, running_var, statistics, momentum)
    # Gradients at False places become 0 here on their way in, and in the other torch.where on their way out.
    return y if mask is None else torch.where(mask, y, 0)


def _builds_graph(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _move_running_stats(
    running_mean: Tensor | None, running_var: Tensor | None, statistics: Tensor, momentum: float | Tensor
) -> None:
    if running_mean is None or running_var is None:
        return
    moves, served = not inside_backward(), kernels.serving(running_mean)
    if collect is not None and collect(running_mean, statistics, moves):
        return
    if served is kernels.reference or isinstance(momentum, Tensor):
        moments.update_running_stats(running_mean, running_var, statistics, momentum, moves)
    elif moves:  # one operator, which has no result to save
        served.update_running_stats(running_mean, running_var, statistics, momentum)


def inside_backward() -> bool:
    """Whether this is called during a backward, as by the recompute of activation checkpointing.

    In a compiled graph that is never so: it recomputes values, not the writes to buffers.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def local_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """F.batch_norm, which is not called by that name because subclasses.py makes it mean that of all ranks."""
    if training and input.numel() == input.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
    )


def evaluate(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    channel_dim: int,
    z: Tensor | None,
    fuse_relu: bool,
    mask: Tensor | None,
    num_channels: int | None,
    check_input_dim: Callable[[Tensor], Any] | None = None,
) -> Tensor:
    """F.batch_norm, then + z, then relu; of this rank's batch without running statistics. Communicates nothing."""
    arguments.check_all(
        input, running_mean, running_var, weight, bias, channel_dim, z, mask, num_channels, check_input_dim
    )
    if mask is not None and running_mean is None:  # the statistics of what counts in this rank's batch
        return train(input, None, None, weight, bias, 0.0, eps, None, channel_dim, z, fuse_relu, mask, num_channels)
    channel_dim %= input.ndim
    x = input
    if mask is not None:
        mask, _ = _with_channels(mask, input, channel_dim)
        x = torch.where(mask, input, 0)
    per_channel = (running_mean, running_var, weight, bias)
    if any(given is not None and given.dtype != input.dtype for given in per_channel):
        # F.batch_norm takes parameters of the input's dtype, or all in float32 beside a lower one.
        dtype = autograd.compute_dtype(input)
        running_mean, running_var, weight, bias = (None if given is None else given.to(dtype) for given in per_channel)
    if channel_dim != 1:
        x = x.contiguous()
        x = Layout.of(x, channel_dim).fold(x)
    y = local_batch_norm(x, running_mean, running_var, weight, bias, running_mean is None, 0.0, eps)
    if channel_dim != 1:
        y = y.view_as(input)
    if z is not None:
        y = y + z.to(input.dtype)
    if fuse_relu:
        y = F.relu(y)
    return y if mask is None else torch.where(mask, y, 0)


def _with_channels(mask: Tensor, input: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
    """`mask` as a view of the input's shape with one channel, and how many values it counts: int64 ()."""
    if mask.ndim == 1:
        mask = mask.view(-1, *(1,) * (input.ndim - 2))
    shape = list(input.shape)
    shape[channel_dim] = 1
    mask = mask.unsqueeze(channel_dim).expand(shape)
    return mask, mask.sum()
