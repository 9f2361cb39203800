"""Pools the statistics of all batches of a block, for running statistics that take them as one batch."""

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn

from syncbn.arguments import Options, Tensors
from syncbn.layer import SyncBatchNorm
from syncbn.raising import raise_on_all_ranks
from syncbn.statistics import from_sums, to_sums, update_buffers
from syncbn.torch_internals.state import current_backward, is_compiling
from syncbn.training import prepared, train


@contextlib.contextmanager
def accumulate_running_stats(model: nn.Module) -> Iterator[None]:
    """Within, the running statistics take all batches as one, in gradient accumulation: k micro-batches x W ranks.

        optimizer.zero_grad()
        with syncbn.accumulate_running_stats(model):
            for images, labels in micro_batches:
                (criterion(model(images), labels) / len(micro_batches)).backward()
        optimizer.step()

    Each micro-batch is normalised by its own statistics, as its gradients go back before the next comes. At the end of
    the block running = (1 - momentum) * running + momentum * statistic happens once, with mean and unbiased variance of
    all values that the layer has seen in the block on all ranks of its group, and num_batches_tracked counts 1. The
    micro-batches may differ in size, between ranks too. Issues no further collective.

    Args:
        model: the one that is trained; its synchronised layers take part, unless they are in evaluation mode or have no
            running statistics.

    Raises:
        ValueError: there is no synchronised layer, or a layer is lazy still; in a forward, on every rank, that a
            subclass gives F.batch_norm other running statistics than the layer's running_mean and running_var.
        RuntimeError: inside another such block; torch.compile with fullgraph=True. (Other compiled modules break their
            graphs at the layers inside the block.)

    After an exception in the block running statistics and counters are what they were before the block.
    """
    pools: dict[SyncBatchNorm, _Pool] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm) and layer.track_running_stats and layer.running_mean is not None:
            if nn.parameter.is_lazy(layer.running_mean):
                raise ValueError(f"the layer {name!r} is lazy and has no statistics yet; run a forward before")
            if "_train_over_ranks" in vars(layer):
                raise RuntimeError("accumulate_running_stats cannot run inside another accumulate_running_stats")
            pools[layer] = _Pool()
    if not pools:
        raise ValueError("no synchronised layer with running statistics: call syncbn.convert_syncbn_model(model)")
    with contextlib.ExitStack() as undo:
        for layer, pool in pools.items():
            vars(layer)["_train_over_ranks"] = pool.train
            undo.callback(vars(layer).pop, "_train_over_ranks")
            if layer.num_batches_tracked is not None:  # which the forward of a subclass may count up itself
                undo.callback(layer.num_batches_tracked.copy_, layer.num_batches_tracked.clone())
        yield
    for layer, pool in pools.items():
        if pool.sums is not None:
            buffers = layer.running_mean, layer.running_var, layer.num_batches_tracked
            update_buffers(*buffers, from_sums(pool.sums, eps=1.0), layer.momentum)  # the invstd is unused


class _Pool:
    """The float64 sums S, Q and n of all batches of a layer, (2C + 1,); None before the first batch."""

    sums: Tensor | None = None

    def train(self, tensors: Tensors, options: Options, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
        """Train the layer, and add the statistics to the pool instead of moving the running statistics. A forward that
        activation checkpointing recomputes adds nothing."""
        running_mean = tensors.running_mean
        if running_mean is None:
            return train(tensors, options, layer)
        if is_compiling():  # the graph breaks here
            raise RuntimeError("compiled graphs cannot collect running statistics; compile without fullgraph=True")
        if running_mean is not layer.running_mean or tensors.running_var is not layer.running_var:
            what = (
                "its forward passes F.batch_norm other running statistics than the layer's running_mean and running_var"
            )
            error = ValueError(f"{what}, which cannot be pooled; let it pass these")
            tensors, options, reduction, _ = prepared(tensors, options, layer)
            raise_on_all_ranks(error, tensors, options, reduction, "forward")
        y, statistics = train(tensors.without_running_stats(), options, layer)
        if current_backward() == -1:
            sums = to_sums(statistics.detach(), len(running_mean))
            self.sums = sums if self.sums is None else self.sums + sums
        return y, statistics
