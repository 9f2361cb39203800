"""Do these digits need synchronised batch norm? One process answers for 8 ranks, before there are any.

    python examples/local_noise.py                    10 seconds

A small residual network trains on scikit-learn's digits for some steps, with ordinary nn.BatchNorm2d. Then it measures
on batches that are cut into as many slices as there would be ranks: the table of `syncbn.measure_local_noise` for 2
images a rank, and how many layers gain from synchronisation with other numbers of images. "Sorted" has the same
batches in the order of their classes, so that each rank has digits of its own.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from digits import NUM_TEST, build_model, load_images
from launch import print_table
from torch import Tensor, nn

import syncbn
from syncbn.tools.measure_local_noise import LocalNoise

NUM_BATCHES = 10  # that are measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="slices of a batch (default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of training, on 32 images (default %(default)s)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_images(torch.float32, torch.device("cpu"))
    model = build_model(width=16)
    train(model, images[:-NUM_TEST], labels[:-NUM_TEST], arguments.steps)
    rows = [("images per rank", "gain", "outputs off", "sorted: gain", "sorted: outputs off")]
    for per_rank in (1, 2, 4, 8, 16, 32, 64):
        shuffled = torch.randint(len(images), (NUM_BATCHES, arguments.ranks * per_rank))
        ordered = torch.stack([indices[labels[indices].argsort()] for indices in shuffled])
        noise, sorted_noise = (measure(model, images[indices], arguments.ranks) for indices in (shuffled, ordered))
        if per_rank == 2:
            print(noise)
        rows.append((str(per_rank), *in_words(noise), *in_words(sorted_noise)))
    print_table(f"{arguments.ranks} ranks: layers that gain, and the most that outputs are off", rows)


def train(model: nn.Module, images: Tensor, labels: Tensor, num_steps: int) -> None:
    """On 32 random images a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    for _ in range(num_steps):
        indices = torch.randint(len(images), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[indices]), labels[indices]).backward()
        optimizer.step()


def measure(model: nn.Module, batches: Tensor, num_ranks: int) -> LocalNoise:
    """Of batches (B, N, 1, 8, 8)."""
    with syncbn.measure_local_noise(model, num_slices=num_ranks) as noise, torch.no_grad():
        for images in batches:
            model(images)
    return noise


def in_words(noise: LocalNoise) -> tuple[str, str]:
    """How many layers gain, and the largest deviation of outputs."""
    return f"{sum(row.gains for row in noise)} of {len(noise)}", f"{max(row.output_deviation for row in noise):.2f}"


if __name__ == "__main__":
    main()
