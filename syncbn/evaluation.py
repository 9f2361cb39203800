"""Evaluates: F.batch_norm with the running statistics, then + z, then relu. Communicates nothing."""

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import general
from syncbn.arguments import Options, Tensors, check_eps
from syncbn.checks import check
from syncbn.inputs.unwrapping import apply_mask, unwrap, without_gaps
from syncbn.layout import Layout
from syncbn.reductions.interface import ONE_RANK
from syncbn.statistics import compute_dtype


def evaluate(tensors: Tensors, options: Options, caller: object = None) -> Tensor:
    """y by the running statistics; without them, by those of this rank's batch. `caller` is a layer or None."""
    tensors, options, wrap = unwrap(tensors, options, synchronises=False)
    check(tensors, options, caller)
    is_masked_batch = tensors.mask is not None and tensors.running_mean is None
    tensors, apply_to_output = apply_mask(tensors, options.channel_dim)
    if is_masked_batch:  # it normalises by the values that count in this batch
        check_eps(options.eps, training=True)
        return wrap(apply_to_output(general.normalize(without_gaps(tensors, options), options, ONE_RANK)[0]))
    x, eps = tensors.input, options.eps
    mean, var, weight, bias = tensors.per_channel().values()
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in (mean, var, weight, bias)):
        # F.batch_norm takes parameters of the input's dtype, or all in float32 beside a lower one.
        dtype = compute_dtype(x.dtype)
        mean, var, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (mean, var, weight, bias))
    if options.channel_dim in (1, 1 - x.ndim):
        y = plain_batch_norm(x, mean, var, weight, bias, mean is None, 0.0, eps)
    else:
        x = x.contiguous()
        folded = Layout.of(x, options.channel_dim).fold(x)
        y = plain_batch_norm(folded, mean, var, weight, bias, mean is None, 0.0, eps).view_as(x)
    if tensors.z is not None:
        y = y + tensors.z.to(y.dtype)
    if options.relu:
        y = F.relu(y)
    return wrap(apply_to_output(y))


def plain_batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, training: bool, momentum: float, eps: float,
) -> Tensor:  # fmt: skip
    """torch.batch_norm, as F.batch_norm is replaced within converted layers; eps is checked as there."""
    check_eps(eps, training)
    if input.shape[1] == 0:  # this rank may have no channels of a DTensor; torch refuses that
        return input.clone()
    if training and input.numel() == input.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled
    )
