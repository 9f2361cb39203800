"""A data-parallel training script with synchronised batch norm. docs/training_script.md explains the script.

    torchrun --standalone --nproc-per-node 2 examples/train.py

All ranks train and validate. After each epoch rank 0 writes a checkpoint. The script resumes from the checkpoint when
the script is started again. At the end rank 0 evaluates the model alone. The data are random images, so the script runs
as it is. For a job of your own replace `load_data` and `build_model`.
"""

import argparse
import inspect
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import syncbn
from syncbn.testing import unequal


def load_data():
    """Return the training, validation and test data, which must be equal on all ranks.

    An image is one of ten random patterns with noise. The label of the image is the number of the pattern.
    """
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1500,), generator=generator)
    patterns = torch.randn(10, 3, 8, 8, generator=generator)
    images = patterns[labels] + 3 * torch.randn(1500, 3, 8, 8, generator=generator)  # (N, C, H, W)
    data = TensorDataset(images, labels)
    return Subset(data, range(1000)), Subset(data, range(1000, 1251)), Subset(data, range(1251, 1500))


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def parallel(model):
    """DistributedDataParallel without its broadcast of buffers, as all ranks compute equal buffers."""
    names = inspect.signature(DistributedDataParallel).parameters
    # torch 2.13 has renamed the argument broadcast_buffers.
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return DistributedDataParallel(model, **{name: False})


def train_epoch(ddp, optimizer, loader, device):
    ddp.train()
    for images, labels in loader:
        loss = F.cross_entropy(ddp(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader, device):
    """Return the number of correctly classified images of this rank. A rank may call this function alone."""
    model.eval()
    num_correct = torch.zeros((), dtype=torch.long, device=device)
    for images, labels in loader:
        num_correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    return num_correct


def save(path, checkpoint):
    """Write the checkpoint on rank 0. The file gets its name when it is complete."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        torch.save(checkpoint, unfinished)
        unfinished.replace(path)


def load(path):
    """Read the checkpoint on rank 0 and return it on all ranks. Return None if there is no file."""
    checkpoint = None
    if dist.get_rank() == 0 and path.exists():
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    objects = [checkpoint]
    dist.broadcast_object_list(objects, src=0)
    return objects[0]


def train(arguments, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, validation, test = load_data()
    sampler = DistributedSampler(training, drop_last=True)
    loader = DataLoader(training, arguments.images_per_rank, sampler=sampler, drop_last=True)
    # A DistributedSampler would repeat or omit images. Here each validation image is on exactly one rank.
    local_validation = Subset(validation, range(rank, len(validation), world_size))
    validation_loader = DataLoader(local_validation, batch_size=100)

    torch.manual_seed(0)
    model = syncbn.convert_syncbn_model(build_model()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    first_epoch = 0
    checkpoint = load(arguments.checkpoint)
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        first_epoch = checkpoint["epochs"]
    ddp = parallel(model)

    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)  # Every epoch has another order of the images.
        # An epoch that is repeated after a restart draws the same dropout and augmentation as before.
        torch.manual_seed(epoch * world_size + rank)
        train_epoch(ddp, optimizer, loader, device)
        scheduler.step()
        assert not unequal(model.state_dict()), "the ranks have different tensors"
        num_correct = evaluate(ddp.module, validation_loader, device)
        dist.all_reduce(num_correct)
        if rank == 0:
            print(f"epoch {epoch + 1}: {num_correct.item()} of {len(validation)} validation images are right")
        checkpoint = {"epochs": epoch + 1, "model": ddp.module.state_dict()}
        checkpoint |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        save(arguments.checkpoint, checkpoint)

    if rank == 0:
        # A forward of ddp may communicate, so rank 0 calls ddp.module.
        num_correct = evaluate(ddp.module, DataLoader(test, batch_size=100), device)
        print(f"test: {num_correct.item()} of {len(test)} images are right")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images-per-rank", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/train/checkpoint.pt"))
    arguments = parser.parse_args()
    local_rank, ranks_of_host = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() >= ranks_of_host:
        device, backend = torch.device("cuda", local_rank), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
    dist.init_process_group(backend)
    train(arguments, device)
    dist.destroy_process_group()  # `train` has returned, so its DistributedDataParallel no longer exists.


if __name__ == "__main__":
    main()
