"""Running statistics as a moving average, or computed exactly from the data (Wu & Johnson 2021, PreciseBN:
https://arxiv.org/abs/2105.07576), with small and large batches.

    moving average    what training leaves in the buffers: 0.9 of the old and 0.1 of each new batch
    recomputed        syncbn.recompute_running_stats with the training data, in a copy of the model

A model is trained with each batch size, with a learning rate proportional to it, and tested with both after 1, 2, 4, 8
epochs. A large batch makes few steps in an epoch, so that the moving average lags behind the weights, and holds some of
the values that it began with.

    torchrun --standalone --nproc-per-node 2 examples/evidence/population_statistics.py          minutes on two cores
    torchrun --standalone --nproc-per-node 2 examples/evidence/population_statistics.py --seeds 1 --epochs 2

Writes metrics.json and errors.png to --output.
"""

from __future__ import annotations

import argparse
import copy
import itertools

import torch
from common import (
    Errors,
    build_network,
    epochs_of,
    falling,
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
from launch import progress_bar, rank, run_on_ranks, world_size

import syncbn

LEARNING_RATE = 0.1  # of 32 images
CHUNK = 50  # images of a batch that recomputes


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train with each seed and batch size, test after each epoch, report."""
    training, test = split(load_images(torch.float32, device))
    share = training[0].tensor_split(world_size())[rank()]
    errors: Errors = {}
    runs = list(itertools.product(range(arguments.seeds), arguments.batches))
    with progress_bar(0, len(runs)) as advance:
        for seed, batch in runs:
            torch.manual_seed(seed)
            model = syncbn.convert_syncbn_model(build_network().to(device))
            batches = own(epochs_of(torch.arange(len(training[0])), batch, arguments.epochs, seed))
            steps_per_epoch = len(batches) // arguments.epochs
            learning_rate = falling(LEARNING_RATE * batch / 32, len(batches))
            for step, _ in enumerate(train(parallel(model), training, batches, learning_rate), 1):
                epoch, rest = divmod(step, steps_per_epoch)
                if rest or epoch & (epoch - 1):
                    continue
                recomputed = copy.deepcopy(model)
                syncbn.recompute_running_stats(recomputed, share.split(CHUNK), progress=False)
                for way, tested in (("moving average", model), ("recomputed", recomputed)):
                    of_epochs = errors.setdefault(f"batch {batch}, {way}", {})
                    of_epochs.setdefault(str(epoch), []).append(test_error(tested, test))
            advance(f"seed {seed}, batch {batch}")
    if rank() == 0:
        print(syncbn.summary(model))
    report(errors, "epochs", "Population statistics", arguments)


def main() -> None:
    """Run the job."""
    parser = new_parser(__doc__, "population_statistics")
    parser.set_defaults(epochs=8)
    parser.add_argument(
        "--batches", type=positive, nargs="+", default=[8, 40, 200], help="images of all ranks per step (%(default)s)"
    )
    arguments = parser.parse_args()
    run_on_ranks(lambda device: job(arguments, device))


if __name__ == "__main__":
    main()
