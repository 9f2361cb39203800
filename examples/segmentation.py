"""Train a small U-Net to classify every pixel in scenes of real handwritten digits, in three ways on the same batches.

    one process     the whole batch on one process, nn.BatchNorm2d
    syncbn          W ranks under DistributedDataParallel, each with its slice of the batch, converted by syncbn
    local           the same with nn.BatchNorm2d: every rank normalises its slice alone

Each scene has its own brightness. If a rank has one image, local statistics remove the brightness, which makes training
easier. But evaluation uses running statistics, which keep it, so the model misses dark scenes. Statistics of all ranks
are closer to the running statistics. The digits of the test scenes are held out.

A run has one seed. The job also prints the stored results of several seeds, which evidence/segmentation_seeds.py made.

    python examples/segmentation.py                                          one process: all three are the same
    torchrun --standalone --nproc-per-node 2 examples/segmentation.py        two ranks
    torchrun --standalone --nproc-per-node 2 examples/segmentation.py --steps 20 --test-scenes 8        a few seconds

Writes metrics.json and predictions.png (scenes, their labels, the predictions of each way) to --output. The data are
scikit-learn's: 1,797 digits of 8 x 8 pixels, which its wheel contains. Scenes of 32 x 32 pixels are drawn from them.
"""

import argparse
import copy
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import launch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import own, positive, print_table, progress_bar, rank, run_on_ranks, sum_over_ranks, world_size
from plots import BLUE, GREEN, LOOKS, ORANGE, PURPLE, SKY, VERMILLION, YELLOW, mean_and_spread
from running_statistics import recompute_running_stats
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from trainer import Trainer, distance, last_losses, report, three_ways

SIZE, DIGIT = 32, 8  # pixels of the side of a scene, and of a digit
NUM_TRIES = 20  # random positions that are tried for digits, which do not overlap
DIGIT_WEIGHT = 5.0  # weight of a digit's pixel in the loss; the background has 1
DARKEST = 0.1  # lowest brightness of a scene; the highest is 1
NUM_TEST = 297  # held-out digits; the other 1,500 are for training
NUM_CLASSES = 11  # background, 0, 1, ..., 9
NUM_SHOWN = 4  # scenes in the picture
NUM_RECOMPUTED = 100  # batches for recomputed running statistics
SAME_IOU = 1e-3  # Smaller differences of the IoU are rounding.
OVER_SEEDS = Path(__file__).parent / "evidence" / "segmentation_seeds.json"
DIGIT_COLORS = [BLUE, ORANGE, GREEN, VERMILLION, PURPLE, "#9a7b4f", YELLOW, "#999999", SKY, "#ffffff"]


def new_parser(manual: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with all options except the seed."""
    parser = launch.new_parser(manual, name)
    add = parser.add_argument
    add("--steps", type=positive, default=1000, help="steps of the optimizer")
    add("--images-per-rank", type=positive, default=1, help="scenes per rank and step")
    add("--learning-rate", type=float, default=0.01, help="peak of the OneCycle schedule, for Adam")
    add("--width", type=positive, default=8, help="channels at full resolution")
    add("--test-scenes", type=positive, default=200, help="number of test scenes")
    add("--dtype", choices=["float64", "float32"], default="float64", help="training amplifies the rounding of float32")
    return parser


class Scenes:
    """Draws scenes: colored digits on a colored gradient, each scene with its own brightness."""

    def __init__(self, held_out: bool, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        digits = load_digits()
        chosen = slice(NUM_TEST) if held_out else slice(NUM_TEST, None)  # The file order mixes the writers.
        self.digits = torch.tensor(digits.images[chosen] / 16)  # (D, 8, 8) in [0, 1]
        self.classes = torch.tensor(digits.target[chosen]) + 1  # (D,) from 1
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def scene(self) -> tuple[Tensor, Tensor]:
        """Return an image (3, 32, 32) in [0, 1] and its labels (32, 32)."""
        ink, labels = torch.zeros(SIZE, SIZE, dtype=torch.float64), torch.zeros(SIZE, SIZE, dtype=torch.long)
        for _ in range(NUM_TRIES):
            top, left = (self.uniform(2) * (SIZE - DIGIT + 1)).int().tolist()
            place = slice(top, top + DIGIT), slice(left, left + DIGIT)
            picked = int(self.uniform(1) * len(self.digits))
            if not ink[place].any():
                ink[place] = self.digits[picked]
                labels[place] = self.classes[picked] * (self.digits[picked] > 0.4)
        background = F.interpolate(0.6 * self.uniform(1, 3, 2, 2), (SIZE, SIZE), mode="bilinear")[0]
        background += 0.1 * (self.uniform(1, SIZE, SIZE) - 0.5)
        color = 0.6 + 0.4 * self.uniform(3, 1, 1)
        brightness = DARKEST + (1 - DARKEST) * self.uniform(1)
        return (brightness * torch.lerp(background, color, ink)).clamp(0, 1), labels

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        """Return images (number, 3, 32, 32) and labels (number, 32, 32)."""
        images, labels = zip(*(self.scene() for _ in range(number)), strict=True)
        return torch.stack(images).to(self.device, self.dtype), torch.stack(labels).to(self.device)


def block(num_in: int, num_out: int) -> nn.Module:
    """(N, num_in, H, W) -> (N, num_out, H, W): conv, batch norm, relu, twice."""
    layers: list[nn.Module] = []
    for channels in (num_in, num_out):
        layers += nn.Conv2d(channels, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """An encoder with three resolutions and a decoder with skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise([width, 3 * width, 6 * width]))
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


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    """(N, 3, 32, 32) images -> (N, 32, 32) labels, with running statistics."""
    return torch.cat([model.eval()(some).argmax(1) for some in images.split(10)])


