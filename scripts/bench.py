"""Time batch norm beside its peers and beside the limit that memory sets, in one run.

    python scripts/bench.py                                                one process: nothing is synchronised
    torchrun --standalone --nproc-per-node 2 scripts/bench.py              two ranks, a process group between them
    torchrun --standalone --nproc-per-node 2 scripts/bench.py --shapes 32x64x56x56 --dtypes float32 --rounds 50
    python scripts/bench.py --guard [REF]                                  this tree beside another commit

Each round runs every peer twice, in turn, and times the second; a time is the median over the rounds of the slowest
rank's, its spread half the distance between the quartiles; the first call is timed apart. Only ratios within one run
mean anything. Prints a table a case, and writes bench.json, bench.csv and bench.png to --output.

Memory is per byte of the input: what is saved for backward, and the most that a step has allocated at once. Collectives
are those of a step, with the bytes that a rank gives to them; waits are the host's for a GPU.

    syncbn               the layer; over all ranks, or over this one when there is one
    nn.BatchNorm         not synchronised: what a rank does without any of this
    hand-written         torch operations and a differentiable all_reduce, as people write it
    nn.SyncBatchNorm     on GPUs, under torchrun; there it and syncbn issue their collectives with one rank too
    limit                what moves the same bytes with the same allocations: x.sum(), x.clone(), a dot product, an add
    two all_reduces      of the same payloads, and nothing else

"fused" adds a residual and a relu to each, "compiled" is torch.compile of the same (without memory and collectives).
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_guard import DTYPES as GUARDED_DTYPES
from bench_guard import SHAPES as GUARDED_SHAPES
from bench_guard import guard
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import syncbn
from syncbn.distributed import reduction
from syncbn.distributed.side_reductions import GraphReduction
from syncbn.roads import choice

SHAPES = "32x64x56x56 32x256x28x28 64x256x56x56 8x64x32x32 8x512x7x7 256x1024 4x32x16x32x32 16x197x384"
DTYPES = "float32 bfloat16 float16 float64"
WARM_UP = 3  # rounds
L2_BYTES = 2**28  # more than any GPU's cache holds
AHEAD_CYCLES = 2_000_000  # about a millisecond, in which Python gets ahead of the GPU: its own time is not measured
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd", "barrier")  # among the operators of torch.distributed


class Case(NamedTuple):
    """One input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool  # in memory, or, with three dims, in the shape

    @property
    def channel_dim(self) -> int:
        return 2 if self.channels_last and len(self.shape) == 3 else 1

    @property
    def name(self) -> str:
        layout = "channels last" if self.channels_last else "contiguous"
        return f"{'x'.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')} {layout}"


class Times(NamedTuple):
    """Milliseconds."""

    forward: float
    backward: float
    both: float
    spread: float  # of both
    first_call: float | None = None


class Needs(NamedTuple):
    """What a step needs beside time."""

    saved: float  # bytes for backward, per byte of the input
    peak: float  # bytes at once, per byte of the input
    collectives: int
    sent: int  # bytes that a rank gives to the collectives
    waits: int  # of the host for a GPU


Peer = Callable[[Tensor, Tensor], Tensor]
Result = tuple[dict[str, Times], dict[str, Needs]]  # of a case, by peer


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", help="NxCx...; NxLxC with three sizes")
    parser.add_argument("--dtypes", nargs="+", help=f"(default {DTYPES}; of --guard fewer)")
    parser.add_argument("--rounds", type=int, default=30, help="of each case (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="per rank (default %(default)s)")
    parser.add_argument("--compiled", action="store_true", help="also under torch.compile")
    parser.add_argument("--guard", nargs="?", const="", metavar="REF", help="only the comparison of bench_guard.py")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder (default %(default)s)")
    return parser.parse_args()


def cases(shapes: list[str], dtypes: list[str]) -> list[Case]:
    """Each shape in each dtype; those of images in both memory formats, (N, L, C) with the channels at the end."""
    found = []
    for shape in (tuple(map(int, text.split("x"))) for text in shapes):
        layouts = {2: [False], 3: [True]}.get(len(shape), [False, True])
        found += [Case(shape, getattr(torch, dtype), layout) for layout in layouts for dtype in dtypes]
    return found


class HandWritten(nn.Module):
    """What one writes without a library: sums, a differentiable all_reduce, and autograd does the rest."""

    def __init__(self, channels: int, channel_dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.channel_dim = channel_dim

    def forward(self, x: Tensor) -> Tensor:
        dims = [dim for dim in range(x.ndim) if dim != self.channel_dim]
        wide = x.float() if x.dtype.itemsize < 4 else x
        count = wide.new_full((1,), x.numel() / len(self.weight))
        sums = torch.cat((wide.sum(dims), wide.square().sum(dims), count))
        if dist.is_initialized():
            sums = all_reduce(sums, "sum", dist.group.WORLD)
        mean, mean_square = (sums[:-1] / sums[-1]).chunk(2)
        var = mean_square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), 0.1)
            self.running_var.lerp_((var * sums[-1] / (sums[-1] - 1)).to(self.running_var.dtype), 0.1)
        shape = [-1 if dim == self.channel_dim else 1 for dim in range(x.ndim)]
        scale = self.weight * (var + 1e-5).rsqrt()
        return ((wide - mean.view(shape)) * scale.view(shape) + self.bias.view(shape)).to(x.dtype)


