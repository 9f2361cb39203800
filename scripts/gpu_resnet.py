"""Times training steps of a ResNet-50 with one kind of batch norm on one GPU: eager, compiled, as a CUDA graph.

    python scripts/gpu_resnet.py syncbn --lock FILE         gpu_run.py starts one for each norm

Those with the same FILE compile together, and then measure one after the other. Prints lines of "RESULT " and json.
Steps are of bfloat16 under autocast, in channels last, with SGD.
"""

import argparse
import fcntl
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.nn.parallel import DistributedDataParallel

import syncbn
from syncbn.reductions import choice, eager
from syncbn.reductions.graph import GraphReduction

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from imagenet import ResNet

TORCH_211 = "torch 2.11 compiles syncbn's layers from the reference: they are not timed"


class OfOneRank(nn.SyncBatchNorm):
    """nn.SyncBatchNorm that synchronises over a group of one rank, too, which it would leave alone."""

    def forward(self, x: Tensor) -> Tensor:
        of_layer = self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum
        self.num_batches_tracked.add_(1)
        return TorchFunction.apply(x, *of_layer, dist.group.WORLD, 1)


def synchronise_one_rank(group: dist.ProcessGroup) -> None:
    """Likewise for ours."""
    eager.resolve = lambda spec: group
    choice.reduction_in_graph = lambda spec: GraphReduction(group)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "nn.SyncBatchNorm": OfOneRank,
    "syncbn": syncbn.SyncBatchNorm2d,
    "syncbn with a group": syncbn.SyncBatchNorm2d,
    "syncbn with its own group": syncbn.SyncBatchNorm2d,  # not that of DistributedDataParallel
}


def raise_too_long(*_: object) -> None:
    raise TimeoutError("the compiler's")


def emit(**result: object) -> None:
    """A line for the runner."""
    print(f"RESULT {json.dumps(result)}", flush=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast(images.device.type, torch.bfloat16):
        loss = model(images).float().square().mean()
    loss.backward()
    optimizer.step()


def captured(call: Callable[[], None]) -> Callable[[], None]:
    """The replay of a step, warmed up on a side stream as torch's notes on CUDA graphs say."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(call: Callable[[], None], steps: int) -> float:
    """The wall clock of a step, in a run at whose end the host waits for the GPU."""
    start = time.perf_counter()
    for _ in range(steps):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("norm", choices=NORMS)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--ddp", action="store_true", help="eager steps under DistributedDataParallel alone")
    parser.add_argument("--compile-seconds", type=int, default=60)
    parser.add_argument("--lock", type=Path, required=True, help="a file")
    arguments = parser.parse_args()
    lock = arguments.lock.open("w")
    fcntl.flock(lock, fcntl.LOCK_SH)
    norm, dry_run = arguments.norm, arguments.dry_run
    device, backend = (torch.device("cpu"), "gloo") if dry_run else (torch.device("cuda:0"), "nccl")
    dist.init_process_group(
        backend, store=dist.HashStore(), rank=0, world_size=1, device_id=None if dry_run else device
    )
    if norm.endswith("group"):
        synchronise_one_rank(dist.new_group() if norm.endswith("its own group") else dist.group.WORLD)
    compiles = not norm.startswith("syncbn") or torch.__version__ >= (2, 12)
    if not compiles:
        emit(norm=norm, note=TORCH_211)
    torch.manual_seed(0)
    model = ResNet(blocks=(1, 0, 0, 0) if dry_run else (3, 4, 6, 3), norm_layer=NORMS[norm])  # dry: the flow alone
    model = model.to(device, memory_format=torch.channels_last)
    if arguments.ddp:
        model, compiles = DistributedDataParallel(model), False
    compiled = torch.compile(model, dynamic=False, backend="aot_eager" if dry_run else "inductor")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sizes, side = ((2,), 32) if dry_run else ((32, 8), 224)
    modes: dict[tuple[str, int], Callable[[], None]] = {}
    signal.signal(signal.SIGALRM, raise_too_long)
    signal.setitimer(signal.ITIMER_REAL, arguments.compile_seconds, 10)  # each size gets an end, should it need one
    for size in sizes:
        images = torch.randn(size, 3, side, side, device=device).to(memory_format=torch.channels_last)
        modes["eager", size], in_graphs = (partial(step, one, optimizer, images) for one in (model, compiled))
        if not compiles:
            continue
        try:
            emit(norm=norm, batch=size, **{"seconds to compile": milliseconds(in_graphs, 1) / 1e3})
            modes["compiled", size] = in_graphs
        except Exception as error:  # whatever the compiler makes of the time-out; the other modes are measured
            emit(norm=norm, mode="compiled", ok="TimeoutError" in f"{type(error)} {error}", error=str(error)[-300:])
    signal.setitimer(signal.ITIMER_REAL, 0)
    fcntl.flock(lock, fcntl.LOCK_EX)  # once all have compiled or ended; then for one at a time
    if not dry_run and not arguments.ddp:  # last, as a capture that fails may leave the GPU unusable
        modes |= {("CUDA graph", size): modes["eager", size] for size in sizes}
    for (mode, size), call in modes.items():
        try:
            replayed = captured(call) if mode == "CUDA graph" else call
            times = [milliseconds(replayed, 1 if dry_run else 5) for _ in range(2 if dry_run else 8)][1:]
            emit(norm=norm, mode=mode, batch=size, ms=statistics.median(times), least=min(times))
        except Exception as error:
            emit(norm=norm, mode=mode, batch=size, ok=False, error=f"{type(error).__name__}: {error}"[:300])
            break
    os._exit(0)  # a graph holds the group, which is not destroyed beneath it


if __name__ == "__main__":
    main()
