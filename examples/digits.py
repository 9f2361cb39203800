"""Real handwritten digits, trained three ways from the same weights on the same batches.

    one process     the whole batch on one process, nn.BatchNorm2d
    syncbn          W ranks under DistributedDataParallel, each with its slice of the batch, syncbn
    local           the same with nn.BatchNorm2d: every rank normalises its slice alone

With syncbn the loss curve lies on that of one process, to rounding; with local statistics of two images it does not.

    torchrun --standalone --nproc-per-node 2 examples/digits.py        two ranks: nccl when each has a GPU, else gloo
    python examples/digits.py                                          one process: all three are the same
    torchrun --standalone --nproc-per-node 2 examples/digits.py --epochs 1 --steps 20        a few seconds

With --checkpoint FILE, which only rank 0 reads and writes, the job goes on from that file when it exists. So it
survives the end of any of its ranks at any time, and may go on with fewer or more of them: the batch stays the same.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/digits.py --checkpoint runs/digits/checkpoint.pt

Writes metrics.json (settings, curves, accuracies, distances) and curves.png to --output. The data are scikit-learn's:
1,797 images of 8 x 8 pixels, inside its wheel. Without rich it prints plain lines, and without matplotlib there is no
picture.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import launch
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import print_table, progress_bar, rank, run_on_ranks, world_size
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn

NUM_TEST = 297  # images held out; 1,500 to train
SMOOTHING = 25  # steps per point of the plot


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--epochs", type=int, default=3, help="passes over the 1,500 training images (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: as many as the images fill)")
    parser.add_argument("--images-per-rank", type=int, default=2, help="images per rank and step (default %(default)s)")
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
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, and to write (default: none)")
    parser.add_argument(
        "--checkpoint-every", type=int, default=25, help="steps between checkpoints (default %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds that a rank waits for the others (default %(default)s)"
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
        self.module = model
        self.model = DistributedDataParallel(model) if sliced and dist.is_initialized() else model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Train on one whole batch, of which this rank may take its slice; note the loss of the whole batch."""
        batch, num_slices = len(images), world_size() if self.sliced else 1
        if self.sliced:
            images, labels = (whole.tensor_split(num_slices)[rank()] for whole in (images, labels))
        # DistributedDataParallel takes the mean over ranks, whose slices may be of different sizes.
        loss = F.cross_entropy(self.model(images), labels, reduction="sum") * (num_slices / batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss = loss.detach()
        if self.sliced and dist.is_initialized():
            dist.all_reduce(loss)
            loss /= num_slices
        self.losses.append(loss.item())

    @torch.no_grad()
    def evaluate(self, images: Tensor, labels: Tensor) -> None:
        """Note the accuracy of this rank's model on the test images."""
        self.module.eval()
        # The module itself: DistributedDataParallel would wait for the other ranks.
        self.accuracies.append((self.module(images).argmax(1) == labels).double().mean().item())
        self.module.train()

    def state_dict(self) -> dict[str, Any]:
        """All that a step changes."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "accuracies": self.accuracies,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.accuracies = state["losses"], state["accuracies"]


class Training:
    """All three ways in lockstep, so that an interruption leaves comparable curves; and where they are in the data."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(arguments.seed)
        dtype = getattr(torch, arguments.dtype)
        images, labels = load_images(dtype, device)
        self.train_images, self.test_images = images[NUM_TEST:], images[:NUM_TEST]
        self.train_labels, self.test_labels = labels[NUM_TEST:], labels[:NUM_TEST]
        initial = build_model(arguments.width).to(device, dtype)
        one_process, synchronised, local = (copy.deepcopy(initial) for _ in range(3))
        self.trainers = [
            Trainer("one process", one_process, arguments.learning_rate, sliced=False),
            Trainer("syncbn", syncbn.convert_syncbn_model(synchronised), arguments.learning_rate, sliced=True),
            Trainer("local", local, arguments.learning_rate, sliced=True),
        ]
        self.arguments, self.device = arguments, device
        self.batch = arguments.images_per_rank * world_size()
        if self.batch > len(self.train_images):
            sys.exit(f"all ranks' images make a batch of {self.batch}, but there are {len(self.train_images)}")
        self.order = torch.Generator().manual_seed(arguments.seed)
        self.epoch = 0
        self.left = self.shuffled()  # of this epoch's images, which are still to come
        if arguments.checkpoint is not None:
            self.load(arguments.checkpoint)

    def steps_per_epoch(self) -> int:
        """Of whole batches."""
        return self.arguments.steps or len(self.train_images) // self.batch

    def shuffled(self) -> Tensor:
        """Indices of an epoch's images."""
        return torch.randperm(len(self.train_images), generator=self.order)[: self.steps_per_epoch() * self.batch]

    def run(self) -> None:
        """To the last epoch's end."""
        every = self.arguments.checkpoint_every if self.arguments.checkpoint is not None else math.inf
        done, epochs = len(self.trainers[0].losses), self.arguments.epochs
        with progress_bar(done, epochs * self.steps_per_epoch()) as advance:
            while self.epoch < epochs:
                self.step()
                done += 1
                losses = "  ".join(f"{trainer.name} {trainer.losses[-1]:.3f}" for trainer in self.trainers)
                advance(f"epoch {min(self.epoch + 1, epochs)}/{epochs}  {losses}")
                if done % every == 0 or (self.epoch == epochs and every < math.inf):
                    self.save(self.arguments.checkpoint)

    def step(self) -> None:
        """One batch, and after the last of an epoch the tests."""
        picked, self.left = self.left[: self.batch], self.left[self.batch :]
        picked = picked.to(self.device)
        for trainer in self.trainers:
            trainer.step(self.train_images[picked], self.train_labels[picked])
        if not len(self.left):
            for trainer in self.trainers:
                trainer.evaluate(self.test_images, self.test_labels)
            self.epoch += 1
            self.left = self.shuffled()

    def settings(self) -> dict[str, str]:
        """Those that a checkpoint was made with, and may not change; the number of ranks and of epochs may."""
        names = ("images_per_rank", "steps", "learning_rate", "width", "dtype", "seed")
        return {name: str(getattr(self.arguments, name)) for name in names}

    def save(self, path: Path) -> None:
        """All that `load` needs, of all ranks, by rank 0."""
        random_states = gather({"CPU": torch.get_rng_state(), "GPU": gpu_rng_state(self.device)})
        if rank() != 0:
            return
        state = {
            "settings": self.settings(),
            "batch": self.batch,
            "epoch": self.epoch,
            "left": self.left,
            "order": self.order.get_state(),
            "random": random_states,  # of each rank
            "trainers": {trainer.name: trainer.state_dict() for trainer in self.trainers},
        }
        launch.save(state, path)

    def load(self, path: Path) -> None:
        """Go on from `path` if it exists. **Exits** with the reason where it is not a checkpoint of this job."""
        state = broadcast(read_checkpoint(path, self.settings()) if rank() == 0 else None)
        if isinstance(state, str):
            sys.exit(state if rank() == 0 else 1)
        if state is None:
            return
        if state["batch"] < world_size():
            sys.exit(f"{path} is of a batch of {state['batch']} images, too few for {world_size()} ranks")
        self.batch, self.epoch, self.left = state["batch"], state["epoch"], state["left"]
        self.order.set_state(state["order"])
        if rank() < len(state["random"]):
            random_state = state["random"][rank()]
            torch.set_rng_state(random_state["CPU"])
            if self.device.type == "cuda" and random_state["GPU"] is not None:
                torch.cuda.set_rng_state(random_state["GPU"], self.device)
        for trainer in self.trainers:
            trainer.load_state_dict(state["trainers"][trainer.name])


def read_checkpoint(path: Path, settings: dict[str, str]) -> dict[str, Any] | str | None:
    """What `Training.save` wrote, nothing where there is no file yet, or what is wrong with it; on one rank."""
    try:
        state = launch.load(path)
        if state is None:
            return None
        made_with = state["settings"]
    except Exception as error:  # a damaged file may raise almost any
        return f"{path} is not a checkpoint of this job; give another --checkpoint ({type(error).__name__}: {error})"
    for name, now in settings.items():
        if made_with.get(name) != now:
            option = "--" + name.replace("_", "-")
            return f"{path} was made with {option} {made_with.get(name)}, not {now}; give another --checkpoint"
    return state


def gpu_rng_state(device: torch.device) -> Tensor | None:
    """Of a rank's own GPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def gather(mine: object) -> list[Any]:
    """Every rank's, on rank 0."""
    if not dist.is_initialized():
        return [mine]
    everyone = [None] * world_size() if rank() == 0 else None
    dist.gather_object(mine, everyone)
    return everyone or []


def broadcast(of_rank_0: object) -> Any:
    """Rank 0's, on every rank."""
    box = [of_rank_0]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]


