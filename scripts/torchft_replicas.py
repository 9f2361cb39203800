"""Trains two torchft replicas of which one leaves in a forward and comes back, and compares with one process.

    python scripts/torchft_replicas.py      needs torchft, in the version of scripts/constraints.txt

Each step trains the same whole batch, whichever replicas take part. A step that torchft discards is undone in the
buffers, too. Prints the largest difference of any parameter and buffer relative to the largest value of its kind, and
ends with status 1 if it is beyond 1e-12. CPU, float64.
"""

import logging
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import syncbn

LEAVES_AT, COMES_BACK_AT, STEPS = 3, 5, 8
PAUSE = 0.3  # seconds between steps
TIMEOUT = timedelta(seconds=60)


def model_and_optimizer() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    model = nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 5)).double()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=generator)
    return x, torch.randint(5, (6,), generator=generator)


def train_replica(index: int, lighthouse: str, folder: Path, leaves: bool) -> None:
    from torchft import Manager
    from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo

    logging.disable()
    model, optimizer = model_and_optimizer()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        ProcessGroupGloo(timeout=TIMEOUT), load,
        lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1, use_async_quorum=False, timeout=TIMEOUT, rank=0, world_size=1, replica_id=str(index),
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, hostname="127.0.0.1",
    )  # fmt: skip
    syncbn.convert_syncbn_model(model, process_group=ManagedProcessGroup(manager))
    (folder / f"{index} {'leaves' if leaves else 'is here'}").touch()
    while manager.current_step() < STEPS:
        if index == 0 and manager.current_step() == COMES_BACK_AT:
            while not (folder / "1 is here").exists():
                time.sleep(PAUSE)
            time.sleep(PAUSE)
        manager.start_quorum()
        step, parts = manager.current_step(), manager.num_participants()
        if leaves and step == LEAVES_AT:
            model[2].register_forward_hook(lambda *_: os._exit(0))
        x, target = (whole.chunk(parts)[manager.participating_rank()] for whole in batch_of(step))
        before = [buffer.clone() for buffer in model.buffers()]
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        commits = manager.should_commit()
        if commits:
            optimizer.step()
        else:  # the running statistics have moved
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
        print(f"replica {index}, step {step}: {parts} replicas, {'committed' if commits else 'discarded'}", flush=True)
        time.sleep(PAUSE)
    torch.save(model.state_dict(), folder / f"{index}.pt")
    os._exit(0)  # its threads wait


def main() -> int:
    from torchft._torchft import LighthouseServer

    folder, context = Path(tempfile.mkdtemp()), mp.get_context("spawn")
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=2000)
    starts = [(0, False), (1, True)]
    replicas = [context.Process(target=train_replica, args=(i, lighthouse.address(), folder, x)) for i, x in starts]
    for replica in replicas:
        replica.start()
    replicas[1].join()
    replicas[1] = context.Process(target=train_replica, args=(1, lighthouse.address(), folder, False))
    replicas[1].start()
    for replica in replicas:
        replica.join()
    model, optimizer = model_and_optimizer()
    for step in range(STEPS):
        x, target = batch_of(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    distances = []
    for index in range(2):
        pairs = zip(torch.load(folder / f"{index}.pt").values(), model.state_dict().values(), strict=True)
        distances.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    print("largest difference from one process, of replica 0 and 1:", *(f"{d:.1e}" for d in distances))
    return max(distances) > 1e-12


if __name__ == "__main__":
    sys.exit(main())
