"""The figures of measure_local_noise, written out in float64 for tests."""

import math

import torch
from torch import Tensor


def figures_by_hand(calls: list[list[Tensor]], eps: float = 1e-5) -> list[float]:
    """Of calls with a part (n, C, ...) for each rank: values of a rank and of the group; the deviations of means,
    measured and predicted, of variances, measured and predicted, and of outputs."""
    rows = []
    for call in calls:
        parts = [part.movedim(1, -1).flatten(0, -2) for part in call]
        whole = torch.cat(parts)
        n, mean, var = len(whole), whole.mean(0), whole.var(0, correction=0)
        for x in parts:
            k, own_mean, own_var = len(x), x.mean(0), x.var(0, correction=0)
            off = (x - own_mean) / (own_var + eps).sqrt() - (x - mean) / (var + eps).sqrt()
            predicted_mean = (n - k) / k / (n - 1)
            predicted_var = (n / k) ** 2 * (k**2 - 1) / (n**2 - 1) - 2 * (n / k) * (k - 1) / (n - 1) + 1
            squares = (own_mean - mean).square() / var, predicted_mean, (own_var / var - 1).square(), predicted_var
            rows.append(torch.stack([mean * 0 + one for one in (k, n, *squares, off.square().mean(0))]))
    means = torch.cat(rows, 1).mean(1).tolist()
    return [*means[:2], *map(math.sqrt, means[2:])]
