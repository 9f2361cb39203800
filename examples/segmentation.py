"""Scenes of real handwritten digits, of which a small U-Net names every pixel, trained three ways on the same batches.

    one process     the whole batch on one process, nn.BatchNorm2d
    syncbn          W ranks under DistributedDataParallel, each with its slice of the batch, syncbn
    local           the same with nn.BatchNorm2d: every rank normalises its slice alone

Each scene has a light of its own. Where a rank has one image, as large images may leave room for no more, local
statistics take that light away, and training looks well. But the tests use running statistics, as always, which leave
it, and the dark scenes come out empty. Statistics of all ranks are nearer to those. Digits of the tests are held out.

    torchrun --standalone --nproc-per-node 2 examples/segmentation.py        two ranks
    python examples/segmentation.py                                          one process: all three are the same
    torchrun --standalone --nproc-per-node 2 examples/segmentation.py --steps 20 --test-scenes 8        a few seconds

Writes metrics.json (settings, curves, IoUs, distances) and predictions.png (scenes, their labels, what each of the
three says) to --output. The data are scikit-learn's: 1,797 digits of 8 x 8 pixels, inside its wheel, from which scenes
of 32 x 32 are composed as they are needed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import print_table, progress_bar, rank, run_on_ranks, world_size
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

SIZE = 32  # pixels of a scene's side
DIGIT = 8  # pixels of a digit's side
NUM_PLACES = 20  # tried for the digits of a scene, which do not overlap
DIGIT_WEIGHT = 5.0  # of a digit's pixel in the loss; the background's is 1
DARKEST = 0.1  # light of a scene; the brightest has 1
NUM_TEST = 297  # digits held out; 1,500 to train
NUM_CLASSES = 11  # background, digits
NUM_SHOWN = 6  # scenes of the picture
SMOOTHING = 50  # steps whose mean is the final loss


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of the optimizer (default %(default)s)")
    parser.add_argument("--images-per-rank", type=int, default=1, help="scenes per rank and step (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="highest, of Adam (default %(default)s)")
    parser.add_argument("--width", type=int, default=8, help="channels at full resolution (default %(default)s)")
    parser.add_argument("--test-scenes", type=int, default=200, help="number of them (default %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=["float64", "float32"],
        default="float64",
        help="of model and scenes; training amplifies rounding, in float32 to visible size (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and scenes (default %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/segmentation"), help="folder to write (default %(default)s)"
    )
    return parser.parse_args()


class Scenes:
    """Draws scenes: coloured digits over a coloured slope, each scene in a light of its own."""

    def __init__(self, held_out: bool, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        digits = load_digits()
        chosen = slice(NUM_TEST) if held_out else slice(NUM_TEST, None)  # the data set's order mixes its writers
        self.digits = torch.tensor(digits.images[chosen] / 16)  # (D, 8, 8) in [0, 1]
        self.classes = torch.tensor(digits.target[chosen]) + 1  # (D,) from 1
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def uniform(self, *shape: int) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def scene(self) -> tuple[Tensor, Tensor]:
        """An image (3, 32, 32) in [0, 1] and its labels (32, 32)."""
        ink, labels = torch.zeros(SIZE, SIZE, dtype=torch.float64), torch.zeros(SIZE, SIZE, dtype=torch.long)
        for _ in range(NUM_PLACES):
            top, left = (self.uniform(2) * (SIZE - DIGIT + 1)).int().tolist()
            place = slice(top, top + DIGIT), slice(left, left + DIGIT)
            picked = int(self.uniform(1) * len(self.digits))
            if not ink[place].any():
                ink[place] = self.digits[picked]
                labels[place] = self.classes[picked] * (self.digits[picked] > 0.4)
        background = F.interpolate(0.6 * self.uniform(1, 3, 2, 2), (SIZE, SIZE), mode="bilinear")[0]
        background += 0.1 * (self.uniform(1, SIZE, SIZE) - 0.5)
        colour = 0.6 + 0.4 * self.uniform(3, 1, 1)
        light = DARKEST + (1 - DARKEST) * self.uniform(1)
        return (light * torch.lerp(background, colour, ink)).clamp(0, 1), labels

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        """Images (number, 3, 32, 32) and labels (number, 32, 32)."""
        images, labels = zip(*(self.scene() for _ in range(number)), strict=True)
        return torch.stack(images).to(self.device, self.dtype), torch.stack(labels).to(self.device)


def block(num_in: int, num_out: int) -> nn.Module:
    """(N, num_in, H, W) -> (N, num_out, H, W): conv, batch norm, relu, twice."""
    layers: list[nn.Module] = []
    for channels in (num_in, num_out):
        layers += nn.Conv2d(channels, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Three resolutions, each half the one before; on the way back each is joined to what it was before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width, 3 * width, 6 * width]
        pairs = list(itertools.pairwise(widths))
        self.first = block(3, width)
        self.down = nn.ModuleList(block(fine, coarse) for fine, coarse in pairs)
        self.up = nn.ModuleList(block(fine + coarse, fine) for fine, coarse in reversed(pairs))
        self.last = nn.Conv2d(width, NUM_CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, 32, 32) images -> (N, 11, 32, 32) logits."""
        levels = [self.first(images)]  # (N, width, 32, 32), (N, 3 * width, 16, 16), (N, 6 * width, 8, 8)
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up in self.up:
            x = up(torch.cat((levels.pop(), F.interpolate(x, scale_factor=2)), 1))
        return self.last(x)


