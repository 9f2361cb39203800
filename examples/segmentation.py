"""Train a small U-Net to classify every pixel in scenes of real handwritten digits, in three ways on the same batches.

    one process     nn.BatchNorm2d on the whole batch
    syncbn          synchronised batch norm on W ranks under DistributedDataParallel, each with its slice of the batch
    local           the same with nn.BatchNorm2d: each rank normalises its slice alone

Each scene has its own brightness. If a rank has one image, local batch norm removes the brightness of the image, which
makes training easier. In evaluation batch norm uses running statistics, which do not remove it, so the model misses
dark scenes. With syncbn training and evaluation agree better. The digits of the test scenes do not occur in training.

A run has one seed. The job also prints results of several seeds that evidence/segmentation_seeds.py has stored.

    python examples/segmentation.py                                          one process: all three ways are the same
    torchrun --standalone --nproc-per-node 2 examples/segmentation.py        two ranks
    torchrun --standalone --nproc-per-node 2 examples/segmentation.py --steps 20 --test-scenes 8        a few seconds

Writes metrics.json and predictions.png (scenes, their labels, the predictions of each way) to --output. The wheel of
scikit-learn contains the digits: 1,797 images of 8 x 8 pixels. A scene has 32 x 32 pixels.
"""

import argparse
import copy
import functools
import json
from pathlib import Path
from typing import Any

import launch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import local_slice, progress, run_on_ranks
from results import LOOKS, mean_and_spread, print_table
from running_statistics import recompute_running_stats
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from trainer import Trainer, distance, last_losses, report, three_ways

SIZE, DIGIT = 32, 8  # sides of a scene and of a digit in pixels
NUM_TRIES = 20  # random positions per scene; a digit is drawn if it does not overlap with an earlier digit
DIGIT_WEIGHT = 5.0  # weight of a digit's pixel in the loss; a pixel of the background has 1
DARKEST = 0.1  # lowest brightness of a scene; the highest is 1
NUM_TEST = 297  # digits of the test scenes; the other 1,500 are for training
NUM_CLASSES = 11  # background, 0, 1, ..., 9
NUM_SHOWN = 4  # scenes in the picture
NUM_FOR_STATISTICS = 100  # scenes per rank from which the running statistics of local batch norm are recomputed
SAME_IOU = 1e-3  # Smaller differences of the IoU are rounding.
STORED_RESULTS = Path(__file__).parent / "evidence" / "segmentation_seeds.json"


