"""What every job needs: options, the ranks that torchrun has started, checkpoints, and progress on rank 0."""

import argparse
import contextlib
import gc
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SECONDS_BETWEEN_LINES = 10  # between lines of progress, without a terminal


class ManualFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description unchanged, and the default of each option."""


def new_parser(manual: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with the option that all jobs have. The manual is the docstring of the job."""
    parser = argparse.ArgumentParser(description=manual, formatter_class=ManualFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="folder for metrics.json and pictures")
    return parser


def positive(text: str) -> int:
    """Convert the text of an option to a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def run_on_ranks(job: Callable[[argparse.Namespace, torch.device], None], parser: argparse.ArgumentParser) -> None:
    """Call `job` with the options and the device of this rank. Under torchrun, create the process group first.

    If the host has a GPU for each of its ranks, each rank gets a GPU. Otherwise all ranks use the CPU.
    """
    arguments = parser.parse_args()
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    else:
        device, backend = torch.device("cpu"), "gloo"
        torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    try:
        job(arguments, device)
    finally:
        gc.collect()  # The models must be freed before the process group. FSDP2 models are in reference cycles.
        if dist.is_initialized():
            dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_slice(batch: Tensor) -> Tensor:
    """Return the slice of this rank of a whole batch."""
    return batch.tensor_split(world_size())[rank()]


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Add up a tensor over all ranks, in place, and return the tensor."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def parallel(model: nn.Module) -> nn.Module:
    """Wrap the model in DistributedDataParallel without its broadcast of buffers, if there is a process group.

    Layers of syncbn compute equal running statistics on all ranks. Without the broadcast, ranks wait for a stalled rank
    in a layer of syncbn, which reports the positions of all ranks. Layers of nn.BatchNorm keep the running statistics
    of their rank. Before torch 2.13 DDP then does not send the initial buffers either, so load a checkpoint on every
    rank, as `load` does.
    """
    if not dist.is_initialized():
        return model
    options = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    return DistributedDataParallel(model, **{name: False})


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write the checkpoint on rank 0. The file gets its name when it is complete."""
    if rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        torch.save(checkpoint, unfinished)
        unfinished.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """Read the checkpoint on rank 0 and return it on all ranks. Return None if there is no file."""
    checkpoint = None
    if rank() == 0 and path.exists():
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    objects = [checkpoint]
    if dist.is_initialized():
        dist.broadcast_object_list(objects, src=0)
    return objects[0]


@contextlib.contextmanager
def progress(step: int, num_steps: int) -> Iterator[Callable[[str], None]]:
    """Yield a function to call after each step with a text. On rank 0 it shows a bar or, without a terminal, prints
    lines. `step` is the number of steps that a resumed job has already done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    is_terminal, last_line = sys.stdout.isatty(), time.monotonic()
    with Progress(*columns, disable=rank() != 0 or not is_terminal) as bar:
        task = bar.add_task("training", completed=step, total=num_steps)

        def advance(text: str) -> None:
            nonlocal step, last_line
            step += 1
            bar.update(task, completed=step, description=text)
            now = time.monotonic()
            if rank() == 0 and not is_terminal and (step == num_steps or now - last_line > SECONDS_BETWEEN_LINES):
                print(f"{step}/{num_steps}  {text}", flush=True)
                last_line = now

        yield advance