class Trainer:
    """One way to train: a model, its optimizer, and what it has measured."""

    def __init__(self, name: str, model: nn.Module, arguments: argparse.Namespace, sliced: bool) -> None:
        self.name = name
        self.sliced = sliced and dist.is_initialized()  # each rank takes its slice; else every rank repeats the whole
        self.module = model
        self.model = DistributedDataParallel(model) if self.sliced else model
        highest = arguments.learning_rate
        self.optimizer = torch.optim.Adam(model.parameters(), lr=highest)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, highest, total_steps=arguments.steps)
        self.losses: list[float] = []
        self.ious = torch.zeros(NUM_CLASSES)  # of background, 0, 1, ..., 9

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one whole batch, of which this rank may take its slice; note the loss of the whole batch."""
        num_slices = world_size() if self.sliced else 1
        weights = torch.full((NUM_CLASSES,), DIGIT_WEIGHT, dtype=images.dtype, device=images.device)
        weights[0] = 1
        # DistributedDataParallel takes the mean over ranks, whose pixels may be of different weights.
        scale = num_slices / weights[labels].sum()
        if self.sliced:
            images, labels = (whole.chunk(num_slices)[rank()] for whole in (images, labels))
        loss = F.cross_entropy(self.model(images), labels, weights, reduction="sum") * scale
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        loss = loss.detach()
        if self.sliced:
            dist.all_reduce(loss)
            loss /= num_slices
        self.losses.append(loss.item())

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Labels (N, 32, 32) for images (N, 3, 32, 32), with running statistics."""
        return torch.cat([self.module.eval()(some).argmax(1) for some in images.split(10)])

    def test(self, images: Tensor, labels: Tensor) -> None:
        """Note each class's intersection over union on all ranks' scenes, of which each rank takes a share."""
        if self.sliced:
            for buffer in self.module.buffers():  # rank 0's; local ones have become different in the last step
                dist.broadcast(buffer, 0)
        images, labels = (whole[rank() :: world_size()] for whole in (images, labels))
        said, true = (F.one_hot(x, NUM_CLASSES).bool() for x in (self.predict(images), labels))
        counts = torch.stack([one.sum((0, 1, 2)) for one in (said & true, said | true)])  # (2, 11)
        if dist.is_initialized():
            dist.all_reduce(counts)
        self.ious = counts[0] / counts[1].clamp(min=1)


