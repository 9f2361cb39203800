"""Tests that a training step on a GPU compiles and launches no unneeded kernel. The launches here do nothing."""

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


def clear_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear all caches while the driver is active. Since Triton 3.8 the driver unloads a kernel without references."""
    gpu.compiled_kernels.clear()
    clear_kernel_caches(monkeypatch)
    clear_triton_caches()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the names of launched kernels; gpu.compiled_kernels contains the compiled kernels."""
    names: list[str] = []
    for target, name, value in (
        (gpu, "compiled_kernels", {}),
        (kernel_cache, "fast_path_back_end", lambda config: gpu),
        (torch.Tensor, "is_cpu", False), (torch.Tensor, "is_cuda", True),
        (triton.runtime.driver, "_active", stand_in_driver(90, lambda _, metadata, *args: names.append(metadata.name))),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    clear_caches(monkeypatch)
    yield names
    clear_caches(monkeypatch)


def step(channels: int, size: int, channels_last: bool, batch: int = 8) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(batch, channels, size, size, dtype=torch.bfloat16).to(memory_format=memory_format)
    syncbn.SyncBatchNorm2d(channels)(x.requires_grad_()).backward(x.detach())


@pytest.mark.parametrize(("channels_last", "num_compiled"), [(True, 6), (False, 10)])
@pytest.mark.parametrize(("num_ranks", "num_launches"), [(1, {6}), (2, {7, 8})])  # 7 if a sum has one part
def test_a_resnet_compiles_few_kernels(
    launched: list[str], request: pytest.FixtureRequest, num_ranks: int, num_launches: set[int], channels_last: bool,
    num_compiled: int,
) -> None:  # fmt: skip
    """Other sizes and batches compile no kernel. An all_reduce needs two kernels more."""
    if num_ranks > 1:
        request.getfixturevalue("fake_group")
    for batch, (channels, size) in enumerate(RESNET, 4):
        launched.clear()
        step(channels, size, channels_last, batch)
        assert len(launched) in num_launches, launched
    assert len(gpu.compiled_kernels) == num_compiled + 2 * (num_ranks > 1), "update the docstring of gpu.py"


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0)])
def test_an_unaligned_address_compiles_a_kernel(launched: list[str], offsets: tuple[int, ...]) -> None:
    """A kernel for addresses that are multiples of 16 would fail at other addresses."""
    storage, num_compiled = torch.empty(1 + 8 * 32), []
    for offset in offsets:
        syncbn.SyncBatchNorm1d(32)(storage[offset : offset + 8 * 32].view(8, 32))
        num_compiled.append(len(gpu.compiled_kernels))
    assert num_compiled[0] < num_compiled[1]


def test_a_profiled_step_launches_the_same_kernels(launched: list[str], fake_group: dist.ProcessGroup) -> None:
    """A profiler must measure the step that trains."""
    step(64, 28, channels_last=True)
    not_profiled = [*launched]
    launched.clear()
    with torch.profiler.profile(acc_events=True) as profile:
        step(64, 28, channels_last=True)
    assert launched == not_profiled
    names = {event.name for event in profile.events()}
    assert {"syncbn.forward", "_StepBackward"} <= names
    assert not any(name.startswith("syncbn::") for name in names), "the step has called operators"


def test_kernels_that_write_nothing_are_rejected(launched: list[str]) -> None:
    """The check also raises errors of the GPU that have not surfaced."""
    with pytest.raises(RuntimeError, match=r"the kernels compute wrong values: expected .* got"):
        select._try_triton(torch.device("cpu"))
    assert launched


def test_a_kernel_stays_loaded_if_triton_releases_it(launched: list[str]) -> None:
    """Since Triton 3.8 a kernel without references is unloaded from the GPU, and may not be launched."""
    unloaded: list[object] = []
    triton.runtime.driver.active.utils.unload_module = unloaded.append
    for _ in range(2):
        step(8, 4, channels_last=False)
        clear_triton_caches()
        gc.collect()
    assert not unloaded
    assert len(launched) == 2 * 6
