"""Running statistics as a moving average, or computed exactly from the data (Wu & Johnson 2021, PreciseBN:
https://arxiv.org/abs/2105.07576), with small and large batches.

    moving average    what training leaves in the buffers: 0.9 of the old and 0.1 of each new batch
    recomputed        recompute_running_stats of ../running_statistics.py, in a copy of the model

A model is trained with each batch size, with a learning rate proportional to it, and tested with both after 1, 2, 4, 8
epochs. A large batch makes few steps in an epoch, so that the moving average lags behind the weights, and holds some of
the values that it began with.

    torchrun --standalone --nproc-per-node 2 examples/evidence/population_statistics.py          minutes on two cores
    torchrun --standalone --nproc-per-node 2 examples/evidence/population_statistics.py --seeds 1 --epochs 2
"""

import argparse
import copy

import torch
from common import Errors, build_network, epochs_of, load_data, new_parser, report, runs, test_error, train
from launch import own, parallel, positive, run_on_ranks
from running_statistics import recompute_running_stats
from torch.utils.data import DataLoader, TensorDataset

import syncbn

LEARNING_RATE = 0.1  # of 32 images
CHUNK = 50  # images of a batch that recomputes

parser = new_parser(__doc__, "population_statistics")
parser.add_argument("--batches", type=positive, nargs="+", default=[8, 40, 200], help="images of all ranks per step")


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    training, test = load_data(device)
    errors = Errors()
    for seed, batch in runs(arguments, arguments.batches):
        model = syncbn.convert_syncbn_model(build_network().to(device))
        batches = [own(whole) for whole in epochs_of(torch.arange(len(training[0])), batch, arguments.epochs, seed)]
        steps_per_epoch = len(batches) // arguments.epochs
        for step, _ in enumerate(train(parallel(model), training, batches, LEARNING_RATE * batch / 32), 1):
            epoch, rest = divmod(step, steps_per_epoch)
            if rest or epoch & (epoch - 1):
                continue
            recomputed = copy.deepcopy(model)
            recompute_running_stats(recomputed, DataLoader(TensorDataset(own(training[0])), CHUNK), training[0][:0])
            errors[f"batch {batch}, moving average"][str(epoch)].append(test_error(model, test))
            errors[f"batch {batch}, recomputed"][str(epoch)].append(test_error(recomputed, test))
    report(errors, "epochs", "Population statistics", arguments, joined=True, panel_of="way", model=model)


if __name__ == "__main__":
    run_on_ranks(job, parser)
