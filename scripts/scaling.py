"""How synchronisation grows with the ranks: bytes and messages counted, collectives timed, a model fitted to the times.

    torchrun --standalone --nproc-per-node 2 scripts/scaling.py               count and time; again with 4
    torchrun --standalone --nproc-per-node 16 scripts/scaling.py --rounds 0   count only: more ranks than cores
    python scripts/scaling.py                                                 fit to all of these, and extrapolate

Counted are the write calls of a rank and their bytes, by Linux in /proc/self/io: gloo's messages with their headers.
Schemes, for a layer of C channels:

    syncbn    forward and backward 2C + 4 float64: an all_reduce or, among at most 16 ranks of gloo, an exchange
    torch     nn.SyncBatchNorm: forward all_gather of 2C + 1 float32, backward all_reduce of 2C float32
    apex      apex.parallel.SyncBatchNorm without its extension: two all_reduces of C float32 each way

The model, for W ranks, n bytes of each, a latency a in seconds and a bandwidth b in bytes/s:

    all_reduce    ring 2 (W - 1) (a + n / (W b))      tree 2 log2(W) a + 2 n / b        (pipelined, as nccl's)
    all_gather    ring (W - 1) (a + n / b)            tree log2(W) a + (W - 1) n / b    (recursive doubling)
    exchange      (W - 1) (a + n / b)

Thakur, Rabenseifner & Gropp 2005, https://doi.org/10.1177/1094342005051521. gloo's are rings: a and b are fitted to
these, by least squares of relative errors. Assumed: every rank is there when a collective begins; nothing overlaps it;
a and b are the same between all ranks and at every number of them, as is a step's time without synchronisation; the
layers are the 53 of ResNet-50.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.measuring import Session, in_turn, session, slowest_rank, time_stages
from torch import Tensor

from syncbn.ranks.all_reduce import MOST_RANKS_OF_EXCHANGE, all_reduce, num_exchanging

COUNTED_STEPS = 20
CHANNELS = 256  # of the layer whose messages are counted
TIMED_BYTES = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
WORLDS = (8, 32, 128, 512, 2048, 8192, 16384)  # modelled ranks
NODE = 8  # ranks of a host
SHARE = 0.05  # of a step
IN_NODES = "syncbn in nodes"  # process_group=int(os.environ["LOCAL_WORLD_SIZE"])
TOPOLOGIES = ("ring", "tree")
RESNET = [64]  # channels of ResNet-50's layers
for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
    RESNET += [4 * width] + blocks * [width, width, 4 * width]

Collective = tuple[str, int]  # all_reduce, all_gather or total, which is syncbn's; the bytes that a rank gives to it
# Name -> the collectives of the forward and backward of a layer of c channels.
SCHEMES: dict[str, Callable[[int], list[Collective]]] = {
    "syncbn": lambda c: [("total", 8 * (2 * c + 4))] * 2,
    "torch": lambda c: [("all_gather", 4 * (2 * c + 1)), ("all_reduce", 4 * 2 * c)],
    "apex": lambda c: [("all_reduce", 4 * c)] * 4,
}


def call_of(kind: str, num_bytes: int) -> Callable[[], object]:
    mine = torch.zeros(num_bytes // 4) if num_bytes % 8 else torch.zeros(num_bytes // 8, dtype=torch.float64)
    if kind == "all_reduce":
        return partial(dist.all_reduce, mine)
    if kind == "total":
        assert dist.group.WORLD is not None
        return partial(all_reduce, mine, dist.group.WORLD, num_exchanging(dist.group.WORLD))
    return partial(dist.all_gather, [torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)


def count(scheme: str) -> dict[str, float]:
    """Messages and bytes that a rank sends in one step of one layer; the most that any rank sends."""
    calls = [call_of(*one) for one in SCHEMES[scheme](CHANNELS)]
    for call in calls:  # connections are made
        call()
    dist.barrier()
    before = written()
    for call in calls * COUNTED_STEPS:
        call()
    most = slowest_rank([(written() - before).tolist()])[0] / COUNTED_STEPS
    return dict(zip(("messages", "bytes"), most.tolist(), strict=True))


def written() -> Tensor:
    """Write calls of this process so far, and their bytes."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return torch.tensor([int(lines["syscw"]), int(lines["wchar"])], dtype=torch.float64)


def measure(arguments: argparse.Namespace, here: Session) -> None:
    """Write ranks-W.json."""
    ranks = dist.get_world_size()
    sent = {scheme: count(scheme) for scheme in SCHEMES}
    rows = [(scheme, f"{one['messages']:.0f}", f"{one['bytes']:,.0f}") for scheme, one in sent.items()]
    here.show(f"a step of {CHANNELS} channels on {ranks} ranks", ("scheme", "messages a rank", "bytes a rank"), rows)
    timed = itertools.product(("all_reduce", "all_gather", "total"), TIMED_BYTES if arguments.rounds else ())
    calls = {one: partial(time_stages, here.device, call_of(*one)) for one in timed}
    times = []
    for (kind, num_bytes), samples in in_turn(calls, arguments.rounds, warm_up=3).items():
        median = slowest_rank(samples).median().item()
        times.append({"collective": kind, "ranks": ranks, "bytes": num_bytes, "seconds": median / 1e3})
        here.print(f"{kind} of {num_bytes:,} bytes: {median:.3f} ms")
    here.write(arguments.output / f"ranks-{ranks}.json", sent=sent, times=times)


