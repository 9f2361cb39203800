"""Calls F.batch_norm: in evaluation, which never communicates, and in training on one rank without kernels.

Evaluation with a mask and without running statistics is the exception: F.batch_norm cannot leave values out of the
statistics, so `evaluate` computes it as a training step over one rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn.arguments import Options, Tensors, check, check_eps, require_float64
from syncbn.dispatched import normalize
from syncbn.inputs import apply_mask, make_dense, unwrap
from syncbn.kernels.layout import Layout
from syncbn.ranks.calls import ONE_RANK
from syncbn.statistics import compute_dtype, pack, supports_float64, update_buffers


def evaluate(tensors: Tensors, options: Options, caller: object = None) -> Tensor:
    """Return y, normalised with the running statistics or, if there are none, with the statistics of this rank's batch.
    `caller` is a layer or None."""
    tensors, options, wrap = unwrap(tensors, options)
    check(tensors, options, caller)
    is_masked_batch = tensors.mask is not None and tensors.running_mean is None
    tensors, wrap = apply_mask(tensors, options.channel_dim, wrap)
    if is_masked_batch:
        check_eps(options.eps, training=True)
        require_float64(tensors.input)
        return wrap(normalize(make_dense(tensors, options.channel_dim), options, ONE_RANK)[0])
    return wrap(batch_norm(tensors, options, training=tensors.running_mean is None))


def train_one_rank(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output of F.batch_norm, and the statistics of this rank's batch, packed as in statistics.py. Update
    the running statistics. The arguments have been checked and have no mask."""
    x = tensors.input
    # With a momentum of 1, F.batch_norm stores the mean and the unbiased variance of the batch in these tensors.
    mean, var = (x.new_zeros(x.shape[options.channel_dim], dtype=compute_dtype(x.dtype)) for _ in range(2))
    y = batch_norm(tensors._replace(running_mean=mean, running_var=var), options, training=True)
    if supports_float64(x.device):  # In float32, `to_sums` would lose a variance that is small compared with mean^2.
        mean, var = mean.to(torch.float64), var.to(torch.float64)
    n = mean.new_full((1,), x.numel() // max(1, len(mean)))
    var = var * ((n - 1) / n.clamp(min=1))
    statistics = pack(mean, var, (var + options.eps).rsqrt(), n)
    update_buffers(tensors.running_mean, tensors.running_var, tensors.counter, statistics, options.momentum)
    return y, statistics


def batch_norm(tensors: Tensors, options: Options, training: bool) -> Tensor:
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
