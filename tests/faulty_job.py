"""One rank of a small training job in which the last rank does something wrong in its third step.

    python tests/faulty_job.py FAULT [FOLDER]         with the environment variables of torchrun

Each rank saves the gradients and buffers of the first two steps to FOLDER.
test_faults.py, test_two_hosts.py and scripts/gpu_run.py run it, and have the names of the faults.
"""

import os
import signal
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from jobs import wait_until
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.ranks.positions import process_state
from syncbn.ranks.watchdog import this_rank

TIMEOUT = timedelta(seconds=int(os.environ.get("COLLECTIVE_SECONDS", 3)))
BACKEND = os.environ.get("TESTS_BACKEND", "gloo")  # With nccl all ranks share a GPU.
DEVICE = "cuda" if BACKEND == "nccl" else "cpu"
STEPS, FAULTY_STEP = 6, 3
FAULT, *FOLDER = sys.argv[1:]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
AT_FAULT = RANK == RANKS - 1
STORE, _, _ = next(dist.rendezvous("env://"))
HAS_LESS = FAULT.startswith("one batch less")  # DDP has its default arguments.


class Body(nn.Module):
    """Three layers. In a faulty step the call of the later two depends on FAULT."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm1d(channels) for _ in range(3))
        self.faulty = False

    def forward(self, x: Tensor) -> Tensor:
        fault = FAULT if self.faulty else ""
        x = self.bn1(x)
        if fault == "exception in forward":
            raise KeyError("no such class: 10")
        if fault == "kill -9 in forward":
            kill()
        if fault == "bad argument":
            self.bn2(x[:, :2])
        if fault == "another order":
            return self.bn2(self.bn3(x))
        return self.bn3(x if fault == "skips a layer" else self.bn2(x))


def wait_until_written() -> None:
    """Wait until the store has the position of this rank, which a thread writes once a second."""
    rank = this_rank()
    wait_until(lambda: rank.written_position == rank.position())


def kill(signal_number: int = signal.SIGKILL) -> None:
    """Send the signal to this rank."""
    wait_until_written()
    os.kill(os.getpid(), signal_number)


def kill_in_collective() -> None:
    """Kill this rank while its other thread waits in the all_reduce of the faulty step."""
    wait_until(lambda: this_rank().waiting)
    kill()


def fork(model: nn.Module) -> None:
    """Call the model in a child process, which has the group of this process."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        sys.exit(f"the forked process ended with {os.waitstatus_to_exitcode(status)}")
    signal.alarm(15)
    try:
        model(torch.randn(4, 3))
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
    os._exit(1)


def before_step(model: nn.Sequential) -> None:
    """What all ranks do before the faulty step."""
    if FAULT == "threads":  # a thread for each layer
        layers, calls = [model.body.bn1, model.body.bn2], []
        with ThreadPoolExecutor() as threads:
            for layer in reversed(layers) if AT_FAULT else layers:
                calls.append(threads.submit(lambda layer: [layer(torch.randn(4, 4)) for _ in range(20)], layer))
                time.sleep(0.5)  # Otherwise the threads of the ranks may stay in step.
        for call in calls:
            call.result()
    if FAULT == "members":
        timeout = timedelta(seconds=1) if AT_FAULT else TIMEOUT  # The rank at fault connects five times.
        model.body.bn1.process_group = dist.new_group(list(range(RANKS - (not AT_FAULT))), timeout=timeout)
    if FAULT == "sizes of groups":
        model.body.bn1.process_group = 2 if AT_FAULT else RANKS
    if FAULT == "a group on one rank alone" and AT_FAULT:
        model.body.bn1.process_group = RANKS
    if FAULT == "replay":
        replay(model)
    if FOLDER:
        wait_until_written()
        gradients = [parameter.grad for parameter in model.parameters()]
        torch.save([gradients, *model.buffers()], Path(*FOLDER, f"rank {RANK}"))
    if FAULT == "link cut":  # The test cuts the link between two hosts when all ranks have saved their gradients.
        wait_until(Path(*FOLDER, "cut").exists)
    if FAULT == "kill -9 in the all_reduce":
        if AT_FAULT:
            threading.Thread(target=kill_in_collective).start()
        else:
            process = int(STORE.get(f"rank {RANKS - 1} is there"))
            wait_until(lambda: "has ended" in process_state(process))


