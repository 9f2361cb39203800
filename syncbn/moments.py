"""Channel mathematics in float64: sums -> mean, variance -> running statistics. Knows no ranks, no layout.

C channels, n values of a channel over all ranks. Everything here has C elements or one, so its cost does not depend on
the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from syncbn import kernels


class Moments(NamedTuple):
    """Statistics of the whole batch, float64."""

    mean: Tensor  # (C,)
    var: Tensor  # (C,) biased
    invstd: Tensor  # (C,) 1 / sqrt(var + eps)
    num_values: Tensor  # () n, values per channel


def from_sums(sums: Tensor, eps: float) -> Moments:
    """mean = S / n and var = max(0, Q / n - mean^2) of the packed sums (S, Q, n), shape (2C + 1,).

    n = 0 gives mean 0 and var 0. The clamp removes the negative rounding residue of constant channels and lets NaN
    through.
    """
    num_values = sums[-1]
    if kernels.serving(sums) is kernels.cpu:
        mean, var, invstd = kernels.cpu.moments(sums, eps)
        return Moments(mean, var, invstd, num_values)
    num_channels = sums.numel() // 2
    sums_per_value = sums[:-1] / num_values.clamp(min=1)
    mean, mean_square = sums_per_value[:num_channels], sums_per_value[num_channels:]
    var = (mean_square - mean * mean).clamp(min=0)
    return Moments(mean, var, inverse_std(var, eps), num_values)


def inverse_std(var: Tensor, eps: float) -> Tensor:
    """1 / sqrt(var + eps)."""
    return (var + eps).rsqrt()


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, moments: Moments, momentum: float | Tensor, moves: bool
) -> None:
    """running = (1 - momentum) * running + momentum * statistic, in place, rounded once to the buffer's own dtype.

    running_var takes the unbiased variance, var * n / (n - 1). No values at all (n = 0) change nothing, one value per
    channel (n = 1) leaves running_var as it is: both without reading n on the host. With `moves` False nothing changes
    although the same operators run, whose results selective checkpointing finds by counting.
    """
    mean, var, _, num_values = moments
    if kernels.serving(running_mean) is kernels.cpu and not isinstance(momentum, Tensor):
        if moves:  # one operator, which has no result to save
            kernels.cpu.update_running_stats(running_mean, running_var, mean, var, num_values, momentum)
        return
    unbiased_var = var * (num_values / (num_values - 1).clamp(min=1))
    for running, statistic, enough in (
        (running_mean, mean, num_values > 0),
        (running_var, unbiased_var, num_values > 1),
    ):
        with torch.no_grad():
            moved = (1 - momentum) * running.to(torch.float64) + momentum * statistic
            moved = torch.where(enough, moved, running)
            if moves:
                running.copy_(moved)
