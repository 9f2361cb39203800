"""Real handwritten digits with FSDP2: the parameters are sharded over the ranks, the batch normalised over all of them.

    torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py        nccl when each rank has a GPU, else gloo
    torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py --epochs 1 --steps 20        a few seconds

Convert first, then fully_shard. Beside it one process trains the same weights on the same whole batches with
nn.BatchNorm2d; the loss curves agree to rounding. In the end the shards are gathered into an ordinary checkpoint, which
an nn.BatchNorm2d model loads, for the accuracy on the test images. Writes that, model.pt, and metrics.json to --output.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import NUM_TEST, ResidualBlock, build_model, load_images
from launch import print_table, progress_bar, rank, run_on_ranks, world_size
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import syncbn


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the 1,500 images (default %(default)s)")
    parser.add_argument("--steps", type=int, default=None, help="steps per epoch (default: as many as the images fill)")
    parser.add_argument("--images-per-rank", type=int, default=4, help="per rank and step (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.01, help="of SGD (default %(default)s)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/fsdp_digits"), help="folder to write (default %(default)s)"
    )
    return parser.parse_args()


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Each residual block and the rest over all ranks."""
    mesh = init_device_mesh(device.type, (world_size(),))
    for module in model:
        if isinstance(module, ResidualBlock):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def num_held(model: nn.Module) -> int:
    """Parameters' values on this rank."""
    return sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """Train; the mean loss of these images."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Of the test images, in evaluation."""
    with torch.no_grad():
        return (model.eval()(images).argmax(1) == labels).double().mean().item()


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train both, compare, save."""
    if not dist.is_initialized():
        sys.exit("FSDP2 needs a process group: torchrun --standalone --nproc-per-node 2 examples/fsdp_digits.py")
    torch.manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)
    test, train = (images[:NUM_TEST], labels[:NUM_TEST]), (images[NUM_TEST:], labels[NUM_TEST:])
    alone = build_model(arguments.width).to(device, torch.float64)
    sharded = shard(syncbn.convert_syncbn_model(copy.deepcopy(alone)), device)  # in this order
    optimizers = [torch.optim.SGD(one.parameters(), arguments.learning_rate, momentum=0.9) for one in (alone, sharded)]

    batch = arguments.images_per_rank * world_size()
    most = len(train[0]) // batch
    if most < 1 or arguments.epochs < 1:
        sys.exit(f"a batch of {batch} images of {len(train[0])}, {arguments.epochs} epochs: nothing to train on")
    steps = min(arguments.steps or most, most)
    losses: list[list[float]] = []  # of one process, of all ranks
    order = torch.Generator().manual_seed(arguments.seed)
    with progress_bar(0, arguments.epochs * steps) as advance:
        for _ in range(arguments.epochs):
            for picked in torch.randperm(len(train[0]), generator=order)[: steps * batch].view(steps, batch).to(device):
                x, y = train[0][picked], train[1][picked]
                mine = slice(rank() * arguments.images_per_rank, (rank() + 1) * arguments.images_per_rank)
                both = torch.stack((step(alone, optimizers[0], x, y), step(sharded, optimizers[1], x[mine], y[mine])))
                dist.all_reduce(both)
                losses.append((both / world_size()).tolist())
                advance(f"loss {losses[-1][1]:.3f}")

    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        torch.save(whole, arguments.output / "model.pt")
        loaded = build_model(arguments.width).to(device, torch.float64)
        loaded.load_state_dict(torch.load(arguments.output / "model.pt", weights_only=True))
        metrics = {
            "ranks": world_size(),
            "steps": len(losses),
            "final loss": losses[-1][1],
            "largest distance from one process": max(abs(a - b) for a, b in losses),
            "test accuracy": accuracy(loaded, *test),
            "test accuracy of one process": accuracy(alone, *test),
            "values of parameters on this rank": num_held(sharded),
            "values of parameters of one process": num_held(alone),
        }
        (arguments.output / "metrics.json").write_text(json.dumps(metrics, indent=1))
        rows = [(name, f"{value:.4g}") for name, value in metrics.items()]
        print_table("FSDP2 and synchronised batch norm", [("", ""), *rows])


def main() -> None:
    """Run the job."""
    arguments = parse_arguments()
    run_on_ranks(lambda device: job(arguments, device))


if __name__ == "__main__":
    main()
