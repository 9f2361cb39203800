"""Train on digits with 1 to 16 images per rank, like figure 1 of Wu & He 2018 (https://arxiv.org/abs/1803.08494).

    local       nn.BatchNorm2d: every rank normalises its images alone
    syncbn      synchronised batch norm: the ranks normalise their images together
    GroupNorm   nn.GroupNorm, which normalises each image alone, in groups of 4 channels

As in the paper, the number of epochs is constant and the learning rate is proportional to the number of images per
step, so fewer images give more and smaller steps. The learning rate falls linearly to 0.

    torchrun --standalone --nproc-per-node 2 examples/evidence/images_per_rank.py          minutes on two cores
    torchrun --standalone --nproc-per-node 2 examples/evidence/images_per_rank.py --seeds 1 --epochs 1 --images 2 8
"""

import argparse

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
from launch import own, parallel, positive, run_on_ranks, world_size
from torch import nn

import syncbn

WAYS = "local", "syncbn", "GroupNorm"
LEARNING_RATE = 0.1  # at a batch size of 32
CHANNELS_PER_GROUP = 4

parser = new_parser(__doc__, "images_per_rank", epochs=4)
parser.add_argument("--images", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="per rank and step")


def convert(model: nn.Module, way: str) -> nn.Module:
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
    training, test = load_data(device)
    errors, noise = Errors(), {}
    for seed, images, way in runs(arguments, arguments.images, WAYS):
        model = convert(build_network(), way).to(device)
        batch = images * world_size()
        batches = shuffled_batches(torch.arange(len(training[0])), batch, arguments.epochs, seed)
        batches = [own(whole) for whole in batches]
        train(parallel(model), training, batches, LEARNING_RATE * batch / 32)
        if (seed, way) == (0, "syncbn"):
            noise[str(images)] = local_noise(model, training[0], batches)
        errors[way][str(images)].append(test_error(model, test))
    report(errors, "images per rank", "Images per rank", arguments, joined=True, noise=noise)


if __name__ == "__main__":
    run_on_ranks(job, parser)
