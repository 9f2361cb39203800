"""Fine-tuning to another kind of images, with frozen and with moving statistics, two images a rank.

A small network learns real handwritten digits in one process. Then the images change: brighter, paler, noisy. What
becomes of the running statistics, which are those of the old images?

    as it was       no training at all
    recomputed      no training: syncbn.recompute_running_stats over the new training images
    frozen          trained with batch norm in evaluation: the old statistics stay
    local           trained with nn.BatchNorm2d, each rank's two images for themselves
    syncbn          trained with synchronised batch norm
    one process     trained with nn.BatchNorm2d on the whole batch; what syncbn must equal

    python examples/finetune.py                                          one process: the last three are the same
    torchrun --standalone --nproc-per-node 2 examples/finetune.py        two ranks: nccl when each has a GPU, else gloo
    torchrun --standalone --nproc-per-node 2 examples/finetune.py --steps 30 --pretrain-steps 30        a few seconds

Prints the accuracies on new test images, and writes metrics.json to --output.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import NUM_TEST, accuracy, build_model, load_images
from launch import new_parser, own, parallel, positive, print_table, progress_bar, rank, run_on_ranks, world_size, write
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import syncbn

PRETRAIN_BATCH, PRETRAIN_LEARNING_RATE = 32, 0.02
NUM_NEW = 500  # training images of the new kind; the others are those to pretrain on


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__, "finetune")
    add = parser.add_argument
    add("--pretrain-steps", type=positive, default=150, help="steps on 32 images")
    add("--steps", type=positive, default=250, help="steps of fine-tuning")
    add("--images-per-rank", type=positive, default=2, help="images per rank and step of fine-tuning")
    add("--learning-rate", type=float, default=0.0005, help="of SGD with momentum 0.9")
    add("--seed", type=int, default=0, help="of weights, noise and batches")
    return parser.parse_args()


def change(images: Tensor, generator: torch.Generator) -> Tensor:
    """The new kind: brighter, paler and noisy."""
    noise = torch.randn(images.shape, generator=generator, dtype=images.dtype).to(images.device)
    return 0.6 + 0.3 * images + 0.05 * noise


def train(model: nn.Module, data: tuple[Tensor, Tensor], batch: int, steps: int, lr: float, name: str) -> list[float]:
    """The losses of the whole batches, of which the ranks take slices when the model is data-parallel."""
    images, labels = data
    generator = torch.Generator().manual_seed(torch.initial_seed())
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    sliced = isinstance(model, DistributedDataParallel)
    losses = []
    with progress_bar(0, steps) as advance:
        for _ in range(steps):
            picked = torch.randint(len(images), (batch,), generator=generator)
            picked = (own(picked) if sliced else picked).to(images.device)
            loss = F.cross_entropy(model(images[picked]), labels[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss = loss.detach()
            if sliced:
                dist.all_reduce(loss)
                loss /= world_size()
            losses.append(loss.item())
            advance(f"{name}: loss {losses[-1]:.3f}")
    return losses


def freeze_statistics(model: nn.Module) -> nn.Module:
    """Batch norm in evaluation, where its weights still learn; model.train() would undo it."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
    return model


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    """Pretrain once, fine-tune in each way, compare."""
    torch.manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)
    changed = change(images, torch.Generator().manual_seed(arguments.seed))
    test, new, old = slice(NUM_TEST), slice(NUM_TEST, NUM_TEST + NUM_NEW), slice(NUM_TEST + NUM_NEW, None)
    model = build_model(width=16).to(device, torch.float64)
    pretraining = PRETRAIN_BATCH, arguments.pretrain_steps, PRETRAIN_LEARNING_RATE
    train(model, (images[old], labels[old]), *pretraining, "pretraining")
    accuracies = {"as it was, old images": accuracy(model, images[test], labels[test])}

    names = "as it was", "recomputed", "frozen", "local", "syncbn", "one process"
    ways = {name: copy.deepcopy(model) for name in names}
    syncbn.recompute_running_stats(ways["recomputed"], own(changed[new]).split(50))
    freeze_statistics(ways["frozen"])
    syncbn.convert_syncbn_model(ways["syncbn"])
    training = arguments.images_per_rank * world_size(), arguments.steps, arguments.learning_rate
    losses = {}
    for name in ("frozen", "local", "syncbn", "one process"):
        way = ways[name] if name == "one process" else parallel(ways[name])
        losses[name] = train(way, (changed[new], labels[new]), *training, name)
    accuracies |= {name: accuracy(way, changed[test], labels[test]) for name, way in ways.items()}
    distance = max(abs(a - b) for a, b in zip(losses["syncbn"], losses["one process"], strict=True))

    if rank() == 0:
        rows = [(name, f"{value:.1%}") for name, value in accuracies.items()]
        print_table(f"{world_size()} ranks x {arguments.images_per_rank} images", ("statistics", "accuracy"), rows)
        name = "largest distance of syncbn from one process"
        print(f"{name}: {distance:.1e}, of the loss")
        write(arguments, {"accuracies": accuracies, "losses": losses, name: distance})


if __name__ == "__main__":
    run_on_ranks(job, parse_arguments())
