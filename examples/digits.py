"""Real handwritten digits, trained three ways from the same weights on the same batches.

    one process     the whole batch on one process, nn.BatchNorm2d
    syncbn          W ranks under DistributedDataParallel, each with its slice of the batch, syncbn
    local           the same with nn.BatchNorm2d: every rank normalises its slice alone

With syncbn the loss curve lies on that of one process, to rounding; with local statistics of two images it does not.

    torchrun --standalone --nproc-per-node 2 examples/digits.py        two ranks: nccl when each has a GPU, else gloo
    python examples/digits.py                                          one process: all three are the same
    torchrun --standalone --nproc-per-node 2 examples/digits.py --epochs 1 --steps 20        a few seconds

Writes metrics.json (settings, curves, accuracies, distances) and curves.png to --output. The data are scikit-learn's:
1,797 images of 8 x 8 pixels, inside its wheel. Without rich it prints plain lines, and without matplotlib there is no
picture.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

NUM_TEST = 297  # images held out; 1,500 to train
SMOOTHING = 25  # steps per point of the plot
LINE_EVERY = 50  # steps, without rich


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--epochs", type=int, default=3, help="passes over the 1,500 training images (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: as many as the images fill)")
    parser.add_argument(
        "--images-per-rank", type=int, default=2, help="images per rank and step, at least 2 (default %(default)s)"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=0.005, help="of SGD with momentum 0.9 (default %(default)s)"
    )
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage (default %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=["float64", "float32"],
        default="float64",
        help="of model and images; training amplifies rounding, in float32 to visible size (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/digits"), help="folder to write (default %(default)s)"
    )
    return parser.parse_args()


class ResidualBlock(nn.Module):
    """conv, batch norm, relu, conv, batch norm, + shortcut, relu."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.shortcut = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: Tensor) -> Tensor:
        """(N, num_in, H, W) -> (N, num_out, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def build_model(width: int) -> nn.Module:
    """(N, 1, 8, 8) images -> (N, 10) logits."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),  # (N, width, 8, 8)
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        ResidualBlock(width, width, stride=1),  # (N, width, 8, 8)
        ResidualBlock(width, 2 * width, stride=2),  # (N, 2 * width, 4, 4)
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def load_images(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) in [0, 1], labels (1797,), in the data set's order: its writers are mixed."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=dtype, device=device).unsqueeze(1)
    return images, torch.tensor(digits.target, device=device)


class Trainer:
    """One way to train: a model, its optimizer, and what it has measured."""

    def __init__(self, name: str, model: nn.Module, learning_rate: float, sliced: bool) -> None:
        self.name = name
        self.sliced = sliced  # each rank takes its slice of the batch; else every rank repeats the whole
        if sliced and dist.is_initialized():
            model = DistributedDataParallel(model)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one whole batch, of which this rank may take its slice; note the loss of the whole batch."""
        if self.sliced:
            images, labels = (whole.chunk(world_size())[rank()] for whole in (images, labels))
        loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        if self.sliced and dist.is_initialized():
            dist.all_reduce(loss)
            loss /= world_size()
        self.losses.append(loss.item())

    @torch.no_grad()
    def evaluate(self, images: Tensor, labels: Tensor) -> None:
        """Note the accuracy of this rank's model on the test images."""
        self.model.eval()
        # The module itself: DistributedDataParallel would wait for the other ranks.
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        self.accuracies.append((model(images).argmax(1) == labels).double().mean().item())
        self.model.train()


def rank() -> int:
    """Of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def choose_device() -> torch.device:
    """Join the process group that torchrun describes, if it does; a GPU of one's own, or the CPU."""
    local_ranks, local_rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    own_gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if own_gpu else torch.device("cpu")
    if own_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if own_gpu else "gloo")
    return device


