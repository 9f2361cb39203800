"""What every job needs: options, a process group, slices of a batch, and progress on rank 0."""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

SECONDS_BETWEEN_LINES = 10  # If the output is not a terminal, progress is a line every 10 seconds.


class ManualFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description unchanged, and the default of each option."""


def new_parser(manual: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with the option that all jobs have. The manual is the docstring of the job."""
    parser = argparse.ArgumentParser(description=manual, formatter_class=ManualFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="folder for metrics.json and pictures")
    return parser


def run_on_ranks(job: Callable[[argparse.Namespace, torch.device], None], parser: argparse.ArgumentParser) -> None:
    """Create the process group and call `job` with the options and the device of this rank.

    If the host has a GPU for each of its ranks, each rank gets a GPU. Otherwise all ranks use the CPU. A process that
    torchrun has not started is the only rank.
    """
    arguments = parser.parse_args()
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(1)
    only_rank = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **only_rank)
    try:
        job(arguments, device)
    finally:
        gc.collect()  # The models must be freed before the process group. FSDP2 models are in reference cycles.
        dist.destroy_process_group()


def local_slice(batch: Tensor) -> Tensor:
    """Return this rank's slice of the whole batch."""
    return batch.tensor_split(dist.get_world_size())[dist.get_rank()]


@contextmanager
def progress(step: int, num_steps: int) -> Iterator[Callable[[str], None]]:
    """Show the progress on rank 0: a bar, or lines if the output is not a terminal.

    The job calls the yielded function after each step, with a text such as the loss, which is shown next to the number
    of steps. `step` is the number of steps that a resumed job has already done.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    is_terminal, time_of_line = sys.stdout.isatty(), time.monotonic()
    with Progress(*columns, disable=dist.get_rank() != 0 or not is_terminal) as bar:
        task = bar.add_task("training", completed=step, total=num_steps)

        def advance(text: str) -> None:
            nonlocal step, time_of_line
            step += 1
            bar.update(task, completed=step, description=text)
            is_due = step == num_steps or time.monotonic() - time_of_line > SECONDS_BETWEEN_LINES
            if dist.get_rank() == 0 and not is_terminal and is_due:
                print(f"{step}/{num_steps}  {text}", flush=True)
                time_of_line = time.monotonic()

        yield advance