def train(arguments: argparse.Namespace, device: torch.device) -> tuple[list[Trainer], tuple[Tensor, Tensor]]:
    """All three ways in lockstep, and the scenes they were tested on."""
    torch.manual_seed(arguments.seed)
    dtype = getattr(torch, arguments.dtype)
    initial = UNet(arguments.width).to(device, dtype)
    one_process, synchronised, local = (copy.deepcopy(initial) for _ in range(3))
    trainers = [
        Trainer("one process", one_process, arguments, sliced=False),
        Trainer("syncbn", syncbn.convert_syncbn_model(synchronised), arguments, sliced=True),
        Trainer("local", local, arguments, sliced=True),
    ]
    scenes = Scenes(False, arguments.seed, dtype, device)
    with progress_bar(0, arguments.steps) as advance:
        for _ in range(arguments.steps):
            images, labels = scenes.draw(arguments.images_per_rank * world_size())
            for trainer in trainers:
                trainer.step(images, labels)
            advance("  ".join(f"{trainer.name} {trainer.losses[-1]:.3f}" for trainer in trainers))
    tests = Scenes(True, arguments.seed, dtype, device).draw(arguments.test_scenes)
    for trainer in trainers:
        trainer.test(*tests)
    return trainers, tests


def distance(trainer: Trainer, reference: Trainer) -> float:
    """The largest difference of two loss curves, in units of the loss."""
    return max(abs(a - b) for a, b in zip(trainer.losses, reference.losses, strict=True))


def report(trainers: list[Trainer], arguments: argparse.Namespace, device: torch.device, seconds: float) -> None:
    """Table and JSON."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    rows = [("training", "final loss", "mean IoU", "largest distance from one process")]
    for trainer in trainers:
        loss = np.mean(trainer.losses[-SMOOTHING:])
        numbers = f"{loss:.4f}", f"{trainer.ious.mean():.1%}", f"{distance(trainer, trainers[0]):.1e}"
        rows.append((trainer.name, *numbers))
    batch = arguments.images_per_rank * world_size()
    print_table(f"{world_size()} ranks, {batch} scenes a step, {arguments.dtype}, {name}", rows)
    metrics = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
        "ranks": world_size(),
        "seconds": seconds,
        "settings": {name: str(value) for name, value in vars(arguments).items()},
        "runs": {
            trainer.name: {
                "losses": trainer.losses,
                "mean_iou": trainer.ious.mean().item(),
                "ious": trainer.ious.tolist(),
                "distance": distance(trainer, trainers[0]),
            }
            for trainer in trainers
        },
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "metrics.json").write_text(json.dumps(metrics, indent=1))


def picture(trainers: list[Trainer], images: Tensor, labels: Tensor, path: Path) -> None:
    """A row for each scene: the scene, its labels, and what each model says."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ListedColormap([(0.1, 0.1, 0.12), *plt.get_cmap("tab10").colors])
    columns = {"scene": images.permute(0, 2, 3, 1), "truth": labels}
    for trainer in trainers:
        columns[f"{trainer.name}\nmean IoU {trainer.ious.mean():.0%}"] = trainer.predict(images)
    size = (1.6 * len(columns), 1.6 * len(images) + 0.9)
    figure, grid = plt.subplots(len(images), len(columns), figsize=size, layout="constrained", squeeze=False)
    for column, (title, cells) in zip(grid.T, columns.items(), strict=True):
        column[0].set_title(title, fontsize=11)
        for axes, cell in zip(column, cells, strict=True):
            axes.imshow(cell.cpu(), cmap=colours, vmin=0, vmax=NUM_CLASSES - 1, interpolation="nearest")
            axes.axis("off")
    patches = [Patch(color=colours(digit + 1), label=str(digit)) for digit in range(NUM_CLASSES - 1)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, handlelength=1)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train three ways, test, report."""
    start = time.monotonic()
    trainers, (images, labels) = train(arguments, device)
    if rank() == 0:
        seconds = time.monotonic() - start
        print(syncbn.summary(trainers[1].model))
        report(trainers, arguments, device, seconds)
        try:
            picture(trainers, images[:NUM_SHOWN], labels[:NUM_SHOWN], arguments.output / "predictions.png")
        except ImportError as error:
            print(f"no picture: {error}")
        print(f"{seconds:.0f} s; wrote to {arguments.output}")


def main() -> None:
    """Run the job."""
    arguments = parse_arguments()
    for name in ("steps", "images_per_rank", "test_scenes"):
        if getattr(arguments, name) < 1:
            sys.exit(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    run_on_ranks(lambda device: job(arguments, device))


if __name__ == "__main__":
    main()
