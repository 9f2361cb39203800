"""Time batch norm on one GPU. The kinds of batch norm take turns in one process, because the host's speed varies.

    python scripts/bench.py gpu layers     the host's time for a layer, in a row of 20
    python scripts/bench.py gpu steps      training steps of a ResNet-50: eager, and in CUDA graphs

"alone" is syncbn's layer without a group. "group" and nn.SyncBatchNorm issue their collectives over a group of one
rank, although both layers normally skip them there. Prints tables, and writes times.json to --output.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from benchmarks.layers import convert
from benchmarks.measuring import Case, Rows, draw, interleave, show, write
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.utils.benchmark import Timer

import syncbn
from syncbn.ranks import calls


class SyncBatchNormOfOneRank(nn.SyncBatchNorm):
    """nn.SyncBatchNorm that also communicates over a group of one rank."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        buffers = self.running_mean, self.running_var
        return TorchFunction.apply(x, self.weight, self.bias, *buffers, self.eps, self.momentum, dist.group.WORLD, 1)


KINDS = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "alone": syncbn.SyncBatchNorm2d,
    "group": syncbn.SyncBatchNorm2d,
    "nn.SyncBatchNorm": SyncBatchNormOfOneRank,
}


def choose_group(kind: str) -> None:
    """Make syncbn's layers communicate over the group of one rank if `kind` is "group", else not at all."""
    group = dist.group.WORLD if kind == "group" else None
    calls.resolve = lambda spec: group  # The real function returns None for a group of one rank.


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of the call's CUDA graph, which takes none of the host's time. On a CPU return the call."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        return call
    graph = torch.cuda.CUDAGraph()
    # The watchdog threads of nccl and syncbn may call CUDA during the capture.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        call()
    return graph.replay


def layers(device: torch.device, dry_run: bool) -> Iterator[tuple[str, Rows]]:
    """Yield the microseconds of the host per layer. The GPU is idle before each forward, and the host never waits."""
    num_layers, rounds = 20, 100
    if dry_run:
        num_layers, rounds = 2, 2
    x, _, dy = draw(Case((4, 64, 8, 8), "bfloat16", True), device)

    def step(kind: str, model: nn.Module) -> list[float]:
        choose_group(kind)
        model.zero_grad()
        x.grad = None
        wait_for_gpu()
        start = time.perf_counter()
        y = model(x)
        middle = time.perf_counter()
        y.backward(dy)
        return [1e6 * seconds / num_layers for seconds in (middle - start, time.perf_counter() - middle)]

    steps = {}
    for kind, layer_class in KINDS.items():
        model = convert(nn.Sequential(*(nn.BatchNorm2d(64) for _ in range(num_layers))), layer_class).to(device)
        steps[kind] = partial(step, kind, model)
    count = dist.group.WORLD._get_sequence_number_for_group  # the number of collectives of the group
    for kind in KINDS:
        before = count()
        steps[kind]()
        number, expected = count() - before, 2 * num_layers if kind in ("group", "nn.SyncBatchNorm") else 0
        if number != expected:
            raise RuntimeError(f"{kind}: expected {expected} collectives of {num_layers} layers, got {number}")
    rows: dict[str, dict[str, float]] = {}
    for kind, samples in interleave(steps, rounds, warm_up=3, repeats=2).items():
        forward, backward = zip(*samples, strict=True)
        rows[kind] = {"forward minimum": min(forward), "forward median": median(forward)}
        rows[kind] |= {"backward minimum": min(backward), "backward median": median(backward)}
    yield "us a layer", rows


def steps(device: torch.device, dry_run: bool) -> Iterator[tuple[str, Rows]]:
    """Yield the milliseconds of a step: bfloat16 under autocast, channels last, SGD."""
    from imagenet import ResNet  # needs Pillow and numpy

    small_batch, large_batch, side, blocks, rounds = 8, 32, 224, (3, 4, 6, 3), 25
    if dry_run:
        small_batch, large_batch, side, blocks, rounds = 2, 3, 32, (1, 0, 0, 0), 2

    def step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
        choose_group(kind)
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()

    def milliseconds(call: Callable[[], object]) -> float:
        return 1e3 * Timer("call()", globals={"call": call}).timeit(2).mean  # timeit waits for the GPU.

    models = {}
    for kind, layer_class in KINDS.items():
        torch.manual_seed(0)
        model = convert(ResNet(blocks=blocks), layer_class).to(device, memory_format=torch.channels_last)
        models[kind] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch, mode in ((small_batch, "eager"), (small_batch, "CUDA graph"), (large_batch, "CUDA graph")):
        images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
        timers = {}
        wait_for_gpu()
        # A capture, and the calls before it, need a side stream. With None calls run on the current stream.
        stream = torch.cuda.Stream() if mode == "CUDA graph" and torch.cuda.is_available() else None
        with torch.cuda.stream(stream):
            for kind, (model, optimizer) in models.items():
                call = partial(step, kind, model, optimizer, images)
                timers[kind] = partial(milliseconds, call if mode == "eager" else capture(call))
            times = interleave(timers, rounds, warm_up=2)
        rows = {kind: {"minimum": min(values), "median": median(values)} for kind, values in times.items()}
        yield f"ms a step, {mode}, batch {batch}", rows


PARTS = {"layers": layers, "steps": steps}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder (default %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if arguments.dry_run:
        device, options = torch.device("cpu"), {"backend": "gloo"}
        del KINDS["nn.SyncBatchNorm"]  # nn.SyncBatchNorm refuses CPU tensors.
    else:
        device = torch.device("cuda:0")
        options = {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    times: dict[str, Rows] = {}
    for title, rows in PARTS[arguments.part](device, arguments.dry_run):
        times[title] = rows
        show(title, rows)
        write(arguments.output / "times.json", times=times)
    sys.stdout.flush()
    os._exit(0)  # A CUDA graph refers to the group, so neither is destroyed.
