"""Time batch norm beside its peers and beside the limit that memory sets.

    python scripts/bench.py                                                one process: nothing is synchronised
    torchrun --standalone --nproc-per-node 2 scripts/bench.py              two ranks, a process group between them
    torchrun --standalone --nproc-per-node 2 scripts/bench.py --shapes 32x64x56x56 --dtypes float32 --rounds 50

In each round every peer takes its turn: two steps, of which the second is timed. A time is the median over the rounds
of the slowest rank's, its spread half the distance between the quartiles; the first call is timed apart. Prints a table
for each case, and writes bench.json, bench.csv and bench.png to --output.

Memory is per byte of the input: what is saved for backward, and the most that a step has allocated at once. Collectives
are those of a step, with the bytes that a rank gives to them.

    syncbn               the layer, over all ranks
    nn.BatchNorm         not synchronised: what a rank does without any of this
    hand-written         torch operations and a differentiable all_reduce, as people write it
    nn.SyncBatchNorm     on several GPUs
    limit                what moves the same bytes with the same allocations: x.sum(), x.clone(), a dot product, an add
    two all_reduces      of the same payloads, and nothing else

"fused" adds a residual and a relu to each, "compiled" is torch.compile of the same (without memory and collectives).
"""

from __future__ import annotations

import argparse
import csv
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.measuring import Case, Peer, Session, Stopwatch, cases, draw, in_turn, session, summarize, time_step
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import syncbn

SHAPES = "32x64x56x56 32x256x28x28 64x256x56x56 8x64x32x32 8x512x7x7 256x1024 4x32x16x32x32 16x197x384"
DTYPES = "float32 bfloat16 float16 float64"
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd", "barrier")  # among the operators of torch.distributed
NEEDS = {  # of a step, beside time -> heading, format
    "first_call": ("first call", ".1f"),
    "saved": ("saved", ".2f"),
    "peak": ("peak", ".2f"),
    "collectives": ("collectives", ""),
    "sent": ("bytes", ","),
}
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", default=SHAPES.split(), help="NxCx...; NxLxC with three sizes (default %(default)s)")
    add("--dtypes", nargs="+", default=DTYPES.split(), help="(default %(default)s)")
    add("--rounds", type=int, default=30, help="of each case (default %(default)s)")
    add("--threads", type=int, default=1, help="per rank (default %(default)s)")
    add("--compiled", action="store_true", help="also under torch.compile")
    add("--output", type=Path, default=Path("runs/bench"), help="folder (default %(default)s)")


class HandWritten(nn.Module):
    """What one writes without a library: sums, a differentiable all_reduce, and autograd does the rest."""

    def __init__(self, channels: int, channel_dim: int = 1) -> None:
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


class ChannelsAtEnd(nn.Module):
    """Batch norm of (N, L, C) by one that wants (N, C, L)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


def make_peers(case: Case, device: torch.device, compiled: bool) -> dict[str, Peer]:
    """Each with parameters of its own."""
    at_end = case.channel_dim != 1
    of_parameters = {"device": device, "dtype": case.dtype_of_parameters}
    ours = [
        syncbn.SyncBatchNorm(case.channels, channel_last=at_end, fuse_relu=fused, **of_parameters)
        for fused in (False, True)
    ]
    peers: dict[str, Peer] = {"syncbn": lambda x, z: ours[0](x), "syncbn fused": lambda x, z: ours[1](x, z)}
    torch_class = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(len(case.shape), nn.BatchNorm1d)
    norms = {"nn.BatchNorm": torch_class(case.channels), "nn.SyncBatchNorm": nn.SyncBatchNorm(case.channels)}
    if device.type != "cuda" or not dist.is_initialized():
        del norms["nn.SyncBatchNorm"]
    norms = {name: ChannelsAtEnd(norm) if at_end else norm for name, norm in norms.items()}
    for name, norm in {**norms, "hand-written": HandWritten(case.channels, case.channel_dim)}.items():
        norm.to(**of_parameters)
        peers[name] = lambda x, z, norm=norm: norm(x)
        peers[f"{name} fused"] = lambda x, z, norm=norm: F.relu(norm(x) + z)
    if compiled:
        torch._dynamo.reset()  # of other cases; else Dynamo soon gives up what it has compiled too often, in silence
        peers |= {f"{name} compiled": torch.compile(peer, dynamic=False) for name, peer in peers.items()}
    return peers


def time_limit(x: Tensor, dy: Tensor) -> list[float]:
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
    return watch.laps()


def time_all_reduces(channels: int, device: torch.device) -> list[float]:
    """Milliseconds of the two bare all_reduces."""
    times = []
    lengths = (2 * channels + 4,) * 2 if device.type == "cpu" else (2 * channels + 1, 2 * channels)
    for length in lengths:
        payload = torch.zeros(length, dtype=torch.float64, device=device)
        watch = Stopwatch(device)
        dist.all_reduce(payload)
        watch.lap()
        times += watch.laps()
    return times


def run_case(case: Case, here: Session, rounds: int, compiled: bool) -> list[Row]:
    """Times and needs of each peer, and times of the limit and of the collectives."""
    x, z, dy = draw(case, here.device)
    peers = make_peers(case, here.device, compiled)
    torch.ones(1, requires_grad=True).clone().backward(torch.ones(1))  # imports sympy, the first time
    needs: dict[str, Row] = {name: {"first_call": sum(time_step(peer, x, z, dy))} for name, peer in peers.items()}
    for name, peer in peers.items():
        if "compiled" not in name:
            needs[name] |= {
                "saved": saved_bytes(peer, x, z) / x.nbytes,
                "peak": peak_bytes(partial(step, peer, x, z, dy), x.device) / x.nbytes,
            } | count_collectives(partial(step, peer, x, z, dy))
    calls = {name: partial(time_step, peer, x, z, dy) for name, peer in peers.items()}
    calls["limit"] = partial(time_limit, x, dy)
    if dist.is_initialized():
        calls["two all_reduces"] = partial(time_all_reduces, case.channels, here.device)
    return [
        {"case": case.name, "peer": name} | summarize(samples)._asdict() | dict.fromkeys(NEEDS) | needs.get(name, {})
        for name, samples in in_turn(calls, rounds, warm_up=3, repeats=2).items()
    ]


def step(peer: Peer, x: Tensor, z: Tensor, dy: Tensor) -> None:
    peer(x, z).backward(dy)
    x.grad = z.grad = None


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


def peak_bytes(step: partial[None], device: torch.device) -> int:
    """The most that a step has allocated at once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        step()
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