def train(arguments: argparse.Namespace, device: torch.device) -> list[Trainer]:
    """All three ways in lockstep, so that an interruption leaves comparable curves."""
    torch.manual_seed(arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    images, labels = load_images(dtype, device)
    train_images, test_images = images[NUM_TEST:], images[:NUM_TEST]
    train_labels, test_labels = labels[NUM_TEST:], labels[:NUM_TEST]
    initial = build_model(arguments.width).to(device, dtype)
    one_process, synchronised, local = (copy.deepcopy(initial) for _ in range(3))
    trainers = [
        Trainer("one process", one_process, arguments.learning_rate, sliced=False),
        Trainer("syncbn", syncbn.convert_syncbn_model(synchronised), arguments.learning_rate, sliced=True),
        Trainer("local", local, arguments.learning_rate, sliced=True),
    ]
    batch = arguments.images_per_rank * world_size()
    num_steps = arguments.steps or len(train_images) // batch
    order = torch.Generator().manual_seed(arguments.seed)
    with progress_bar(arguments.epochs * num_steps) as advance:
        for epoch in range(arguments.epochs):
            shuffled = torch.randperm(len(train_images), generator=order).to(device)
            for picked in shuffled.split(batch)[:num_steps]:
                for trainer in trainers:
                    trainer.step(train_images[picked], train_labels[picked])
                losses = "  ".join(f"{trainer.name} {trainer.losses[-1]:.3f}" for trainer in trainers)
                advance(f"epoch {epoch + 1}/{arguments.epochs}  {losses}")
            for trainer in trainers:
                trainer.evaluate(test_images, test_labels)
    if rank() == 0:
        print(syncbn.summary(trainers[1].model))
    return trainers


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Yields what to call after each of `total` steps, with what to show; rank 0 shows it."""
    if rank() != 0:
        yield lambda text: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        step = itertools.count(1)
        yield lambda text: print(text) if next(step) % LINE_EVERY == 0 else None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    """The first row holds the headings."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title, *("  ".join(cell.rjust(14) for cell in row) for row in rows), sep="\n")
        return
    table = Table(title=title)
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)


def distance(trainer: Trainer, reference: Trainer) -> float:
    """The largest difference of two loss curves, in units of the loss."""
    return max(abs(a - b) for a, b in zip(trainer.losses, reference.losses, strict=True))


def report(trainers: list[Trainer], arguments: argparse.Namespace, seconds: float) -> None:
    """Table, JSON and plot; on one rank."""
    device = (
        torch.cuda.get_device_name() if dist.is_initialized() and dist.get_backend() == "nccl" else platform.machine()
    )
    rows = [("training", "final loss", "test accuracy", "largest distance from one process")]
    for trainer in trainers:
        loss = sum(trainer.losses[-SMOOTHING:]) / len(trainer.losses[-SMOOTHING:])
        numbers = f"{loss:.4f}", f"{trainer.accuracies[-1]:.1%}", f"{distance(trainer, trainers[0]):.1e}"
        rows.append((trainer.name, *numbers))
    print_table(f"{world_size()} ranks x {arguments.images_per_rank} images, {arguments.dtype}, {device}", rows)

    arguments.output.mkdir(parents=True, exist_ok=True)
    metrics = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "device": device,
        "ranks": world_size(),
        "seconds": seconds,
        "settings": {name: str(value) for name, value in vars(arguments).items()},
        "runs": {
            trainer.name: {
                "losses": trainer.losses,
                "accuracies": trainer.accuracies,
                "distance": distance(trainer, trainers[0]),
            }
            for trainer in trainers
        },
    }
    (arguments.output / "metrics.json").write_text(json.dumps(metrics, indent=1))
    try:
        plot(trainers, arguments.output / "curves.png")
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"{seconds:.0f} s; wrote to {arguments.output}: {', '.join(sorted(os.listdir(arguments.output)))}")


def plot(trainers: list[Trainer], path: Path) -> None:
    """The three loss curves, and below them the distances of two of them from one process."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, distances) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    styles = {"one process": ("black", "-", 4.0), "syncbn": ("gold", "--", 2.0), "local": ("tab:red", "-", 1.5)}
    for trainer in trainers:
        color, line, width = styles[trainer.name]
        blocks = torch.tensor(trainer.losses).split(SMOOTHING)
        steps = [SMOOTHING * index + len(block) / 2 for index, block in enumerate(blocks)]
        curves.plot(steps, [block.mean() for block in blocks], line, color=color, linewidth=width, label=trainer.name)
        if trainer is not trainers[0]:
            difference = np.abs(np.subtract(trainer.losses, trainers[0].losses))
            distances.semilogy(difference.clip(min=1e-17), color=color, linewidth=1, label=trainer.name)
    curves.set(ylabel=f"training loss (mean of {SMOOTHING} steps)", title="One batch, three ways to normalise it")
    distances.set(xlabel="step", ylabel="distance from one process")
    curves.legend()
    distances.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train three ways and report."""
    start = time.monotonic()
    trainers = train(arguments, device)
    if rank() == 0:
        report(trainers, arguments, time.monotonic() - start)


def main() -> None:
    """Run the job between the making and the end of the process group, which no model may outlive."""
    arguments = parse_arguments()
    if arguments.images_per_rank < 2:
        sys.exit("--images-per-rank must be at least 2: local batch norm cannot normalise one value per channel")
    device = choose_device()
    try:
        job(arguments, device)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
