"""Time what the host does in a training step on a GPU, without a GPU: launches and collectives that do nothing.

    python scripts/bench_launches.py

Triton gets a driver whose launches return at once, for a GPU of capability 9.0; the tensors are in the host's memory.
Kernels are compiled, cached and launched by Triton's own code. "with a group" is a process group of two ranks whose
all_reduce does nothing (torch's "fake" backend). Microseconds of processor time: medians over rounds of the mean of 100
steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget

import syncbn
from syncbn.kernels import gpu, select
from syncbn.kernels.plans import TensorPlan
from syncbn.layout import Layout

STEPS = 100  # of a round


class Utils:
    """Of the driver."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Those that Triton asks for."""
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *kernel: object) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, most threads."""
        return 1, 1, 32, 0, 1024


class Launcher:
    """Returns at once."""

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *arguments: object) -> None:
        pass


class Driver:
    """Stands in for a GPU."""

    launcher_cls, utils = Launcher, Utils()

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """An H100."""
        return GPUTarget("cuda", 90, 32)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


def timed(layer: nn.Module, steps: int) -> tuple[float, float]:
    """Microseconds of forward and backward."""
    x, dy = torch.randn(2, 8, 2, 2, requires_grad=True), torch.randn(2, 8, 2, 2)
    forward = backward = 0.0
    for _ in range(steps):
        x.grad = None
        start = time.thread_time()
        y = layer(x)
        middle = time.thread_time()
        y.backward(dy)
        forward, backward = forward + middle - start, backward + time.thread_time() - middle
    return forward / steps * 1e6, backward / steps * 1e6


def table(layers: dict[str, nn.Module], rounds: int) -> None:
    """Print a line for each layer."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    for index in range(1 + rounds):
        for name, layer in layers.items():
            taken = timed(layer, STEPS)
            if index:
                samples[name].append(taken)
    for name, of_rounds in samples.items():
        forward, backward = (statistics.median(times) for times in zip(*of_rounds, strict=True))
        print(f"{name:27} forward {forward:6.1f} us   backward {backward:6.1f} us")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="(default %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(Driver())

    def new_plan(x: Tensor, layout: Layout, **options: Any) -> TensorPlan:
        """As for a tensor on a GPU, which is not signed."""
        return TensorPlan(gpu, layout, **options)

    select.new_plan = new_plan
    print(f"Triton {triton.__version__}, torch {torch.__version__}")
    table({"nn.BatchNorm2d, on the CPU": nn.BatchNorm2d(8), "syncbn": syncbn.SyncBatchNorm2d(8)}, arguments.rounds)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    table({"syncbn with a group": syncbn.SyncBatchNorm2d(8)}, arguments.rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
