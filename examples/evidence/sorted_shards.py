"""Digits in shards that are sorted by class: each rank sees classes that no other rank sees.

    local               nn.BatchNorm2d; tested with rank 0's running statistics, as DistributedDataParallel leaves them
    local, merged       the same model after merge_running_stats of ../running_statistics.py
    local, recomputed   the same model after recompute_running_stats over all ranks' images
    syncbn              synchronised batch norm

Each is trained on shuffled shards, where every rank sees all classes, and on sorted ones. A rank has a batch of 16
images, enough for batch norm, so that it is not their number that makes the difference. A local layer normalises the
classes of its rank by their own mean and variance, so what it lets through does not say which rank's classes they are,
and no single set of statistics serves all classes in evaluation.

    torchrun --standalone --nproc-per-node 5 examples/evidence/sorted_shards.py          2 classes for each rank
    torchrun --standalone --nproc-per-node 2 examples/evidence/sorted_shards.py          5 classes for each rank
    torchrun --standalone --nproc-per-node 2 examples/evidence/sorted_shards.py --seeds 1 --epochs 2
"""

import argparse
import copy

import torch
from common import Errors, build_network, epochs_of, load_data, local_noise, new_parser, report, runs, test_error, train
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


def shards(labels: Tensor, kind: str, seed: int) -> list[Tensor]:
    """Indices of each rank's training images, of as many for each."""
    if kind == "shuffled":
        of_ranks = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tensor_split(world_size())
    else:
        classes = torch.arange(NUM_CLASSES).tensor_split(world_size())
        of_ranks = [torch.isin(labels.cpu(), some).nonzero().flatten() for some in classes]
    return [indices[: min(map(len, of_ranks))] for indices in of_ranks]


def variants(model: nn.Module, way: str, images: Tensor) -> dict[str, nn.Module]:
    """What there is to test of a trained model; `images` are this rank's."""
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
        indices = shards(training[1], kind, seed)[rank()]
        batches = epochs_of(indices, IMAGES_PER_RANK, arguments.epochs, seed)
        list(train(parallel(model), training, batches, LEARNING_RATE))
        if (seed, way) == (0, "syncbn"):
            noise[kind] = local_noise(model, training[0], batches)
        for name, variant in variants(model, way, training[0][indices]).items():
            errors[name][kind].append(test_error(variant, test))
    report(errors, "shards", "Sorted shards", arguments, joined=False, noise=noise)


if __name__ == "__main__":
    run_on_ranks(job, new_parser(__doc__, "sorted_shards"))
