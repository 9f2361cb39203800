"""Shared by all jobs: options, the ranks that torchrun has started, checkpoints, progress on rank 0, results."""

import argparse
import contextlib
import gc
import glob
import inspect
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plots import STYLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

START = time.monotonic()
LINE_EVERY = 10  # seconds between lines, without a terminal


class ManualFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows a docstring as it is written, and the default of each option."""


def new_parser(manual: str, name: str, timeout: float = 60) -> argparse.ArgumentParser:
    """Return a parser with the options of all jobs."""
    parser = argparse.ArgumentParser(description=manual, formatter_class=ManualFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="folder for metrics.json and pictures")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds that a rank waits in a collective")
    return parser


def positive(text: str) -> int:
    """Convert an option that must be a whole number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def run_on_ranks(job: Callable[[argparse.Namespace, torch.device], None], parser: argparse.ArgumentParser) -> None:
    """Call `job` with the options and this rank's device, in the process group that torchrun describes, if any.
    Each rank has its own GPU, or all ranks use the CPU."""
    arguments = parser.parse_args()
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=arguments.timeout))
    try:
        job(arguments, device)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finally:
        gc.collect()  # The models must be freed before the process group; FSDP's are in reference cycles.
        if dist.is_initialized():
            dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def own(batch: Tensor) -> Tensor:
    """Return this rank's slice of a whole batch."""
    return batch.tensor_split(world_size())[rank()]


def parallel(model: nn.Module) -> nn.Module:
    """Wrap the model in DistributedDataParallel if there are ranks, without a broadcast of the buffers in each forward.

    syncbn computes equal running statistics on all ranks, so the broadcast is not needed. Without it a rank whose peer
    stalls waits in a syncbn layer, which reports both positions. (nn.BatchNorm then keeps each rank's own statistics.)
    Before torch 2.13 DDP does not send the buffers at its construction either: load a checkpoint on every rank, as
    `resume` does.
    """
    if not dist.is_initialized():
        return model
    options = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    return DistributedDataParallel(model, **{name: False})


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def save(state: object, path: Path) -> None:
    """Write a checkpoint atomically: the file gets its name after it has been written to the disk."""
    unfinished = path.with_name(f"{path.name} unfinished by {platform.node()} {os.getpid()}")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: Path) -> Any:
    """Return the state that `save` wrote, or None without a file. Make the folder for the next `save`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in path.parent.glob(f"{glob.escape(path.name)} unfinished by *"):  # left by a process that was killed
        file.unlink(missing_ok=True)
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def resume(path: Path, settings: dict[str, str]) -> Any:
    """Load a checkpoint on rank 0 and return it on every rank, or None without a file.

    **Exits** on every rank if the file is not a checkpoint, or if its "settings" differ.
    """
    state, reason = None, None
    try:
        if rank() == 0 and (state := load(path)) is not None:
            for name, saved in state["settings"].items():
                if saved != settings[name]:
                    reason = f"{path} was made with {name} {saved}, not {settings[name]}; give another --checkpoint"
    except Exception as error:  # A damaged file may raise any exception.
        reason = f"{path} is not a checkpoint of this job; give another --checkpoint ({type(error).__name__}: {error})"
    results = [state, reason]
    if dist.is_initialized():
        dist.broadcast_object_list(results)
    state, reason = results
    if reason is not None:
        sys.exit(reason if rank() == 0 else 1)
    return state


@contextlib.contextmanager
def progress_bar(done: int, total: int) -> Iterator[Callable[[str], None]]:
    """Yield the function to call after each step from `done` to `total`, with the text to show."""
    if rank() != 0:
        yield lambda text: None
    elif sys.stdout.isatty():
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as progress:
            task = progress.add_task("training", completed=done, total=total)
            yield lambda text: progress.update(task, advance=1, description=text)
    else:
        steps, printed = itertools.count(done + 1), time.monotonic()

        def print_sometimes(text: str) -> None:
            nonlocal printed
            step, now = next(steps), time.monotonic()
            if step == total or now - printed > LINE_EVERY:
                print(f"{step}/{total}  {text}", flush=True)
                printed = now

        yield print_sometimes


def print_table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(headings[0], *(Column(heading, justify="right") for heading in headings[1:]), title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def write(
    arguments: argparse.Namespace,
    metrics: dict[str, Any],
    file: str = "metrics.json",
    **pictures: Callable[[Any], None],
) -> None:
    """Write the metrics as JSON, with their conditions, and the pictures that functions draw on matplotlib figures."""
    seconds = time.monotonic() - START
    conditions = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else platform.machine(),
        "ranks": world_size(),
        "seconds": seconds,
        "settings": {name: str(value) for name, value in vars(arguments).items()},
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / file).write_text(json.dumps(conditions | metrics, indent=1))
    for name, draw in pictures.items():
        from matplotlib import rc_context  # Not every job draws, and a machine for benchmarks may lack matplotlib.
        from matplotlib.figure import Figure

        with rc_context(STYLE):
            draw(figure := Figure(layout="constrained"))
            figure.savefig(arguments.output / f"{name}.png", dpi=120)
    files = file, *(f"{name}.png" for name in pictures)
    print(f"{seconds:.0f} s; wrote to {arguments.output}: {', '.join(files)}")