def ious(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the intersection over union (11,) of each class on all scenes; each rank predicts a share of them."""
    images, labels = (whole[rank() :: world_size()] for whole in (images, labels))
    predicted, true = (F.one_hot(x, NUM_CLASSES).bool() for x in (predict(model, images), labels))
    overlap, union = (sum_over_ranks(both.sum((0, 1, 2))) for both in (predicted & true, predicted | true))
    return overlap / union.clamp(min=1)


def test(trainer: Trainer, images: Tensor, labels: Tensor, training: Tensor) -> None:
    """Record the IoUs; for local batch norm also with running statistics that are recomputed on training scenes."""
    if trainer.sliced:
        for buffer in trainer.module.buffers():
            dist.broadcast(buffer, 0)  # Test what a job would save: the buffers of rank 0.
    iou = ious(trainer.module, images, labels)
    trainer.tests = {"mean_iou": iou.mean().item(), "ious": iou.tolist()}
    if trainer.name == "local":
        recomputed = copy.deepcopy(trainer.module)
        recompute_running_stats(recomputed, DataLoader(TensorDataset(own(training))), training[:0])
        trainer.tests["mean_iou_recomputed"] = ious(recomputed, images, labels).mean().item()


def draw_predictions(figure: Any, trainers: list[Trainer], images: Tensor, labels: Tensor) -> None:
    """Draw a row for each scene: the scene, its labels, and the prediction of each model."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colors = ListedColormap(["#1a1a1f", *DIGIT_COLORS])
    columns = {"scene": images.permute(0, 2, 3, 1), "labels": labels}
    for trainer in trainers:
        columns[f"{trainer.name}\nmean IoU {trainer.tests['mean_iou']:.0%}"] = predict(trainer.module, images)
    figure.set_size_inches(1.6 * len(columns), 1.6 * len(images) + 0.9)
    grid = figure.subplots(len(images), len(columns), squeeze=False)
    for column, (title, cells) in zip(grid.T, columns.items(), strict=True):
        way = title.partition("\n")[0]
        column[0].set_title(title, fontsize=11, color=LOOKS[way][0] if way in LOOKS else "black")
        for axes, cell in zip(column, cells, strict=True):
            axes.imshow(cell.cpu(), cmap=colors, vmin=0, vmax=NUM_CLASSES - 1, interpolation="nearest")
            axes.axis("off")
    patches = [Patch(color=colors(digit + 1), label=str(digit)) for digit in range(NUM_CLASSES - 1)]
    legend = figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), handlelength=1)
    legend.set(frame_on=True)
    legend.get_frame().set(facecolor="#e5e5e5", edgecolor="none")


