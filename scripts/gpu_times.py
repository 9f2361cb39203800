"""Time batch norm on one GPU. All kinds take turns in one process, because the host's speed differs between runs.

    python scripts/gpu_times.py layers     the host's time for a layer, in a row of 20
    python scripts/gpu_times.py steps      training steps of a ResNet-50: eager, and in CUDA graphs

"alone" is syncbn's layer without a group. "group" and nn.SyncBatchNorm communicate over a group of one rank, where both
would normally not communicate. Prints tables, and writes times.json to --output.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.measuring import Case, Rows, draw, interleave, show, write
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction

import syncbn
from syncbn.ranks import calls

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from imagenet import ResNet


class SyncBatchNormOfOneRank(nn.SyncBatchNorm):
    """nn.SyncBatchNorm that also communicates over a group of one rank."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        buffers = self.running_mean, self.running_var
        return TorchFunction.apply(x, self.weight, self.bias, *buffers, self.eps, self.momentum, dist.group.WORLD, 1)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "alone": syncbn.SyncBatchNorm2d,
    "group": syncbn.SyncBatchNorm2d,
    "nn.SyncBatchNorm": SyncBatchNormOfOneRank,
}


def choose_group(norm: str) -> None:
    """Let syncbn's layers communicate over the group of one rank if `norm` is "group"."""
    group = dist.group.WORLD if norm == "group" else None
    calls.resolve = lambda spec: group


def minimum_and_median(values: Sequence[float], prefix: str = "") -> dict[str, float]:
    return {f"{prefix}minimum": min(values), f"{prefix}median": statistics.median(values)}


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """Return the replay of a call's CUDA graph, which hides the host's time. On a CPU return the call."""
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
    num_layers, rounds = (2, 2) if dry_run else (20, 100)
    x, _, dy = draw(Case((4, 64, 8, 8), "bfloat16", True), device)

    def step(norm: str, model: nn.Module) -> list[float]:
        choose_group(norm)
        model.zero_grad()
        x.grad = None
        wait_for_gpu()
        start = time.perf_counter()
        y = model(x)
        middle = time.perf_counter()
        y.backward(dy)
        return [1e6 * seconds / num_layers for seconds in (middle - start, time.perf_counter() - middle)]

    calls = {}
    for norm, make in NORMS.items():
        calls[norm] = partial(step, norm, nn.Sequential(*(make(64) for _ in range(num_layers))).to(device))
        with CommDebugMode() as collectives:
            calls[norm]()
        expected, number = 2 * num_layers * (norm in ("group", "nn.SyncBatchNorm")), collectives.get_total_counts()
        if number != expected:
            raise RuntimeError(f"expected {expected} collectives of {num_layers} layers, got {number}")
    rows: dict[str, dict[str, float]] = {}
    for norm, samples in interleave(calls, rounds, warm_up=3, repeats=2).items():
        for stage, values in zip(("forward", "backward"), zip(*samples, strict=True), strict=True):
            rows.setdefault(norm, {}).update(minimum_and_median(values, f"{stage} "))
    yield "us a layer", rows


def steps(device: torch.device, dry_run: bool) -> Iterator[tuple[str, Rows]]:
    """Yield the milliseconds of a step: bfloat16 under autocast, channels last, SGD."""
    batches, side, blocks, rounds = ((2, 3), 32, (1, 0, 0, 0), 2) if dry_run else ((8, 32), 224, (3, 4, 6, 3), 25)

    def step(norm: str, model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
        choose_group(norm)
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()

    def milliseconds(call: Callable[[], object]) -> float:
        wait_for_gpu()
        start = time.perf_counter()
        for _ in range(3):
            call()
        wait_for_gpu()
        return (time.perf_counter() - start) / 3 * 1e3

    trained = {}
    for norm, make in NORMS.items():
        torch.manual_seed(0)
        model = ResNet(blocks=blocks, norm_layer=make).to(device, memory_format=torch.channels_last)
        trained[norm] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch, mode in ((batches[0], "eager"), *((batch, "CUDA graph") for batch in batches)):
        images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
        timers = {}
        wait_for_gpu()
        # Captures, and the calls before them, need a side stream.
        side_stream = torch.cuda.Stream() if mode == "CUDA graph" and torch.cuda.is_available() else None
        with torch.cuda.stream(side_stream):
            for norm, arguments in trained.items():
                call = partial(step, norm, *arguments, images)
                timers[norm] = partial(milliseconds, call if mode == "eager" else capture(call))
            times = interleave(timers, rounds, warm_up=2)
        yield f"ms a step, {mode}, batch {batch}", {norm: minimum_and_median(values) for norm, values in times.items()}


PARTS = {"layers": layers, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder (default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu" if arguments.dry_run else "cuda:0")
    if arguments.dry_run:
        del NORMS["nn.SyncBatchNorm"]  # nn.SyncBatchNorm refuses CPUs.
    group = {"backend": "gloo"} if arguments.dry_run else {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **group)
    times: dict[str, Rows] = {}
    for title, rows in PARTS[arguments.part](device, arguments.dry_run):
        times[title] = rows
        show(title, rows)
        write(arguments.output / "times.json", times=times)
    sys.stdout.flush()
    os._exit(0)  # A CUDA graph refers to the group, so neither is destroyed.


if __name__ == "__main__":
    main()
