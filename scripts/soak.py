"""Train for long and see whether anything grows, drifts or leaks.

    torchrun --standalone --nproc-per-node 4 scripts/soak.py --minutes 10
    torchrun --standalone --nproc-per-node 2 scripts/soak.py --minutes 0.1        a few seconds

Each round does all that makes or keeps something, see `round_of_everything`, in a default process group of its own. At
its end it compares the ranks' models byte by byte, the group is destroyed, and each rank notes its
resident memory and its numbers of file descriptors and threads, of which every gloo group has some.

Prints, of the second half of the rounds, the slope of a line fitted to the memory, and by how much the numbers grew;
the exit status is 1 where numbers grow, or memory by more than 1 %.
"""

import argparse
import copy
import gc
import json
import os
import statistics
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

STEPS = 5  # of each kind in a round
MOST_GROWTH = 0.01  # of the memory
FIRST_ROUNDS = 20  # in which memory is still being taken for the first time
COUNTS = {"file descriptors": "/proc/self/fd", "threads": "/proc/self/task"}
Rounds = list[dict[str, float]]  # what a rank measured after each


def build_model(process_group: int | None = None) -> nn.Module:
    """(N, 3, 8, 8) -> (N, 10)."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return syncbn.convert_syncbn_model(model, process_group)


def draw(generator: torch.Generator) -> Tensor:
    """A batch (1 to 5, 3, 8, 8), of this rank's own size."""
    return torch.randn(int(torch.randint(1, 6, (), generator=generator)), 3, 8, 8, generator=generator)


def train(model: nn.Module, data: torch.Generator, steps: int = STEPS) -> None:
    """Forward and backward; nothing learns."""
    for _ in range(steps):
        model(draw(data)).square().mean().backward()


def round_of_everything(data: torch.Generator) -> nn.Module:
    """Returns a model that took part in most of it."""
    ddp = DistributedDataParallel(build_model())
    train(ddp, data)
    train(build_model(2 if dist.get_world_size() % 2 == 0 else 1), data)
    train(ddp, data, STEPS + dist.get_rank())
    for _ in range(dist.get_rank(), dist.get_world_size() - 1):  # this rank has run out of data
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


def measure() -> dict[str, float]:
    """What this process holds, in bytes and numbers."""
    gc.collect()
    deadline = time.monotonic() + 5
    while len(os.listdir(COUNTS["threads"])) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)  # in which threads end whose group has gone
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counts = {name: len(os.listdir(folder)) for name, folder in COUNTS.items()}
    return {"memory": pages * os.sysconf("SC_PAGE_SIZE"), **counts}


def soak(store: dist.Store, rank: int, size: int, seconds: float) -> Rounds:
    """What this rank measured after each round, when there was no process group."""
    start, is_last = time.monotonic(), False
    rounds: Rounds = []
    while not is_last:
        index, common = len(rounds), {"rank": rank, "world_size": size, "timeout": timedelta(seconds=60)}
        dist.init_process_group("gloo", store=dist.PrefixStore(f"round {index}", store), **common)
        torch.manual_seed(index)  # the same weights on all ranks
        model = round_of_everything(torch.Generator().manual_seed(index * size + rank))
        assert not unequal(model.state_dict())
        seconds_over = torch.tensor(index > 0 and time.monotonic() - start > seconds)
        dist.broadcast(seconds_over, 0)
        is_last = bool(seconds_over)
        dist.destroy_process_group()
        rounds.append({"seconds": time.monotonic() - start} | measure())
        if rank == 0 and index % 20 == 0:
            print(f"round {index}:", *(f"{name} {value:.0f}" for name, value in rounds[-1].items()), flush=True)
    return rounds


def grows(rank: int, rounds: Rounds) -> bool:
    """Print what this rank measured in the second half of the rounds; whether anything grew."""
    half = rounds[len(rounds) // 2 :]
    seconds, memory = ([one[name] for one in half] for name in ("seconds", "memory"))
    slope = statistics.linear_regression(seconds, memory).slope if len(half) > 1 else 0.0  # bytes/s
    counts = {name: half[-1][name] - half[0][name] for name in COUNTS}
    more = ", ".join(f"{number:+.0f} {name}" for name, number in counts.items())
    print(f"rank {rank}: {memory[-1] / 1e6:.0f} MB, which grow by {3600 * slope / 1e6:.2f} MB an hour; {more}")
    too_much = slope * (seconds[-1] - seconds[0]) > MOST_GROWTH * memory[0]
    return max(counts.values()) > 0 or (too_much and len(rounds) >= FIRST_ROUNDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="(default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store, rank, size = next(dist.rendezvous("env://"))
    store.set(f"measured {rank}", json.dumps(soak(store, rank, size, 60 * arguments.minutes)))
    if rank == 0:
        measured = [json.loads(store.get(f"measured {other}")) for other in range(size)]
        print(f"{len(measured[0])} rounds in {measured[0][-1]['seconds']:.0f} s; in the second half of them:")
        sys.exit(sum(grows(other, rounds) for other, rounds in enumerate(measured)) > 0)


if __name__ == "__main__":
    main()
