"""Train on ranks with unequal shares of the data: on all data with empty batches, or dropping the rest.

    empty batches          an epoch is as long as the longest share; the other ranks continue with empty batches
    drop                   an epoch is as long as the shortest share; the rest of the other shares is dropped
    drop, as many steps    the same with more epochs, so that there are as many steps as with empty batches

Rank 0 has 50, 75 or 90 % of the images; the others share the rest. Every epoch shuffles the share of each rank,
so other images are dropped. The optimizer is SGD without momentum.

    torchrun --standalone --nproc-per-node 2 examples/evidence/uneven_data.py          minutes on two cores
    torchrun --standalone --nproc-per-node 2 examples/evidence/uneven_data.py --seeds 1 --epochs 2 --shares 90
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Data, Errors, build_network, load_data, new_parser, report, runs, shuffled_batches, test_error
from launch import parallel, positive, rank, run_on_ranks, world_size
from torch import Tensor, nn

import syncbn

WAYS = "empty batches", "drop", "drop, as many steps"
IMAGES_PER_RANK = 8
LEARNING_RATE = 0.2

parser = new_parser(__doc__, "uneven_data")
parser.add_argument("--shares", type=positive, nargs="+", default=[50, 75, 90], help="%% of the images on rank 0")


def split(num_images: int, percent: int, seed: int) -> tuple[Tensor, ...]:
    """Return the indices of each rank's images; rank 0 has `percent` of them."""
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(seed))
    first, others = order.tensor_split([num_images * percent // 100])
    return first, *others.tensor_split(world_size() - 1)


def train_on_share(model: nn.Module, data: Data, shares: tuple[Tensor, ...], way: str, epochs: int, seed: int) -> int:
    """Train on this rank's share, and return the number of steps."""
    sizes = [len(share) // IMAGES_PER_RANK for share in shares]  # steps of each rank in an epoch
    if min(sizes) == 0:
        sys.exit(f"each rank needs {IMAGES_PER_RANK} images, and they have {', '.join(map(str, map(len, shares)))}")
    steps = max(sizes) if way == "empty batches" else min(sizes)
    total = epochs * (steps if way == "drop" else max(sizes))
    (images, labels), share = data, shares[rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for done in range(0, total, steps):
        batches = shuffled_batches(share, IMAGES_PER_RANK, 1, seed=1000 * seed + done)
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
        shares, setting = split(len(training[0]), percent, seed), f"{percent} %"
        steps[way][setting] = train_on_share(parallel(model), training, shares, way, arguments.epochs, seed)
        errors[way][setting].append(test_error(model, test))
    report(errors, "images on rank 0", "Uneven data", arguments, joined=True, model=model, steps=steps)


if __name__ == "__main__":
    run_on_ranks(job, parser)
