"""Functions that replace the running statistics of a trained model: see docs/running_statistics.md."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

import syncbn


@torch.no_grad()
def recompute_running_stats(model: nn.Module, loader: DataLoader, empty: Tensor) -> None:
    """Replace the running statistics by the mean and the unbiased variance over the data of all ranks.

    Each batch is a tuple or list, which starts with the input of the model. `empty` is an input without samples, on the
    device of the model. A rank that has fewer batches than another rank continues with `empty`.
    """
    copied = syncbn.convert_syncbn_model(copy.deepcopy(model))
    copied.eval()  # This switches off dropout. Only the batch-norm layers train.
    for layer in copied.modules():
        if isinstance(layer, syncbn.SyncBatchNorm):
            layer.train().reset_running_stats()
            layer.momentum = 1.0  # The new statistics replace the old statistics.
            layer.process_group = None  # all ranks
    max_batches = torch.tensor(len(loader), device=empty.device)
    if dist.is_initialized():
        dist.all_reduce(max_batches, dist.ReduceOp.MAX)
    with syncbn.accumulate_running_stats(copied):
        for images, *_ in loader:
            copied(images.to(empty.device))
        for _ in range(len(loader), int(max_batches)):
            copied(empty)
    model.load_state_dict(copied.state_dict())


@torch.no_grad()
def merge_running_stats(model: nn.Module) -> None:
    """Replace the running statistics of each rank by those of all ranks together, approximately: the ranks are weighted
    by their numbers of batches."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            n, mean, var = layer.num_batches_tracked.double(), layer.running_mean.double(), layer.running_var.double()
            mean_square = var + mean * mean
            sums = torch.cat((n * mean, n * mean_square, n.view(1)))
            if dist.is_initialized():
                dist.all_reduce(sums)
                dist.all_reduce(layer.num_batches_tracked, dist.ReduceOp.MAX)
            if sums[-1] > 0:  # At least one rank has trained the layer.
                mean, mean_square = (sums[:-1] / sums[-1]).chunk(2)
                layer.running_mean.copy_(mean)
                layer.running_var.copy_((mean_square - mean * mean).clamp(min=0))
