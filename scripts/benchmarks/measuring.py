"""Shared by the benchmarks: shapes to measure, timers, interleaved rounds, and the conditions of a run."""

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

L2_BYTES = 2**28  # The L2 cache of any GPU is smaller.
AHEAD_CYCLES = 2_000_000  # The GPU sleeps for about 1 ms, so that Python's time is hidden.
Name, Result = TypeVar("Name"), TypeVar("Result")
Rows = Mapping[str, Mapping[str, float]]  # row -> column -> value


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool  # With three dims the shape is (N, L, C); otherwise this is the memory format.
    fused: bool = False  # Add a residual and apply relu.

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
    """Return a case for each shape and dtype. Images get both memory formats; three dims mean (N, L, C)."""
    sizes = [tuple(map(int, shape.split("x"))) for shape in shapes]
    layouts = {2: [False], 3: [True]}  # number of dims -> values of channels_last
    return [Case(s, dtype, last) for s in sizes for last in layouts.get(len(s), [False, True]) for dtype in dtypes]


def draw(case: Case, device: torch.device) -> list[Tensor]:
    """Return random x, residual and dy; x and residual require gradients."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if case.channels_last else {}
    memory_format = formats.get(len(case.shape), torch.contiguous_format)
    tensors = (torch.randn(case.shape, device=device).to(getattr(torch, case.dtype)) for _ in range(3))
    x, residual, dy = (tensor.contiguous(memory_format=memory_format) for tensor in tensors)
    return [x.requires_grad_(), residual.requires_grad_(), dy]


def time_stages(device: torch.device, *stages: Callable[..., Any]) -> list[float]:
    """Return the milliseconds of each stage, on this CPU thread or the GPU's current stream. Each stage after the first
    gets the result of the stage before it."""
    stream = torch.cuda.current_stream() if device.type == "cuda" else None
    if stream:
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    if stream:
        torch.empty(L2_BYTES, dtype=torch.uint8, device=device).zero_()  # This overwrites the L2 cache.
        torch.cuda._sleep(AHEAD_CYCLES)
    clock = (lambda: stream.record_event(torch.cuda.Event(enable_timing=True))) if stream else time.perf_counter
    results: list[Any] = []
    times = [clock()]
    for stage in stages:
        results.append(stage(*results[-1:]))
        times.append(clock())
    if stream:
        torch.cuda.synchronize()
    return [a.elapsed_time(b) if stream else 1e3 * (b - a) for a, b in itertools.pairwise(times)]


def time_step(peer: Callable[[Tensor, Tensor], Tensor], x: Tensor, residual: Tensor, dy: Tensor) -> list[float]:
    """Return the milliseconds of forward, and of backward with all gradients."""
    times = time_stages(x.device, partial(peer, x, residual), lambda y: y.backward(dy))
    x.grad = residual.grad = None
    return times


def interleave(
    calls: Mapping[Name, Callable[[], Result]], rounds: int, warm_up: int, repeats: int = 1
) -> dict[Name, list[Result]]:
    """Return the results of each call. Each round makes every call `repeats` times and keeps the last result, because
    the call before it has evicted the caches. The first `warm_up` rounds are dropped."""
    results: dict[Name, list[Result]] = {name: [] for name in calls}
    for _ in range(warm_up + rounds):
        for name, call in calls.items():
            results[name].append([call() for _ in range(repeats)][-1])
    return {name: values[warm_up:] for name, values in results.items()}


def median_and_spread(values: Sequence[float] | Tensor) -> tuple[float, float]:
    """Return the median, and half the distance between the quartiles."""
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = torch.as_tensor(values, dtype=torch.float64).quantile(quartiles).tolist()
    return middle, (high - low) / 2


def summarize(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return medians over (forward, backward) milliseconds of the rounds, of the slowest rank in each."""
    times = torch.tensor(samples, dtype=torch.float64)
    if dist.is_initialized():
        times = times.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(times, dist.ReduceOp.MAX)
    forward, backward = times.median(0).values.tolist()
    both, spread = median_and_spread(times.sum(1).cpu())
    return {"forward": forward, "backward": backward, "both": both, "+-": spread}


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def show(title: str, rows: Rows) -> None:
    """Print a table on the first rank, of values with four digits."""
    columns = dict.fromkeys(itertools.chain(*rows.values()))
    table = Table("", *(Column(name, justify="right") for name in columns), title=f"\n{title}", title_justify="left")
    for name, values in rows.items():
        table.add_row(name, *(f"{values[column]:.4g}" if column in values else "" for column in columns))
    if is_first_rank():
        Console(width=150, highlight=False).print(table)


def conditions() -> dict[str, object]:
    """Return when, where and how this process measures."""
    from syncbn.__main__ import info  # guard.py imports the syncbn of another commit

    cpuinfo = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": " ".join(sys.argv),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "processor": next(iter(re.findall("model name\t: (.*)", cpuinfo)), platform.processor()),
        "cores": os.cpu_count(),
        **info(),
    }


def write(file: Path, **results: object) -> None:
    """Write results with their conditions as JSON, on the first rank."""
    if is_first_rank():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"about": conditions(), **results}, indent=1))


@contextlib.contextmanager
def session(threads: int = 1, on_cpu: bool = False) -> Iterator[torch.device]:
    """Yield the device to measure on: a GPU if there is one, else `threads` threads of the CPU. Under torchrun there is
    a process group. Print the conditions."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    if torch.cuda.is_available() and not on_cpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if is_first_rank():
        print(*(f"{key}: {value}" for key, value in conditions().items()), sep="\n")
    try:
        yield device
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
