"""functional.batch_norm_backward: the closed form of the gradient, for a backward that is written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syncbn import arguments, autograd, callers, collectives, groups, kernels
from syncbn.layout import dense, laid_out_as

if TYPE_CHECKING:
    from syncbn.groups import ProcessGroupLike


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

    One all_reduce of 8 * (2C + 1) bytes in training (mean_dy, mean_dy_xmu and n together), on CPU 24 more, none with
    one rank or no process group. With `training=False` the statistics are constants: grad_input = dy * invstd * weight,
    and nothing is communicated.

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
        ValueError, TypeError: a bad argument; on CPU in eager mode on every rank, as in `sync_batch_norm`, when mean
            gives C.
    """
    group = groups.resolve(groups.specification(process_group)) if training else None
    caller = callers.new_call("batch_norm_backward", group, input)
    try:
        needs_input, needs_weight, needs_bias = output_mask
        arguments.check_input(input, channel_dim, None)
        arguments.check_like_input("grad_output", grad_output, input)
        for name, given in (("mean", mean), ("invstd", invstd)):
            if given is None:
                raise TypeError(f"expected {name} to be a Tensor of shape ({input.shape[channel_dim]},), got None")
        arguments.check_channels(input, channel_dim, None, {"mean": mean, "invstd": invstd, "weight": weight})
    except (TypeError, ValueError) as error:
        num_channels = arguments.likely_channels(input, channel_dim, mean, invstd, weight)
        if num_channels is None:
            raise
        device = arguments.device_of(mean, invstd, weight, input)
        collectives.raise_on_all_ranks(error, num_channels, device, group, caller)

    channel_dim %= input.ndim
    with torch.no_grad():
        x = dense(input, channel_dim)
        dy = laid_out_as(x, grad_output.to(x.dtype), channel_dim)
        mean, invstd = mean.to(torch.float64), invstd.to(torch.float64)
        num_values = mean.new_full((1,), x.numel() // max(len(mean), 1))
        statistics = torch.cat((mean, invstd.square().reciprocal(), num_values))  # var, beside an eps of 0
        served = kernels.serving(x)
        dtype = autograd.compute_dtype(input) if weight is None else weight.dtype
        sums, grad_weight, grad_bias = served.gradient_sums(
            dy, x, None, channel_dim, statistics, 0.0, dtype if needs_weight else None, dtype if needs_bias else None
        )
        grad_input = None
        if training:
            packed = collectives.all_reduce_counted_sums(torch.cat((sums, num_values)), group, caller)
            if needs_input:
                statistics[-1:] = packed[-1:]
                grad_input, _ = served.input_gradient(
                    dy, x, None, channel_dim, statistics, 0.0, weight, packed[:-1], of_residual=False
                )
        elif needs_input:
            scale = invstd if weight is None else invstd * weight
            inner_dims = (1,) * (input.ndim - channel_dim - 1)
            grad_input = dy * scale.to(autograd.compute_dtype(input)).view(-1, *inner_dims)
            grad_input = grad_input.to(input.dtype)
    return grad_input, grad_weight, grad_bias
