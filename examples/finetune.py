"""Fine-tuning to another kind of images, with frozen and with moving statistics, two images a rank.

A small network learns real handwritten digits in one process. Then the images change: brighter, paler, noisy. What
becomes of the running statistics, which are those of the old images?

    as it was       no training at all
    recomputed      no training: syncbn.recompute_running_stats over the new training images
    frozen          trained with batch norm in evaluation: the old statistics stay
    local           trained with nn.BatchNorm2d, each rank's two images for themselves
    syncbn          trained with synchronised batch norm
    one process     trained with nn.BatchNorm2d on the whole batch; what syncbn must equal

    torchrun --standalone --nproc-per-node 2 examples/finetune.py        two ranks: nccl when each has a GPU, else gloo
    torchrun --standalone --nproc-per-node 2 examples/finetune.py --steps 30 --pretrain-steps 30        a few seconds

Prints the accuracies on new test images, and writes metrics.json to --output.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import NUM_TEST, build_model, load_images
from launch import print_table, progress_bar, rank, run_on_ranks, world_size
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import syncbn

PRETRAIN_BATCH, PRETRAIN_LEARNING_RATE = 32, 0.02
NUM_NEW = 500  # training images of the new kind; the others are those to pretrain on


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain-steps", type=int, default=150, help="of 32 images (default %(default)s)")
    parser.add_argument("--steps", type=int, default=250, help="of fine-tuning (default %(default)s)")
    parser.add_argument("--images-per-rank", type=int, default=2, help="per rank and step (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.0005, help="of SGD (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, noise and batches (default %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/finetune"), help="folder to write (default %(default)s)"
    )
    return parser.parse_args()


def change(images: Tensor, generator: torch.Generator) -> Tensor:
    """Brighter, paler and noisy."""
    noise = torch.randn(images.shape, generator=generator, dtype=images.dtype).to(images.device)
    return 0.6 + 0.3 * images + 0.05 * noise


def train(
    model: nn.Module, images: Tensor, labels: Tensor, batch: int, steps: int, learning_rate: float, name: str
) -> list[float]:
    """The losses of the whole batches, of which the ranks take slices when the model is data-parallel."""
    generator = torch.Generator().manual_seed(torch.initial_seed())
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    parallel = isinstance(model, DistributedDataParallel)
    losses = []
    with progress_bar(0, steps) as advance:
        for _ in range(steps):
            picked = torch.randint(len(images), (batch,), generator=generator)
            picked = (picked.tensor_split(world_size())[rank()] if parallel else picked).to(images.device)
            loss = F.cross_entropy(model(images[picked]), labels[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss = loss.detach()
            if parallel:
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


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """In evaluation."""
    with torch.no_grad():
        return (model.eval()(images).argmax(1) == labels).double().mean().item()


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    """Pretrain once, fine-tune in each way, compare."""
    torch.manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)
    changed = change(images, torch.Generator().manual_seed(arguments.seed))
    old, new = slice(NUM_TEST + NUM_NEW, None), slice(NUM_TEST, NUM_TEST + NUM_NEW)
    model = build_model(width=16).to(device, torch.float64)
    pretraining = PRETRAIN_BATCH, arguments.pretrain_steps, PRETRAIN_LEARNING_RATE
    train(model, images[old], labels[old], *pretraining, "pretraining")

    ways = {
        name: copy.deepcopy(model).train()
        for name in ("as it was", "recomputed", "frozen", "local", "syncbn", "one process")
    }
    share = changed[new].tensor_split(world_size())[rank()]
    syncbn.recompute_running_stats(ways["recomputed"], share.split(50))
    freeze_statistics(ways["frozen"])
    syncbn.convert_syncbn_model(ways["syncbn"])
    batch, losses = arguments.images_per_rank * world_size(), {}
    for name in ("frozen", "local", "syncbn", "one process"):
        way = ways[name]
        if name != "one process" and dist.is_initialized():
            way = DistributedDataParallel(way)
        losses[name] = train(way, changed[new], labels[new], batch, arguments.steps, arguments.learning_rate, name)

    test = changed[:NUM_TEST], labels[:NUM_TEST]
    metrics = {
        "ranks": world_size(),
        "accuracies": {
            "as it was, old images": accuracy(ways["as it was"], images[:NUM_TEST], labels[:NUM_TEST]),
            **{name: accuracy(way, *test) for name, way in ways.items()},
        },
        "losses": losses,
        "largest distance of syncbn from one process": max(
            abs(a - b) for a, b in zip(losses["syncbn"], losses["one process"], strict=True)
        ),
    }
    if rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "metrics.json").write_text(json.dumps(metrics, indent=1))
        rows = [(name, f"{value:.1%}") for name, value in metrics["accuracies"].items()]
        print_table(f"{world_size()} ranks x {arguments.images_per_rank} images", [("statistics", "accuracy"), *rows])
        print(f"distance of syncbn's loss curve from that of one process: {list(metrics.values())[-1]:.1e}")


def main() -> None:
    """Run the job."""
    arguments = parse_arguments()
    run_on_ranks(lambda device: job(arguments, device))


if __name__ == "__main__":
    main()
