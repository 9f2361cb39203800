"""What all jobs here share: ranks' batches, training and testing, and the report of errors as table, JSON and plot.

It also makes the modules of examples/ importable, so it is imported before them.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from syncbn.tools.measure_local_noise import LocalNoise

sys.path.append(str(Path(__file__).parents[1]))
from digits import ResidualBlock
from launch import print_table, rank, world_size
from local_noise import in_words

START = time.monotonic()  # of the job
NUM_TRAIN = 600  # of the 1,797 digits; the others test, so that an error is known to 0.1 %

Data = tuple[Tensor, Tensor]  # images and labels
Errors = dict[str, dict[str, list[float]]]  # of each way, in each setting: the error in % with each seed


def new_parser(manual: str, name: str) -> argparse.ArgumentParser:
    """With the knobs of all jobs."""
    parser = argparse.ArgumentParser(description=manual, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=positive, default=3, help="runs, of which mean and spread are shown (%(default)s)"
    )
    parser.add_argument(
        "--epochs", type=positive, default=4, help="passes over the training data (default %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs") / name, help="folder to write (default %(default)s)"
    )
    return parser


def positive(text: str) -> int:
    """An option's whole number."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def build_network(width: int = 16) -> nn.Module:
    """(N, 1, 8, 8) images -> (N, 10) logits. The last stage has 4 values per image and channel, as the last ones of a
    detector or a segmentation network have few: it is there that small batches are noisy."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),  # (N, width, 8, 8)
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        ResidualBlock(width, 2 * width, stride=2),  # (N, 2 * width, 4, 4)
        ResidualBlock(2 * width, 4 * width, stride=2),  # (N, 4 * width, 2, 2)
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def split(data: Data) -> tuple[Data, Data]:
    """Training and test data; the data set's order mixes its writers."""
    images, labels = data
    return (images[:NUM_TRAIN], labels[:NUM_TRAIN]), (images[NUM_TRAIN:], labels[NUM_TRAIN:])


def epochs_of(indices: Tensor, batch: int, epochs: int, seed: int) -> list[Tensor]:
    """Shuffled batches of so many of these indices; what does not fill a batch is left out of its epoch.

    **Exits** where they do not fill one.
    """
    if len(indices) < batch:
        sys.exit(f"a batch of {batch} is more than all {len(indices)} that there are to train with")
    generator = torch.Generator().manual_seed(seed)
    whole = len(indices) // batch * batch
    orders = [indices[torch.randperm(len(indices), generator=generator)[:whole]] for _ in range(epochs)]
    return list(torch.cat(orders).split(batch))


def own(batches: Iterable[Tensor]) -> list[Tensor]:
    """This rank's slices of the batches of all ranks."""
    return [batch.tensor_split(world_size())[rank()] for batch in batches]


def parallel(model: nn.Module) -> nn.Module:
    """Data-parallel where there are ranks."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def unwrap(model: nn.Module) -> nn.Module:
    """The module that DistributedDataParallel holds."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def train(
    model: nn.Module,
    data: Data,
    batches: Iterable[Tensor],
    learning_rate: Callable[[int], float],
    momentum: float = 0.9,
) -> Iterator[float]:
    """A step of SGD on each of this rank's batches of indices; yields its loss."""
    images, labels = data
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    for picked in batches:
        loss = F.cross_entropy(model(images[picked]), labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss.item()


def falling(highest: float, num_steps: int) -> Callable[[int], float]:
    """A learning rate that falls in a straight line to 0."""
    return lambda step: highest * (1 - step / num_steps)


@torch.no_grad()
def test_error(model: nn.Module, data: Data) -> float:
    """In %, of rank 0's model, with its running statistics; it is the one that a job would save."""
    images, labels = data
    wrong = (unwrap(model).eval()(images).argmax(1) != labels).double().mean() * 100
    model.train()
    if dist.is_initialized():
        dist.broadcast(wrong, 0)
    return wrong.item()


@torch.no_grad()
def local_noise(model: nn.Module, images: Tensor, batches: Iterable[Tensor]) -> LocalNoise:
    """How far this rank's statistics of a trained model lie from those of all ranks, on this rank's batches."""
    copied = copy.deepcopy(unwrap(model)).train()
    with syncbn.measure_local_noise(copied) as noise:
        for picked in batches:
            copied(images[picked])
    return noise


def print_noise(axis: str, noise: dict[str, LocalNoise]) -> None:
    """The layers of the noisiest setting, and a row for each setting."""
    noisiest = max(noise, key=lambda setting: max(row.output_deviation for row in noise[setting]))
    print(f"{axis}: {noisiest}", noise[noisiest], sep="\n")
    rows = [(setting, *in_words(layers)) for setting, layers in noise.items()]
    print_table("What local batch norm would do", [(axis, "layers that gain", "outputs off by up to"), *rows])


def report(
    errors: Errors,
    axis: str,
    title: str,
    arguments: argparse.Namespace,
    noise: dict[str, LocalNoise] | None = None,
    **more: Any,
) -> None:
    """Table, JSON and plot of the errors against the settings, which `axis` names, and of noise there; on rank 0."""
    if rank() != 0:
        return
    if noise:
        print_noise(axis, noise)
        more["local noise"] = {setting: [row._asdict() for row in layers] for setting, layers in noise.items()}
    settings = list(next(iter(errors.values())))
    rows = [(axis, *settings)]
    for way, by_setting in errors.items():
        rows.append((way, *(f"{statistics.mean(values):.1f} ± {spread(values):.1f}" for values in by_setting.values())))
    print_table(f"{title}: test error (%), {world_size()} ranks, {arguments.seeds} seeds", rows)
    metrics = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "device": platform.machine(),
        "ranks": world_size(),
        "seconds": time.monotonic() - START,
        "settings": {name: str(value) for name, value in vars(arguments).items()},
        "test errors in %": errors,
        **more,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "metrics.json").write_text(json.dumps(metrics, indent=1))
    try:
        plot(errors, axis, title, arguments.output / "errors.png")
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"{metrics['seconds']:.0f} s; wrote to {arguments.output}")


def spread(values: list[float]) -> float:
    """The standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def plot(errors: Errors, axis: str, title: str, path: Path) -> None:
    """A line for each way: means, with the spread as bars. Ways that differ after a comma have the same colour."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    settings = list(next(iter(errors.values())))
    families = [way.partition(",")[0] for way in errors]
    for index, (way, by_setting) in enumerate(errors.items()):
        places = [place + 0.03 * (index - (len(errors) - 1) / 2) for place in range(len(settings))]  # bars side by side
        means, spreads = ([measure(values) for values in by_setting.values()] for measure in (statistics.mean, spread))
        style = {
            "color": f"C{list(dict.fromkeys(families)).index(families[index])}",
            "linestyle": ("-", "--", ":")[families[:index].count(families[index])],
        }
        axes.errorbar(places, means, spreads, label=way, marker="o", markersize=4, capsize=3, **style)
    axes.set(title=title, xlabel=axis, ylabel="test error (%)", ylim=(0, None))
    axes.set_xticks(range(len(settings)), settings)
    axes.legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)
