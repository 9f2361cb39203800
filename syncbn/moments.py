"""Channel mathematics in float64: sums -> mean, variance -> running statistics. Knows no ranks, no layout.

C channels, n values of a channel over all ranks; S = sum x and Q = sum x^2 of a channel. Packed are
    sums        (2C + 1,)  S, Q, n
    statistics  (2C + 1,)  mean, biased var, n
Everything here has that many elements at most, so its cost does not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def from_sums(sums: Tensor) -> Tensor:
    """The statistics: mean = S / n and var = max(0, Q / n - mean^2).

    n = 0 gives mean 0 and var 0. The clamp removes the negative rounding residue of constant channels and lets NaN
    through.
    """
    num_values = sums[-1:]
    mean, mean_square = (sums[:-1] / num_values.clamp(min=1)).chunk(2)
    return torch.cat((mean, (mean_square - mean * mean).clamp(min=0), num_values))


def to_sums(statistics: Tensor) -> Tensor:
    """The sums again, which can be added up."""
    (mean, var), num_values = statistics[:-1].chunk(2), statistics[-1:]
    return torch.cat((mean * num_values, (var + mean * mean) * num_values, num_values))


def unpack(statistics: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """mean (C,), invstd = 1 / sqrt(var + eps) (C,) and n ()."""
    mean, var = statistics[:-1].chunk(2)
    return mean, inverse_std(var, eps), statistics[-1]


def inverse_std(var: Tensor, eps: float) -> Tensor:
    """1 / sqrt(var + eps)."""
    return (var + eps).rsqrt()


@torch.no_grad()
def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    """running = (1 - momentum) * running + momentum * statistic, in place, rounded once to the buffer's own dtype.

    running_var takes the unbiased variance, var * n / (n - 1). No values at all (n = 0) change nothing, one value per
    channel (n = 1) leaves running_var as it is: both without reading n on the host. With `moves` False nothing changes
    although the same operators run, whose results selective checkpointing finds by counting.
    """
    (mean, var), num_values = statistics[:-1].chunk(2), statistics[-1]
    unbiased_var = var * (num_values / (num_values - 1).clamp(min=1))
    for running, statistic, enough in (
        (running_mean, mean, num_values > 0),
        (running_var, unbiased_var, num_values > 1),
    ):
        moved = (1 - momentum) * running.to(torch.float64) + momentum * statistic
        moved = torch.where(enough, moved, running)
        if moves:
            running.copy_(moved)
