"""Time batch norm on one GPU. All kinds take turns in one process, because the host's speed differs between runs.

    python scripts/gpu_times.py layers     the host's time for a layer, in a row of 20
    python scripts/gpu_times.py steps      training steps of a ResNet-50: eager, and in CUDA graphs
    python scripts/gpu_times.py passes     the GPU's time for forward and backward, of tensors larger than the L2 cache

"alone" is syncbn's layer without a group. "group" and nn.SyncBatchNorm communicate over a group of one rank, where both
would normally not communicate. Prints each figure, and again as a line of "RESULT " and JSON for gpu_run.py.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.measuring import Case, cases, draw, interleave, time_stages
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction

import syncbn
from syncbn.ranks import calls

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from imagenet import ResNet

EPS = 1e-5
LAYERS = 20  # layers in a row
CALLS = 16  # calls in a CUDA graph, each on its own tensors
CASES = cases(["32x64x112x112", "32x512x14x14", "32x2048x7x7", "8x256x14x14"], ["bfloat16"])
CASES += cases(["32x256x56x56"], ["float32"])
Call = Callable[[], Any]
Pass = tuple[Callable[[Tensor], Any], Callable[[Any, Tensor, Tensor], object]]  # x -> saved; saved, x, dy -> gradients


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
COMMUNICATE = "group", "nn.SyncBatchNorm"


def choose_group(norm: str) -> None:
    """Let syncbn's layers communicate over the group of one rank if `norm` is "group"."""
    group = dist.group.WORLD if norm == "group" else None
    calls.resolve = lambda spec: group


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def show(*labels: object, **results: Any) -> None:
    figures = (f"{name} {one:.1f}" if isinstance(one, float) else f"{name} {one}" for name, one in results.items())
    print(", ".join(map(str, labels)) + ":", *figures)
    print(f"RESULT {json.dumps({'of': labels, **results})}", flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "minimum": min(values),
        "quartile": statistics.quantiles(values, method="inclusive")[0],
        "median": statistics.median(values),
    }


@contextlib.contextmanager
def showing_errors(*labels: object) -> Any:
    """Show the error of one figure and go on. In a dry run nn.SyncBatchNorm's kernels refuse the CPU, which is ok."""
    try:
        yield
    except Exception as error:
        ok = isinstance(error, NotImplementedError) and not torch.cuda.is_available()
        show(*labels, ok=ok, error=f"{type(error).__name__}: {error}"[:300])


def side_stream() -> contextlib.AbstractContextManager[object]:
    """Return a context for captures and for the calls before them, which need the same stream."""
    wait_for_gpu()
    return torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else contextlib.nullcontext()


