"""How synchronisation grows with the ranks: bytes and messages counted, collectives timed, a model fitted to the times.

    torchrun --standalone --nproc-per-node 2 scripts/scaling.py               count and time; again with 4
    torchrun --standalone --nproc-per-node 16 scripts/scaling.py --rounds 0   count only: more ranks than cores
    python scripts/scaling.py                                                 fit to all of these, and extrapolate

Counted are the write calls of a rank and their bytes, as Linux keeps them in /proc/self/io: gloo's messages with their
headers. Three schemes, for a layer of C channels:

    syncbn    forward all_reduce of 2C + 1 float64, backward all_reduce of 2C float64 (without the signatures of CPUs)
    torch     nn.SyncBatchNorm: forward all_gather of 2C + 1 float32 from every rank, backward all_reduce of 2C float32
    apex      apex.parallel.SyncBatchNorm without its extension: two all_reduces of C float32 each way

The model, for W ranks, n bytes of each, a latency a in seconds and a bandwidth b in bytes/s:

    all_reduce    ring 2 (W - 1) (a + n / (W b))      tree 2 log2(W) a + 2 n / b
    all_gather    ring (W - 1) (a + n / b)            tree log2(W) a + (W - 1) n / b

Thakur, Rabenseifner & Gropp 2005, https://doi.org/10.1177/1094342005051521. The tree of the all_reduce is pipelined, as
nccl's; that of the all_gather is recursive doubling, where nccl has a ring. gloo's are rings, so a and b are fitted to
the rings, by least squares of relative errors.

Assumed: every rank is there when a collective begins; nothing overlaps it; a and b are the same between all ranks,
within a host or not, and do not change with their number; a step takes the same time without synchronisation at every
number of ranks; the layers are the 53 of ResNet-50.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench import describe, slowest_rank
from bench_steps import resnet
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

COUNTED_STEPS = 20
CHANNELS = 256  # of the layer whose messages are counted
TIMED_BYTES = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
WORLDS = (8, 32, 128, 512, 2048, 8192, 16384)  # modelled ranks
NODE = 8  # ranks of a host


class Payload(NamedTuple):
    """What one rank gives to a collective."""

    collective: str  # "all_reduce" or "all_gather"
    numbers: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.numbers * self.dtype.itemsize


def payloads(scheme: str, channels: int) -> list[Payload]:
    """Those of one layer's forward and backward."""
    if scheme == "syncbn":
        return [Payload("all_reduce", 2 * channels + extra, torch.float64) for extra in (1, 0)]
    if scheme == "torch":
        gathered = Payload("all_gather", 2 * channels + 1, torch.float32)
        return [gathered, Payload("all_reduce", 2 * channels, torch.float32)]
    return [Payload("all_reduce", channels, torch.float32)] * 4


SCHEMES = ("syncbn", "torch", "apex")


def parse_arguments() -> argparse.Namespace:
    """The knobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="of each timed collective (default %(default)s)")
    parser.add_argument("--step", type=float, default=3.0, help="seconds without synchronisation (default %(default)s)")
    parser.add_argument("--latency", type=float, help="seconds, instead of the fitted one")
    parser.add_argument("--bandwidth", type=float, help="bytes/s, instead of the fitted one")
    parser.add_argument("--output", type=Path, default=Path("runs/scaling"), help="folder (default %(default)s)")
    return parser.parse_args()


# Measured, under torchrun.


def collective(payload: Payload) -> Callable[[], object]:
    """A call of it."""
    mine = torch.zeros(payload.numbers, dtype=payload.dtype)
    if payload.collective == "all_reduce":
        return lambda: dist.all_reduce(mine)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    return lambda: dist.all_gather(everyone, mine)


def written() -> Tensor:
    """Write calls of this process so far, and their bytes."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return torch.tensor([int(lines["syscw"]), int(lines["wchar"])], dtype=torch.float64)


