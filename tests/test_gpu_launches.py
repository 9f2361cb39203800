"""Tests how many kernels a training step on a GPU compiles and launches. No GPU is needed: the launches do nothing."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from equal_to_torch import clear_kernel_caches

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton
from gpu_static import stand_in_driver

import syncbn
from syncbn import kernel_cache
from syncbn.kernels import gpu, gpu_channels, gpu_tiles, select

# Channels and sizes of the layers of a ResNet-50 for 224 x 224 pixels.
RESNET = [(64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7)]


def clear_triton_caches() -> None:
    for function in (*vars(gpu_channels).values(), *vars(gpu_tiles).values()):
        if isinstance(function, triton.JITFunction):
            function.device_caches.clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Treat CPU tensors as tensors of a GPU with capability 9.0. Return the names of the launched kernels."""
    names: list[str] = []
    driver = stand_in_driver(90, lambda source, metadata, *arguments: names.append(metadata.name))
    monkeypatch.setattr(gpu, "compiled_kernels", {})
    monkeypatch.setattr(kernel_cache, "fast_path_back_end", lambda config: gpu)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    clear_kernel_caches(monkeypatch)
    clear_triton_caches()
    yield names
    # Triton 3.8 unloads kernels that are no longer referenced, and needs the driver to do so.
    gpu.compiled_kernels.clear()
    clear_kernel_caches(monkeypatch)
    clear_triton_caches()


def step(channels: int, size: int, channels_last: bool, batch: int = 8) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(batch, channels, size, size, dtype=torch.bfloat16).to(memory_format=memory_format)
    syncbn.SyncBatchNorm2d(channels)(x.requires_grad_()).backward(x.detach())


@pytest.mark.parametrize(("channels_last", "num_compiled"), [(True, 6), (False, 10)])
@pytest.mark.parametrize(("num_ranks", "num_launches"), [(1, [6]), (2, [7, 8])])  # 7 if each sum has a single part
def test_a_resnet_compiles_few_kernels(
    launched: list[str], request: pytest.FixtureRequest, num_ranks: int, num_launches: list[int], channels_last: bool,
    num_compiled: int,
) -> None:  # fmt: skip
    """Kernels are compiled for dtypes and layouts, not for each size. Each all_reduce needs another kernel."""
    if num_ranks > 1:
        request.getfixturevalue("fake_group")
        num_compiled += 2
    for batch, (channels, size) in enumerate(RESNET, start=4):
        launched.clear()
        step(channels, size, channels_last, batch)
        assert len(launched) in num_launches, launched
    assert len(gpu.compiled_kernels) == num_compiled, "update the docstring of gpu.py"


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0)])
def test_a_tensor_at_an_unaligned_address_gets_its_own_kernel(launched: list[str], offsets: tuple[int, int]) -> None:
    """A kernel that is compiled for addresses that are multiples of 16 would fail at other addresses."""
    storage, num_compiled = torch.empty(1 + 8 * 32), []
    for offset in offsets:
        syncbn.SyncBatchNorm1d(32)(storage[offset:][: 8 * 32].view(8, 32))
        num_compiled.append(len(gpu.compiled_kernels))
    assert num_compiled[0] < num_compiled[1]


def test_a_profiled_step_launches_the_same_kernels(launched: list[str], fake_group: dist.ProcessGroup) -> None:
    """A profiler must measure the step that trains."""
    step(64, 28, channels_last=True)
    expected = launched.copy()
    launched.clear()
    with torch.profiler.profile(acc_events=True) as profile:
        step(64, 28, channels_last=True)
    assert launched == expected
    names = {event.name for event in profile.events()}
    assert {"syncbn.forward", "_StepBackward"} <= names
    assert not any(name.startswith("syncbn::") for name in names), "the step has called operators"


def test_a_gpu_whose_kernels_write_nothing_is_rejected(launched: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"the kernels compute wrong values: expected .* got"):
        select._try_triton(torch.device("cpu"))
    assert launched


def test_a_kernel_stays_loaded_after_triton_has_released_it(launched: list[str]) -> None:
    """Triton 3.8 unloads a kernel without references from the GPU. A launch would then crash."""
    unloaded: list[object] = []
    triton.runtime.driver.active.utils.unload_module = unloaded.append
    for _ in range(2):
        step(8, 4, channels_last=False)
        clear_triton_caches()
        gc.collect()
    assert not unloaded
    assert len(launched) == 2 * 6
