"""What all jobs here share: ranks' batches, the loop over runs, training and testing, the report of the errors.

It also makes the modules of examples/ importable, so it is imported before them.
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

NUM_TRAIN = 600  # of the 1,797 digits; the others test, so that an error is known to 0.1 %
NUM_MEASURED = 20  # batches on which local noise is measured

Data = tuple[Tensor, Tensor]  # images and labels
# Errors()[way][setting] are the test errors in %, with each seed
Errors = functools.partial(collections.defaultdict, functools.partial(collections.defaultdict, list))


def new_parser(manual: str, name: str, epochs: int = 8) -> argparse.ArgumentParser:
    """A parser with the options of all jobs."""
    parser = launch.new_parser(manual, name)
    parser.add_argument("--seeds", type=positive, default=5, help="runs, of which mean and spread are shown")
    parser.add_argument("--epochs", type=positive, default=epochs, help="passes over the training data")
    return parser


def build_network() -> nn.Module:
    """(N, 1, 8, 8) images -> (N, 10) logits. The last stage has 4 values per image and channel, as the last ones of a
    detector or a segmentation network have few: it is there that small batches are noisy."""
    return build_model(width=16, strides=(2, 2))


def load_data(device: torch.device) -> tuple[Data, Data]:
    """Digits to train and to test with; the data set's order mixes its writers."""
    images, labels = load_images(torch.float32, device)
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


def runs(arguments: argparse.Namespace, *axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Each seed with each choice of one value from each axis. The weights are drawn anew from the seed."""
    combinations = list(itertools.product(range(arguments.seeds), *axes))
    with progress_bar(0, len(combinations)) as advance:
        for seed, *values in combinations:
            torch.manual_seed(seed)
            yield seed, *values
            advance(", ".join(map(str, (f"seed {seed}", *values))))


def epochs_of(indices: Tensor, batch: int, epochs: int, seed: int) -> list[Tensor]:
    """Shuffled batches of these indices, without those that do not fill one. **Exits** where none is filled."""
    if len(indices) < batch:
        sys.exit(f"a batch of {batch} is more than all {len(indices)} that there are to train with")
    generator = torch.Generator().manual_seed(seed)
    whole = len(indices) // batch * batch
    orders = [indices[torch.randperm(len(indices), generator=generator)[:whole]] for _ in range(epochs)]
    return list(torch.cat(orders).split(batch))


def train(model: nn.Module, data: Data, batches: list[Tensor], lr: float) -> Iterator[float]:
    """Make a step of SGD on each of this rank's batches of indices; yields its loss. The learning rate falls to 0 in a
    straight line."""
    images, labels = data
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step, picked in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / len(batches))
        loss = F.cross_entropy(model(images[picked]), labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


@torch.no_grad()
def test_error(model: nn.Module, data: Data) -> float:
    """In %, of rank 0's model, which is the one that a job would save, with its running statistics."""
    images, labels = data
    wrong = (model.eval()(images).argmax(1) != labels).double().mean() * 100
    model.train()
    if dist.is_initialized():
        dist.broadcast(wrong, 0)
    return wrong.item()


def local_noise(model: nn.Module, images: Tensor, batches: list[Tensor]) -> list[LayerNoise]:
    """How far this rank's statistics of a trained model lie from those of all ranks, on this rank's first batches."""
    return measure(copy.deepcopy(model).train(), (images[picked] for picked in batches[:NUM_MEASURED]))


def in_panels(errors: Lines, panel_of: str, title: str) -> dict[str, Lines]:
    """The errors of each panel of a plot. A way or a setting ("way" or "setting") names its panel before a comma."""
    panels: dict[str, Lines] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for way, settings in errors.items():
        for setting, seeds in settings.items():
            panel, line, place = title, way, setting
            if panel_of == "way":
                panel, line = way.split(", ", 1)
            elif panel_of == "setting":
                panel, place = setting.split(", ", 1)
            panels[panel][line][place] = seeds
    return panels


def report(
    errors: Any, axis: str, title: str, arguments: argparse.Namespace, joined: bool, panel_of: str = "", **more: Any
) -> None:
    """On rank 0 table, JSON and plot of the errors against the settings, which `axis` names, the noise there, and
    the summary of a model. Lines join the settings where they are `joined`: numbers, and not categories. `panel_of`:
    see `in_panels`."""
    if rank() != 0:
        return
    if model := more.pop("model", None):
        print(syncbn.summary(model))
    if noise := more.pop("noise", None):
        noisiest = max(noise, key=lambda setting: max(row.output_deviation for row in noise[setting]))
        print_noise(f"{axis}: {noisiest}", noise[noisiest])
        rows = [(setting, *format_noise(layers)) for setting, layers in noise.items()]
        print_table("What local batch norm would do", (axis, "layers that gain", "outputs off by up to"), rows)
        more["local noise"] = {setting: [row._asdict() for row in layers] for setting, layers in noise.items()}
    cells = {way: [mean_and_spread(seeds) for seeds in errors[way].values()] for way in errors}
    rows = [(way, *("{:.1f} ± {:.1f}".format(*cell) for cell in cells[way])) for way in errors]
    settings = list(next(iter(errors.values())))
    print_table(f"{title}: test error (%), {world_size()} ranks, {arguments.seeds} seeds", (axis, *settings), rows)
    panels = in_panels(errors, panel_of, title)
    write(
        arguments, {"test errors in %": errors, **more}, errors=lambda figure: draw_panels(figure, panels, axis, joined)
    )
