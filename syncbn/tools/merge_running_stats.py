"""Merges the ranks' running statistics, each of a rank's data, into those of all data."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.comm import groups
from syncbn.comm.text_exchange import all_reduce_max
from syncbn.diagnosis.sites import Caller
from syncbn.reductions.eager import reduction_of
from syncbn.reductions.totals import totals
from syncbn.statistics import to_float64
from syncbn.tools.running_stats import agreed_layers, buffers_of, overwrite, unchanged_after_error

_CALLER = Caller("merge_running_stats")


@torch.no_grad()
def merge_running_stats(model: nn.Module, count: float | Mapping[str, float] | None = None) -> None:
    r"""Give all ranks the running statistics of their data together, after training with local BatchNorm.

        n = sum_r n_r        mean = sum_r n_r mean_r / n
        var = (sum_r (n_r - b) var_r + sum_r n_r (mean_r - mean)^2) / (n - b)

    Rank r's running statistics count as those of n_r values. With `count`, which says n_r, b = 1: from unbiased
    variances the unbiased variance of all values, so that after one batch of local BatchNorm with momentum 1 this is
    what the whole batch has. Without, n_r is the number of batches that the layer has seen (num_batches_tracked) and
    b = 0: the variance of the mixture. A rank with n_r = 0 adds nothing; if all are, nothing changes. Chan, Golub &
    LeVeque 1979, http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.

    A collective of all ranks of the default group: two all_reduces for all layers, and an exchange of texts. Afterwards
    the buffers are the same bit by bit on all ranks, num_batches_tracked being the largest. (Moving averages do not
    tell how the ranks' means went apart over time; `recompute_running_stats` computes what synchronised layers would
    have.)

    Args:
        model: the same on all ranks; every BatchNorm with running statistics takes part.
        count: values per channel that this rank's running statistics stand for, of all layers or by the layer's name.

    Raises:
        ValueError: there is no BatchNorm with running statistics; a count is negative or missing; the ranks' models
            differ in their layers. On every rank, before anything is changed.

    After any error all buffers are as before.
    """
    layers = agreed_layers(model, count)
    world = groups.world()
    if world is None:
        return
    b = 0 if count is None else 1
    counts: Mapping[str, float | None] = count if isinstance(count, Mapping) else dict.fromkeys(layers, count)
    sums = [_weighted_sums(layer, counts[name], b) for name, layer in layers.items()]
    sums_of_ranks = totals(sums, reduction_of(None, _CALLER, sums[0].dtype), "all_reduce")
    counters = all_reduce_max(torch.stack([buffers_of(layer)[-1] for layer in layers.values()]), world)
    with unchanged_after_error(layers.values()):
        for layer, total, counter in zip(layers.values(), sums_of_ranks, counters, strict=True):
            (weighted_mean, weighted_square), n = total[:-1].chunk(2), total[-1]
            mean = weighted_mean / n
            var = ((weighted_square - n * mean * mean) / (n - b)).clamp(min=0)
            overwrite(layer, (mean, var, counter), (n > 0, n > b, counter > 0))


def _weighted_sums(layer: _BatchNorm, count: float | None, b: int) -> Tensor:
    """n mean, (n - b) var + n mean^2 and n, float64 (2C + 1,); zeros where n is 0, whatever the buffers hold. Without a
    `count` n is the number of batches."""
    mean, var, n = map(to_float64, buffers_of(layer))
    if count is not None:
        n = torch.as_tensor(count, dtype=torch.float64, device=mean.device)
    sums = torch.cat((n * mean, (n - b) * var + n * mean * mean, n.view(1)))
    return torch.where(n > 0, sums, 0.0)
