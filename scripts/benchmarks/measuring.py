"""What the benchmarks share: cases, a clock, rounds in which all calls take turns, and what is said of a run."""

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

L2_BYTES = 2**28  # more than any GPU's cache holds
AHEAD_CYCLES = 2_000_000  # about a millisecond, in which Python gets ahead of the GPU: its own time is not measured
Name, Result = TypeVar("Name"), TypeVar("Result")
Peer = Callable[[Tensor, Tensor], Tensor]  # (x, z) -> y


class Case(NamedTuple):
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
    layouts = {2: [False], 3: [True]}  # by the number of dims
    return [
        Case(shape, dtype, channels_last)
        for shape in (tuple(map(int, text.split("x"))) for text in shapes)
        for channels_last in layouts.get(len(shape), [False, True])
        for dtype in dtypes
    ]


def draw(case: Case, device: torch.device) -> list[Tensor]:
    """x, z and dy."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if case.channels_last else {}
    memory_format = formats.get(len(case.shape), torch.contiguous_format)
    values = (torch.randn(case.shape, device=device).to(getattr(torch, case.dtype)) for _ in range(3))
    x, z, dy = (value.contiguous(memory_format=memory_format) for value in values)
    return [x.requires_grad_(), z.requires_grad_(), dy]


def time_stages(device: torch.device, *stages: Callable[..., Any]) -> list[float]:
    """Milliseconds of each, on this thread of a CPU or the current stream of a GPU. A stage gets what the one before it
    returned; all of that is freed afterwards."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    if on_gpu:
        torch.empty(L2_BYTES, dtype=torch.uint8, device=device).zero_()  # leaves nothing of use in the cache
        torch.cuda._sleep(AHEAD_CYCLES)
    stream = torch.cuda.current_stream() if on_gpu else None
    clock = (lambda: stream.record_event(torch.cuda.Event(enable_timing=True))) if stream else time.perf_counter
    results: list[Any] = []
    times = [clock()]
    for stage in stages:
        results.append(stage(*results[-1:]))
        times.append(clock())
    if on_gpu:
        torch.cuda.synchronize()
    pairs = itertools.pairwise(times)
    return [start.elapsed_time(end) if on_gpu else 1e3 * (end - start) for start, end in pairs]


def time_step(peer: Peer, x: Tensor, z: Tensor, dy: Tensor) -> list[float]:
    """Milliseconds of forward and backward, all gradients included."""
    times = time_stages(x.device, partial(peer, x, z), lambda y: y.backward(dy))
    x.grad = z.grad = None
    return times


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


def summarize(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Medians of (forward, backward) in each round, and the spread of both."""
    times = slowest_rank(samples)
    forward, backward = times.median(0).values.tolist()
    both, spread = median_and_spread(times.sum(1))
    return {"forward": forward, "backward": backward, "both": both, "spread": spread}


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
    print: Callable[..., None]
    about: dict[str, object]

    def show(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        numbers = (Column(name, justify="right") for name in columns[1:])
        table = Table(columns[0], *numbers, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        self.print(table)

    def write(self, file: Path, **results: object) -> None:
        """As JSON."""
        if self.is_first:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"about": self.about, **results}, indent=1))


@contextlib.contextmanager
def session(threads: int = 1, on_cpu: bool = False) -> Iterator[Session]:
    """On a GPU if there is one, else on `threads` of the CPU; under torchrun with a process group. Prints where and how
    it measures."""
    from syncbn.__main__ import info  # here, as guard.py imports the syncbn of another commit

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    if torch.cuda.is_available() and not on_cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    cpuinfo = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    about = {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": " ".join(sys.argv),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "processor": next(iter(re.findall("model name\t: (.*)", cpuinfo)), platform.processor()),
        "cores": os.cpu_count(),
        **info(),
    }
    console = Console(quiet=not is_first, width=150, highlight=False)
    here = Session(device, is_first, console.print, about)
    for key, value in about.items():
        here.print(f"{key}: {value}")
    try:
        yield here
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
