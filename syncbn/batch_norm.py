"""Runs one batch norm, of checked arguments: over all ranks in training, by fixed statistics in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import autograd, torch_private
from syncbn.arguments import Arguments
from syncbn.collectives import Ranks
from syncbn.kernels import select_kernels
from syncbn.layout import Layout
from syncbn.moments import Pool


def train(inputs: Sequence[Arguments], ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """The output of each input, and the statistics of all ranks: mean, biased var and n packed as in moments.py.

    One all_reduce for all inputs. The running statistics are not touched: their owner moves them. **Raises** a fault in
    the arguments of any rank on every rank, see `collectives.Ranks.raise_on_all`.
    """
    try:
        for arguments in inputs:
            arguments.check()
            arguments.check_numbers()
    except Exception as error:  # of whatever class a subclass's _check_input_dim raises
        raise_on_all_ranks(error, inputs, ranks)
    return normalize_by_batch(inputs, ranks)


def evaluate(arguments: Arguments) -> Tensor:
    """F.batch_norm, then + z, then relu; of this rank's batch without running statistics. Communicates nothing."""
    arguments.check()
    if arguments.mask is not None and arguments.running_mean is None:  # the statistics of what counts in this batch
        return normalize_by_batch([arguments], Ranks(None))[0][0]
    x, mask, z = arguments.input, None, arguments.z
    if arguments.mask is not None:
        mask = _with_channels(arguments.mask, x, arguments.channel_dim)
        x = torch.where(mask, x, 0)
    mean, var, weight, bias = arguments.per_channel().values()
    if any(given is not None and given.dtype != x.dtype for given in (mean, var, weight, bias)):
        # F.batch_norm takes parameters of the input's dtype, or all in float32 beside a lower one.
        dtype = torch.promote_types(x.dtype, torch.float32)
        mean, var, weight, bias = (None if given is None else given.to(dtype) for given in (mean, var, weight, bias))
    if arguments.channel_dim in (1, 1 - x.ndim):
        y = plain_batch_norm(x, mean, var, weight, bias, mean is None, 0.0, arguments.eps)
    else:
        x = x.contiguous()
        folded = Layout.of(x, arguments.channel_dim).fold(x)
        y = plain_batch_norm(folded, mean, var, weight, bias, mean is None, 0.0, arguments.eps).view_as(x)
    if z is not None:
        y = y + z.to(y.dtype)
    if arguments.relu:
        y = F.relu(y)
    return y if mask is None else torch.where(mask, y, 0)


def normalize_by_batch(inputs: Sequence[Arguments], ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """What `train` gives, of arguments that have been checked."""
    tensors: list[Tensor | None] = []
    layouts, masks = [], []
    for one in inputs:
        x, mask, num_values = one.input, None, None
        if one.mask is not None:
            mask = _with_channels(one.mask, x, one.channel_dim)
            x, num_values = torch.where(mask, x, 0), mask.sum()
        layout = Layout.of(x, one.channel_dim)
        residual = None if one.z is None else layout.dense(one.z.to(x.dtype))
        tensors += [layout.dense(x), one.weight, one.bias, residual, num_values]
        layouts.append(layout)
        masks.append(mask)
    call = autograd.Call(tuple(layouts), inputs[0].eps, inputs[0].relu, ranks)
    results = autograd.apply(call, *tensors)
    # Gradients at False places become 0 here on their way in, and in the other torch.where on their way out.
    ys = [y if mask is None else torch.where(mask, y, 0) for y, mask in zip(results[::2], masks, strict=True)]
    return list(zip(ys, results[1::2], strict=True))


def move_running_stats(
    arguments: Arguments, statistics: Tensor, counter: Tensor | None = None, pool: Pool | None = None
) -> None:
    """Move the running statistics by those of a batch, or give these to the pool, and count the batch.

    Inside a backward, as in activation checkpointing's recompute, nothing moves: it has in the first forward.
    """
    running_mean, running_var = arguments.running_mean, arguments.running_var
    if running_mean is None or running_var is None:
        return
    moves = not torch_private.inside_backward()
    if pool is not None:
        pool.add(statistics, moves)
    else:
        select_kernels(running_mean).update_running_stats(
            running_mean, running_var, statistics, arguments.momentum, moves
        )
    if counter is not None and moves:
        counter.add_(1)


def raise_on_all_ranks(
    error: Exception, inputs: Sequence[Arguments], ranks: Ranks, pass_name: str = "forward"
) -> NoReturn:
    """Raise the fault of this rank's arguments on every rank; here alone where they do not tell how much it sends."""
    num_channels = [one.likely_channels() for one in inputs]
    known = [number for number in num_channels if number is not None]
    if not inputs or len(known) < len(inputs):
        raise error
    num_sums = 2 * sum(known) + len(inputs)
    ranks.raise_on_all(error, num_sums, inputs[0].device(), pass_name)


def plain_batch_norm(
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


def _with_channels(mask: Tensor, input: Tensor, channel_dim: int) -> Tensor:
    """`mask` as a view of the input's shape with one channel."""
    if mask.ndim == 1:
        mask = mask.view(-1, *(1,) * (input.ndim - 2))
    shape = list(input.shape)
    shape[channel_dim] = 1
    return mask.unsqueeze(channel_dim % input.ndim).expand(shape)
