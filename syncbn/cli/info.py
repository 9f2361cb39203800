"""Lists for `python -m syncbn info` what is installed, and what of it syncbn can use."""

import importlib.metadata
import os
import platform
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
import torch.distributed as dist

import syncbn

VARIABLES = ("SYNCBN_KERNELS", "SYNCBN_DEBUG", "OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def info() -> dict[str, str]:
    """The lines of the table, by their names."""
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_backend_available(name)]
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    return {
        "syncbn": f"{syncbn.__version__}, {Path(__file__).resolve().parents[1]}",
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": next((found.version for found in importlib.metadata.distributions(name="triton")), "not installed"),
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
    found = ", ".join(str(path) for path in paths if path.exists())
    return f"{found}: `import syncbn` finds the package where both lie in one folder" if found else "none"
