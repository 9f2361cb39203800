"""Runs python -m syncbn info|check.

    python -m syncbn --version                                       which syncbn this is
    python -m syncbn info                                            what is installed and used
    torchrun --standalone --nproc-per-node 2 -m syncbn check         whether these ranks train as one process does

check runs on any number of ranks and hosts, with nccl if each rank of the host has a GPU, otherwise with gloo. Rank 0
prints the result. The exit status is 0 if the check has passed, 1 if it has failed, and 2 for an invalid command line.
"""

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import syncbn
from syncbn.summaries import table
from syncbn.testing import TOLERANCES, differences, unequal

VARIABLES = ("SYNCBN_KERNELS", "SYNCBN_CHECKS", "OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def main() -> int:
    """Run the command, and return the exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m syncbn", description=__doc__, formatter_class=formatter)
    parser.add_argument("--version", action="version", version=f"syncbn {syncbn.__version__}")
    parser.add_argument("command", choices=("info", "check"))
    if parser.parse_args().command == "info":
        passed, text = True, "\n".join(f"{name:33}  {value}" for name, value in info().items())
    else:
        passed, text = _check_here()
    # Some clusters set RANK but not LOCAL_RANK in shells that torchrun did not start.
    if "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0":
        print(text)
    return 0 if passed else 1


def info() -> dict[str, str]:
    """Return, by name, the installed versions and the kernels, backends and hardware that syncbn can use."""
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    triton = [package.version for package in importlib.metadata.distributions(name="triton")]
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return {
        "syncbn": f"{syncbn.__version__}, {Path(__file__).resolve().parent}",
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton[0] if triton else "not installed",
        "cuda": torch.version.cuda or "none",
        "gpus": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none",
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, torch threads: {torch.get_num_threads()}",
        "kernels": syncbn.kernels.available(),
        "backends": ", ".join(backends) or "none",
        "environment": " ".join(variables) or "none of " + " ".join(VARIABLES),
    }


def _check_here() -> tuple[bool, str]:
    """Check the ranks that torchrun has started or, without torchrun (LOCAL_RANK is not set), this process."""
    device = torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return check(device)
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        device = torch.device("cuda", local_rank % num_gpus)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if num_gpus >= local_size else "gloo")  # nccl refuses two ranks on one GPU.
    try:
        return check(device)
    finally:
        dist.destroy_process_group()


def check(device: torch.device) -> tuple[bool, str]:
    """Train a small model in float64 and float32, on the ranks of the default group (or in this process if there is
    none), and compare with one process. Return whether all tensors agree, and a report; both are equal on all ranks."""
    world = dist.group.WORLD
    size, backend = (1, "none") if world is None else (world.size(), dist.get_backend(world))
    rows, errors = [], []
    passed = True
    for dtype, allowed in TOLERANCES.items():
        torch.manual_seed(0)
        model = syncbn.convert_syncbn_model(_model()).to(device, dtype)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(2 * size + 1, 3, 16, 16, generator=generator, device="cpu")  # Slices are uneven.
        labels = torch.randint(10, (len(images),), generator=generator, device="cpu")
        with torch.backends.cudnn.flags(allow_tf32=False):
            compared, trained = differences(model, (images.to(device, dtype), labels.to(device)), F.cross_entropy)
        for what in dict.fromkeys(difference.what for difference in compared):
            errors_of_kind = [difference.relative for difference in compared if difference.what == what]
            largest = float(torch.tensor(errors_of_kind, dtype=torch.float64, device="cpu").max())  # This keeps NaN.
            passed = passed and largest <= allowed
            rows.append((str(dtype).removeprefix("torch."), what, f"{largest:.1e}", f"{allowed:.1e}"))
        if world is not None and (names := unequal(trained.state_dict())):
            errors.append(f"{dtype}: the ranks have different values of {', '.join(names)}")
    passed = passed and not errors
    verdict = "passed" if passed else "FAILED: these ranks do not train as one process does"
    if passed and size == 1:
        verdict = "passed on one rank: no ranks were compared; start the check with torchrun to compare some"
    lines = (
        f"{size} rank{'s' * (size > 1)} ({backend}, {device}) and one process with the whole batch; "
        f"kernels {syncbn.kernels.available()}",
        table(("dtype", "what", "error", "allowed"), rows),
        *errors,
        verdict,
    )
    return passed, "\n".join(lines)


def _model() -> nn.Module:
    """Return a model that maps (N, 3, 16, 16) to (N, 10)."""
    layers: list[nn.Module] = []
    with torch.device("cpu"):
        for num_channels in (3, 8):
            layers += nn.Conv2d(num_channels, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 10), nn.BatchNorm1d(10))


if __name__ == "__main__":
    raise SystemExit(main())