def distance(trainer: Trainer, reference: Trainer) -> float:
    """The largest difference of two loss curves, in units of the loss."""
    return max(abs(a - b) for a, b in zip(trainer.losses, reference.losses, strict=True))


def report(training: Training, seconds: float) -> None:
    """Table, JSON and plot; on one rank."""
    trainers, arguments = training.trainers, training.arguments
    device = (
        torch.cuda.get_device_name() if dist.is_initialized() and dist.get_backend() == "nccl" else platform.machine()
    )
    rows = [("training", "final loss", "test accuracy", "largest distance from one process")]
    for trainer in trainers:
        loss = sum(trainer.losses[-SMOOTHING:]) / len(trainer.losses[-SMOOTHING:])
        numbers = f"{loss:.4f}", f"{trainer.accuracies[-1]:.1%}", f"{distance(trainer, trainers[0]):.1e}"
        rows.append((trainer.name, *numbers))
    print_table(f"{world_size()} ranks, {training.batch} images a step, {arguments.dtype}, {device}", rows)

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
    training = Training(arguments, device)
    training.run()
    if rank() == 0:
        print(syncbn.summary(training.trainers[1].model))
        report(training, time.monotonic() - start)


def main() -> None:
    """Run the job."""
    arguments = parse_arguments()
    for name in ("epochs", "images_per_rank", "checkpoint_every"):
        if getattr(arguments, name) < 1:
            sys.exit(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    run_on_ranks(lambda device: job(arguments, device), arguments.timeout)


if __name__ == "__main__":
    main()