def count(scheme: str) -> dict[str, float]:
    """Messages and bytes that a rank sends in one step of one layer; the most that any rank sends."""
    calls = [collective(payload) for payload in payloads(scheme, CHANNELS)]
    for call in calls:
        call()
    dist.barrier()
    before = written()
    for _ in range(COUNTED_STEPS):
        for call in calls:
            call()
    sent = (written() - before) / COUNTED_STEPS
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return {"messages": sent[0].item(), "bytes": sent[1].item()}


def time_collective(payload: Payload, rounds: int) -> float:
    """Seconds, the median over the rounds of the slowest rank's."""
    call, samples = collective(payload), []
    for _ in range(3 + rounds):
        dist.barrier()
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start, 0.0))
    return slowest_rank(samples[3:])[:, 0].median().item()


def measure(arguments: argparse.Namespace, console: Console) -> None:
    """Write ranks-W.json."""
    ranks = dist.get_world_size()
    sent = {scheme: count(scheme) for scheme in SCHEMES}
    times = []
    for kind in ("all_reduce", "all_gather") if arguments.rounds else ():
        for num_bytes in TIMED_BYTES:
            seconds = time_collective(Payload(kind, num_bytes // 8, torch.float64), arguments.rounds)
            times.append({"collective": kind, "ranks": ranks, "bytes": num_bytes, "seconds": seconds})
    console.print(f"a step of one layer of {CHANNELS} channels on {ranks} ranks")
    table = Table("scheme")
    for column in ("messages a rank", "bytes a rank"):
        table.add_column(column, justify="right")
    for scheme, one in sent.items():
        table.add_row(scheme, f"{one['messages']:.0f}", f"{one['bytes']:,.0f}")
    console.print(table)
    for one in times:
        console.print(f"{one['collective']} of {one['bytes']:,} bytes: {1e3 * one['seconds']:.3f} ms", highlight=False)
    if dist.get_rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        file = arguments.output / f"ranks-{ranks}.json"
        file.write_text(json.dumps({"about": describe(1), "sent": sent, "times": times}, indent=1))
        console.print(f"wrote {file}")


# Modelled, alone.


class Network(NamedTuple):
    """Seconds of a message, bytes/s of a link."""

    latency: float
    bandwidth: float


def coefficients(topology: str, kind: str, ranks: int, num_bytes: int) -> tuple[float, float]:
    """Of the latency, and bytes of the inverse bandwidth, in the time of a collective."""
    if kind == "all_reduce":
        if topology == "ring":
            return 2 * (ranks - 1), 2 * (ranks - 1) / ranks * num_bytes
        return 2 * math.log2(ranks), 2 * num_bytes
    return (ranks - 1 if topology == "ring" else math.log2(ranks)), (ranks - 1) * num_bytes


def seconds_of(network: Network, topology: str, kind: str, ranks: int, num_bytes: int) -> float:
    messages, moved = coefficients(topology, kind, ranks, num_bytes)
    return messages * network.latency + moved / network.bandwidth


def fit(times: list[dict[str, Any]]) -> tuple[Network, Tensor]:
    """The network of the rings that fits best, and the relative errors of its times."""
    rows, ones = [], []
    for one in times:
        of_time = coefficients("ring", one["collective"], one["ranks"], one["bytes"])
        rows.append([number / one["seconds"] for number in of_time])
        ones.append([1.0])
    wanted = torch.tensor(ones, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64)
    solution = torch.linalg.lstsq(matrix, wanted).solution
    latency, inverse_bandwidth = solution.flatten().tolist()
    return Network(latency, 1 / inverse_bandwidth), (matrix @ solution - wanted).flatten()


@functools.cache
def channels_of_layers() -> list[int]:
    """Of ResNet-50."""
    return [module.num_features for module in resnet(nn.BatchNorm2d).modules() if isinstance(module, nn.BatchNorm2d)]


def seconds_of_step(network: Network, scheme: str, topology: str, ranks: int) -> float:
    """Of all collectives of ResNet-50's step."""
    return sum(
        seconds_of(network, topology, payload.collective, ranks, payload.num_bytes)
        for channels in channels_of_layers()
        for payload in payloads(scheme, channels)
    )


def ranks_at_share(network: Network, scheme: str, topology: str, step: float, share: float = 0.05) -> int | None:
    """The fewest ranks, of the powers of 2 up to 2^20, on which synchronisation takes this share of a step."""
    for exponent in range(1, 21):
        seconds = seconds_of_step(network, scheme, topology, 2**exponent)
        if seconds > share * (step + seconds):
            return 2**exponent
    return None


def model(arguments: argparse.Namespace, console: Console) -> None:
    """Read every ranks-W.json; print, write model.json and scaling.png."""
    files = sorted(arguments.output.glob("ranks-*.json"))
    times = [one for file in files for one in json.loads(file.read_text())["times"]]
    if not times:
        raise SystemExit(f"no times in {arguments.output}: run this under torchrun first, as --help says")
    fitted, errors = fit(times)
    if min(fitted) < 0:
        raise SystemExit(f"the times fit no network ({fitted}): measure them again, on idle machines, with more rounds")
    network = Network(
        fitted.latency if arguments.latency is None else arguments.latency, arguments.bandwidth or fitted.bandwidth
    )
    console.print(
        f"fitted to {len(times)} times: latency {1e6 * fitted.latency:.0f} us, bandwidth {fitted.bandwidth / 1e9:.2f} "
        f"GB/s; relative error: median {errors.abs().median():.0%}, largest {errors.abs().max():.0%}"
    )
    console.print(
        f"modelled with {1e6 * network.latency:.0f} us and {network.bandwidth / 1e9:.2f} GB/s, a step of "
        f"{arguments.step} s, ResNet-50's layers; node: groups of {NODE} ranks"
    )
    curves = {
        f"{scheme}, {topology}": [seconds_of_step(network, scheme, topology, ranks) for ranks in WORLDS]
        for scheme in SCHEMES
        for topology in ("ring", "tree")
    }
    for topology in ("ring", "tree"):
        curves[f"syncbn in nodes, {topology}"] = [seconds_of_step(network, "syncbn", topology, NODE)] * len(WORLDS)
    limits = {
        f"{scheme}, {topology}": ranks_at_share(network, scheme, topology, arguments.step)
        for scheme in SCHEMES
        for topology in ("ring", "tree")
    }
    console.print("synchronisation, ms of a step")
    table = Table("ranks")
    for column in (*(f"{ranks:,}" for ranks in WORLDS), "over 5 % from"):
        table.add_column(column, justify="right")
    for name, seconds in curves.items():
        of_limit = "" if name not in limits else f"{limits[name]:,}" if limits[name] else "never"
        table.add_row(name, *(f"{1e3 * one:,.0f}" for one in seconds), of_limit)
    console.print(table)
    results = {
        "fitted": fitted._asdict(),
        "relative errors": errors.tolist(),
        "modelled": network._asdict(),
        "step seconds": arguments.step,
        "ranks": WORLDS,
        "seconds": curves,
        "over 5 % from": limits,
    }
    (arguments.output / "model.json").write_text(json.dumps(results, indent=1))
    plot(arguments.output / "scaling.png", curves, arguments.step)
    console.print(f"wrote {arguments.output}/model.json and scaling.png")


def plot(file: Path, curves: dict[str, list[float]], step: float) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colours = dict(zip((*SCHEMES, "syncbn in nodes"), ("C0", "C1", "C2", "C3"), strict=True))
    for name, seconds in curves.items():
        who, _, topology = name.rpartition(", ")
        shares = [100 * one / (step + one) for one in seconds]
        axes.plot(WORLDS, shares, color=colours[who], linestyle="-" if topology == "ring" else "--", label=name)
    axes.axhline(5, color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="% of a step spent in synchronisation")
    axes.set_xticks(WORLDS, [f"{ranks:,}" for ranks in WORLDS])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    """Measure under torchrun, model without."""
    arguments = parse_arguments()
    if "WORLD_SIZE" not in os.environ:
        model(arguments, Console(width=130))
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measure(arguments, Console(width=110, quiet=dist.get_rank() != 0))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