class TorchSyncBatchNorm(nn.SyncBatchNorm):
    """nn.SyncBatchNorm that synchronises with one rank too."""

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        of_layer = (self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum)
        self.num_batches_tracked.add_(1)
        return TorchFunction.apply(x, *of_layer, group, dist.get_world_size(group))


def synchronise_one_rank() -> None:
    """Ours does from now on, too, for comparison with the former; else it would leave a group of one rank alone."""
    reduction.resolve = lambda spec: dist.group.WORLD
    choice.reduction_in_graph = lambda *of_call: GraphReduction(dist.group.WORLD)


class ChannelsAtEnd(nn.Module):
    """Batch norm of (N, L, C) by one that wants (N, C, L)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


def make_peers(case: Case, device: torch.device, compiled: bool) -> dict[str, Peer]:
    """Name -> (x, z) -> y, with parameters of its own."""
    channels = case.shape[case.channel_dim]
    at_end = case.channel_dim != 1

    def plain(norm: nn.Module) -> nn.Module:
        return ChannelsAtEnd(norm) if at_end else norm

    torch_class = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(case.shape)]
    peers: dict[str, Peer] = {}
    of_parameters = {"device": device, "dtype": torch.promote_types(case.dtype, torch.float32)}
    of_ours = {"channel_last": at_end, **of_parameters}
    ours = [syncbn.SyncBatchNorm(channels, fuse_relu=fused, **of_ours) for fused in (False, True)]
    peers["syncbn"] = lambda x, z: ours[0](x)
    peers["syncbn fused"] = lambda x, z: ours[1](x, z)
    norms = {"nn.BatchNorm": plain(torch_class(channels)), "hand-written": HandWritten(channels, case.channel_dim)}
    if device.type == "cuda" and dist.is_initialized():
        norms["nn.SyncBatchNorm"] = plain(TorchSyncBatchNorm(channels))
    for name, norm in norms.items():
        norm.to(**of_parameters)
        peers[name] = lambda x, z, norm=norm: norm(x)
        peers[f"{name} fused"] = lambda x, z, norm=norm: F.relu(norm(x) + z)
    if compiled:
        torch._dynamo.reset()  # of other cases; else Dynamo soon gives up what it has compiled too often, in silence
        peers |= {f"{name} compiled": torch.compile(peer, dynamic=False) for name, peer in peers.items()}
    return peers


def draw(case: Case, device: torch.device) -> list[Tensor]:
    """x, z and dy."""
    values = [torch.randn(case.shape, device=device).to(case.dtype) for _ in range(3)]
    if case.channels_last and len(case.shape) > 3:
        memory_format = torch.channels_last if len(case.shape) == 4 else torch.channels_last_3d
        values = [value.contiguous(memory_format=memory_format) for value in values]
    return [values[0].requires_grad_(), values[1].requires_grad_(), values[2]]


class Stopwatch:
    """Laps in milliseconds, from when it is made: of this thread on a CPU, of the current stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.synchronize(device)
        if dist.is_initialized():
            dist.barrier()
        if self.on_gpu:
            torch.empty(L2_BYTES, dtype=torch.uint8, device=device).zero_()  # leaves nothing of use in the cache
            torch.cuda._sleep(AHEAD_CYCLES)
        self.times: list[Any] = []
        self.lap()

    def lap(self) -> None:
        if self.on_gpu:
            self.times.append(torch.cuda.Event(enable_timing=True))
            self.times[-1].record()
        else:
            self.times.append(time.perf_counter())

    def laps(self) -> list[float]:
        pairs = itertools.pairwise(self.times)
        if not self.on_gpu:
            return [1e3 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def time_step(peer: Peer, x: Tensor, z: Tensor, dy: Tensor) -> tuple[float, float]:
    """Milliseconds of forward and backward, all gradients included."""
    watch = Stopwatch(x.device)
    y = peer(x, z)
    watch.lap()
    y.backward(dy)
    watch.lap()
    x.grad = z.grad = None
    forward, backward = watch.laps()
    return forward, backward


def time_limit(x: Tensor, dy: Tensor) -> tuple[float, float]:
    """Milliseconds of what moves the bytes of a forward, and those of a backward."""
    flat, flat_dy = ((one.movedim(1, -1) if not one.is_contiguous() else one).detach().reshape(-1) for one in (x, dy))
    watch = Stopwatch(x.device)
    flat.sum()
    output = flat.clone()
    watch.lap()
    torch.dot(flat_dy, flat)
    torch.add(flat_dy, flat)
    watch.lap()
    del output  # not earlier: an output lives until the backward
    forward, backward = watch.laps()
    return forward, backward


def time_all_reduces(channels: int, device: torch.device) -> tuple[float, float]:
    """Milliseconds of the two bare all_reduces."""
    times = []
    lengths = (2 * channels + 4,) * 2 if device.type == "cpu" else (2 * channels + 1, 2 * channels)
    for length in lengths:
        payload = torch.zeros(length, dtype=torch.float64, device=device)
        watch = Stopwatch(device)
        dist.all_reduce(payload)
        watch.lap()
        times += watch.laps()
    return times[0], times[1]


def run_case(case: Case, device: torch.device, rounds: int, compiled: bool) -> Result:
    """The times of each peer, of the limit and of the collectives; and what each peer needs."""
    x, z, dy = draw(case, device)
    peers = make_peers(case, device, compiled)
    torch.ones(1, requires_grad=True).clone().backward(torch.ones(1))  # imports sympy, the first time
    first_calls = {name: sum(time_step(peer, x, z, dy)) for name, peer in peers.items()}
    needs = {
        name: Needs(saved_bytes(peer, x, z) / x.nbytes, peak_bytes(peer, x, z, dy) / x.nbytes,
                    *count_collectives(peer, x, z, dy), count_waits(peer, x, z, dy))
        for name, peer in peers.items()
        if "compiled" not in name
    }  # fmt: skip
    samples: dict[str, list[tuple[float, float]]] = {}
    for index in range(WARM_UP + rounds):
        for name, peer in peers.items():
            time_step(peer, x, z, dy)  # the first after another peer finds nothing of its own in the caches
            sample = time_step(peer, x, z, dy)
            if index >= WARM_UP:
                samples.setdefault(name, []).append(sample)
        if index >= WARM_UP:
            time_limit(x, dy)
            samples.setdefault("limit", []).append(time_limit(x, dy))
            if dist.is_initialized():
                sample = time_all_reduces(case.shape[case.channel_dim], device)
                samples.setdefault("two all_reduces", []).append(sample)
    times = {name: summarize(slowest_rank(own)) for name, own in samples.items()}
    return {name: one._replace(first_call=first_calls.get(name)) for name, one in times.items()}, needs


def slowest_rank(samples: list[tuple[float, float]]) -> Tensor:
    """(rounds, 2), the maximum over the ranks."""
    times = torch.tensor(samples, dtype=torch.float64)
    if dist.is_initialized():
        times = times.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.cpu()


def summarize(times: Tensor) -> Times:
    forward, backward = times.median(0).values.tolist()
    both = times.sum(1)
    low, middle, high = both.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=both.dtype)).tolist()
    return Times(forward, backward, middle, (high - low) / 2)


