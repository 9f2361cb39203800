"""Runs batch norm in evaluation, by the running statistics, else by this rank's batch. Communicates nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import autograd, masks, other_tensors
from syncbn.arguments import Arguments
from syncbn.distributed.collectives import Ranks
from syncbn.layout import Layout
from syncbn.moments import compute_dtype


def evaluate(arguments: Arguments) -> Tensor:
    """F.batch_norm, then + z, then relu; of this rank's batch without running statistics. Communicates nothing."""
    if type(arguments.input) is Tensor:
        return _evaluate(arguments)
    arguments.process_group = None  # which is not asked
    arguments, wrap = other_tensors.unwrap(arguments)
    return wrap(_evaluate(arguments))


def _evaluate(arguments: Arguments) -> Tensor:
    try:
        arguments.check()
    except (TypeError, ValueError) as error:
        raise type(error)(f"{arguments.name}{error}") from error
    if arguments.mask is not None and arguments.running_mean is None:  # the statistics of what counts in this batch
        [(y, _)] = autograd.normalize([arguments.prepare()], arguments.eps, arguments.relu, Ranks(None))
        return y
    x, mask, z = arguments.input, arguments.mask, arguments.z
    if mask is not None:
        x, mask = masks.apply(mask, x, arguments.channel_dim)
    mean, var, weight, bias = arguments.per_channel().values()
    if any(given is not None and given.dtype != x.dtype for given in (mean, var, weight, bias)):
        # F.batch_norm takes parameters of the input's dtype, or all in float32 beside a lower one.
        dtype = compute_dtype(x.dtype)
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
    if input.shape[1] == 0:  # this rank's share of a DTensor may have no channels, for which torch has no batch norm
        return input.clone()
    if training and input.numel() == input.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
    )
