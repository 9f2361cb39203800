"""Runs python -m syncbn info|check.

    python -m syncbn --version                                       which syncbn this is
    python -m syncbn info                                            what is installed and used
    torchrun --standalone --nproc-per-node 2 -m syncbn check         do these ranks equal one, and what does that cost

check takes as many ranks on as many hosts as torchrun gives it: nccl when each has a GPU, else gloo. Rank 0 prints. The
exit status is 0 when all is well, 1 when W ranks do not equal one, 2 for a bad command line.
"""

import argparse
import importlib.metadata
import os
import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
import torch.distributed as dist

import syncbn
from syncbn.tools.check import check

SET_BY_TORCHRUN = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
VARIABLES = ("SYNCBN_KERNELS", "OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def main() -> int:
    """Runs the command and returns the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m syncbn", description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"syncbn {syncbn.__version__}")
    parser.add_argument("command", choices=("info", "check"))
    missing = [name for name in SET_BY_TORCHRUN if name not in os.environ]
    if parser.parse_args().command == "info":
        passed, text = True, "\n".join(f"{name:33}  {value}" for name, value in info().items())
    elif "RANK" in os.environ and missing:
        remedy = "torchrun sets all of them. To check one process, unset RANK"
        parser.error(f"RANK is set, but not {', '.join(missing)}; {remedy}")
    else:
        passed, text = _check_here()
    if "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0":  # a cluster's shell may have a RANK alone
        print(text)
    return 0 if passed else 1


def info() -> dict[str, str]:
    """What is installed, and what of it syncbn can use, by name."""
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return {
        "syncbn": f"{syncbn.__version__}, {Path(__file__).resolve().parent}",
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": next(
            (package.version for package in importlib.metadata.distributions(name="triton")), "not installed"
        ),
        "cuda": torch.version.cuda or "none",
        "gpus": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none",
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, torch threads: {torch.get_num_threads()}",
        "kernels": syncbn.kernels.available(),
        "backends": ", ".join(backends) or "none",
        "environment": " ".join(variables) or "none of " + " ".join(VARIABLES),
        "apex's module of the same name": _apex(),
    }


def _apex() -> str:
    """Finds the extension module `syncbn` that apex, built with APEX_CUDA_EXT=1, installs at the top level."""
    paths = (Path(folder, f"syncbn{suffix}") for folder in sys.path for suffix in EXTENSION_SUFFIXES)
    modules = ", ".join(str(path) for path in paths if path.exists())
    return f"{modules}: `import syncbn` finds the package where both lie in one folder" if modules else "none"


def _check_here() -> tuple[bool, str]:
    """Checks the ranks that torchrun has started, else this process."""
    device = torch.device("cpu")
    if "RANK" not in os.environ:
        return check(device)
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        device = torch.device("cuda", local_rank % num_gpus)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if num_gpus >= local_size else "gloo")  # nccl refuses two ranks on one GPU
    try:
        return check(device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
