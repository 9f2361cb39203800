"""Merges the running statistics that the ranks have each of their own data."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.distributed import groups
from syncbn.distributed.reduction import Caller, reduction_of
from syncbn.distributed.text_exchange import all_reduce_max
from syncbn.tools.running_stats_layers import agreed_layers, running_stats

_CALLER = Caller("merge_running_stats")


@torch.no_grad()
def merge_running_stats(model: nn.Module, count: float | Mapping[str, float] | None = None) -> None:
    r"""Give all ranks the running statistics of their data together, after training with each rank's own BatchNorm.

        n = sum_r n_r        mean = sum_r n_r mean_r / n
        var = (sum_r (n_r - b) var_r + sum_r n_r (mean_r - mean)^2) / (n - b)

    Rank r's running statistics count as those of n_r values. With `count`, which says n_r, b = 1: from unbiased
    variances the unbiased variance of all values, so that after one batch of local BatchNorm with momentum 1 this is
    what the whole batch has. Without, n_r is the number of batches that the layer has seen (num_batches_tracked) and
    b = 0: the variance of the mixture. A rank with n_r = 0 adds nothing; if all are, nothing changes. Chan, Golub &
    LeVeque 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.

    A collective of all ranks of the default group: two all_reduces for all layers, and an exchange of texts. Afterwards
    the buffers are the same bit by bit on all ranks, num_batches_tracked being the largest. (Moving averages do not
    tell how the ranks' means went apart over time; for what synchronised layers would have found, see
    `recompute_running_stats`.)

    Args:
        model: the same on all ranks; every BatchNorm with running statistics takes part.
        count: values per channel that this rank's running statistics stand for, of all layers or by the layer's name.

    Raises:
        ValueError: there is no BatchNorm with running statistics; a count is negative or missing; the ranks' models
            differ in their layers. On every rank, before anything is changed.
    """
    weights: list[float | Tensor] = []

    def prepare(layers: list[_BatchNorm]) -> None:
        weights.extend(_weights(model, layers, count))

    layers = agreed_layers(model, prepare, "" if count is None else ", with count")
    world = groups.world()
    if world is None:
        return
    b = 0 if count is None else 1
    sums = torch.cat([_weighted_sums(layer, n, b) for layer, n in zip(layers, weights, strict=True)])
    reduction = reduction_of(None, _CALLER, sums)
    sizes = [2 * layer.num_features + 1 for layer in layers]
    totals = torch.split(reduction.total(sums, "all_reduce"), sizes)
    counters = torch.stack([_counter(layer) for layer in layers])
    counters = all_reduce_max(counters, world)
    for layer, total, counter in zip(layers, totals, counters, strict=True):
        (weighted_mean, weighted_square), n = total[:-1].chunk(2), total[-1]
        mean = weighted_mean / n
        var = ((weighted_square - n * mean * mean) / (n - b)).clamp(min=0)
        running_mean, running_var = running_stats(layer)
        running_mean.copy_(torch.where(n > 0, mean, running_mean))
        running_var.copy_(torch.where(n > b, var, running_var))
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.copy_(counter)


def _weights(
    model: nn.Module, layers: list[_BatchNorm], count: float | Mapping[str, float] | None
) -> list[float | Tensor]:
    """n_r of each layer."""
    if count is None:
        return [_counter(layer) for layer in layers]
    names = {module: name for name, module in model.named_modules()}
    weights: list[float | Tensor] = []
    for layer in layers:
        name = names[layer]
        if isinstance(count, Mapping) and name not in count:
            raise ValueError(f"count has nothing for the layer {name!r}; it has {sorted(count)}")
        weight = count[name] if isinstance(count, Mapping) else count
        if weight != 0 and not 1 <= weight < math.inf:
            raise ValueError(f"a count of values must be 0, or 1 or more, got {weight} for the layer {name!r}")
        weights.append(weight)
    return weights


def _counter(layer: _BatchNorm) -> Tensor:
    counter = layer.num_batches_tracked  # which checkpoints of long ago lack
    return running_stats(layer)[0].new_ones((), dtype=torch.int64) if counter is None else counter


def _weighted_sums(layer: _BatchNorm, n: float | Tensor, b: int) -> Tensor:
    """n mean, (n - b) var + n mean^2 and n, float64 (2C + 1,); zeros where n is 0, whatever the buffers hold."""
    mean, var = (buffer.double() for buffer in running_stats(layer))
    n = torch.as_tensor(n, dtype=torch.float64, device=mean.device)
    sums = torch.cat((n * mean, (n - b) * var + n * mean * mean, n.view(1)))
    return torch.where(n > 0, sums, 0.0)
