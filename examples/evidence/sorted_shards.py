"""Train on digits in shards that are sorted by class: each rank has classes that no other rank has.

    local               nn.BatchNorm2d; tested with rank 0's running statistics
    local, merged       the same model after merge_running_stats of ../running_statistics.py
    local, recomputed   the same model after recompute_running_stats over all ranks' images
    syncbn              synchronised batch norm

For comparison each way also trains on shuffled shards. A rank has 16 images per batch, which is enough for batch norm,
so the number of images is not the cause. A local layer normalises the classes of its rank by their own mean and
variance, so no single set of statistics fits all classes in evaluation.

    torchrun --standalone --nproc-per-node 5 examples/evidence/sorted_shards.py          2 classes for each rank
    torchrun --standalone --nproc-per-node 2 examples/evidence/sorted_shards.py          5 classes for each rank
    torchrun --standalone --nproc-per-node 2 examples/evidence/sorted_shards.py --seeds 1 --epochs 2
"""

import argparse
import copy

import torch
from common import (
    Errors,
    build_network,
    load_data,
    local_noise,
    new_parser,
    report,
    runs,
    shuffled_batches,
    test_error,
    train,
)
from launch import parallel, rank, run_on_ranks, world_size
from running_statistics import merge_running_stats, recompute_running_stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import syncbn

IMAGES_PER_RANK = 16
LEARNING_RATE = 0.1
SHARDS = "shuffled", "sorted"
WAYS = "local", "syncbn"
NUM_CLASSES = 10


def own_shard(labels: Tensor, kind: str, seed: int) -> Tensor:
    """Return the indices of this rank's training images; all ranks have equally many."""
    if kind == "shuffled":
        shards = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tensor_split(world_size())
    else:
        classes = torch.arange(NUM_CLASSES).tensor_split(world_size())
        shards = [torch.isin(labels.cpu(), some).nonzero().flatten() for some in classes]
    return shards[rank()][: min(map(len, shards))]


def variants(model: nn.Module, way: str, images: Tensor) -> dict[str, nn.Module]:
    """Return the models to test, given a trained model and this rank's images."""
    if way == "syncbn":
        return {way: model}
    merged, recomputed = copy.deepcopy(model), copy.deepcopy(model)
    merge_running_stats(merged)
    recompute_running_stats(recomputed, DataLoader(TensorDataset(images), IMAGES_PER_RANK), images[:0])
    return {way: model, f"{way}, merged": merged, f"{way}, recomputed": recomputed}


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    training, test = load_data(device)
    errors, noise = Errors(), {}
    for seed, kind, way in runs(arguments, SHARDS, WAYS):
        model = build_network().to(device)
        if way == "syncbn":
            syncbn.convert_syncbn_model(model)
        indices = own_shard(training[1], kind, seed)
        batches = shuffled_batches(indices, IMAGES_PER_RANK, arguments.epochs, seed)
        train(parallel(model), training, batches, LEARNING_RATE)
        if (seed, way) == (0, "syncbn"):
            noise[kind] = local_noise(model, training[0], batches)
        for name, variant in variants(model, way, training[0][indices]).items():
            errors[name][kind].append(test_error(variant, test))
    report(errors, "shards", "Sorted shards", arguments, joined=False, noise=noise)


if __name__ == "__main__":
    run_on_ranks(job, new_parser(__doc__, "sorted_shards"))