def capture(call: Call) -> Call:
    """Return the replay of a call's CUDA graph, which hides the host's time. On a CPU return the call."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        return call
    graph = torch.cuda.CUDAGraph()
    # The watchdog threads of nccl and syncbn may call CUDA during the capture.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        kept = call()  # Keep all results until the end, so that no memory is reused.
    del kept
    return graph.replay


def layers(device: torch.device, dry_run: bool) -> None:
    """Show the microseconds of the host per layer. The GPU is idle before each forward, and the host never waits."""
    num_layers, rounds = (2, 2) if dry_run else (LAYERS, 100)
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
        with showing_errors("layers", norm):
            call = partial(step, norm, nn.Sequential(*(make(64) for _ in range(num_layers))).to(device))
            with CommDebugMode() as collectives:
                call()
            number = collectives.get_total_counts()
            show("collectives of all layers", norm, number=number, ok=number == 2 * num_layers * (norm in COMMUNICATE))
            calls[norm] = call
    for norm, samples in interleave(calls, rounds, warm_up=3, repeats=2).items():
        for name, values in zip(("forward", "backward"), zip(*samples, strict=True), strict=True):
            show("us a layer", norm, name, **spread(values))


def steps(device: torch.device, dry_run: bool) -> None:
    """Show the milliseconds of a step: bfloat16 under autocast, channels last, SGD."""
    batches, side, blocks, rounds = ((2, 3), 32, (1, 0, 0, 0), 2) if dry_run else ((8, 32), 224, (3, 4, 6, 3), 25)

    def step(norm: str, model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
        choose_group(norm)
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(images).float().square().mean()
        loss.backward()
        optimizer.step()

    def milliseconds(call: Call) -> float:
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
        with contextlib.nullcontext() if mode == "eager" else side_stream():
            for norm, arguments in trained.items():
                with showing_errors(mode, f"batch {batch}", norm):
                    call = partial(step, norm, *arguments, images)
                    call()
                    timers[norm] = partial(milliseconds, call if mode == "eager" else capture(call))
            for norm, values in interleave(timers, rounds, warm_up=2).items():
                show("ms a step", mode, f"batch {batch}", norm, **spread(values))


def layer_pass(norm: str, channels: int, device: torch.device) -> Pass:
    layer = syncbn.SyncBatchNorm2d(channels, device=device)

    def forward(x: Tensor) -> Tensor:
        choose_group(norm)
        return layer(x)

    def backward(y: Tensor, x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), dy, retain_graph=True)

    return forward, backward


def make_passes(channels: int, device: torch.device) -> dict[str, Pass]:
    """Return a copy, syncbn's layers, torch's batch norm, and the kernels of nn.SyncBatchNorm for whole tensors."""
    weight, bias, mean, var = (make(channels, device=device) for make in (torch.ones, torch.zeros) * 2)
    count = torch.ones(1, dtype=torch.int32, device=device)

    def native(x: Tensor) -> Any:
        return torch.native_batch_norm(x.detach(), weight, bias, mean, var, True, 0.1, EPS)

    def native_backward(saved: Any, x: Tensor, dy: Tensor) -> object:
        options = *saved[1:], True, EPS, [True, True, True]
        return torch.ops.aten.native_batch_norm_backward(dy, x.detach(), weight, mean, var, *options)

    def synchronised(x: Tensor) -> Any:
        statistics = torch.batch_norm_stats(x.detach(), EPS)
        return statistics, torch.batch_norm_elemt(x.detach(), weight, bias, *statistics, EPS)

    def synchronised_backward(saved: Any, x: Tensor, dy: Tensor) -> object:
        tensors = dy, x.detach(), *saved[0], weight
        sums = torch.batch_norm_backward_reduce(*tensors, True, True, True)
        return sums, torch.batch_norm_backward_elemt(*tensors, *sums[:2], count)

    return {
        "copy": (lambda x: x.detach().clone(), lambda _, x, dy: dy.clone()),
        "alone": layer_pass("alone", channels, device),
        "native_batch_norm": (native, native_backward),
        "nn.SyncBatchNorm": (synchronised, synchronised_backward),
        "group": layer_pass("group", channels, device),
    }


def passes(device: torch.device, dry_run: bool) -> None:
    """Show the microseconds of the GPU. The limit is the time of copying the bytes that a pass reads and writes."""

    def microseconds(calls: Sequence[Call]) -> float:
        """Return the mean time of the calls, as a median over replays; each call misses the cache."""
        replay = capture(lambda: [call() for call in calls])
        return 1e3 * statistics.median(time_stages(device, replay)[0] for _ in range(7)) / len(calls)

    for case in [Case((2, 8, 3, 3), "bfloat16", True)] if dry_run else CASES:
        with side_stream():
            inputs = [draw(case, device)[::2] for _ in range(CALLS)]  # x, dy
            for kind, (forward, backward) in make_passes(case.channels, device).items():
                with showing_errors(case.name, kind):
                    forwards = [partial(forward, x) for x, _ in inputs]
                    backwards = [partial(backward, call(), *pair) for call, pair in zip(forwards, inputs, strict=True)]
                    us = [microseconds(calls) for calls in (forwards, backwards)]
                    show("us a pass", case.name, kind, forward=us[0], backward=us[1])
                    if kind == "copy":
                        show("us a pass", case.name, "limit", forward=1.5 * us[0], backward=2.5 * us[1])


PARTS = {"layers": layers, "steps": steps, "passes": passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu" if arguments.dry_run else "cuda:0")
    if arguments.dry_run:
        del NORMS["nn.SyncBatchNorm"]  # nn.SyncBatchNorm refuses CPUs.
    group = {"backend": "gloo"} if arguments.dry_run else {"backend": "nccl", "device_id": device}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **group)
    PARTS[arguments.part](device, arguments.dry_run)
    os._exit(0)  # A CUDA graph refers to the group, so neither is destroyed.


if __name__ == "__main__":
    main()
