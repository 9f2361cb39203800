"""Ranks with unequal shares of the data: training on all of them with empty batches, or dropping the rest.

    empty batches          an epoch is as long as the longest share; the other ranks go on with empty batches
    drop                   an epoch is as long as the shortest share; what the others have beyond it is dropped
    drop, as many steps    the same with more epochs, which make as many steps as with empty batches

Rank 0 has 50, 75 or 90 % of the images, the others share the rest. Each epoch shuffles each rank's share anew, so that
it drops other images. The optimizer is SGD without momentum.

    torchrun --standalone --nproc-per-node 2 examples/evidence/uneven_data.py          minutes on two cores
    torchrun --standalone --nproc-per-node 2 examples/evidence/uneven_data.py --seeds 1 --epochs 2 --shares 90
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Data, Errors, build_network, epochs_of, load_data, new_parser, report, runs, test_error
from launch import parallel, positive, rank, run_on_ranks, world_size
from torch import Tensor, nn

import syncbn

WAYS = "empty batches", "drop", "drop, as many steps"
IMAGES_PER_RANK = 8
LEARNING_RATE = 0.2

parser = new_parser(__doc__, "uneven_data")
parser.add_argument("--shares", type=positive, nargs="+", default=[50, 75, 90], help="%% of the images on rank 0")


def shares_of(num_images: int, percent: int, seed: int) -> tuple[Tensor, ...]:
    """Indices of each rank's images, of which rank 0 has so many percent."""
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed))
    of_rank_0, others = order.tensor_split([num_images * percent // 100])
    return of_rank_0, *others.tensor_split(world_size() - 1)


def train_on_share(model: nn.Module, data: Data, shares: tuple[Tensor, ...], way: str, epochs: int, seed: int) -> int:
    """Train on this rank's share; returns the number of steps."""
    steps_of_ranks = [len(share) // IMAGES_PER_RANK for share in shares]  # in an epoch
    if min(steps_of_ranks) == 0:
        sys.exit(f"each rank needs {IMAGES_PER_RANK} images, and they have {', '.join(map(str, map(len, shares)))}")
    steps = max(steps_of_ranks) if way == "empty batches" else min(steps_of_ranks)
    total = epochs * (steps if way == "drop" else max(steps_of_ranks))
    (images, labels), share = data, shares[rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for done in range(0, total, steps):
        batches = epochs_of(share, IMAGES_PER_RANK, 1, seed=1000 * seed + done)
        batches += [share[:0]] * (steps - len(batches))
        for step, picked in enumerate(batches[: min(steps, total - done)], done):
            num_samples = torch.tensor(float(len(picked)), device=images.device)
            dist.all_reduce(num_samples)
            loss = F.cross_entropy(model(images[picked]), labels[picked], reduction="sum") * world_size() / num_samples
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - step / total)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return total


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    if world_size() < 2:
        sys.exit("uneven_data.py needs two ranks or more; start it with torchrun")
    training, test = load_data(device)
    errors, steps = Errors(), {way: {} for way in WAYS}
    for seed, percent, way in runs(arguments, arguments.shares, WAYS):
        model = syncbn.convert_syncbn_model(build_network().to(device))
        shares, share = shares_of(len(training[0]), percent, seed), f"{percent} %"
        steps[way][share] = train_on_share(parallel(model), training, shares, way, arguments.epochs, seed)
        errors[way][share].append(test_error(model, test))
    report(errors, "images on rank 0", "Uneven data", arguments, joined=True, model=model, steps=steps)


if __name__ == "__main__":
    run_on_ranks(job, parser)
