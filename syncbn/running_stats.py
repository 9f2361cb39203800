"""Offers the statistics of a batch over all ranks, and running statistics that take several batches as one."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from syncbn.arguments import Options, Tensors
from syncbn.fallback import Call, apply_function, general_back_end, prepared, raise_on_all_ranks, total
from syncbn.inputs import apply_mask, without_gaps
from syncbn.kernels.interface import TRAILER_NUMBERS
from syncbn.kernels.reference import minus_mean
from syncbn.layer import SyncBatchNorm
from syncbn.plan import kind_of
from syncbn.ranks.groups import ProcessGroupLike, to_spec
from syncbn.ranks.reduction import note_ranks
from syncbn.ranks.sites import Caller
from syncbn.statistics import compute_dtype, from_sums, to_sums, update_buffers
from syncbn.step import train
from syncbn.torch_internals import current_backward, is_compiling, keeps_graph, recorded

_SYNC_BATCH_STATS = Caller("sync_batch_stats", needs_two_values=False)


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
            if layer._train_and_pool is not None:
                raise RuntimeError("accumulate_running_stats cannot run inside another accumulate_running_stats")
            pools[layer] = _Pool()
    if not pools:
        raise ValueError("no synchronised layer with running statistics: call syncbn.convert_syncbn_model(model)")
    with contextlib.ExitStack() as undo:
        for layer, pool in pools.items():
            vars(layer)["_train_and_pool"] = pool.train
            undo.callback(vars(layer).pop, "_train_and_pool")
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


def sync_batch_stats(
    input: Tensor, process_group: ProcessGroupLike = None, *, channel_dim: int = 1, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The mean, the biased variance and the number of values of each channel, over all ranks of a process group.

        forward   n = sum_r n_r      mean = sum_r sum x / n      var = max(0, sum_r sum x^2 / n - mean^2)
        backward  grad_input = (sum_r dmean_r + 2 * (x - mean) * sum_r dvar_r) / n

    For losses and layers that need the batch's statistics themselves. All ranks get the same numbers, bit by bit. They
    are differentiable as often as one likes; each derivative is that of the sum of the ranks' losses. So where every
    rank computes the same loss from them, divide that by the number of ranks, unless DistributedDataParallel averages
    the gradients.

    Issues one all_reduce of 8 * (2C + 4) bytes in forward and one in backward, also with create_graph=True; none with
    one rank or without a process group. Every rank of the group must make the same calls in the same order, and so the
    same backwards: `requires_grad` of the input must agree on all ranks.

    Args:
        input: as in `functional.sync_batch_norm`; a rank may have no values.
        process_group, channel_dim, mask: as in `functional.sync_batch_norm`.

    Returns:
        (mean, var, count): mean and var (C,), float32, or float64 for float64 input; 0 where no rank has a value.
        count (), int64, the number n of values of a channel, without a gradient. The unbiased variance is
        var * count / (count - 1). All are plain tensors.

    Raises:
        RuntimeError: as `functional.sync_batch_norm`.
        ValueError, TypeError: a bad argument. In eager mode every rank raises, the others (on a GPU at a later call) an
            error with the faulty ranks' numbers, as long as the input has a dim `channel_dim`.

    >>> mean, var, count = sync_batch_stats(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))  # (N, C) on the only rank
    >>> mean, var, count
    (tensor([ 2., 20.]), tensor([  1., 100.]), tensor(2))
    """
    options = Options(channel_dim=channel_dim, process_group=to_spec(process_group))
    tensors, options, reduction, _ = prepared(Tensors(input, mask=mask), options, _SYNC_BATCH_STATS)
    with recorded("syncbn.forward"), reduction.noting_errors():
        tensors = without_gaps(apply_mask(tensors, channel_dim)[0], options)
        x = tensors.input
        (sums,) = apply_function(_Sums, (kind_of(tensors, options), reduction), x, tensors.num_values)
    note_ranks(_SYNC_BATCH_STATS, reduction)
    count = sums[-TRAILER_NUMBERS].detach()
    mean, mean_square = (sums[:-TRAILER_NUMBERS] / count.clamp(min=1)).chunk(2)
    var = mean_square - mean.square()
    var = var + (var.clamp(min=0) - var).detach()  # the clamp must not stop the gradients of a constant channel
    mean, var = (values.to(compute_dtype(x.dtype)) for values in (mean, var))
    return mean, var, count.to(torch.int64)


class _Sums(torch.autograd.Function):
    """((kind, reduction), x, num_values) -> the sums over all ranks, packed as in statistics.py.

    The arguments are those of fallback.SyncBatchNormFunction. Saved for backward: x and the sums. Collectives: one
    all_reduce each way. The gradient is d sum + 2 x d sum of squares; x is taken as center + (x - center), by any
    constant center, so that second derivatives need no other.
    """

    @staticmethod
    def forward(call: Call, x: Tensor, num_values: Tensor | None) -> tuple[Tensor]:
        kind, reduction = call
        sums = general_back_end(kind, x).Forward(kind).forward_sums(x)
        return (total(sums, reduction, "forward", num_values),)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor]) -> None:
        (ctx.kind, ctx.reduction), x, _ = inputs
        ctx.save_for_backward(x, *output)

    @staticmethod
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[None, Tensor, None]:
        num_channels = ctx.kind.layout.sizes[1]
        with recorded("syncbn.backward"), ctx.reduction.noting_errors():
            x, sums = ctx.saved_tensors
            center = sums.detach()[:num_channels] / sums[-TRAILER_NUMBERS].detach().clamp(min=1)
            grad_sum, grad_square = total(grad_sums, ctx.reduction, "backward")[:-TRAILER_NUMBERS].chunk(2)
            at_center, slope = grad_sum + 2 * grad_square * center, 2 * grad_square
            if torch.is_grad_enabled():
                layout = ctx.kind.layout
                wide_grad_x = at_center[:, None] + slope[:, None] * minus_mean(layout.fold(x), center)
                return None, layout.unfold(wide_grad_x, x.shape).to(x.dtype), None
            if not (is_compiling() or keeps_graph()):
                ctx.reduction.forward_total = None
            # The same as the output of a batch norm: sums of squares 0 and eps 1 make the variance 0 and invstd 1.
            kind = ctx.kind._replace(eps=1.0, weight_dtype=torch.float64, bias_dtype=torch.float64)
            x = kind.layout.dense(x.to(kind.dtype))  # saved_tensors_hooks may have rounded or moved it
            sums = torch.cat((center, torch.zeros_like(center), center.new_ones(TRAILER_NUMBERS)))
            inputs = x, slope, at_center, None
            return None, general_back_end(kind, x, slope).Forward(kind).forward_outputs(inputs, sums)[0], None
