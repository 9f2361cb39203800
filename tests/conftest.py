"""Settings of all tests: one thread, and NaN in memory that a kernel leaves unwritten. A fixture with each back end."""

import gc
import importlib.metadata
import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncbn import testing
from syncbn.kernels import cpu, reference, select

# Without this variable matrix products on a GPU raise under use_deterministic_algorithms. cuBLAS reads it at its start.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="how often test_crashes.py kills a rank (default: 2)")
    parser.addoption(
        "--fuzz-cases", type=int, default=100, help="number of programs that test_fuzz.py draws (default: 100)"
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="seed of the programs (default: 0)")
    parser.addoption("--large", action="store_true", help="also run tests that need many GB")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which takes a tenth of the time on ranks otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    torch.set_num_threads(1)  # up to four ranks share two cores
    torch.backends.cudnn.allow_tf32 = False  # TF32 has 10 bits, so its rounding errors are 1,000 times larger
    assert torch.utils.deterministic.fill_uninitialized_memory  # Deterministic algorithms fill it with NaN.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def interpret_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip two steps that take half of the time of Triton's interpreter and change no result.

    They are the overflow check of each integer operation, whose result is ignored without `debug`, and the patching of
    Triton's language in each function call, because the launch has patched it.
    """
    if not importlib.metadata.version("triton").startswith("3.6."):
        return  # Other versions may have other names.
    import triton.language
    from triton.runtime import interpreter

    from syncbn.kernels import gpu_channels, gpu_tiles

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function.rewrite()(*args, **kwargs)

    options, core = interpreter.InterpreterOptions(sanitize_overflow=False), triton.language.core
    patches = [
        (interpreter.interpreter_builder, "options", options),
        (interpreter.InterpretedFunction, "__call__", call),
    ]
    # The launch patches the modules in a kernel's globals. For Triton's own functions `core` must be among them.
    patches += [(module, "core", core) for module in (gpu_channels, gpu_tiles)]
    for patch in patches:
        monkeypatch.setattr(*patch, raising=False)


@pytest.fixture(params=["reference", "cpu", "operators", pytest.param("triton", marks=pytest.mark.triton)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return each back end. New tensors are on its device. On a CPU Triton's interpreter runs the kernels. The
    parameter "chunks" is the reference without gradients, which computes one chunk after another."""
    if request.param != "triton":
        if request.param in ("cpu", "operators") and (reason := cpu.load()):
            pytest.skip(reason)
        if request.param == "chunks":
            monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 48)  # The last of 49 columns is a chunk alone.
            with torch.no_grad():
                yield reference
        else:
            yield importlib.import_module(f"syncbn.kernels.{request.param}")
        return
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (interpreted or torch.cuda.is_available()):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    if interpreted:
        interpret_faster(monkeypatch)
    with torch.device("cpu" if interpreted else "cuda"), warnings.catch_warnings():
        # NumPy warns of infinities and scalars in the interpreter.
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield importlib.import_module("syncbn.kernels.gpu")


@pytest.fixture(params=["", "reference"])
def syncbn_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set SYNCBN_KERNELS as for a new process, and return the value."""
    from equal_to_torch import clear_kernel_caches  # scripts/package.sh copies this file without equal_to_torch.py

    monkeypatch.setenv("SYNCBN_KERNELS", request.param)
    clear_kernel_caches(monkeypatch)
    select.reason_forced.cache_clear()
    yield request.param
    select.reason_forced.cache_clear()


@pytest.fixture
def ranks_start_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the ranks of syncbn.testing by forking a process that has imported the modules that they need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "syncbn.testing"])
    monkeypatch.setattr(testing, "START_METHOD", "forkserver")


GROUP_TIMEOUT = timedelta(seconds=77)


@pytest.fixture
def group_of_one() -> Iterator[dist.ProcessGroup]:
    """Create a default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=GROUP_TIMEOUT)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    """Create a default group of two ranks. The collectives of torch's fake backend return without the other rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
