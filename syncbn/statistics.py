"""Computes per-channel values in float64: sums -> mean, variance -> running statistics.

C channels, n values of a channel over all ranks; S = sum x and Q = sum x^2 of a channel. Packed are
    sums          (2C + 1,)  S, Q, n
    statistics    (3C + 1,)  mean, biased var, invstd = 1 / sqrt(var + eps), n
                  (5C + 1,)  of a relu without residual: then scale and shift, see kernels/reference.py
All tensors here have that size, so the cost does not depend on the batch. Knows no ranks, no layout.
"""

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which maps compute values of this dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def from_sums(sums: Tensor, eps: float) -> Tensor:
    """The statistics: mean = S / n and var = max(0, Q / n - mean^2).

    n = 0 gives mean 0 and var 0. The clamp removes the negative rounding residue of constant channels and lets NaN
    through.
    """
    num_values = sums[-1:]
    mean, mean_square = (sums[:-1] / num_values.clamp(min=1)).chunk(2)
    var = (mean_square - mean * mean).clamp(min=0)
    return torch.cat((mean, var, (var + eps).rsqrt(), num_values))


def to_sums(statistics: Tensor, num_channels: int) -> Tensor:
    """The sums from which from_sums made these statistics; sums can be added up."""
    mean, var, _, num_values = unpack(statistics, num_channels)
    return torch.cat((mean * num_values, (var + mean * mean) * num_values, num_values))


def unpack(statistics: Tensor, num_channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mean, var and invstd (C,), and n (1,)."""
    of_channels, num_values = statistics[: 3 * num_channels], statistics[3 * num_channels : 3 * num_channels + 1]
    return *of_channels.chunk(3), num_values  # type: ignore[return-value]


def num_statistics(num_channels: int, relu: bool) -> int:
    """How many numbers are packed; `relu`: with the scale and shift of a relu without residual."""
    return (5 if relu else 3) * num_channels + 1


def has_scale_and_shift(statistics: Tensor, num_channels: int) -> bool:
    """Whether scale and shift follow."""
    return statistics.numel() == num_statistics(num_channels, relu=True) > 1


def unbiased(statistics: Tensor, num_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """mean (C,), the unbiased variance var * n / (n - 1) (C,), which is meaningless for n <= 1, and n (1,)."""
    mean, var, _, num_values = unpack(statistics, num_channels)
    return mean, var * (num_values / (num_values - 1).clamp(min=1)), num_values


@torch.no_grad()
def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    """running = (1 - momentum) * running + momentum * statistic, in place, rounded once to the buffer's own dtype.

    running_var takes the unbiased variance, var * n / (n - 1). With n = 0 values nothing changes, with n = 1
    running_var stays; the host does not read n. With `moves` False nothing changes, but the same operators run, because
    selective checkpointing finds their results by counting.
    """
    mean, var, num_values = unbiased(statistics.detach(), len(running_mean))  # no_grad leaves tangents
    for running, statistic, enough in ((running_mean, mean, num_values > 0), (running_var, var, num_values > 1)):
        moved = (1 - momentum) * running.to(torch.float64) + momentum * statistic
        moved = torch.where(enough, moved, running)
        if moves:
            running.copy_(moved)


class Pool:
    """Collects the statistics of all batches of a layer: their sums, and the number of forwards."""

    def __init__(self, num_channels: int, device: torch.device) -> None:
        self.packed = torch.zeros(2 * num_channels + 2, dtype=torch.float64, device=device)
        self.is_empty = True

    def add(self, statistics: Tensor, moves: bool) -> None:
        """Adds the statistics of a batch. In a recompute (`moves` False) it does not: the first forward did."""
        packed = torch.cat((to_sums(statistics.detach(), len(self.packed) // 2 - 1), statistics.new_ones(1)))
        if moves:
            self.packed += packed
            self.is_empty = False

    def statistics(self) -> Tensor:
        """mean, biased var and n of all batches, packed as the statistics of one batch."""
        return from_sums(self.packed[:-1], eps=1.0)  # invstd is unused
