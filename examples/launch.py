"""What all jobs here share: the ranks that torchrun has started, checkpoints, a progress bar and a table."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import platform
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LINE_EVERY = 50  # steps, without rich


def run_on_ranks(job: Callable[[torch.device], None], timeout: float = 60) -> None:
    """Call `job` with this rank's device, between the making and the end of the process group, which no model of it
    may outlive. A rank waits `timeout` seconds for the others."""
    device = choose_device(timeout)
    try:
        job(device)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def rank() -> int:
    """Of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def choose_device(timeout: float) -> torch.device:
    """Join the process group that torchrun describes, if it does; a GPU of one's own, or the CPU."""
    local_ranks, local_rank = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    own_gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if own_gpu else torch.device("cpu")
    if own_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if own_gpu else "gloo", timeout=timedelta(seconds=timeout))
    return device


def save(state: object, path: Path) -> None:
    """Whole or not at all: the file gets its name when it is on the disk."""
    unfinished = path.with_name(f"{path.name} unfinished by {platform.node()} {os.getpid()}")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: Path) -> Any:
    """What `save` wrote, or None where there is no file yet, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in path.parent.glob(f"{glob.escape(path.name)} unfinished by *"):  # a process that was killed as it wrote
        file.unlink(missing_ok=True)
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


@contextlib.contextmanager
def progress_bar(done: int, total: int) -> Iterator[Callable[[str], None]]:
    """Yields what to call after each step from `done` to `total`, with what to show; rank 0 shows it."""
    if rank() != 0:
        yield lambda text: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        step = itertools.count(1)
        yield lambda text: print(text) if next(step) % LINE_EVERY == 0 else None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("training", completed=done, total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def print_table(title: str, rows: list[tuple[str, ...]]) -> None:
    """The first row holds the headings."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title, *("  ".join(cell.rjust(14) for cell in row) for row in rows), sep="\n")
        return
    table = Table(title=title)
    for index, heading in enumerate(rows[0]):
        table.add_column(heading, justify="right" if index else "left")
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)
