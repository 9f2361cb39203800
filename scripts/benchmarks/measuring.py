"""Shared by the benchmarks: cases to measure, timers, interleaved rounds, tables, and the conditions of a run.

torch.utils.benchmark times one statement after another. It cannot make the calls of several layers in turn, and cannot
time the forward and the backward of the same step.
"""

import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from syncbn.__main__ import info

FLUSHED_BYTES = 2**28  # more than the L2 cache of any GPU
SLEEP_CYCLES = 2_000_000  # The GPU sleeps for about 1 ms, so that the host's time is hidden.
Rows = Mapping[str, Mapping[str, float]]  # row -> column -> value


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    # If True, a shape of three dims is (N, L, C), and four or five dims have the memory format channels last.
    channels_last: bool

    @property
    def channel_dim(self) -> int:
        return 2 if self.channels_last and len(self.shape) == 3 else 1

    @property
    def channels(self) -> int:
        return self.shape[self.channel_dim]

    @property
    def name(self) -> str:
        layout = "channels last" if self.channels_last else "contiguous"
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {layout}"


def cases(shapes: Iterable[str], dtypes: Sequence[str]) -> list[Case]:
    """Return a case for each shape and dtype. Images have both memory formats. A shape of three dims is (N, L, C)."""
    result = []
    for text in shapes:
        shape = tuple(map(int, text.split("x")))
        layouts = [False, True] if len(shape) > 3 else [len(shape) == 3]
        result += [Case(shape, dtype, channels_last) for channels_last in layouts for dtype in dtypes]
    return result


def draw(case: Case, device: torch.device) -> list[Tensor]:
    """Return random x, residual and dy. x and residual require gradients."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}
    memory_format = torch.contiguous_format
    if case.channels_last:
        memory_format = channels_last.get(len(case.shape), torch.contiguous_format)
    x, residual, dy = (
        torch.randn(case.shape, device=device).to(getattr(torch, case.dtype), memory_format=memory_format)
        for _ in range(3)
    )
    return [x.requires_grad_(), residual.requires_grad_(), dy]


def time_stages(device: torch.device, *stages: Callable[..., Any]) -> list[float]:
    """Return the milliseconds of each stage, on this CPU thread or on the GPU's current stream. A stage gets the
    result of the stage before; the first stage gets nothing."""
    stream = torch.cuda.current_stream() if device.type == "cuda" else None
    if stream:
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    if stream:
        torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device).zero_()  # This evicts the tensors from L2.
        torch.cuda._sleep(SLEEP_CYCLES)

    def now() -> Any:
        return stream.record_event(torch.cuda.Event(enable_timing=True)) if stream else time.perf_counter()

    results: list[Any] = []  # kept until the end, so that no time contains freeing memory
    times = [now()]
    for stage in stages:
        results.append(stage(*results[-1:]))
        times.append(now())
    if stream:
        torch.cuda.synchronize()
    return [a.elapsed_time(b) if stream else 1e3 * (b - a) for a, b in itertools.pairwise(times)]


def time_step(layer: Callable[[Tensor, Tensor], Tensor], x: Tensor, residual: Tensor, dy: Tensor) -> list[float]:
    """Return the milliseconds of the forward `layer(x, residual)`, and of its backward with all gradients."""
    times = time_stages(x.device, partial(layer, x, residual), lambda y: y.backward(dy))
    x.grad = residual.grad = None
    return times


def interleave(
    calls: Mapping[Any, Callable[[], Any]], rounds: int, warm_up: int, repeats: int = 1
) -> dict[Any, list[Any]]:
    """Make all calls in turn in each round, and return the results of each call, without those of `warm_up` rounds.

    In a round each call is made `repeats` times in a row, and only the last result is kept. With repeats=2 a repetition
    of the same call precedes the measured call, so that the caches do not contain the tensors of a different call.
    """
    results: dict[Any, list[Any]] = {name: [] for name in calls}
    for _ in range(warm_up + rounds):
        for name, call in calls.items():
            for _ in range(repeats):
                result = call()
            results[name].append(result)
    return {name: values[warm_up:] for name, values in results.items()}


def median_and_spread(values: Tensor) -> tuple[float, float]:
    """Return the median, and half the distance between the quartiles."""
    quartiles = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    low, middle, high = values.double().quantile(quartiles).tolist()
    return middle, (high - low) / 2


def summarize(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return medians of forward, backward and both, over rounds of (forward, backward) milliseconds. The time of a
    round is that of the slowest rank."""
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
    columns = list(dict.fromkeys(column for values in rows.values() for column in values))  # each once, in order
    table = Table("", *(Column(name, justify="right") for name in columns), title=f"\n{title}", title_justify="left")
    for name, values in rows.items():
        table.add_row(name, *(f"{values[column]:.4g}" if column in values else "" for column in columns))
    if is_first_rank():
        Console(width=150, highlight=False).print(table)


def conditions() -> dict[str, object]:
    """Return when, where and how this process measures."""
    cpuinfo = Path("/proc/cpuinfo")  # exists on Linux only
    processors = re.findall("model name\t: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "command": " ".join(sys.argv),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "processors": f"{len(processors)} x {', '.join({*processors})}",
        **info(),
    }


def write(file: Path, **results: object) -> None:
    """Write results with their conditions as JSON, on the first rank."""
    if is_first_rank():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"about": conditions(), **results}, indent=1))


@contextlib.contextmanager
def session() -> Iterator[torch.device]:
    """Print the conditions, and yield the device to measure on: a GPU if there is one, otherwise one thread of the CPU.
    Under torchrun there is a process group until the end."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
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
