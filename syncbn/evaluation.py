"""Normalises by F.batch_norm, then adds z, then applies relu: in evaluation, and where one rank trains on the general
road. Communicates nothing."""

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import general
from syncbn.arguments import Options, Tensors, check, check_eps
from syncbn.inputs import apply_mask, unwrap, without_gaps
from syncbn.layout import Layout
from syncbn.ranks.reduction import ONE_RANK
from syncbn.statistics import compute_dtype, has_float64, pack


def evaluate(tensors: Tensors, options: Options, caller: object = None) -> Tensor:
    """y by the running statistics; without them, by those of this rank's batch. `caller` is a layer or None."""
    tensors, options, wrap = unwrap(tensors, options)
    check(tensors, options, caller)
    is_masked_batch = tensors.mask is not None and tensors.running_mean is None
    tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
    if is_masked_batch:  # it normalises by the values that count in this batch
        check_eps(options.eps, training=True)
        return wrap(apply_to_output(general.normalize(without_gaps(tensors, options), options, ONE_RANK)[0]))
    mean, var = tensors.running_mean, tensors.running_var
    return wrap(apply_to_output(_by_torch(tensors, options, mean, var, training=mean is None)))


def train_alone(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return y by F.batch_norm, and the statistics of this rank's batch, packed as in statistics.py. The arguments have
    been checked, and there is no mask."""
    x = tensors.input
    # With a momentum of 1, F.batch_norm replaces these running statistics by those of the batch.
    mean, var = (x.new_zeros(x.shape[options.channel_dim], dtype=compute_dtype(x.dtype)) for _ in range(2))
    y = _by_torch(tensors, options, mean, var, training=True)
    if has_float64(x.device):  # `to_sums` in float32 would lose the variance beside a large mean.
        mean, var = mean.to(torch.float64), var.to(torch.float64)
    n = mean.new_full((1,), x.numel() // max(1, len(mean)))
    var = var * ((n - 1) / n.clamp(min=1))
    return y, pack(mean, var, (var + options.eps).rsqrt(), n)


def _by_torch(tensors: Tensors, options: Options, mean: Tensor | None, var: Tensor | None, training: bool) -> Tensor:
    """Return y by these running statistics or, in training, by those of the batch."""
    x, eps, weight, bias = tensors.input, options.eps, tensors.weight, tensors.bias
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in (mean, var, weight, bias)):
        # F.batch_norm takes parameters of the input's dtype, or all in float32 beside a lower one.
        dtype = compute_dtype(x.dtype)
        mean, var, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (mean, var, weight, bias))
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
    bias: Tensor | None, training: bool, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """torch.batch_norm, as F.batch_norm is replaced within converted layers; eps is checked as there."""
    check_eps(eps, training)
    if training and input.numel() == input.shape[1] > 0:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
    )
