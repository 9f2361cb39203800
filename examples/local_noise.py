"""Do these digits need synchronised batch norm? One process answers for 8 ranks, before there are any.

    python examples/local_noise.py                    10 seconds

A small residual network trains on scikit-learn's digits for some steps, with ordinary nn.BatchNorm2d. Then it measures
on batches that are cut into as many slices as there would be ranks: the table of `syncbn.measure_local_noise` for 2
images a rank, and how many layers gain from synchronisation with other numbers of images. "Sorted" has the same
batches in the order of their classes, so that each rank has digits of its own.
"""

import argparse
import functools
from collections.abc import Iterable

import torch
from digits import NUM_TEST, build_model, load_images
from launch import ManualFormatter, positive, print_table
from torch import Tensor, nn
from trainer import Trainer

import syncbn
from syncbn.tools.measure_local_noise import LocalNoise

NUM_BATCHES = 10  # that are measured

parser = argparse.ArgumentParser(description=__doc__, formatter_class=ManualFormatter)
parser.add_argument("--ranks", type=positive, default=8, help="slices of a batch")
parser.add_argument("--steps", type=positive, default=100, help="of training, on 32 images")


def main() -> None:
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_images(torch.float32, torch.device("cpu"))
    model = build_model(width=16)
    trainer = Trainer("one process", model, functools.partial(torch.optim.SGD, lr=0.005, momentum=0.9))
    for _ in range(arguments.steps):
        indices = torch.randint(len(images) - NUM_TEST, (32,))
        trainer.step(images[indices], labels[indices])
    rows = []
    for per_rank in (1, 2, 4, 8, 16, 32, 64):
        shuffled = torch.randint(len(images), (NUM_BATCHES, arguments.ranks * per_rank))
        ordered = torch.stack([indices[labels[indices].argsort()] for indices in shuffled])
        noise, sorted_noise = (measure(model, images[indices], arguments.ranks) for indices in (shuffled, ordered))
        if per_rank == 2:
            print(noise)
        rows.append((str(per_rank), *in_words(noise), *in_words(sorted_noise)))
    headings = "images per rank", "gain", "outputs off", "sorted: gain", "sorted: outputs off"
    print_table(f"{arguments.ranks} ranks: layers that gain, and the most that outputs are off", headings, rows)


def measure(model: nn.Module, batches: Iterable[Tensor], num_slices: int = 1) -> LocalNoise:
    """The noise on batches of images (N, 1, 8, 8)."""
    with syncbn.measure_local_noise(model, num_slices=num_slices) as noise, torch.no_grad():
        for images in batches:
            model(images)
    return noise


def in_words(noise: LocalNoise) -> tuple[str, str]:
    """How many layers gain, and the largest deviation of outputs."""
    return f"{sum(row.gains for row in noise)} of {len(noise)}", f"{max(row.output_deviation for row in noise):.2f}"


if __name__ == "__main__":
    main()
