"""Time batch norm beside its peers and beside the limit that memory sets.

    python scripts/bench.py --shapes 32x64x56x56 --dtypes float32       one process: nothing is synchronised
    torchrun --standalone --nproc-per-node 2 scripts/bench.py           two ranks, a process group between them

In each round every peer takes its turn: two steps, of which the second is timed. A time is the median over the rounds
of the slowest rank's, its spread half the distance between the quartiles; the first call is timed apart. Memory is per
byte of the input: what is saved for backward, and the most that a step has allocated at once. Prints a table for each
case, and writes bench.json to --output.

    syncbn               the layer, over all ranks
    nn.BatchNorm         not synchronised: what a rank does without any of this
    hand-written         torch operations and a differentiable all_reduce, as people write it
    nn.SyncBatchNorm     on several GPUs
    limit                what moves the same bytes with the same allocations: x.sum(), x.clone(), a dot product, an add
    two all_reduces      of the same payloads, and nothing else

"fused" adds a residual and a relu to each.
"""

import argparse
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.measuring import Case, Peer, Session, cases, draw, in_turn, session, summarize, time_stages, time_step
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import profile

import syncbn

SHAPES = "32x64x56x56 32x256x28x28 64x256x56x56 8x64x32x32 8x512x7x7 256x1024 4x32x16x32x32 16x197x384"
DTYPES = "float32 bfloat16 float16 float64"
COLUMNS = {"forward": ".3f", "backward": ".3f", "both": ".3f", "spread": ".3f", "both / syncbn": ".2f"}
COLUMNS |= {"first call": ".1f", "saved": ".2f", "peak": ".2f", "collectives": ""}  # of the table -> format
Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", default=SHAPES.split(), help="NxCx...; NxLxC with three sizes (default %(default)s)")
    add("--dtypes", nargs="+", default=DTYPES.split(), help="(default %(default)s)")
    add("--rounds", type=int, default=30, help="of each case (default %(default)s)")
    add("--threads", type=int, default=1, help="per rank (default %(default)s)")
    add("--output", type=Path, default=Path("runs/bench"), help="folder (default %(default)s)")


def by_hand(x: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor, bias: Tensor, **_: bool) -> Tensor:
    """What one writes without a library: sums, a differentiable all_reduce, and autograd does the rest."""
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
        return by_hand(x, self.running_mean, self.running_var, self.weight, self.bias)


def make_peers(case: Case, device: torch.device) -> dict[str, Peer]:
    """Each with parameters of its own."""
    at_end = case.channel_dim != 1
    of_parameters = {"device": device, "dtype": torch.promote_types(getattr(torch, case.dtype), torch.float32)}
    options = {"channel_last": at_end, **of_parameters}
    ours, fused = (syncbn.SyncBatchNorm(case.channels, fuse_relu=fuse, **options) for fuse in (False, True))
    peers: dict[str, Peer] = {"syncbn": lambda x, z: ours(x), "syncbn fused": fused}
    torch_class = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(len(case.shape), nn.BatchNorm1d)
    norms = {"nn.BatchNorm": torch_class(case.channels), "hand-written": HandWritten(case.channels)}
    if device.type == "cuda" and dist.is_initialized():
        norms["nn.SyncBatchNorm"] = nn.SyncBatchNorm(case.channels)
    for name, norm in norms.items():
        norm.to(**of_parameters)
        peers[name] = (lambda x, z, norm=norm: norm(x.mT).mT) if at_end else (lambda x, z, norm=norm: norm(x))
        peers[f"{name} fused"] = lambda x, z, peer=peers[name]: F.relu(peer(x, z) + z)
    return peers


def time_limit(x: Tensor, dy: Tensor) -> list[float]:
    """Milliseconds of what moves the bytes of a forward, and those of a backward."""
    flat, flat_dy = ((one.movedim(1, -1) if not one.is_contiguous() else one).detach().reshape(-1) for one in (x, dy))
    forward, backward = lambda: (flat.sum(), flat.clone()), lambda _: (torch.dot(flat_dy, flat), flat_dy + flat)
    return time_stages(x.device, forward, backward)


def time_all_reduces(channels: int, device: torch.device) -> list[float]:
    """Milliseconds of the two bare all_reduces."""
    payload = torch.zeros(2 * channels + 4, dtype=torch.float64, device=device)
    return [ms for _ in range(2) for ms in time_stages(device, partial(dist.all_reduce, payload))]


def run_case(case: Case, here: Session, rounds: int) -> list[Row]:
    """Times and needs of each peer, and times of the limit and of the collectives."""
    x, z, dy = draw(case, here.device)
    peers = make_peers(case, here.device)
    torch.ones(1, requires_grad=True).clone().backward(torch.ones(1))  # imports sympy, the first time
    calls = {name: partial(time_step, peer, x, z, dy) for name, peer in peers.items()}
    first = {name: {"first call": sum(call())} for name, call in calls.items()}
    needs = {name: first[name] | needs_of(peer, case, here.device) for name, peer in peers.items()}
    calls["limit"] = partial(time_limit, x, dy)
    if dist.is_initialized():
        calls["two all_reduces"] = partial(time_all_reduces, case.channels, here.device)
    times = {name: summarize(samples) for name, samples in in_turn(calls, rounds, warm_up=3, repeats=2).items()}
    rows = []
    for name, one in times.items():
        ratio = one["both"] / times["syncbn fused" if "fused" in name else "syncbn"]["both"]
        row = {"case": case.name, "peer": name, **dict.fromkeys(COLUMNS), **one, "both / syncbn": ratio}
        rows.append(row | needs.get(name, {}))
    return rows


def needs_of(peer: Peer, case: Case, device: torch.device) -> Row:
    """Of one step: the memory that backward holds on to and the most that was allocated at once; its collectives."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # of a tensor subclass it has no data_ptr
        storages[storage._cdata] = storage.nbytes()
        return tensor

    x, z, dy = draw(case, device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), CommDebugMode() as collectives:
        peer(x, z).backward(dy)
    x, z, dy = draw(case, device)  # as its hooks on leaves stay, and would copy their gradients
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        peer(x, z).backward(dy)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with profile(profile_memory=True) as profiler:
            peer(x, z).backward(dy)
        events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        peak = max(itertools.accumulate(event.nbytes() for event in events))
    saved = sum(storages.values())
    return {"saved": saved / x.nbytes, "peak": peak / x.nbytes, "collectives": collectives.get_total_counts()}


def run(arguments: argparse.Namespace) -> None:
    with session(arguments.threads) as here:
        rows: list[Row] = []
        for case in cases(arguments.shapes, arguments.dtypes):
            of_case = run_case(case, here, arguments.rounds)
            rows += of_case
            shown = [
                [row["peer"], *("" if row[name] is None else format(row[name], spec) for name, spec in COLUMNS.items())]
                for row in of_case
            ]
            here.show(f"\n{case.name}, ms", ("peer", *COLUMNS), shown)
            here.write(arguments.output / "bench.json", times=rows)  # also what there is when the time is over
        here.print(f"wrote {arguments.output}/bench.json")
