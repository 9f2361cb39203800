"""Pools the statistics of all batches of a block, for running statistics that take them as one batch."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from syncbn.arguments import Options, Tensors, num_channels_of
from syncbn.layer import SyncBatchNorm
from syncbn.raising import raise_on_all_ranks
from syncbn.statistics import from_sums, to_float64, to_sums, update_buffers
from syncbn.torch_internals.autograd import is_wrapped
from syncbn.torch_internals.state import PLAIN_CLASSES, current_backward, is_compiling
from syncbn.training import prepared, train

OF_OTHER_MEMORY = (
    "its forward passes running statistics to F.batch_norm that are not in the memory of the layer's running_mean and "
    "running_var, so they cannot be pooled; let it pass these or a slice of them"
)


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
        ValueError: there is no synchronised layer, or one is lazy still; in a forward, on every rank, that a subclass
            gives F.batch_norm running statistics of its own, which are not in the layer's running_mean and running_var.
        RuntimeError: inside another such block; torch.compile with fullgraph=True. (Other compiled modules break their
            graphs at the layers inside the block.)

    After an exception in the block running statistics and counters are what they were before it.
    """
    layers = _layers_with_running_stats(model)
    if not layers:
        raise ValueError("no synchronised layer with running statistics: call syncbn.convert_syncbn_model(model)")
    if any("_train_over_ranks" in vars(layer) for layer in layers):
        raise RuntimeError("accumulate_running_stats: a layer is in such a block already; leave that first")
    pools = {layer: Pool(num_channels_of(layer), _buffers_of(layer)[0].device) for layer in layers}
    with contextlib.ExitStack() as undo:
        for layer, pool in pools.items():
            vars(layer)["_train_over_ranks"] = pool.train  # hides the method
            undo.callback(vars(layer).pop, "_train_over_ranks", None)
            *_, counter = _buffers_of(layer)
            undo.callback(counter.copy_, counter.clone())
        yield
    for layer, pool in pools.items():
        if not pool.is_empty:
            mean, var, counter = _buffers_of(layer)
            update_buffers(mean[None], var[None], counter, pool.statistics(), layer.momentum)


class Pool:
    """The statistics of all batches of a layer: S, Q, n and the number of forwards, (4, C). Each channel has its own n,
    as a subclass may normalise some channels only."""

    def __init__(self, num_channels: int, device: torch.device) -> None:
        self.packed = to_float64(torch.zeros(4, num_channels, device=device))
        self.is_empty = True

    def train(self, tensors: Tensors, options: Options, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
        """Trains the layer, and adds its statistics to the pool in place of its running statistics. A recompute adds
        nothing, since the first forward did. **Raises** ValueError, on every rank, for those of other memory than the
        layer's."""
        if tensors.running_mean is None:
            return train(tensors, options, layer)
        if is_compiling():  # the graph breaks here
            raise RuntimeError("compiled graphs cannot collect running statistics; compile without fullgraph=True")
        channels = _channels_in(tensors.running_mean, layer.running_mean)
        if channels is None or channels != _channels_in(tensors.running_var, layer.running_var):
            tensors, options, reduction, _ = prepared(tensors, options, layer)
            raise_on_all_ranks(ValueError(OF_OTHER_MEMORY), tensors, options, reduction, "forward")
        y, statistics = train(tensors.without_running_stats(), options, layer)
        if current_backward() == -1:
            sums = to_sums(statistics.detach(), len(channels))
            rows = *sums[:-1].chunk(2), sums[-1].expand(len(channels))
            self.packed[:-1, channels.start : channels.stop] += torch.stack(rows)
            self.packed[-1] += 1
            self.is_empty = False
        return y, statistics

    def statistics(self) -> Tensor:
        """mean, biased var, invstd and n of all batches, (4, C): each channel is packed as a batch norm of its own."""
        return from_sums(self.packed[:-1], eps=1.0)  # invstd is unused


def _channels_in(view: object, buffer: Tensor | None) -> range | None:
    """The channels of a layer's buffer (C,) that a subclass has passed: `buffer[:c]`, `buffer.view(-1)`. None if `view`
    is in other memory."""
    if not isinstance(view, Tensor) or buffer is None:
        return None
    if view is buffer:
        return range(len(buffer))
    if not PLAIN_CLASSES.issuperset((type(view), type(buffer))) or is_wrapped(view) or is_wrapped(buffer):
        return None  # memory cannot be compared
    start = view.storage_offset() - buffer.storage_offset()
    part = buffer[max(start, 0) : start + view.numel()]
    is_part = all(of(view) == of(part) for of in (Tensor.data_ptr, Tensor.size, Tensor.stride, Tensor.type))
    return range(start, start + len(part)) if is_part else None


def _layers_with_running_stats(model: nn.Module) -> list[SyncBatchNorm]:
    """The synchronised layers that have running statistics. **Raises** ValueError if one is lazy still."""
    layers = []
    for name, layer in model.named_modules():
        if isinstance(layer, SyncBatchNorm) and layer.track_running_stats and layer.running_mean is not None:
            if nn.parameter.is_lazy(layer.running_mean):
                raise ValueError(f"the layer {name!r} is lazy and has no statistics yet; run a forward before")
            layers.append(layer)
    return layers


def _buffers_of(layer: SyncBatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """running_mean, running_var and num_batches_tracked of a layer that has running statistics."""
    return layer.get_buffer("running_mean"), layer.get_buffer("running_var"), layer.get_buffer("num_batches_tracked")