def replay(model: nn.Sequential) -> None:
    """Capture and replay a CUDA graph, which has another layer on the rank at fault."""
    layer, x, graph = model.body.bn2 if AT_FAULT else model.body.bn1, torch.randn(4, 4), torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            layer(x)
        graph.replay()
        torch.cuda.synchronize()
        layer(x)


def inputs(fault: str) -> Tensor:
    """Return the batch of this rank in a step with this fault."""
    x = torch.randn(4, 3)
    if fault == "NaN":
        x[0, 0] = torch.nan
    return x[: 1 - AT_FAULT] if fault == "one value" else x


def recreate_group() -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=TIMEOUT)


BEFORE_FAULTY_STEP: dict[str, Callable[[nn.Module], object]] = {
    "stopped for longer than the time-out": lambda model: kill(signal.SIGSTOP),
    "sleeps": lambda model: time.sleep(34),
    "group made anew": lambda model: recreate_group(),
    "fork after use": fork,
}


def train_two_models() -> None:
    """Train a generator and a discriminator, whose layers have the same name."""
    models = [syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))) for _ in range(2)]
    models = [*map(DistributedDataParallel, models)]
    for step in range(1, STEPS):
        for model in reversed(models) if AT_FAULT and step == FAULTY_STEP else models:
            model(torch.randn(4, 3)).square().mean().backward()


def train() -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of DDP's argument broadcast_buffers
    show, warned = warnings.showwarning, threading.Event()
    warnings.showwarning = lambda *arguments: (show(*arguments), warned.set())
    STORE.set(f"rank {RANK} is there", str(os.getpid()))  # A rank may start much later.
    STORE.wait([f"rank {rank} is there" for rank in range(RANKS)])
    if BACKEND == "nccl":
        os.environ["NCCL_HOSTID"] = str(RANK)  # nccl refuses two ranks of one host on one GPU
        torch.set_default_device("cuda")
    dist.init_process_group(BACKEND, store=STORE, rank=RANK, world_size=RANKS, timeout=TIMEOUT)
    torch.manual_seed(RANK)
    if FAULT == "two numbers of channels":
        sync_batch_norm(torch.randn(2, 4), None, None, torch.ones(3 if AT_FAULT else 4), training=True)
    channels = 5 if AT_FAULT and FAULT == "channels" else 4
    body = Body(channels)
    model = nn.Sequential(OrderedDict(linear=nn.Linear(3, channels), body=body))
    syncbn.convert_syncbn_model(model)
    ddp = model  # The constructor of DistributedDataParallel would raise for other channels.
    if FAULT != "channels":
        ddp = DistributedDataParallel(model, broadcast_buffers="buffers" in FAULT or HAS_LESS)
    if FAULT == "two models, another order":
        train_two_models()
    more_steps = AT_FAULT * (FAULT.startswith("one more step") - HAS_LESS)
    for step in range(1, STEPS + 1 + more_steps):
        body.faulty = AT_FAULT and step == FAULTY_STEP
        if step == FAULTY_STEP:
            before_step(model)
        if body.faulty and FAULT in BEFORE_FAULTY_STEP:
            BEFORE_FAULTY_STEP[FAULT](model)
        if body.faulty and FAULT.startswith("evaluates"):
            ddp.eval()(torch.randn(4, 3))
            ddp.train()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=body.faulty and FAULT == "autocast"):
            has_fault = body.faulty or (FAULT == "one value" and step == FAULTY_STEP)
            y = ddp(inputs(FAULT if has_fault else ""))
        if body.faulty and FAULT == "out of memory, caught":
            continue
        y.square().mean().backward()
        y.detach().cpu()  # Wait for a GPU.
    if FAULT == "NaN" and AT_FAULT:
        wait_until(warned.is_set)
    if FAULT.endswith("a barrier"):
        dist.barrier()
    if "a metric" in FAULT:
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    train()
    dist.destroy_process_group()  # after the end of DDP, see docs/rules.md
