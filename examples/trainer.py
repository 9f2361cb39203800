"""Train copies of a model in different ways on the same batches, and compare their losses with those of one process."""

import argparse
import copy
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from launch import local_slice
from results import print_table, write
from torch import Tensor, nn
from torch.optim import Optimizer
from train import parallel

import syncbn

NUM_AVERAGED = 25  # The final loss is the mean of the last 25 losses.

Wrap = Callable[[nn.Module], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Trainer:
    """A model with its optimizer, losses and test results.

    A trainer named "one process" trains on the whole batch, on every rank. Any other trainer trains on the slice of its
    rank, with the parallel model `wrap(model)`. With `wrap=parallel` ranks share no buffers, so layers of nn.BatchNorm
    keep the running statistics of their rank.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: MakeOptimizer, wrap: Wrap = parallel) -> None:
        self.name, self.module, self.optimizer = name, model, optimizer(model.parameters())
        self.is_parallel = name != "one process"
        self.model = wrap(model) if self.is_parallel else model
        self.losses: list[float] = []
        self.tests: dict[str, Any] = {}

    def step(self, images: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> None:
        """Train on a whole batch, and append the loss to `losses`."""
        total_weight = len(labels) if class_weights is None else class_weights[labels].sum()
        if self.is_parallel:
            images, labels = local_slice(images), local_slice(labels)
        loss = F.cross_entropy(self.model(images), labels, class_weights, reduction="sum") / total_weight
        # DDP averages gradients over ranks. The factor gives the gradient of the whole batch, even with uneven slices.
        factor = dist.get_world_size() if self.is_parallel else 1
        self.optimizer.zero_grad()
        (factor * loss).backward()
        self.optimizer.step()
        whole_loss = loss.detach()
        if self.is_parallel:
            dist.all_reduce(whole_loss)
        self.losses.append(whole_loss.item())

    def final_loss(self) -> float:
        return statistics.mean(self.losses[-NUM_AVERAGED:])

    def state_dict(self) -> dict[str, Any]:
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state | {"losses": self.losses, "tests": self.tests}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.tests = state["losses"], state["tests"]


def three_ways(model: nn.Module, optimizer: MakeOptimizer) -> list[Trainer]:
    """Return trainers of copies of the model: "one process", "syncbn", and "local" (nn.BatchNorm on each rank)."""
    models = {name: copy.deepcopy(model) for name in ("one process", "syncbn", "local")}
    syncbn.convert_syncbn_model(models["syncbn"])
    return [Trainer(name, model, optimizer) for name, model in models.items()]


def distance(trainer: Trainer, reference: Trainer) -> float:
    """Return the largest difference between the losses of two trainers in the same step."""
    return max(abs(a - b) for a, b in zip(trainer.losses, reference.losses, strict=True))


def last_losses(trainers: list[Trainer]) -> str:
    """Format the last loss of each trainer for the progress bar."""
    return "  ".join(f"{trainer.name} {trainer.losses[-1]:.3f}" for trainer in trainers)


def report(
    trainers: list[Trainer], test: str, scores: list[float], batch: str, arguments: argparse.Namespace, **pictures: Any
) -> None:
    """Print the synchronised layers and a table, and write metrics.json and the pictures. `scores` has the result of
    each trainer in the test, whose name is `test`."""
    print(syncbn.summary(trainers[1].model))
    rows, runs = [], {}
    for trainer, score in zip(trainers, scores, strict=True):
        largest = distance(trainer, trainers[0])
        rows.append((trainer.name, f"{trainer.final_loss():.4f}", f"{score:.1%}", f"{largest:.1e}"))
        runs[trainer.name] = {"losses": trainer.losses, "distance": largest, **trainer.tests}
    title = f"this run: seed {arguments.seed}, {dist.get_world_size()} ranks, {batch} a step, float64"
    print_table(title, ("training", "final loss", test, "largest distance from one process"), rows)
    write(arguments, {"runs": runs}, **pictures)