class Collectives(TorchDispatchMode):
    """Counts them, and the bytes of their tensors, on every thread of autograd."""

    calls = sent = 0

    def __torch_dispatch__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in NO_COLLECTIVES:
            self.calls += 1
            given = args[1] if "allgather" in func._opname else args[0]  # which has its outputs first
            self.sent += sum(tensor.nbytes for tensor in tree_leaves(given))
        return func(*args, **(kwargs or {}))


def count_collectives(step: partial[None]) -> dict[str, int]:
    """Of a step, with the bytes that this rank gives to them."""
    with Collectives() as collectives:
        step()
    return {"collectives": collectives.calls, "sent": collectives.sent}


def show(here: Session, case: Case, rows: list[Row]) -> None:
    """A table."""
    both = {row["peer"]: row["both"] for row in rows}
    shown = []
    for row in rows:
        ratio = row["both"] / both["syncbn fused" if "fused" in row["peer"] else "syncbn"]
        times = [f"{row[name]:.3f}" for name in ("forward", "backward", "both", "spread")]
        needs = ["" if row[name] is None else format(row[name], spec) for name, (_, spec) in NEEDS.items()]
        shown.append([row["peer"], *times, f"{ratio:.2f}", *needs])
    columns = ("peer", "forward ms", "backward ms", "both ms", "+-", "both / syncbn")
    here.show(f"\n{case.name}", (*columns, *(heading for heading, _ in NEEDS.values())), shown)


def plot(file: Path, about: dict[str, object], rows: list[Row]) -> None:
    """The ratio of nn.BatchNorm's time to syncbn's in each case."""
    import matplotlib.pyplot as plt

    both = {(row["case"], row["peer"]): row["both"] for row in rows}
    names = list(dict.fromkeys(row["case"] for row in rows))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.3 * len(names)), layout="constrained")
    for offset, kind in ((-0.2, ""), (0.2, " fused")):
        ratios = [both[name, f"nn.BatchNorm{kind}"] / both[name, f"syncbn{kind}"] for name in names]
        places = [index + offset for index in range(len(names))]
        axes.barh(places, ratios, height=0.38, label=f"nn.BatchNorm{kind} / syncbn{kind}")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"ratio of times, forward + backward, {about['ranks']} ranks x {about['threads']} threads")
    axes.legend()
    figure.savefig(file, dpi=120)


def run(arguments: argparse.Namespace) -> None:
    with session(arguments.threads) as here:
        rows: list[Row] = []
        for case in cases(arguments.shapes, arguments.dtypes):
            of_case = run_case(case, here, arguments.rounds, arguments.compiled)
            rows += of_case
            show(here, case, of_case)
            here.write(arguments.output / "bench.json", times=rows)  # also what there is when the time is over
        if here.is_first:
            with (arguments.output / "bench.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
            plot(arguments.output / "bench.png", here.about, rows)
            here.console.print(f"wrote {arguments.output}/bench.json, bench.csv and bench.png")
