"""Runs python -m syncbn info|check.

    python -m syncbn --version                                       which syncbn this is
    python -m syncbn info                                            what is installed and used
    torchrun --standalone --nproc-per-node 2 -m syncbn check         do these ranks equal one, and what does that cost

check takes as many ranks on as many hosts as torchrun gives it: nccl when each has a GPU, else gloo. Rank 0 prints. The
exit status is 0 when all is well, 1 when W ranks do not equal one, 2 for a bad command line.
"""

import argparse
import json
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import syncbn
from syncbn.cli.check import check
from syncbn.cli.info import info
from syncbn.tools.table import table

SET_BY_TORCHRUN = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
TORCHRUN = "torchrun --standalone --nproc-per-node 2 -m syncbn check"


def main() -> int:
    """Runs the command and returns the exit status."""
    arguments = _parse_arguments()
    results: Any
    if arguments.command == "info":
        results, passed = info(), True
        width = max(map(len, results))
        described = "\n".join(f"{name:{width}}  {value}" for name, value in results.items())
    else:
        results = _check_here(arguments.layers, arguments.channels)
        passed, described = results.passed, _described(results)
    if "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0":  # a cluster's shell may have a RANK alone
        print(json.dumps(results, indent=2, default=vars) if arguments.json else described)
    return 0 if passed else 1


def _parse_arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m syncbn", description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"syncbn {syncbn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("info", "what is installed and used"), ("check", "do these ranks equal one")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--json", action="store_true", help="print JSON in place of tables")
    command = commands.choices["check"]
    layers = "of a model, whose cost is printed (default %(default)s, as ResNet-50 has)"
    command.add_argument("--layers", type=_positive, default=53, help=layers)
    command.add_argument("--channels", type=_positive, default=256, help="of each layer (default %(default)s)")
    arguments = parser.parse_args()
    missing = [name for name in SET_BY_TORCHRUN if name not in os.environ]
    if arguments.command == "check" and "RANK" in os.environ and missing:
        remedy = f"torchrun sets all of them: {TORCHRUN}. To check one process, unset RANK"
        parser.error(f"RANK is set, but not {', '.join(missing)}; {remedy}")
    return arguments


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _check_here(num_layers: int, num_channels: int) -> SimpleNamespace:
    """Checks the ranks that torchrun has started, else this process."""
    device = torch.device("cpu")
    if "RANK" not in os.environ:
        return check(device, num_layers, num_channels)
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        device = torch.device("cuda", local_rank % num_gpus)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if num_gpus >= local_size else "gloo")  # nccl refuses two ranks on one GPU
    try:
        return check(device, num_layers, num_channels)
    finally:
        dist.destroy_process_group()


def _described(results: SimpleNamespace) -> str:
    ranks = f"{results.ranks} rank{'s' * (results.ranks > 1)} ({results.backend}, {results.device})"
    rows = [(row.dtype, row.what, f"{row.error:.1e}", f"{row.allowed:.1e}") for row in results.accuracy]
    cost = f"One rank has nothing to synchronise: {TORCHRUN}"
    if results.ranks > 1:
        times = [("all_reduce", f"{1e3 * results.seconds['all_reduce']:.2f} ms")]
        step = f"step, {results.layers} layers", f"{1e3 * results.seconds['step']:.1f} ms"
        cost = f"a layer of {results.channels} channels\n{table(('of', 'time'), times, step)}"
    lines = (
        f"{ranks} and one process with the whole batch; kernels {results.kernels}",
        table(("dtype", "what", "error", "allowed"), rows),
        cost,
        results.synced,
        "Which layers of your model gain from synchronisation: help(syncbn.measure_local_noise)",
        "passed" if results.passed else "FAILED: these ranks do not train as one process does",
    )
    return "\n".join(filter(None, lines))


if __name__ == "__main__":
    raise SystemExit(main())
