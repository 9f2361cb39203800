"""Train for long, and look for memory, threads and file descriptors that grow and for ranks that drift apart.

    torchrun --standalone --nproc-per-node 4 scripts/soak.py --minutes 10
    torchrun --standalone --nproc-per-node 2 scripts/soak.py --minutes 0.1        a few seconds

Each round uses every feature that allocates something, in a default process group of its own. At its end the ranks
compare their models byte by byte, destroy the group, and measure. Each rank prints its growth over the second half of
the rounds. The exit status is 1 if the number of threads or file descriptors grew, or the memory by more than 1 %.
"""

import argparse
import copy
import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import syncbn
from syncbn.testing import unequal

STEPS = 5  # steps of each feature in a round
MAX_GROWTH = 0.01  # relative growth of the memory
WARM_UP_ROUNDS = 20  # The allocator's caches still grow in these rounds.
FOLDERS = {"file descriptors": "/proc/self/fd", "threads": "/proc/self/task"}  # name -> folder with an entry for each


def build_model(process_group: int | None = None) -> nn.Module:
    """(N, 3, 8, 8) -> (N, 10)."""
    convs = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Conv2d(16, 32, 3, padding=1, bias=False)
    norms = nn.Sequential(convs[0], nn.BatchNorm2d(16), nn.ReLU(), convs[1], nn.BatchNorm2d(32))
    model = nn.Sequential(*norms, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return syncbn.convert_syncbn_model(model, process_group)


def draw(generator: torch.Generator) -> Tensor:
    """Return a batch of this rank's own size, (1 to 5, 3, 8, 8)."""
    return torch.randn(int(torch.randint(1, 6, (), generator=generator)), 3, 8, 8, generator=generator)


def train(model: nn.Module, data: torch.Generator, steps: int = STEPS) -> None:
    for _ in range(steps):
        model(draw(data)).square().mean().backward()


def train_all(data: torch.Generator) -> nn.Module:
    """Train with DDP, groups, uneven data, conversion, checkpointing, second derivatives, masks and errors."""
    ddp = DistributedDataParallel(build_model())
    train(ddp, data)
    train(build_model(2 if dist.get_world_size() % 2 == 0 else 1), data)
    train(ddp, data, STEPS + dist.get_rank())
    for _ in range(dist.get_rank(), dist.get_world_size() - 1):  # This rank has run out of data.
        ddp(draw(data)[:0]).sum().backward()
    model = syncbn.convert_syncbn_model(syncbn.revert_syncbn_model(copy.deepcopy(ddp.module)))
    train(model, data)
    for _ in range(STEPS):
        model.eval()(draw(data))
        model.train()
        checkpoint(model, draw(data).requires_grad_(), use_reentrant=False).square().mean().backward()
        x = draw(data).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        slope.square().sum().backward()
        images = model[0](draw(data))
        model[1](images, mask=torch.arange(len(images)) % 2 == 0)
        with pytest.raises(ValueError, match="expected 16 channels"):
            model[1](images[:, 1:] if dist.get_rank() == 0 else images)
    return model


def measure() -> dict[str, int]:
    """Return this process's resident memory in bytes, and its numbers of file descriptors and threads."""
    gc.collect()
    deadline = time.monotonic() + 5
    while len(os.listdir(FOLDERS["threads"])) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)  # Threads of the destroyed group end.
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE")} | {name: len(os.listdir(FOLDERS[name])) for name in FOLDERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="(default %(default)s)")
    seconds, start = 60 * parser.parse_args().minutes, time.monotonic()
    torch.set_num_threads(1)
    store, rank, size = next(dist.rendezvous("env://"))
    rounds: list[dict[str, int]] = []
    is_last = False
    while not is_last:
        group = {"store": dist.PrefixStore(f"round {len(rounds)}", store), "timeout": timedelta(seconds=60)}
        dist.init_process_group("gloo", rank=rank, world_size=size, **group)
        torch.manual_seed(len(rounds))  # All ranks get the same weights.
        model = train_all(torch.Generator().manual_seed(len(rounds) * size + rank))
        assert not unequal(model.state_dict())
        time_is_over = torch.tensor(len(rounds) > 0 and time.monotonic() - start > seconds)
        dist.broadcast(time_is_over, 0)
        is_last = bool(time_is_over)
        dist.destroy_process_group()
        rounds.append(measure())
    half = rounds[len(rounds) // 2 :]
    growth = {name: half[-1][name] - half[0][name] for name in half[0]}
    changes = ", ".join(f"{change:+} {name}" for name, change in growth.items())
    print(f"rank {rank}: {len(rounds)} rounds in {time.monotonic() - start:.0f} s; in their second half {changes}")
    memory_grows = growth["bytes"] > MAX_GROWTH * half[0]["bytes"] and len(rounds) >= WARM_UP_ROUNDS
    sys.exit(memory_grows or any(growth[name] > 0 for name in FOLDERS))


if __name__ == "__main__":
    main()
