"""Digits with 1, 2, 4, 8 and 16 images per rank: figure 1 of Wu & He 2018 (https://arxiv.org/abs/1803.08494), in small.

    local       nn.BatchNorm2d: every rank normalises its images alone
    syncbn      synchronised batch norm: the ranks normalise their images together
    GroupNorm   nn.GroupNorm, which normalises each image by itself, in groups of 4 channels

As in the paper, the number of epochs is always the same and the learning rate is proportional to the images of a step,
so that fewer images make more and smaller steps. Here it falls to 0 in a straight line.

    torchrun --standalone --nproc-per-node 2 examples/evidence/images_per_rank.py          minutes on two cores
    torchrun --standalone --nproc-per-node 2 examples/evidence/images_per_rank.py --seeds 1 --epochs 1 --images 2 8

Writes metrics.json and errors.png to --output.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from common import (
    Errors,
    build_network,
    epochs_of,
    falling,
    local_noise,
    new_parser,
    own,
    parallel,
    positive,
    report,
    split,
    test_error,
    train,
)
from digits import load_images
from launch import progress_bar, run_on_ranks, world_size
from torch import nn

import syncbn
from syncbn.tools.measure_local_noise import LocalNoise

WAYS = "local", "syncbn", "GroupNorm"
LEARNING_RATE = 0.1  # of 16 images on each of 2 ranks
NUM_MEASURED = 20  # batches on which local noise is measured
CHANNELS_PER_GROUP = 4  # of GroupNorm


def normalised(model: nn.Module, way: str) -> nn.Module:
    """The model with its BatchNorm layers replaced as the way says."""
    if way == "syncbn":
        return syncbn.convert_syncbn_model(model)
    if way == "GroupNorm":
        for parent in list(model.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.BatchNorm2d):
                    channels = layer.num_features
                    setattr(parent, name, nn.GroupNorm(channels // CHANNELS_PER_GROUP, channels))
    return model


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train with each seed and number of images in each way, test, report."""
    training, test = split(load_images(torch.float32, device))
    errors: Errors = {way: {str(images): [] for images in arguments.images} for way in WAYS}
    noise: dict[str, LocalNoise] = {}
    runs = list(itertools.product(range(arguments.seeds), arguments.images, WAYS))
    with progress_bar(0, len(runs)) as advance:
        for seed, images, way in runs:
            torch.manual_seed(seed)
            model = parallel(normalised(build_network(), way).to(device))
            batch = images * world_size()
            batches = own(epochs_of(torch.arange(len(training[0])), batch, arguments.epochs, seed))
            *_, loss = train(model, training, batches, falling(LEARNING_RATE * batch / 32, len(batches)))
            if (seed, way) == (0, "syncbn"):
                noise[str(images)] = local_noise(model, training[0], batches[:NUM_MEASURED])
            errors[way][str(images)].append(test_error(model, test))
            advance(f"seed {seed}, {images} images per rank, {way}: loss {loss:.3f}")
    report(errors, "images per rank", "Images per rank", arguments, noise)


def main() -> None:
    """Run the job."""
    parser = new_parser(__doc__, "images_per_rank")
    parser.add_argument(
        "--images", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="per rank and step (default %(default)s)"
    )
    arguments = parser.parse_args()
    run_on_ranks(lambda device: job(arguments, device))


if __name__ == "__main__":
    main()
