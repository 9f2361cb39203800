"""Train on real handwritten digits in three ways, from the same weights on the same batches.

    one process     nn.BatchNorm2d on the whole batch
    syncbn          synchronised batch norm on W ranks under DistributedDataParallel, each with its slice of the batch
    local           the same with nn.BatchNorm2d: each rank normalises its slice alone

With syncbn the loss curve equals that of one process, up to rounding. With local statistics of two images per rank the
curve is different. The seed decides which way has the best test accuracy. (segmentation.py is a job in which local
statistics are worse with every seed.)

    python examples/digits.py                                          one process: all three ways are the same
    torchrun --standalone --nproc-per-node 2 examples/digits.py        two ranks, on GPUs (nccl) or CPUs (gloo)
    torchrun --standalone --nproc-per-node 2 examples/digits.py --epochs 1 --steps 20        a few seconds

With --checkpoint FILE the job saves its state, and resumes if the file exists. Any rank may be killed at any time. The
job may resume with another number of ranks, because the batch stays the same.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/digits.py --checkpoint runs/digits/checkpoint.pt

Writes metrics.json (settings, losses, accuracies, distances) to --output. The wheel of scikit-learn contains the data:
1,797 images of 8 x 8 pixels.
"""

import argparse
import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import new_parser, progress, run_on_ranks
from sklearn.datasets import load_digits
from torch import Tensor, nn
from train import load, save
from trainer import last_losses, report, three_ways

NUM_TEST = 297  # images for the test; the other 1,500 are for training

parser = new_parser(__doc__, "digits")
add = parser.add_argument
add("--epochs", type=int, default=3, help="passes over the 1,500 training images")
add("--steps", type=int, help="steps per epoch; None: use all images")
add("--images-per-rank", type=int, default=2, help="images per rank and step")
add("--learning-rate", type=float, default=0.005, help="of SGD with momentum 0.9")
add("--width", type=int, default=16, help="channels of the first stage")
add("--seed", type=int, default=0, help="of weights and batches")
add("--checkpoint", type=Path, help="file to resume from, and to write")
add("--checkpoint-every", type=int, default=25, help="steps between checkpoints")


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
        y = F.relu(self.bn1(self.conv1(x)))  # (N, num_out, H / stride, W / stride)
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def build_model(width: int, strides: tuple[int, int] = (1, 2)) -> nn.Module:
    """Map images (N, 1, 8, 8) to logits (N, 10). A block with stride 2 also doubles the number of channels."""
    inner = width * strides[0]
    outer = inner * strides[1]
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),  # (N, width, 8, 8)
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        ResidualBlock(width, inner, strides[0]),  # (N, inner, 8, 8), or (N, inner, 4, 4) with stride 2
        ResidualBlock(inner, outer, strides[1]),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(outer, 10),
    )


def load_images(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return images (1797, 1, 8, 8) in [0, 1] and labels (1797,)."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=dtype, device=device).unsqueeze(1)
    return images, torch.tensor(digits.target, device=device)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of correctly classified images. The model normalises by its running statistics."""
    is_correct = model.eval()(images).argmax(1) == labels
    model.train()
    return is_correct.double().mean().item()


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(arguments.seed)
    images, labels = load_images(torch.float64, device)  # In float32 rounding would change the loss curves visibly.
    test = images[:NUM_TEST], labels[:NUM_TEST]
    images, labels = images[NUM_TEST:], labels[NUM_TEST:]  # for training
    sgd = functools.partial(torch.optim.SGD, lr=arguments.learning_rate, momentum=0.9)
    trainers = three_ways(build_model(arguments.width).to(device, torch.float64), sgd)
    batch, epoch = arguments.images_per_rank * dist.get_world_size(), 0
    if batch > len(images):
        sys.exit(f"the batch of all ranks has {batch} images, but there are only {len(images)}")
    generator = torch.Generator().manual_seed(arguments.seed)
    remaining = torch.empty(0, dtype=torch.long)  # indices of the images for the remaining steps of the epoch

    path = arguments.checkpoint
    state = load(path) if path is not None else None
    if state is not None:
        batch, epoch, remaining = state["batch"], state["epoch"], state["remaining"]
        generator.set_state(state["generator"])
        for trainer in trainers:
            trainer.load_state_dict(state["trainers"][trainer.name])

    steps = arguments.steps or len(images) // batch
    step = len(trainers[0].losses)
    with progress(step, arguments.epochs * steps) as advance:
        while epoch < arguments.epochs:
            if len(remaining) == 0:
                remaining = torch.randperm(len(images), generator=generator)[: steps * batch]
            indices, remaining = remaining[:batch].to(device), remaining[batch:]
            for trainer in trainers:
                trainer.step(images[indices], labels[indices])
            step += 1
            advance(f"epoch {epoch + 1}/{arguments.epochs}  {last_losses(trainers)}")
            if len(remaining) == 0:
                epoch += 1
                # Evaluation calls trainer.module, the model without DDP, so it does not communicate.
                for trainer in trainers:
                    trainer.tests.setdefault("accuracies", []).append(accuracy(trainer.module, *test))
            if path is not None and (step % arguments.checkpoint_every == 0 or epoch == arguments.epochs):
                state = {"batch": batch, "epoch": epoch, "remaining": remaining}
                state["generator"] = generator.get_state()  # Nothing else is random: the model has no dropout.
                state["trainers"] = {trainer.name: trainer.state_dict() for trainer in trainers}
                save(path, state)
    if dist.get_rank() == 0:
        accuracies = [trainer.tests["accuracies"][-1] for trainer in trainers]
        report(trainers, "test accuracy", accuracies, batch=f"{batch} images", arguments=arguments)


if __name__ == "__main__":
    run_on_ranks(job, parser)
