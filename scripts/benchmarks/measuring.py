"""What the benchmarks share: cases, a stopwatch, rounds in which all calls take turns, and what is said of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
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
T = TypeVar("T")
Peer = Callable[[Tensor, Tensor], Tensor]  # (x, z) -> y


class Case(NamedTuple):
    """One input."""

    shape: tuple[int, ...]
    dtype: str
    channels_last: bool  # in memory, or, with three dims, in the shape

    @property
    def channel_dim(self) -> int:
        return 2 if self.channels_last and len(self.shape) == 3 else 1

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    @property
    def dtype_of_parameters(self) -> torch.dtype:
        return torch.promote_types(getattr(torch, self.dtype), torch.float32)

    @property
    def name(self) -> str:
        return (
            f"{'x'.join(map(str, self.shape))} {self.dtype} {'channels last' if self.channels_last else 'contiguous'}"
        )


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
        pairs = itertools.pairwise(self.times)
        if not self.on_gpu:
            return [1e3 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def time_step(peer: Peer, x: Tensor, z: Tensor, dy: Tensor) -> list[float]:
    """Milliseconds of forward and backward, all gradients included."""
    watch = Stopwatch(x.device)
    y = peer(x, z)
    watch.lap()
    y.backward(dy)
    watch.lap()
    x.grad = z.grad = None
    return watch.laps()


def in_turn(calls: Mapping[str, Callable[[], T]], rounds: int, warm_up: int, repeats: int = 1) -> dict[str, list[T]]:
    """What each call returned in each round after `warm_up` others. A round makes every call `repeats` times and keeps
    the last result: the first call after another's finds nothing of its own in the caches."""
    results: dict[str, list[T]] = {name: [] for name in calls}
    for index in range(warm_up + rounds):
        for name, call in calls.items():
            for _ in range(repeats):
                result = call()
            if index >= warm_up:
                results[name].append(result)
    return results


class Times(NamedTuple):
    """Milliseconds, medians."""

    forward: float
    backward: float
    both: float
    spread: float  # of both: half the distance between the quartiles


def summarize(samples: Sequence[Sequence[float]]) -> Times:
    """Of (forward, backward) in each round, in which the slowest rank counts."""
    times = slowest_rank(samples)
    both = times.sum(1)
    low, middle, high = both.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=both.dtype)).tolist()
    return Times(*times.median(0).values.tolist(), middle, (high - low) / 2)


def slowest_rank(samples: Sequence[Sequence[float]]) -> Tensor:
    """The maximum over the ranks."""
    times = torch.tensor(samples, dtype=torch.float64)
    if dist.is_initialized():
        times = times.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.cpu()


class Session(NamedTuple):
    """One run of a benchmark."""

    device: torch.device
    is_first: bool  # this rank, which prints and writes
    console: Console
    about: dict[str, object]

    def say(self, **facts: object) -> None:
        """Print where and how this is measured, for the files too."""
        self.about.update(facts)
        for key, value in facts.items():
            self.console.print(f"{key}: {value}", highlight=False)

    def show(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table."""
        table = Table(title=title, title_justify="left")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def write(self, file: Path, **results: object) -> None:
        """As JSON, from the first rank."""
        if self.is_first:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"about": self.about, **results}, indent=1))


@contextlib.contextmanager
def session(threads: int, on_cpu: bool = False) -> Iterator[Session]:
    """On a GPU if there is one, else on `threads` of the CPU; under torchrun with a process group."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    if torch.cuda.is_available() and not on_cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        here = Session(device, is_first, Console(quiet=not is_first, width=150), {})
        here.say(
            date=datetime.now(UTC).isoformat(timespec="minutes"),
            command=" ".join(sys.argv),
            ranks=dist.get_world_size() if dist.is_initialized() else 1,
            threads=threads,
            hardware=torch.cuda.get_device_name() if device.type == "cuda" else processor_name(),
            cores=os.cpu_count(),
            python=platform.python_version(),
            torch=torch.__version__,
            syncbn=syncbn.kernels.available(),
        )
        yield here
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def processor_name() -> str:
    """As Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