def train(arguments: argparse.Namespace, seed: int, device: torch.device) -> tuple[list[Trainer], Tensor, Tensor]:
    """Train and test the three ways from one seed. Return them with the first test scenes and their labels."""
    torch.manual_seed(seed)
    dtype, highest = getattr(torch, arguments.dtype), arguments.learning_rate
    trainers = three_ways(UNet(arguments.width).to(device, dtype), functools.partial(torch.optim.Adam, lr=highest))
    schedules = [OneCycleLR(trainer.optimizer, highest, total_steps=arguments.steps) for trainer in trainers]
    class_weights = torch.tensor([1.0] + (NUM_CLASSES - 1) * [DIGIT_WEIGHT], dtype=dtype, device=device)
    scenes, batch = Scenes(False, seed, dtype, device), arguments.images_per_rank * world_size()
    with progress_bar(0, arguments.steps) as advance:
        for _ in range(arguments.steps):
            images, labels = scenes.draw(batch)
            for trainer, schedule in zip(trainers, schedules, strict=True):
                trainer.step(images, labels, class_weights)
                schedule.step()
            advance(f"seed {seed}  {last_losses(trainers)}")
    training, _ = scenes.draw(NUM_RECOMPUTED * world_size())
    images, labels = Scenes(True, seed, dtype, device).draw(arguments.test_scenes)
    for trainer in trainers:
        test(trainer, images, labels, training)
    return trainers, images[:NUM_SHOWN], labels[:NUM_SHOWN]


def print_over_seeds(file: Path) -> None:
    """Print the table that evidence/segmentation_seeds.py has stored in `file`, and the command that made it."""
    results = json.loads(file.read_text())
    ways, rows = results["ways"], []
    reference = [seed["mean_iou"] for seed in ways["one process"]]
    for way, seeds in ways.items():
        scores = [seed["mean_iou"] for seed in seeds]
        loss, score = mean_and_spread([seed["final loss"] for seed in seeds]), mean_and_spread(scores)
        num_lower = sum(a < b - SAME_IOU for a, b in zip(scores, reference, strict=True))
        cells = "{:.2f} ± {:.2f}".format(*loss), "{:.1%} ± {:.1%}".format(*score), f"{num_lower} of {len(seeds)}"
        rows.append((way, *cells, f"{max(seed['largest distance'] for seed in seeds):.1e}"))
    recomputed = mean_and_spread([seed["mean_iou_recomputed"] for seed in ways["local"]])
    headings = "training", "final loss", "mean IoU", "seeds with a lower IoU", "largest distance, all seeds"
    print_table(f"{len(reference)} seeds: mean ± standard deviation ({results['date'][:10]})", headings, rows)
    print("Local with recomputed running statistics: mean IoU {:.1%} ± {:.1%}".format(*recomputed))
    command = f"torchrun --standalone --nproc-per-node {results['ranks']} {results['command']}"
    print(f"Measured with torch {results['torch']} ({results['device']}) by\n  {command}")


def conclusion(trainers: list[Trainer], arguments: argparse.Namespace) -> str:
    """Return one line about the claims that this run shows, and those that it does not."""
    if world_size() == 1:
        return "Nothing is shown: in one process all three ways are the same. Start two ranks with torchrun."
    one_process, synchronised, local = (f"{trainer.tests['mean_iou']:.0%}" for trainer in trainers)
    return (
        f"Shown, at seed {arguments.seed}: {world_size()} ranks with syncbn train as one process does, each loss to "
        f"{distance(trainers[1], trainers[0]):.0e}; mean IoU is {one_process} (one process), {synchronised} (syncbn), "
        f"{local} (local). Not shown: other seeds (the table above), other tasks, more images a rank, GPUs."
    )


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    trainers, images, labels = train(arguments, arguments.seed, device)
    if rank() == 0:
        scores = [trainer.tests["mean_iou"] for trainer in trainers]
        predictions = functools.partial(draw_predictions, trainers=trainers, images=images, labels=labels)
        batch = f"{arguments.images_per_rank * world_size()} scenes"
        report(trainers, "mean IoU", scores, batch, arguments, predictions=predictions)
        print_over_seeds(OVER_SEEDS)
        print(conclusion(trainers, arguments))


if __name__ == "__main__":
    parser = new_parser(__doc__, "segmentation")
    parser.add_argument("--seed", type=int, default=0, help="of weights and scenes")
    run_on_ranks(job, parser)
