"""What the benchmarks share: cases, a stopwatch, rounds in which all calls take turns, and what is said of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import syncbn

L2_BYTES = 2**28  # more than any GPU's cache holds
AHEAD_CYCLES = 2_000_000  # about a millisecond, in which Python gets ahead of the GPU: its own time is not measured
Name, Result = TypeVar("Name"), TypeVar("Result")
Peer = Callable[[Tensor, Tensor], Tensor]  # (x, z) -> y


class Case(NamedTuple):
    """One input."""

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool  # in memory, or, with three dims, in the shape
    fused: bool = False  # with residual and relu

    @property
    def channel_dim(self) -> int:
        return 2 if self.channels_last and len(self.shape) == 3 else 1

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    @property
    def name(self) -> str:
        layout = "channels last" if self.channels_last else "contiguous"
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {layout}{' fused' if self.fused else ''}"


def cases(shapes: Iterable[str], dtypes: Sequence[str]) -> list[Case]:
    """Each shape in each dtype; images in both memory formats, (N, L, C) with the channels at the end."""
    found = []
    for shape in (tuple(map(int, text.split("x"))) for text in shapes):
        layouts = {2: [False], 3: [True]}.get(len(shape), [False, True])
        found += [Case(shape, dtype, layout) for layout in layouts for dtype in dtypes]
    return found


def draw(case: Case, device: torch.device) -> list[Tensor]:
    """x, z and dy."""
    values = [torch.randn(case.shape, device=device).to(getattr(torch, case.dtype)) for _ in range(3)]
    if case.channels_last and len(case.shape) > 3:
        memory_format = torch.channels_last if len(case.shape) == 4 else torch.channels_last_3d
        values = [value.contiguous(memory_format=memory_format) for value in values]
    return [values[0].requires_grad_(), values[1].requires_grad_(), values[2]]


class Stopwatch:
    """Laps in milliseconds from its creation on: of this thread on a CPU, of the current stream on a GPU."""

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
        if self.on_gpu:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in itertools.pairwise(self.times)]
        return [1e3 * (end - start) for start, end in itertools.pairwise(self.times)]


def time_step(peer: Peer, x: Tensor, z: Tensor, dy: Tensor) -> list[float]:
    """Milliseconds of forward and backward, all gradients included."""
    watch = Stopwatch(x.device)
    y = peer(x, z)
    watch.lap()
    y.backward(dy)
    watch.lap()
    x.grad = z.grad = None
    return watch.laps()


def in_turn(
    calls: Mapping[Name, Callable[[], Result]], rounds: int, warm_up: int, repeats: int = 1
) -> dict[Name, list[Result]]:
    """What each call returned in each round after `warm_up` others. A round makes every call `repeats` times and keeps
    the last result: the first call after another's finds nothing of its own in the caches."""
    results: dict[Name, list[Result]] = {name: [] for name in calls}
    for index in range(warm_up + rounds):
        for name, call in calls.items():
            for _ in range(repeats):
                result = call()
            if index >= warm_up:
                results[name].append(result)
    return results


def median_and_spread(values: Sequence[float] | Tensor) -> tuple[float, float]:
    """The spread is half the distance between the quartiles."""
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = torch.as_tensor(values, dtype=torch.float64).quantile(quartiles).tolist()
    return middle, (high - low) / 2


class Times(NamedTuple):
    """Milliseconds, medians."""

    forward: float
    backward: float
    both: float
    spread: float  # of both


def summarize(samples: Sequence[Sequence[float]]) -> Times:
    """Of (forward, backward) in each round."""
    times = slowest_rank(samples)
    return Times(*times.median(0).values.tolist(), *median_and_spread(times.sum(1)))


def slowest_rank(samples: Sequence[Sequence[float]]) -> Tensor:
    """The maximum over the ranks."""
    times = torch.tensor(samples, dtype=torch.float64)
    if dist.is_initialized():
        times = times.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.cpu()


class Session(NamedTuple):
    """One run of a benchmark. Only the first rank prints and writes."""

    device: torch.device
    is_first: bool
    console: Console
    about: dict[str, object]

    def print(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def show(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table."""
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def write(self, file: Path, **results: object) -> None:
        """As JSON."""
        if self.is_first:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"about": self.about, **results}, indent=1))


@contextlib.contextmanager
def session(threads: int = 1, on_cpu: bool = False) -> Iterator[Session]:
    """On a GPU if there is one, else on `threads` of the CPU; under torchrun with a process group. Prints where and how
    it measures."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    if torch.cuda.is_available() and not on_cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    about = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": " ".join(sys.argv),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "threads": threads,
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "syncbn": syncbn.kernels.available(),
    }
    here = Session(device, is_first, Console(quiet=not is_first, width=150), about)
    for key, value in about.items():
        here.print(f"{key}: {value}")
    try:
        yield here
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def processor() -> str:
    """As Linux names it, and the instructions that torch uses."""
    file = Path("/proc/cpuinfo")
    name = re.search("model name\t: (.*)", file.read_text()) if file.exists() else None
    return f"{name[1] if name else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
