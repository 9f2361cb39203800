"""Shared by the studies: options, data, the loop over runs, training, testing, and the report of the test errors.

This module also makes the modules of examples/ importable, so import it before them.
"""

import argparse
import collections
import copy
import functools
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import syncbn

sys.path.append(str(Path(__file__).parents[1]))
import launch
from digits import build_model, load_images
from launch import positive, print_table, progress_bar, rank, world_size, write
from local_noise import LayerNoise, format_noise, measure, print_noise
from plots import Lines, draw_panels, mean_and_spread

NUM_TRAIN = 600  # training digits of 1,797; the others are for testing, so that an error is known to 0.1 %
NUM_MEASURED = 20  # batches on which local noise is measured

Data = tuple[Tensor, Tensor]  # images, labels
# Errors()[way][setting] lists the test error in % of each seed.
Errors = functools.partial(collections.defaultdict, functools.partial(collections.defaultdict, list))


def new_parser(manual: str, name: str, epochs: int = 8) -> argparse.ArgumentParser:
    """Return a parser with the options of all studies."""
    parser = launch.new_parser(manual, name)
    parser.add_argument("--seeds", type=positive, default=5, help="number of runs, for mean and standard deviation")
    parser.add_argument("--epochs", type=positive, default=epochs, help="passes over the training data")
    return parser


def build_network() -> nn.Module:
    """(N, 1, 8, 8) images -> (N, 10) logits. The last stage has 4 values per image and channel, so small batches are
    noisy there, as in the last stages of detectors and segmentation networks."""
    return build_model(width=16, strides=(2, 2))


def load_data(device: torch.device) -> tuple[Data, Data]:
    """Return digits for training and for testing. The order of the data set mixes its writers."""
    images, labels = load_images(torch.float32, device)
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


def runs(arguments: argparse.Namespace, *axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield every seed with every combination of values of the axes, and seed torch for the weights."""
    combinations = list(itertools.product(range(arguments.seeds), *axes))
    with progress_bar(0, len(combinations)) as advance:
        for seed, *values in combinations:
            torch.manual_seed(seed)
            yield seed, *values
            advance(", ".join(map(str, (f"seed {seed}", *values))))


def shuffled_batches(indices: Tensor, batch: int, epochs: int, seed: int) -> list[Tensor]:
    """Return full batches of the indices, shuffled in each epoch. **Exits** without a full batch."""
    if len(indices) < batch:
        sys.exit(f"a batch of {batch} is more than all {len(indices)} that there are to train with")
    generator = torch.Generator().manual_seed(seed)
    whole = len(indices) // batch * batch
    orders = [indices[torch.randperm(len(indices), generator=generator)[:whole]] for _ in range(epochs)]
    return list(torch.cat(orders).split(batch))


def train(model: nn.Module, data: Data, batches: list[Tensor], lr: float) -> list[float]:
    """Train with SGD on this rank's batches of indices and return the losses. The learning rate falls linearly to 0."""
    images, labels = data
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step, picked in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / len(batches))
        loss = F.cross_entropy(model(images[picked]), labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def test_error(model: nn.Module, data: Data) -> float:
    """Return the test error in % of rank 0's model, which a job would save, with its running statistics."""
    images, labels = data
    wrong = (model.eval()(images).argmax(1) != labels).double().mean() * 100
    model.train()
    if dist.is_initialized():
        dist.broadcast(wrong, 0)
    return wrong.item()


def local_noise(model: nn.Module, images: Tensor, batches: list[Tensor]) -> list[LayerNoise]:
    """Measure the local noise of a trained model on this rank's first batches."""
    return measure(copy.deepcopy(model).train(), (images[picked] for picked in batches[:NUM_MEASURED]))


def report(errors: Any, axis: str, title: str, arguments: argparse.Namespace, joined: bool, **results: Any) -> None:
    """On rank 0 print the table of the errors, and write JSON and a plot. `axis` names the settings; a line joins them
    if they are numbers (`joined`). A setting "panel, place" has a panel of its own.

    The result "noise" is printed as tables, and of "model" the synchronised layers.
    """
    if rank() != 0:
        return
    if model := results.pop("model", None):
        print(syncbn.summary(model))
    if noise := results.pop("noise", None):
        noisiest = max(noise, key=lambda setting: max(row.output_deviation for row in noise[setting]))
        print_noise(f"{axis}: {noisiest}", noise[noisiest])
        rows = [(setting, *format_noise(layers)) for setting, layers in noise.items()]
        print_table("Noise of local batch norm", (axis, "layers that gain", "outputs off by up to"), rows)
        results["local noise"] = {setting: [row._asdict() for row in layers] for setting, layers in noise.items()}
    rows = []
    panels: dict[str, Lines] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for way, settings in errors.items():
        rows.append((way, *("{:.1f} ± {:.1f}".format(*mean_and_spread(seeds)) for seeds in settings.values())))
        for setting, seeds in settings.items():
            panel, _, place = setting.rpartition(", ")
            panels[panel or title][way][place] = seeds
    headings = axis, *next(iter(errors.values()))
    print_table(f"{title}: test error (%), {world_size()} ranks, {arguments.seeds} seeds", headings, rows)
    results["test errors in %"] = errors
    write(arguments, results, errors=lambda figure: draw_panels(figure, panels, axis, joined))