def saved_bytes(peer: Peer, x: Tensor, z: Tensor) -> int:
    """Of all memory that backward holds on to."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # of a tensor subclass it has no data_ptr
        storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        peer(x, z)
    return sum(storages.values())


def peak_bytes(peer: Peer, x: Tensor, z: Tensor, dy: Tensor) -> int:
    """The most that a step has allocated at once."""
    if x.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        peer(x, z).backward(dy)
        x.grad = z.grad = None
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        peer(x, z).backward(dy)
        x.grad = z.grad = None
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


class _Collectives(TorchDispatchMode):
    """Counts them, and the bytes of their tensors, on every thread of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in NO_COLLECTIVES:
            self.calls += 1
            given = args[1] if "allgather" in func._opname else args[0]  # which has its outputs first
            self.sent += sum(tensor.nbytes for tensor in tree_leaves(given))
        return func(*args, **(kwargs or {}))


def count_collectives(peer: Peer, x: Tensor, z: Tensor, dy: Tensor) -> tuple[int, int]:
    """Of a step: how many, and the bytes that this rank gives to them."""
    with _Collectives() as collectives:
        peer(x, z).backward(dy)
    x.grad = z.grad = None
    return collectives.calls, collectives.sent


def count_waits(peer: Peer, x: Tensor, z: Tensor, dy: Tensor) -> int:
    """How often a step makes the host wait for the GPU."""
    if x.is_cpu:
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        peer(x, z).backward(dy)
        torch.cuda.set_sync_debug_mode("default")
    x.grad = z.grad = None
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def import_seconds() -> dict[str, float]:
    """Medians over fresh processes; of syncbn, after torch."""
    seconds: dict[str, list[float]] = {"import torch": [], "import syncbn": []}
    timed = [f"start = time.perf_counter(); {name}; print(time.perf_counter() - start)" for name in seconds]
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, "-c", "; ".join(["import time", *timed])], capture_output=True, check=True
        )
        for of_name, text in zip(seconds.values(), run.stdout.split(), strict=True):
            of_name.append(float(text))
    return {name: statistics.median(of_name) for name, of_name in seconds.items()}


