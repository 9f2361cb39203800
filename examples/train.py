"""A whole data-parallel job with synchronised batch norm: docs/training_script.md describes it.

    torchrun --standalone --nproc-per-node 2 examples/train.py

It trains and validates on all ranks, writes a checkpoint after each epoch, and resumes from it when it is started
again. At the end rank 0 alone evaluates the model. The data are random images, so the script runs unchanged: replace
`load_data` and `build_model` with your own.
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
    """Return training, validation and test data, equal on all ranks: images of ten patterns with noise, and classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1500,), generator=generator)
    patterns = torch.randn(10, 3, 8, 8, generator=generator)
    images = patterns[labels] + 3 * torch.randn(1500, 3, 8, 8, generator=generator)  # (N, C, H, W)
    data = TensorDataset(images, labels)
    return Subset(data, range(1000)), Subset(data, range(1000, 1251)), Subset(data, range(1251, 1500))


def build_model():
    """An ordinary model with nn.BatchNorm2d."""
    first = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 16, 10))


def parallel(model):
    """DistributedDataParallel without its broadcast of buffers, as all ranks compute equal buffers."""
    names = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"  # before torch 2.13
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
    """Return (right, total), the numbers of images of this rank's loader. Sends nothing: any rank may call it."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.long, device=device)
    for images, labels in loader:
        right = model(images.to(device)).argmax(1) == labels.to(device)
        counts += torch.stack((right.sum(), torch.tensor(len(right), device=device)))
    return counts


def save(path, **state):
    """Rank 0 writes a temporary file and renames it, so that `path` is always complete."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, unfinished := path.with_name(path.name + ".unfinished"))
        unfinished.replace(path)


def load(path):
    """Return the state that `save` wrote, or None if there is no file. Rank 0 reads it and sends it to all ranks."""
    state = [None]
    if dist.get_rank() == 0 and path.exists():
        state = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(state, src=0)
    return state[0]


def train(arguments, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, validation, test = load_data()
    sampler = DistributedSampler(training, drop_last=True)
    loader = DataLoader(training, arguments.images_per_rank, sampler=sampler, drop_last=True)
    my_validation = Subset(validation, range(rank, len(validation), world_size))  # each image on one rank
    validation_loader = DataLoader(my_validation, batch_size=100)

    torch.manual_seed(0)
    model = syncbn.convert_syncbn_model(build_model()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    first_epoch = 0
    if checkpoint := load(arguments.checkpoint):
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        first_epoch = checkpoint["epochs"]
    ddp = parallel(model)

    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)  # shuffles each epoch differently
        torch.manual_seed(epoch * world_size + rank)  # for dropout and augmentation, also after a restart
        train_epoch(ddp, optimizer, loader, device)
        scheduler.step()
        assert not unequal(model.state_dict()), "the ranks have different tensors"
        counts = evaluate(ddp.module, validation_loader, device)
        dist.all_reduce(counts)
        right, total = counts.tolist()
        if rank == 0:
            print(f"epoch {epoch + 1}: {right} of {total} validation images are right")
        states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        save(arguments.checkpoint, epochs=epoch + 1, model=ddp.module.state_dict(), **states)

    if rank == 0:  # through ddp.module, because the forward of ddp may communicate
        right, total = evaluate(ddp.module, DataLoader(test, batch_size=100), device).tolist()
        print(f"test: {right} of {total} images are right")


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
    dist.destroy_process_group()  # `train` has returned, so DistributedDataParallel is gone


if __name__ == "__main__":
    main()
