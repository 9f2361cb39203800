"""The figures of measure_local_noise, written out in float64 for tests."""

import torch
from torch import Tensor


def figures_by_hand(calls: list[list[Tensor]], eps: float = 1e-5) -> list[float]:
    """Of calls with a part (n, C, ...) for each rank: values of a rank and of the group; the deviations of means, of
    variances and of outputs."""
    rows = []
    for call in calls:
        parts = [part.movedim(1, -1).flatten(0, -2) for part in call]
        whole = torch.cat(parts)
        n, mean, var = len(whole), whole.mean(0), whole.var(0, correction=0)
        for x in parts:
            own_mean, own_var = x.mean(0), x.var(0, correction=0)
            off = (x - own_mean) / (own_var + eps).sqrt() - (x - mean) / (var + eps).sqrt()
            squares = (own_mean - mean).square() / var, (own_var / var - 1).square(), off.square().mean(0)
            rows.append(torch.stack([torch.full_like(mean, len(x)), torch.full_like(mean, n), *squares]))
    means = torch.cat(rows, 1).mean(1)
    return [*means[:2].tolist(), *means[2:].sqrt().tolist()]