def new_parser(manual: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options that this job and evidence/segmentation_seeds.py have in common. This job adds
    --seed, a seed, and the other job --seeds, a number of seeds."""
    parser = launch.new_parser(manual, name)
    add = parser.add_argument
    add("--steps", type=int, default=1000, help="steps of the optimizer")
    add("--images-per-rank", type=int, default=1, help="scenes per rank and step")
    add("--learning-rate", type=float, default=0.01, help="peak of the OneCycle schedule, for Adam")
    add("--width", type=int, default=8, help="channels at full resolution")
    add("--test-scenes", type=int, default=200, help="number of test scenes")
    return parser


class Scenes:
    """Draws scenes: digits of one color on a colored gradient, each scene with its own brightness."""

    def __init__(self, digits: slice, seed: int, device: torch.device) -> None:
        images, labels = load_digits(return_X_y=True)
        self.digits = torch.tensor(images[digits] / 16).view(-1, DIGIT, DIGIT)  # (D, 8, 8) in [0, 1]
        self.classes = torch.tensor(labels[digits]) + 1  # (D,) in 1 ... 10, because class 0 is the background
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def draw_scene(self) -> tuple[Tensor, Tensor]:
        """Return an image (3, 32, 32) in [0, 1] and its labels (32, 32)."""
        ink, labels = torch.zeros(SIZE, SIZE, dtype=torch.float64), torch.zeros(SIZE, SIZE, dtype=torch.long)
        for _ in range(NUM_TRIES):
            top, left = (self.uniform(2) * (SIZE - DIGIT + 1)).int().tolist()
            position = slice(top, top + DIGIT), slice(left, left + DIGIT)
            index = int(self.uniform(1) * len(self.digits))
            if not ink[position].any():
                ink[position] = self.digits[index]
                labels[position] = self.classes[index] * (self.digits[index] > 0.4)
        corners = 0.6 * self.uniform(1, 3, 2, 2)  # colors of the four corners
        background = F.interpolate(corners, (SIZE, SIZE), mode="bilinear")[0]
        background += 0.1 * (self.uniform(1, SIZE, SIZE) - 0.5)  # noise
        color = 0.6 + 0.4 * self.uniform(3, 1, 1)
        brightness = DARKEST + (1 - DARKEST) * self.uniform(1)
        return (brightness * torch.lerp(background, color, ink)).clamp(0, 1), labels

    def draw(self, number: int) -> tuple[Tensor, Tensor]:
        """Return images (number, 3, 32, 32) and labels (number, 32, 32)."""
        images, labels = zip(*(self.draw_scene() for _ in range(number)), strict=True)
        return torch.stack(images).to(self.device), torch.stack(labels).to(self.device)


def block(num_in: int, num_out: int) -> nn.Module:
    """Map (N, num_in, H, W) to (N, num_out, H, W): twice a convolution, batch norm and relu."""
    layers: list[nn.Module] = []
    for channels in (num_in, num_out):
        layers += nn.Conv2d(channels, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """An encoder with three resolutions and a decoder with skip connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = block(3, width)
        self.down = nn.ModuleList([block(width, 3 * width), block(3 * width, 6 * width)])
        self.up = nn.ModuleList([block((3 + 6) * width, 3 * width), block((1 + 3) * width, width)])
        self.last = nn.Conv2d(width, NUM_CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, 11, 32, 32)."""
        levels = [self.first(images)]  # (N, width, 32, 32)
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))  # (N, 3 * width, 16, 16), then (N, 6 * width, 8, 8)
        x = levels.pop()
        for up in self.up:
            x = up(torch.cat((levels.pop(), F.interpolate(x, scale_factor=2)), 1))
        return self.last(x)


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Map images (N, 3, 32, 32) to labels (N, 32, 32). The model normalises by its running statistics."""
    return torch.cat([model.eval()(part).argmax(1) for part in images.split(10)])


def intersection_over_union(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the intersection over union of each class (11,) on all scenes. Each rank predicts its share of them."""
    images, labels = local_slice(images), local_slice(labels)
    predicted = F.one_hot(predict(model, images), NUM_CLASSES).bool()  # (N, 32, 32, 11)
    expected = F.one_hot(labels, NUM_CLASSES).bool()
    counts = torch.stack(((predicted & expected).sum((0, 1, 2)), (predicted | expected).sum((0, 1, 2))))
    dist.all_reduce(counts)
    intersection, union = counts
    return intersection / union.clamp(min=1)


def test(trainer: Trainer, images: Tensor, labels: Tensor, training: Tensor) -> None:
    """Test the model and store the results in trainer.tests: the IoU of each class and the mean IoU. For local batch
    norm add the mean IoU with running statistics that are recomputed on training scenes."""
    if trainer.is_parallel:
        for buffer in trainer.module.buffers():
            dist.broadcast(buffer, 0)  # Local buffers differ. A job usually saves those of rank 0, so these are tested.
    iou = intersection_over_union(trainer.module, images, labels)
    trainer.tests = {"mean_iou": iou.mean().item(), "ious": iou.tolist()}
    if trainer.name == "local":
        recomputed = copy.deepcopy(trainer.module)
        loader = DataLoader(TensorDataset(local_slice(training)))
        recompute_running_stats(recomputed, loader, empty=training[:0])
        trainer.tests["mean_iou_recomputed"] = intersection_over_union(recomputed, images, labels).mean().item()


def draw_predictions(figure: Any, trainers: list[Trainer], images: Tensor, labels: Tensor) -> None:
    """Draw a row for each scene: the scene, its labels, and the prediction of each model."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    colors = ListedColormap(["black", *colormaps["tab10"].colors])  # background, 0, 1, ..., 9
    columns = [("scene", "black", images.permute(0, 2, 3, 1)), ("labels", "black", labels)]
    for trainer in trainers:
        title = f"{trainer.name}\nmean IoU {trainer.tests['mean_iou']:.0%}"
        color, _ = LOOKS[trainer.name]
        columns.append((title, color, predict(trainer.module, images)))
    figure.set_size_inches(1.6 * len(columns), 1.6 * len(images) + 0.9)
    grid = figure.subplots(len(images), len(columns), squeeze=False)
    for axes_of_column, (title, color, pictures) in zip(grid.T, columns, strict=True):
        axes_of_column[0].set_title(title, fontsize=11, color=color)
        for axes, picture in zip(axes_of_column, pictures, strict=True):
            axes.imshow(picture.cpu(), cmap=colors, vmin=0, vmax=NUM_CLASSES - 1, interpolation="nearest")
            axes.axis("off")


def train(arguments: argparse.Namespace, seed: int, device: torch.device) -> tuple[list[Trainer], Tensor, Tensor]:
    """Train and test in three ways from one seed. Return the trainers, and the first test scenes with their labels."""
    torch.manual_seed(seed)
    model = UNet(arguments.width).to(device, torch.float64)  # In float32 rounding would change the loss curves.
    peak = arguments.learning_rate
    trainers = three_ways(model, functools.partial(torch.optim.Adam, lr=peak))
    schedules = [OneCycleLR(trainer.optimizer, peak, total_steps=arguments.steps) for trainer in trainers]
    class_weights = torch.tensor([1.0] + (NUM_CLASSES - 1) * [DIGIT_WEIGHT], dtype=torch.float64, device=device)
    training_scenes, test_scenes = Scenes(slice(NUM_TEST, None), seed, device), Scenes(slice(NUM_TEST), seed, device)
    with progress(0, arguments.steps) as advance:
        for _ in range(arguments.steps):
            images, labels = training_scenes.draw(arguments.images_per_rank * dist.get_world_size())
            for trainer, schedule in zip(trainers, schedules, strict=True):
                trainer.step(images, labels, class_weights)
                schedule.step()
            advance(f"seed {seed}  {last_losses(trainers)}")
    training, _ = training_scenes.draw(NUM_FOR_STATISTICS * dist.get_world_size())
    images, labels = test_scenes.draw(arguments.test_scenes)
    for trainer in trainers:
        test(trainer, images, labels, training)
    return trainers, images[:NUM_SHOWN], labels[:NUM_SHOWN]


def print_stored_results(file: Path) -> None:
    """Print the results that evidence/segmentation_seeds.py has stored in `file`, and the command that made them."""
    results = json.loads(file.read_text())
    ways, rows = results["ways"], []
    for way, seeds in ways.items():
        loss = mean_and_spread([seed["final loss"] for seed in seeds])
        iou = mean_and_spread([seed["mean_iou"] for seed in seeds])
        pairs = zip(seeds, ways["one process"], strict=True)
        num_lower = sum(seed["mean_iou"] < reference["mean_iou"] - SAME_IOU for seed, reference in pairs)
        largest = max(seed["largest distance"] for seed in seeds)
        cells = "{:.2f} ± {:.2f}".format(*loss), "{:.1%} ± {:.1%}".format(*iou), f"{num_lower} of {len(seeds)}"
        rows.append((way, *cells, f"{largest:.1e}"))
    recomputed = mean_and_spread([seed["mean_iou_recomputed"] for seed in ways["local"]])
    headings = "training", "final loss", "mean IoU", "seeds with a lower IoU", "largest distance of losses, all seeds"
    print_table(f"{len(seeds)} seeds: mean ± standard deviation ({results['date'][:10]})", headings, rows)
    print("Local with recomputed running statistics: mean IoU {:.1%} ± {:.1%}".format(*recomputed))
    command = f"torchrun --standalone --nproc-per-node {results['ranks']} {results['command']}"
    print(f"Measured with torch {results['torch']} ({results['device']}) by\n  {command}")


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    trainers, images, labels = train(arguments, arguments.seed, device)
    if dist.get_rank() != 0:
        return
    num_ranks = dist.get_world_size()
    scores = [trainer.tests["mean_iou"] for trainer in trainers]
    predictions = functools.partial(draw_predictions, trainers=trainers, images=images, labels=labels)
    batch = f"{arguments.images_per_rank * num_ranks} scenes"
    report(trainers, "mean IoU", scores, batch, arguments, predictions=predictions)
    print_stored_results(STORED_RESULTS)
    if num_ranks == 1:
        print("This run compares nothing: in one process all three ways are the same. Start two ranks with torchrun.")
    else:
        iou = ", ".join(f"{score:.0%} ({trainer.name})" for trainer, score in zip(trainers, scores, strict=True))
        shown = f"the losses differ by at most {distance(trainers[1], trainers[0]):.0e}, and mean IoU is {iou}"
        print(
            f"Shown, at seed {arguments.seed}: {num_ranks} ranks with syncbn train as one process does: {shown}. "
            "Not shown: other seeds (the table above), other tasks, more images a rank, GPUs."
        )


if __name__ == "__main__":
    parser = new_parser(__doc__, "segmentation")
    parser.add_argument("--seed", type=int, default=0, help="of weights and scenes")
    run_on_ranks(job, parser)