def describe(threads: int) -> dict[str, object]:
    """Where and how this was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": " ".join(sys.argv),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "threads": threads,
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "syncbn": syncbn.kernels.available(),
    }


def processor_name() -> str:
    """As Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def show(console: Console, case: Case, times: dict[str, Times], needs: dict[str, Needs]) -> None:
    """A table."""
    console.print(f"\n{case.name}")
    table = Table("peer")
    titles = ("forward ms", "backward ms", "both ms", "+-", "both / syncbn")
    for column in (*titles, "first call", "saved", "peak", "collectives", "bytes", "waits"):
        table.add_column(column, justify="right")
    for name, one in times.items():
        ours = times["syncbn fused" if "fused" in name else "syncbn"].both
        numbers = [f"{number:.3f}" for number in one[:4]]
        further = ["" if one.first_call is None else f"{one.first_call:.1f}"]
        if name in needs:
            saved, peak, collectives, sent, waits = needs[name]
            further += [f"{saved:.2f}", f"{peak:.2f}", f"{collectives}", f"{sent:,}", f"{waits}"]
        table.add_row(name, *numbers, f"{one.both / ours:.2f}", *further)
    console.print(table)


def write(output: Path, about: dict[str, object], results: dict[str, Result]) -> None:
    """bench.json and bench.csv."""
    output.mkdir(parents=True, exist_ok=True)
    nothing = dict.fromkeys(Needs._fields)
    rows = [
        {"case": case, "peer": peer} | one._asdict() | (needs[peer]._asdict() if peer in needs else nothing)
        for case, (times, needs) in results.items()
        for peer, one in times.items()
    ]
    (output / "bench.json").write_text(json.dumps({"about": about, "times": rows}, indent=1))
    with (output / "bench.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def plot(output: Path, about: dict[str, object], results: dict[str, Result]) -> None:
    """bench.png."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.3 * len(results)), layout="constrained")
    names = list(results)
    for offset, kind in ((-0.2, ""), (0.2, " fused")):
        ratios = [times[f"nn.BatchNorm{kind}"].both / times[f"syncbn{kind}"].both for times, _ in results.values()]
        places = [index + offset for index in range(len(names))]
        axes.barh(places, ratios, height=0.38, label=f"nn.BatchNorm{kind} / syncbn{kind}")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"ratio of times, forward + backward, {about['ranks']} ranks x {about['threads']} threads")
    axes.legend()
    figure.savefig(output / "bench.png", dpi=120)


def choose_device(threads: int) -> torch.device:
    """A GPU if there is one, else `threads` of the CPU; join the process group that torchrun describes, if it does."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main() -> None:
    """All cases; rank 0 prints and writes."""
    arguments = parse_arguments()
    device = choose_device(arguments.threads)
    first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(quiet=not first, width=150)
    about = describe(arguments.threads)
    if first and arguments.guard is None:
        about |= import_seconds()
    for key, value in about.items():
        console.print(f"{key}: {value}", highlight=False)
    if arguments.guard is not None:
        shapes, dtypes = arguments.shapes or GUARDED_SHAPES, arguments.dtypes or GUARDED_DTYPES
        sys.exit(guard(arguments.guard, arguments.rounds, shapes, dtypes, arguments.threads))
    if device.type == "cuda" and dist.is_initialized() and dist.get_world_size() == 1:
        synchronise_one_rank()
    results = {}
    for case in cases(arguments.shapes or SHAPES.split(), arguments.dtypes or DTYPES.split()):
        results[case.name] = run_case(case, device, arguments.rounds, arguments.compiled)
        show(console, case, *results[case.name])
        if first:  # also what there is when the time is over
            write(arguments.output, about, results)
    if first:
        plot(arguments.output, about, results)
        console.print(f"wrote {arguments.output}/bench.json, bench.csv and bench.png")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
