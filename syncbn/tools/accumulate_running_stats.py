"""Moves the running statistics once for several micro-batches, as if they were one batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from weakref import WeakSet

import torch
from torch import Tensor, nn

from syncbn import moments, step
from syncbn.arguments import Arguments
from syncbn.layer import SyncBatchNorm
from syncbn.moments import Pool
from syncbn.tools.replaced_method import replaced
from syncbn.tools.running_stats_layers import layers_with_running_stats, running_stats
from syncbn.torch_state import current_backward, refuse_graph


@contextlib.contextmanager
def accumulate_running_stats(model: nn.Module) -> Iterator[None]:
    """Within, the running statistics take all batches as one, in gradient accumulation: k micro-batches x W ranks.

        optimizer.zero_grad()
        with syncbn.accumulate_running_stats(model):
            for images, labels in micro_batches:
                (criterion(model(images), labels) / len(micro_batches)).backward()
        optimizer.step()

    Normalisation is that of each micro-batch, as its gradients go back before the next comes. At the end of the block
    running = (1 - momentum) * running + momentum * statistic happens once, with mean and unbiased variance of all
    values that the layer has seen in the block on all ranks of its group, and num_batches_tracked counts 1. The
    micro-batches may differ in size, between ranks too. Issues no collective of its own.

    Args:
        model: whose synchronised layers are meant; those in evaluation mode, and those without running statistics, are
            left alone.

    Raises:
        ValueError: there is no synchronised layer, or one is lazy still.
        RuntimeError: inside another such block; torch.compile with fullgraph=True. (Other compiled modules break their
            graphs at the layers inside the block.)

    After an exception in the block running statistics and counters are what they were before it.
    """
    layers = layers_with_running_stats(model, SyncBatchNorm)
    if not layers:
        raise ValueError("no synchronised layer with running statistics: call syncbn.convert_syncbn_model(model)")
    with collecting(layers) as pools:
        yield
    with torch.no_grad():
        for layer, pool in pools.items():
            if pool.is_empty:
                continue
            counter = layer.num_batches_tracked
            assert counter is not None
            counter += 1
            momentum = 1.0 / counter.to(torch.float64) if layer.momentum is None else layer.momentum
            moments.update_running_stats(*running_stats(layer), pool.statistics(), momentum)


@contextlib.contextmanager
def collecting(layers: Iterable[SyncBatchNorm]) -> Iterator[dict[SyncBatchNorm, Pool]]:
    """Within, these layers' statistics go to the pools, one for each layer; counters are put back."""
    pools, counters = {}, {}
    for layer in layers:
        if layer in _collecting:
            raise RuntimeError("accumulate_running_stats and recompute_running_stats cannot run inside one another")
        pools[layer] = Pool(layer.num_features, running_stats(layer)[0].device)
        if layer.num_batches_tracked is not None:
            counters[layer] = layer.num_batches_tracked.clone()
    try:
        _collecting.update(pools)
        with contextlib.ExitStack() as stack:
            for layer, pool in pools.items():
                stack.enter_context(replaced(layer, "_train_over_ranks", functools.partial(_train, pool)))
            yield pools
    finally:
        _collecting.difference_update(pools)
        for layer, counter in counters.items():
            layer.num_batches_tracked.copy_(counter)  # type: ignore[union-attr]


_collecting: WeakSet[SyncBatchNorm] = WeakSet()  # the layers whose statistics go to a pool now


def _train(pool: Pool, given: Arguments, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
    """Train the layer, and give the statistics to the pool."""
    if given.running_mean is not layer.running_mean:  # a subclass's own buffers
        return step.train(given, layer)
    refuse_graph("compiled graphs cannot collect running statistics; compile without fullgraph=True")
    y, statistics = step.train(given.without_running_stats(), layer)
    pool.add(statistics, moves=current_backward() == -1)
    return y, statistics
