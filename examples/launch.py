"""What all jobs here share: options, the ranks that torchrun has started, checkpoints, printing on rank 0, results.
Without rich there are plain lines, and without matplotlib no pictures."""

import argparse
import contextlib
import gc
import glob
import importlib.util
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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

START = time.monotonic()  # of the job
LINE_EVERY = 10  # seconds, without a terminal or rich


class ManualFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows a docstring as it is written, and the default of each option."""


def new_parser(manual: str, name: str, timeout: float = 60) -> argparse.ArgumentParser:
    """A parser with the options of all jobs."""
    parser = argparse.ArgumentParser(description=manual, formatter_class=ManualFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="folder for metrics.json and pictures")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds that a rank waits for the others")
    return parser


def positive(text: str) -> int:
    """Converts the text of an option that must be a whole number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def run_on_ranks(job: Callable[[argparse.Namespace, torch.device], None], parser: argparse.ArgumentParser) -> None:
    """Call `job` with the options and this rank's device, in the process group that torchrun describes, if it does.
    Each rank has a GPU of its own, or all have the CPU."""
    arguments = parser.parse_args()
    own_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if own_gpu else torch.device("cpu")
    if own_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if own_gpu else "gloo", timeout=timedelta(seconds=arguments.timeout))
    try:
        job(arguments, device)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    finally:
        gc.collect()  # no model may outlive the process group, and FSDP's are in reference cycles
        if dist.is_initialized():
            dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def own(whole: Tensor) -> Tensor:
    """This rank's slice of a whole batch."""
    return whole.tensor_split(world_size())[rank()]


def parallel(model: nn.Module) -> nn.Module:
    """The model under DistributedDataParallel, where there are ranks."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def sum_over_ranks(numbers: Tensor) -> Tensor:
    """The same tensor, with the sums."""
    if dist.is_initialized():
        dist.all_reduce(numbers)
    return numbers


def save(state: object, path: Path) -> None:
    """Write a checkpoint, whole or not at all: the file gets its name when it is on the disk."""
    unfinished = path.with_name(f"{path.name} unfinished by {platform.node()} {os.getpid()}")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: Path) -> Any:
    """What `save` wrote, or None where there is no file yet. Makes the folder, for the next `save`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file in path.parent.glob(f"{glob.escape(path.name)} unfinished by *"):  # a process that was killed as it wrote
        file.unlink(missing_ok=True)
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def resume(path: Path, settings: dict[str, str]) -> Any:
    """What rank 0 loads, on every rank. **Exits** with the reason where it cannot, or the "settings" differ."""
    state, reason = None, None
    try:
        if rank() == 0 and (state := load(path)) is not None:
            for name, made_with in state["settings"].items():
                if made_with != (now := settings[name]):
                    reason = f"{path} was made with {name} {made_with}, not {now}; give another --checkpoint"
    except Exception as error:  # a damaged file may raise almost any
        reason = f"{path} is not a checkpoint of this job; give another --checkpoint ({type(error).__name__}: {error})"
    box = [state, reason]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    state, reason = box
    if reason is not None:
        sys.exit(reason if rank() == 0 else 1)
    return state


@contextlib.contextmanager
def progress_bar(done: int, total: int) -> Iterator[Callable[[str], None]]:
    """Yields the function to call after each step from `done` to `total`, with the text to show."""
    if rank() != 0:
        yield lambda text: None
        return
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        steps, printed = itertools.count(done + 1), time.monotonic()

        def print_sometimes(text: str) -> None:
            nonlocal printed
            step, now = next(steps), time.monotonic()
            if step == total or now - printed > LINE_EVERY:
                print(f"{step}/{total}  {text}", flush=True)
                printed = now

        yield print_sometimes
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("training", completed=done, total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def print_table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        print(title, *("  ".join(cell.rjust(14) for cell in row) for row in (headings, *rows)), sep="\n")
        return
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
    """Write a JSON file, with how it was made, and the pictures that functions draw on a matplotlib figure."""
    seconds = time.monotonic() - START
    made = {
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
    (arguments.output / file).write_text(json.dumps(made | metrics, indent=1))
    for name, draw in pictures.items():
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError as error:
            print(f"no picture: {error}")
            break
        with rc_context(STYLE):
            draw(figure := Figure(layout="constrained"))
            figure.savefig(arguments.output / f"{name}.png", dpi=120)
    written = file, *(f"{name}.png" for name in pictures)
    print(f"{seconds:.0f} s; wrote to {arguments.output}: {', '.join(written)}")
