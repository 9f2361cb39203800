"""Time what the host does in a training step on a GPU, without a GPU: launches and collectives that do nothing.

    python scripts/bench.py launches

Triton gets a driver whose launches return at once, for a GPU of capability 9.0; the tensors are in the host's memory.
Triton's own code compiles, caches and launches the kernels. "with a group" is a process group of two ranks whose
all_reduce does nothing (torch's "fake" backend). Microseconds of processor time: medians over rounds of the mean of 100
steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import triton
from benchmarks.measuring import Session, in_turn, session
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget

import syncbn
from syncbn.kernels import gpu, select
from syncbn.layout import Layout

STEPS = 100  # of a round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="(default %(default)s)")


DRIVER = SimpleNamespace(  # of an H100
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
        load_binary=lambda *kernel: (1, 1, 32, 0, 1024),  # module, function, registers, spills, most threads
    ),
    launcher_cls=lambda source, metadata: lambda *arguments: None,
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)


def time_steps(layer: nn.Module) -> tuple[float, float]:
    """Microseconds of forward and backward."""
    x, dy = torch.randn(2, 8, 2, 2, requires_grad=True), torch.randn(2, 8, 2, 2)
    forward = backward = 0.0
    for _ in range(STEPS):
        x.grad = None
        start = time.thread_time()
        y = layer(x)
        middle = time.thread_time()
        y.backward(dy)
        forward, backward = forward + middle - start, backward + time.thread_time() - middle
    return forward / STEPS * 1e6, backward / STEPS * 1e6


def show(here: Session, layers: dict[str, nn.Module], rounds: int) -> None:
    """A line for each layer."""
    calls = {name: partial(time_steps, layer) for name, layer in layers.items()}
    for name, samples in in_turn(calls, rounds, warm_up=1).items():
        forward, backward = map(statistics.median, zip(*samples, strict=True))
        here.print(f"{name:27} forward {forward:6.1f} us   backward {backward:6.1f} us")


def run(arguments: argparse.Namespace) -> None:
    def new_plan(x: Tensor, layout: Layout, **options: Any) -> gpu.Plan:
        """As for a tensor on a GPU."""
        return gpu.Plan(layout, x.dtype, x.device, **options)

    with session(on_cpu=True) as here:
        here.print(f"triton: {triton.__version__}")
        triton.runtime.driver.set_active(DRIVER)
        select.new_plan = new_plan
        layers = {"nn.BatchNorm2d, on the CPU": nn.BatchNorm2d(8), "syncbn": syncbn.SyncBatchNorm2d(8)}
        show(here, layers, arguments.rounds)
        options = FakeProcessGroup.Options()
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore(), pg_options=options)
        show(here, {"syncbn with a group": syncbn.SyncBatchNorm2d(8)}, arguments.rounds)
