"""One rank of a small training job in which the last rank does something wrong in the third step.

    python tests/faulty_job.py FAULT [FOLDER]         with the environment variables of torchrun

FAULT is a name from test_faults.py or scripts/gpu_run.py. FOLDER is for the fault "link cut" alone.
"""

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import wait_until
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.ranks.watchdog import this_rank

TIMEOUT = timedelta(seconds=int(os.environ.get("COLLECTIVE_SECONDS", 3)))
BACKEND = os.environ.get("TESTS_BACKEND", "gloo")  # With nccl all ranks share a GPU.
NUM_STEPS, FAULTY_STEP = 6, 3
FAULT, *FOLDER = sys.argv[1:]
RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IS_LAST_RANK = RANK == NUM_RANKS - 1
OWN_FAULT = FAULT if IS_LAST_RANK else "none"


class Body(nn.Module):
    """Three layers, which are called in order unless `fault` changes the calls."""

    fault = "none"

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm1d(channels) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(x)
        if self.fault == "exception in forward":
            raise KeyError("no such class: 10")
        if self.fault == "kill -9 in forward":
            send_signal(signal.SIGKILL)
        if self.fault == "bad argument":
            self.bn2(x[:, :2])
        if self.fault == "another order":
            return self.bn2(self.bn3(x))
        if self.fault != "skips a layer":
            x = self.bn2(x)
        return self.bn3(x)


def new_model(channels: int) -> nn.Sequential:
    return syncbn.convert_syncbn_model(nn.Sequential(OrderedDict(linear=nn.Linear(3, channels), body=Body(channels))))


def send_signal(signal_number: int) -> None:
    """Send a signal to this process when the store has the position of this rank."""
    wait_until_position_is_written()
    os.kill(os.getpid(), signal_number)


def wait_until_position_is_written() -> None:
    rank = this_rank()  # A thread writes the position once a second.
    wait_until(lambda: rank.written_position == rank.position())


def before_faulty_step(model: nn.Sequential) -> None:
    if FAULT == "replay":
        replay_graph(model.body.bn2 if IS_LAST_RANK else model.body.bn1)  # The graphs have different layers.
    if FAULT == "link cut":  # The test waits for a file of each rank, cuts the link between two hosts and adds "cut".
        wait_until_position_is_written()
        Path(*FOLDER, f"rank {RANK}").touch()
        wait_until(Path(*FOLDER, "cut").exists)
    if OWN_FAULT == "a group on one rank alone":
        # An int is the number of ranks per group. The next call creates the groups, which is a collective.
        model.body.bn1.process_group = NUM_RANKS
    if OWN_FAULT == "stopped for longer than the timeout":
        send_signal(signal.SIGSTOP)
    if OWN_FAULT == "sleeps":
        time.sleep(34)  # longer than the 30 s after which the other rank warns
    if OWN_FAULT == "fork after use":  # The child inherits the process group. It prints its error.
        child = multiprocessing.get_context("fork").Process(target=model, args=(torch.randn(4, 3),), daemon=True)
        child.start()
        child.join(15)
        sys.exit("the forked process has ended or hangs; this exit ends it")


@torch.no_grad()
def replay_graph(layer: nn.Module) -> None:
    """Replay a call of the layer in a CUDA graph. The eager call after the replay raises the fault of the replay."""
    x, graph = torch.randn(4, 4), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x)
    graph.replay()
    torch.cuda.synchronize()
    layer(x)


def train_two_models() -> None:
    """Train two models whose layers have the same name, as a GAN does."""
    models = [syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))) for _ in range(2)]
    for step in range(1, NUM_STEPS):
        for model in reversed(models) if IS_LAST_RANK and step == FAULTY_STEP else models:
            model(torch.randn(4, 3)).square().mean().backward()


def train() -> None:
    num_steps = NUM_STEPS + {"one more step": 1, "one batch less, then a metric": -1}.get(OWN_FAULT, 0)
    model = new_model(channels=4)
    # With these two faults a rank waits in DDP's broadcast of buffers before a forward. Other jobs disable it.
    broadcast_buffers = FAULT in ("one batch less, then a metric", "validates through DDP")
    ddp = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
    for step in range(1, num_steps + 1):
        if step == FAULTY_STEP:
            before_faulty_step(model)
        fault = model.body.fault = OWN_FAULT if step == FAULTY_STEP else "none"
        x = torch.randn(4, 3)
        if fault == "NaN":
            x[0, 0] = torch.nan
        if fault == "validates through DDP":
            ddp.eval()(x)
            ddp.train()
        if FAULT == "one value" and step == FAULTY_STEP:
            x = x[:0] if IS_LAST_RANK else x[:1]  # one value per channel over both ranks
        with torch.autocast(x.device.type, torch.bfloat16, enabled=fault == "autocast"):
            y = ddp(x)
        if fault == "out of memory, caught":
            continue  # Skip the backward, like a program that has caught an error at the end of the forward.
        y.square().mean().backward()
        y.detach().cpu()  # Wait for a GPU.


def main() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has renamed the argument broadcast_buffers.
    store, _, _ = next(dist.rendezvous("env://"))
    store.set(f"rank {RANK} has started", "")
    # A rank on a busy machine may start so late that the other ranks would time out in init_process_group.
    store.wait([f"rank {rank} has started" for rank in range(NUM_RANKS)])
    if BACKEND == "nccl":
        os.environ["NCCL_HOSTID"] = str(RANK)  # nccl refuses two ranks of one host on one GPU
        torch.set_default_device("cuda")
    dist.init_process_group(BACKEND, store=store, rank=RANK, world_size=NUM_RANKS, timeout=TIMEOUT)
    torch.manual_seed(RANK)
    if FAULT == "channels":  # without DistributedDataParallel, whose constructor compares the shapes of parameters
        new_model(5 if IS_LAST_RANK else 4)(torch.randn(4, 3))
    if FAULT == "two numbers of channels":
        sync_batch_norm(torch.randn(2, 4), None, None, torch.ones(3 if IS_LAST_RANK else 4), training=True)
    if FAULT == "two models, another order":
        train_two_models()
    train()
    if OWN_FAULT == "NaN":
        time.sleep(3)  # On a GPU the watchdog warns of NaN, and polls once a second.
    if FAULT == "one batch less, then a metric":
        dist.all_reduce(torch.ones(1))
    # The functions that created DDP have returned. DDP must be gone before this call, see docs/rules.md, "The end".
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
