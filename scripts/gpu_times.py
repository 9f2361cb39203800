"""Times batch norm on one GPU. All kinds take turns in one process, as the host's speed differs from run to run.

    python scripts/gpu_times.py layers     the host's time for a layer, of 20 in a row
    python scripts/gpu_times.py steps      training steps of a ResNet-50: eager, and in CUDA graphs
    python scripts/gpu_times.py passes     the GPU's time for forward and backward, of tensors that no cache holds

"alone" is syncbn's layer without a group. "group" and nn.SyncBatchNorm communicate over a group of one rank, which both
would otherwise leave alone. Prints tables, and each figure as a line of "RESULT " and JSON, which gpu_run.py reads.
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
from benchmarks.measuring import Case, cases, draw, in_turn, time_stages
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction

import syncbn
from syncbn.ranks import calls

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from imagenet import ResNet

EPS = 1e-5
LAYERS = 20  # in a row
CALLS = 16  # of a pass in a CUDA graph, each of other tensors
CASES = cases(["32x64x112x112", "32x512x14x14", "32x2048x7x7", "8x256x14x14"], ["bfloat16"])
CASES += cases(["32x256x56x56"], ["float32"])
Call = Callable[[], object]


class OfOneRank(nn.SyncBatchNorm):
    """nn.SyncBatchNorm that synchronises over a group of one rank, too."""

    def forward(self, x: Tensor) -> Tensor:
        of_layer = self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum
        self.num_batches_tracked.add_(1)
        return TorchFunction.apply(x, *of_layer, dist.group.WORLD, 1)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "nn.BatchNorm2d": nn.BatchNorm2d,
    "alone": syncbn.SyncBatchNorm2d,
    "group": syncbn.SyncBatchNorm2d,
    "nn.SyncBatchNorm": OfOneRank,
}
COMMUNICATE = "group", "nn.SyncBatchNorm"


def choose_group(norm: str) -> None:
    """Let syncbn's layers synchronise over the group of one rank, or not, as this norm does."""
    group = dist.group.WORLD if norm == "group" else None
    calls.resolve = lambda spec: group


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def show(*labels: object, **results: Any) -> None:
    """A line to read, and one for gpu_run.py."""
    figures = (f"{name} {one:.1f}" if isinstance(one, float) else f"{name} {one}" for name, one in results.items())
    print(", ".join(map(str, labels)) + ":", *figures)
    print(f"RESULT {json.dumps({'of': labels, **results})}", flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    quartile = torch.tensor(values, dtype=torch.float64).quantile(0.25).item()
    return {"minimum": min(values), "quartile": quartile, "median": statistics.median(values)}


def show_error(*labels: object, error: Exception) -> None:
    """Of one figure, so that the others are measured. nn.SyncBatchNorm's kernels refuse the CPU of a dry run."""
    ok = isinstance(error, NotImplementedError) and not torch.cuda.is_available()
    show(*labels, ok=ok, error=f"{type(error).__name__}: {error}"[:300])


def on_side_stream() -> contextlib.AbstractContextManager[object]:
    """Captures, and what must run on the same stream before them."""
    wait_for_gpu()
    return torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else contextlib.nullcontext()


def captured(call: Call) -> Call:
    """The replay of a call on the current stream, with which the GPU alone sets the pace. On a CPU the call."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        return call
    graph = torch.cuda.CUDAGraph()
    # Other threads may call CUDA meanwhile: nccl's and syncbn's watchdogs.
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        kept = call()  # until the end, so that no memory is used twice
    del kept
    return graph.replay


def prepared(calls: dict[str, Call], in_graphs: bool, *labels: object) -> dict[str, Call]:
    """Those of the calls that can be made, as replays if so. The errors of the others are shown."""
    found = {}
    for norm, call in calls.items():
        try:
            call()
            found[norm] = captured(call) if in_graphs else call
        except Exception as error:
            show_error(*labels, norm, error=error)
    return found


def layers(device: torch.device, dry_run: bool) -> None:
    """Microseconds of the host; the GPU is idle at the start of each forward, and the host never waits for it."""
    num_layers, rounds = (2, 2) if dry_run else (LAYERS, 100)
    x, _, dy = draw(Case((4, 64, 8, 8), "bfloat16", True), device)

    def once(norm: str, model: nn.Module) -> list[float]:
        choose_group(norm)
        model.zero_grad()
        x.grad = None
        wait_for_gpu()
        start = time.perf_counter()
        y = model(x)
        middle = time.perf_counter()
        y.backward(dy)
        return [1e6 * seconds / num_layers for seconds in (middle - start, time.perf_counter() - middle)]

    models = {norm: nn.Sequential(*(make(64) for _ in range(num_layers))).to(device) for norm, make in NORMS.items()}
    calls = prepared({norm: partial(once, norm, model) for norm, model in models.items()}, False, "layers")
    for norm, samples in in_turn(calls, rounds, warm_up=3, repeats=2).items():
        for name, values in zip(("forward", "backward"), zip(*samples, strict=True), strict=True):
            show("us a layer", norm, name, **spread(values))
    for norm, call in calls.items():  # else something else was measured
        with CommDebugMode() as collectives:
            call()
        number = collectives.get_total_counts()
        show("collectives of all layers", norm, number=number, ok=number == 2 * num_layers * (norm in COMMUNICATE))


def step(norm: str, model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor) -> None:
    choose_group(norm)
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast(images.device.type, torch.bfloat16):
        loss = model(images).float().square().mean()
    loss.backward()
    optimizer.step()


def milliseconds(call: Call, steps: int) -> float:
    """The wall clock of a step, in a run at whose end the host waits for the GPU."""
    wait_for_gpu()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    wait_for_gpu()
    return (time.perf_counter() - start) / steps * 1e3


def steps(device: torch.device, dry_run: bool) -> None:
    """Milliseconds of steps of bfloat16 under autocast, in channels last, with SGD."""
    batches, side, blocks, rounds = ((2, 3), 32, (1, 0, 0, 0), 2) if dry_run else ((8, 32), 224, (3, 4, 6, 3), 25)
    trained = {}
    for norm, make in NORMS.items():
        torch.manual_seed(0)
        model = ResNet(blocks=blocks, norm_layer=make).to(device, memory_format=torch.channels_last)
        trained[norm] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch, mode in ((batches[0], "eager"), *((batch, "CUDA graph") for batch in batches)):
        images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
        with contextlib.nullcontext() if mode == "eager" else on_side_stream():
            calls = {norm: partial(step, norm, *of_norm, images) for norm, of_norm in trained.items()}
            calls = prepared(calls, mode != "eager", mode, f"batch {batch}")
            timers = {norm: partial(milliseconds, call, 3) for norm, call in calls.items()}
            for norm, values in in_turn(timers, rounds, warm_up=2).items():
                show("ms a step", mode, f"batch {batch}", norm, **spread(values))


# (x) -> what backward needs; (that, x, dy) -> gradients.
Passes = tuple[Callable[[Tensor], Any], Callable[[Any, Tensor, Tensor], object]]


def of_layer(norm: str, channels: int, device: torch.device) -> Passes:
    layer = syncbn.SyncBatchNorm2d(channels, device=device)

    def forward(x: Tensor) -> Tensor:
        choose_group(norm)
        return layer(x)

    def backward(y: Tensor, x: Tensor, dy: Tensor) -> object:
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), dy, retain_graph=True)

    return forward, backward


def kinds_of_passes(channels: int, device: torch.device) -> dict[str, Passes]:
    """A copy; syncbn's layers; torch's batch norm; and the kernels of nn.SyncBatchNorm for whole tensors."""
    weight, bias, mean, var = (make(channels, device=device) for make in (torch.ones, torch.zeros) * 2)
    num_values = torch.ones(1, dtype=torch.int32, device=device)

    def native(x: Tensor) -> Any:
        return torch.native_batch_norm(x.detach(), weight, bias, mean, var, True, 0.1, EPS)

    def native_backward(saved: Any, x: Tensor, dy: Tensor) -> object:
        of_call = *saved[1:], True, EPS, [True, True, True]
        return torch.ops.aten.native_batch_norm_backward(dy, x.detach(), weight, mean, var, *of_call)

    def synchronised(x: Tensor) -> Any:
        statistics = torch.batch_norm_stats(x.detach(), EPS)
        return statistics, torch.batch_norm_elemt(x.detach(), weight, bias, *statistics, EPS)

    def synchronised_backward(saved: Any, x: Tensor, dy: Tensor) -> object:
        of_call = dy, x.detach(), *saved[0], weight
        sums = torch.batch_norm_backward_reduce(*of_call, True, True, True)
        return sums, torch.batch_norm_backward_elemt(*of_call, *sums[:2], num_values)

    return {
        "copy": (lambda x: x.detach().clone(), lambda _, x, dy: dy.clone()),
        "alone": of_layer("alone", channels, device),
        "native_batch_norm": (native, native_backward),
        "nn.SyncBatchNorm": (synchronised, synchronised_backward),
        "group": of_layer("group", channels, device),
    }


def microseconds(calls: Sequence[Call], device: torch.device) -> float:
    """Of one of these calls: the median of replays of all, each of which finds the cache empty."""
    replay = captured(lambda: [call() for call in calls])
    return 1e3 * statistics.median(time_stages(device, replay)[0] for _ in range(7)) / len(calls)


def passes(device: torch.device, dry_run: bool) -> None:
    """Microseconds of the GPU. The limit is the time of a copy of as many bytes as a pass must read and write."""
    for case in [Case((2, 8, 3, 3), "bfloat16", True)] if dry_run else CASES:
        with on_side_stream():
            inputs = [draw(case, device)[::2] for _ in range(CALLS)]  # x, dy
            for kind, (forward, backward) in kinds_of_passes(case.channels, device).items():
                try:
                    forwards = [partial(forward, x) for x, _ in inputs]
                    backwards = [partial(backward, call(), *of) for call, of in zip(forwards, inputs, strict=True)]
                    us = [microseconds(calls, device) for calls in (forwards, backwards)]
                    show("us a pass", case.name, kind, forward=us[0], backward=us[1])
                    if kind == "copy":
                        show("us a pass", case.name, "limit", forward=1.5 * us[0], backward=2.5 * us[1])
                except Exception as error:
                    show_error(case.name, kind, error=error)


PARTS = {"layers": layers, "steps": steps, "passes": passes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device, on_gpu = torch.device("cpu"), {}
    if arguments.dry_run:
        del NORMS["nn.SyncBatchNorm"]  # which refuses CPUs
    else:
        device = on_gpu["device_id"] = torch.device("cuda:0")
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1, **on_gpu)
    PARTS[arguments.part](device, arguments.dry_run)
    os._exit(0)  # a graph holds the group, which is not destroyed beneath it


if __name__ == "__main__":
    main()