class Network(NamedTuple):
    latency: float  # seconds
    bandwidth: float  # bytes/s

    def __str__(self) -> str:
        return f"{1e6 * self.latency:.0f} us and {self.bandwidth / 1e9:.2f} GB/s"


def coefficients(topology: str, kind: str, ranks: int, num_bytes: int) -> tuple[float, float]:
    """Of the latency and of the inverse bandwidth in the time of a collective."""
    turns = ranks - 1 if topology == "ring" else math.log2(ranks)
    exchanges = kind == "total" and topology == "ring" and ranks <= MOST_RANKS_OF_EXCHANGE
    if kind == "all_gather" or exchanges:
        return turns, (ranks - 1) * num_bytes
    return 2 * turns, 2 * num_bytes * ((ranks - 1) / ranks if topology == "ring" else 1)


def fit(times: list[dict[str, Any]]) -> tuple[Network, Tensor]:
    """The network of the rings that fits best, and the relative errors of its times."""
    of_times = [coefficients("ring", one["collective"], one["ranks"], one["bytes"]) for one in times]
    seconds = torch.tensor([[one["seconds"]] for one in times], dtype=torch.float64)
    matrix = torch.tensor(of_times, dtype=torch.float64) / seconds
    solution = torch.linalg.lstsq(matrix, torch.ones_like(seconds)).solution
    latency, inverse_bandwidth = solution.flatten().tolist()
    return Network(latency, 1 / inverse_bandwidth), (matrix @ solution - 1).flatten()


def seconds_of_step(network: Network, scheme: str, topology: str, ranks: int) -> float:
    """Of all collectives of ResNet-50's step."""
    if scheme == IN_NODES:
        scheme, ranks = "syncbn", min(ranks, NODE)
    seconds = 0.0
    for kind, num_bytes in itertools.chain(*map(SCHEMES[scheme], RESNET)):
        turns, moved = coefficients(topology, kind, ranks, num_bytes)
        seconds += turns * network.latency + moved / network.bandwidth
    return seconds


def model(arguments: argparse.Namespace, here: Session) -> None:
    """Read every ranks-W.json; print, and write model.json."""
    files = sorted(arguments.output.glob("ranks-*.json"))
    times = [one for file in files for one in json.loads(file.read_text())["times"]]
    if not times:
        raise SystemExit(f"no times in {arguments.output}: run this under torchrun first, as --help says")
    fitted, errors = fit(times)
    if min(fitted) < 0:
        raise SystemExit(f"the times fit no network ({fitted}): measure them again, on idle machines, with more rounds")
    given = {"latency": arguments.latency, "bandwidth": arguments.bandwidth}
    network = fitted._replace(**{name: value for name, value in given.items() if value is not None})
    error, most = errors.abs().median(), errors.abs().max()
    here.print(f"fitted to {len(times)} times: {fitted}; relative error {error:.0%} in the median, {most:.0%} at most")
    here.print(f"modelled: {network}, a step of {arguments.step} s, ResNet-50's layers, nodes of {NODE} ranks")
    rows, most_seconds = [], SHARE / (1 - SHARE) * arguments.step
    for scheme, topology in itertools.product((*SCHEMES, IN_NODES), TOPOLOGIES):
        seconds = partial(seconds_of_step, network, scheme, topology)
        first = next((2**power for power in range(1, 21) if seconds(2**power) > most_seconds), "never")
        rows.append((f"{scheme}, {topology}", *(f"{1e3 * seconds(ranks):,.0f}" for ranks in WORLDS), f"{first}"))
    columns = ("ranks", *(f"{ranks:,}" for ranks in WORLDS), f"over {SHARE:.0%} from")
    here.show("synchronisation, ms of a step", columns, rows)
    here.write(arguments.output / "model.json", fitted=fitted._asdict(), columns=columns, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=50, help="of each timed collective (default %(default)s)")
    add("--step", type=float, default=3.0, help="seconds without synchronisation (default %(default)s)")
    add("--latency", type=float, help="seconds, instead of the fitted one")
    add("--bandwidth", type=float, help="bytes/s, instead of the fitted one")
    add("--output", type=Path, default=Path("runs/scaling"), help="folder (default %(default)s)")
    arguments = parser.parse_args()
    with session(on_cpu=True) as here:
        (measure if dist.is_initialized() else model)(arguments, here)


if __name__ == "__main__":
    main()
