"""Time batch norm, compared with its peers.

    python scripts/bench.py --shapes 32x64x56x56 --dtypes float32       one process: nothing is synchronised
    torchrun --standalone --nproc-per-node 2 scripts/bench.py           two ranks, a process group between them

The peers take turns. In each round each peer makes two steps, and the second is timed. A time in milliseconds is the
median over the rounds of the slowest rank; "+-" is half the distance between the quartiles. Memory is relative to the
input: "saved" for backward, and "peak", the maximum that a step has allocated at once. Prints a table for each case,
and writes bench.json to --output.

    syncbn               the layer, over all ranks
    nn.BatchNorm         not synchronised
    hand-written         torch operations and a differentiable all_reduce
    nn.SyncBatchNorm     on several GPUs
    two all_reduces      the payloads of a step, and no other work

"fused" adds a residual and a relu to each peer.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.measuring import Case, cases, draw, interleave, session, show, summarize, time_stages, time_step, write
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.profiler import profile

import syncbn
from syncbn.payload import num_elements

SHAPES = "32x64x56x56 32x256x28x28 64x256x56x56 8x64x32x32 8x512x7x7 256x1024 4x32x16x32x32 16x197x384"
DTYPES = "float32 bfloat16 float16 float64"
Peer = Callable[[Tensor, Tensor], Tensor]  # (x, residual) -> y


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", default=SHAPES.split(), help="NxCx...; NxLxC with three sizes (default %(default)s)")
    add("--dtypes", nargs="+", default=DTYPES.split(), help="(default %(default)s)")
    add("--rounds", type=int, default=30, help="rounds of each case (default %(default)s)")
    add("--output", type=Path, default=Path("runs/bench"), help="folder (default %(default)s)")


def hand_written(
    x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor, bias: Tensor, training: bool = True
) -> Tensor:
    """Normalise by sums and a differentiable all_reduce, in training only. autograd computes the backward."""
    dims, shape = [0, *range(2, x.ndim)], [-1] + [1] * (x.ndim - 2)
    wide = x.float() if x.dtype.itemsize < 4 else x
    count = wide.new_full((1,), x.numel() / len(weight))
    sums = torch.cat((wide.sum(dims), wide.square().sum(dims), count))
    if dist.is_initialized():
        sums = all_reduce(sums, "sum", dist.group.WORLD)
    mean, mean_square = (sums[:-1] / sums[-1]).chunk(2)
    var = (mean_square - mean.square()).clamp(min=0)
    with torch.no_grad():
        running_mean.lerp_(mean.to(running_mean.dtype), 0.1)
        running_var.lerp_((var * sums[-1] / (sums[-1] - 1)).to(running_var.dtype), 0.1)
    scale = weight * (var + 1e-5).rsqrt()
    return ((wide - mean.view(shape)) * scale.view(shape) + bias.view(shape)).to(x.dtype)


class HandWritten(nn.modules.batchnorm._BatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        return hand_written(x, self.running_mean, self.running_var, self.weight, self.bias)


def convert(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return the model with layers of the class `kind` in place of nn.BatchNorm2d."""
    if kind is syncbn.SyncBatchNorm2d:
        return syncbn.convert_syncbn_model(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = kind
    return model


def make_peers(case: Case, device: torch.device) -> dict[str, Peer]:
    transposed = case.channel_dim != 1
    options = {"device": device, "dtype": torch.promote_types(getattr(torch, case.dtype), torch.float32)}
    make = partial(syncbn.SyncBatchNorm, case.channels, channel_last=transposed, **options)
    layer, fused = make(), make(fuse_relu=True)
    peers: dict[str, Peer] = {"syncbn": lambda x, z: layer(x), "syncbn fused": fused}

    def add(name: str, norm: nn.Module) -> None:
        norm.to(**options)

        def peer(x: Tensor, z: Tensor) -> Tensor:
            return norm(x.mT).mT if transposed else norm(x)

        peers[name] = peer
        peers[f"{name} fused"] = lambda x, z: F.relu(peer(x, z) + z)

    torch_class = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(len(case.shape), nn.BatchNorm1d)
    add("nn.BatchNorm", torch_class(case.channels))
    add("hand-written", HandWritten(case.channels))
    if device.type == "cuda" and dist.is_initialized():
        add("nn.SyncBatchNorm", nn.SyncBatchNorm(case.channels))
    return peers


def time_all_reduces(channels: int, device: torch.device) -> list[float]:
    payload = torch.zeros(num_elements(channels), dtype=torch.float64, device=device)
    return time_stages(device, lambda: dist.all_reduce(payload), lambda _: dist.all_reduce(payload))


def measure_memory(peer: Peer, case: Case, device: torch.device) -> dict[str, float]:
    """Return the memory that a step saves and allocates, relative to the input."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()  # The storage of a tensor subclass has no data_ptr.
        return tensor

    x, z, dy = draw(case, device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        peer(x, z).backward(dy)
    x, z, dy = draw(case, device)  # A second step on the same tensors would add to their gradients.
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        peer(x, z).backward(dy)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with profile(profile_memory=True) as profiler:
            peer(x, z).backward(dy)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        peak = max(itertools.accumulate(event.nbytes() for event in events))
    return {"saved": sum(storages.values()) / x.nbytes, "peak": peak / x.nbytes}


def run_case(case: Case, device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    x, z, dy = draw(case, device)
    peers = make_peers(case, device)
    # In the first step of a process torch imports sympy, so memory is measured before times.
    memory = {name: measure_memory(peer, case, device) for name, peer in peers.items()}
    calls = {name: partial(time_step, peer, x, z, dy) for name, peer in peers.items()}
    if dist.is_initialized():
        calls["two all_reduces"] = partial(time_all_reduces, case.channels, device)
    times = {name: summarize(samples) for name, samples in interleave(calls, rounds, warm_up=3, repeats=2).items()}
    for name, row in times.items():
        row["both / syncbn"] = row["both"] / times["syncbn fused" if "fused" in name else "syncbn"]["both"]
        row.update(memory.get(name, {}))
    return times


def run(arguments: argparse.Namespace) -> None:
    results: dict[str, dict[str, dict[str, float]]] = {}
    with session() as device:
        for case in cases(arguments.shapes, arguments.dtypes):
            results[case.name] = run_case(case, device, arguments.rounds)
            show(f"{case.name}, ms", results[case.name])
            write(arguments.output / "bench.json", times=results)
