"""Running statistics over more than one batch, and over all ranks; see docs/running_statistics.md."""

import copy
import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

import syncbn


@torch.no_grad()
def recompute_running_stats(model: nn.Module, loader: DataLoader, empty: Tensor) -> None:
    """Replace the running statistics by the mean and the unbiased variance of the data of all ranks.

    The loader's batches begin with the model's input. `empty` is an input without samples, on the model's device,
    for ranks that have fewer batches than others.
    """
    copied = syncbn.convert_syncbn_model(copy.deepcopy(model)).eval()  # without dropout
    for layer in copied.modules():
        if isinstance(layer, syncbn.SyncBatchNorm):
            layer.train().reset_running_stats()
            layer.momentum = 1.0  # The old statistics have no weight.
            layer.process_group = None  # all ranks
    num_batches = torch.tensor(len(loader), device=empty.device)
    if dist.is_initialized():
        dist.all_reduce(num_batches, dist.ReduceOp.MAX)
    batches = itertools.chain(loader, itertools.repeat([empty]))
    with syncbn.accumulate_running_stats(copied):
        for images, *_ in itertools.islice(batches, int(num_batches)):
            copied(images.to(empty.device))
    model.load_state_dict(copied.state_dict())


@torch.no_grad()
def merge_running_stats(model: nn.Module) -> None:
    """Give all ranks the mean and variance of their running statistics, each rank weighted by its number of batches."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            n, mean, var = (x.double() for x in (layer.num_batches_tracked, layer.running_mean, layer.running_var))
            sums = torch.cat((n * mean, n * (var + mean * mean), n.view(1)))
            if dist.is_initialized():
                dist.all_reduce(sums)
                dist.all_reduce(layer.num_batches_tracked, dist.ReduceOp.MAX)
            if sums[-1] > 0:  # Some rank has trained the layer.
                mean, mean_square = (sums[:-1] / sums[-1]).chunk(2)
                layer.running_mean.copy_(mean)
                layer.running_var.copy_((mean_square - mean * mean).clamp(min=0))
