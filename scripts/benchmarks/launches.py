"""Time what the host does in a training step on a GPU, without a GPU: launches and collectives that do nothing.

    python scripts/bench.py launches

Triton gets a driver whose launches return at once, for a GPU of capability 9.0; the tensors are in the host's memory.
Triton's own code compiles, caches and launches the kernels. "with a group" is a process group of two ranks whose
all_reduce does nothing (torch's "fake" backend). Microseconds of processor time: medians over rounds of the mean of 100
steps.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import triton
from benchmarks.measuring import Session, in_turn, session
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.compiler import GPUTarget

import syncbn
from syncbn import kernel_cache
from syncbn.kernels import gpu

CHANNELS = 8
STEPS = 100  # of a round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15, help="(default %(default)s)")


def stand_in_driver(capability: int, launch: Callable[..., None]) -> SimpleNamespace:
    """What Triton asks of a driver, for a GPU of this capability. `launch` gets a kernel's source and metadata, and all
    that a launch passes; the binary stands for the function that is loaded from it."""
    return SimpleNamespace(
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 << 10},
            load_binary=lambda name, binary, *_: (1, binary, 32, 0, 1024),  # module, registers, spills, most threads
            unload_module=lambda module: None,
        ),
        launcher_cls=lambda source, metadata: partial(launch, source, metadata),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )


def time_steps(layer: nn.Module) -> tuple[float, float]:
    """Microseconds of forward and backward, means of STEPS steps."""
    x, dy = torch.randn(2, CHANNELS, 2, 2, requires_grad=True), torch.randn(2, CHANNELS, 2, 2)
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
    calls = {name: partial(time_steps, layer) for name, layer in layers.items()}
    for name, samples in in_turn(calls, rounds, warm_up=1).items():
        forward, backward = map(statistics.median, zip(*samples, strict=True))
        here.print(f"{name:27} forward {forward:6.1f} us   backward {backward:6.1f} us")


def run(arguments: argparse.Namespace) -> None:
    with session(on_cpu=True) as here:
        here.print(f"triton: {triton.__version__}")
        triton.runtime.driver.set_active(stand_in_driver(90, lambda *launch: None))
        kernel_cache.fast_path_back_end = lambda kind: gpu
        torch.Tensor.is_cpu, torch.Tensor.is_cuda = False, True  # as of a GPU
        layers = {"nn.BatchNorm2d, on the CPU": nn.BatchNorm2d(CHANNELS), "syncbn": syncbn.SyncBatchNorm2d(CHANNELS)}
        show(here, layers, arguments.rounds)
        options = FakeProcessGroup.Options()
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore(), pg_options=options)
        show(here, {"syncbn with a group": syncbn.SyncBatchNorm2d(CHANNELS)}, arguments.rounds)
