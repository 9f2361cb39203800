"""Options and settings of all tests, and fixtures that several files use."""

import gc
import importlib.util
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from syncbn import testing
from syncbn.kernels import cpu, reference, select

# Tests on ranks are collected only under torchrun. They need the plugin `voting`, too.
collect_ignore_glob = [] if "RANK" in os.environ else ["distributed/*"]

# With use_deterministic_algorithms, matrix products on a GPU need this variable, which cuBLAS reads when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="how often test_faults.py kills a rank (default: 2)")
    parser.addoption("--fuzz-cases", type=int, default=100, help="number of test_fuzz.py's programs (default: 100)")
    parser.addoption("--fuzz-seed", type=int, default=0, help="seed of these programs (default: 0)")
    parser.addoption("--large", action="store_true", help="also run tests that need many GB")


def pytest_configure() -> None:
    """Skip two steps that take half the time of Triton's interpreter and change no result.

    The interpreter checks operations for overflow, but without `debug` it ignores the check. It patches triton.language
    at the launch of a kernel, and again at each function that the kernel calls.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        from triton import __version__, language
        from triton.runtime import interpreter

        from syncbn.kernels import gpu_channels, gpu_tiles

        if __version__.startswith("3.6."):  # Other versions may have other names.
            interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
            interpreter.InterpretedFunction.__call__ = lambda self, *args, **options: self.rewrite()(*args, **options)
            # A launch patches the modules that the kernel's file imports. Add core, which triton's own functions use.
            gpu_channels.core = gpu_tiles.core = language.core


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection. On ranks the tests then take a tenth less time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    torch.set_num_threads(1)  # Up to four ranks share two cores.
    torch.backends.cudnn.allow_tf32 = False  # TF32 rounds to 10 bits.
    # With deterministic algorithms torch fills new memory with NaN, so a test notices elements that are left unwritten.
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["reference", "cpu", "operators", pytest.param("triton", marks=pytest.mark.triton)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the module of a back end, and create new tensors on the device of its kernels.

    Triton's interpreter runs the GPU kernels on the CPU. A test may also request "chunks", the reference without
    gradients, which computes one chunk of a tensor after another.
    """
    if request.param in ("cpu", "operators") and (reason := cpu.load()):
        pytest.skip(reason)
    if request.param == "chunks":
        # 48 elements are 24 values of 2 channels, so the runs of test_kernels.py's (5, 2, 49) give 24, 24 and 1.
        monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 48)
        with torch.no_grad():
            yield reference
    elif request.param != "triton":
        yield importlib.import_module(f"syncbn.kernels.{request.param}")
    else:
        pytest.importorskip("triton")
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if not (is_interpreted or torch.cuda.is_available()):
            pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
        with torch.device("cpu" if is_interpreted else "cuda"), warnings.catch_warnings():
            # NumPy warns of infinities and scalars in the interpreter.
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield importlib.import_module("syncbn.kernels.gpu")


@pytest.fixture(params=["", "reference"])
def syncbn_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Set the environment variable SYNCBN_KERNELS, clear all caches that depend on it, and return its value."""
    from equal_to_torch import clear_kernel_caches  # scripts/package.sh copies conftest.py without equal_to_torch.py.

    monkeypatch.setenv("SYNCBN_KERNELS", request.param)
    clear_kernel_caches(monkeypatch)
    select.reason_forced.cache_clear()
    yield request.param
    select.reason_forced.cache_clear()


@pytest.fixture
def ranks_start_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let syncbn.testing fork its ranks from a process that has imported their modules."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "syncbn.testing"])
    monkeypatch.setattr(testing, "START_METHOD", "forkserver")


@pytest.fixture
def fake_group() -> Iterator[dist.ProcessGroup]:
    """Create a default group of two ranks with torch's fake backend: collectives return without the other rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # The import registers the backend.

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
