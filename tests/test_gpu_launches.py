"""Catches a kernel that a training step on a GPU compiles or launches without need; no launch does anything."""

import gc
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equal_to_torch import forget_kernels

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton
from gpu_static import stand_in_driver
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from triton.backends.amd.compiler import HIPBackend

import syncbn
from syncbn import kernel_cache
from syncbn.kernels import gpu, gpu_channels, gpu_tiles, select
from syncbn.kernels.interface import ForwardConfig, Layout

# Channels and sizes of the layers of a ResNet-50 for 224 x 224 pixels.
RESNET = [(64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7)]
# Pixels of a detector's images, which are multiples of 32.
DETECTOR = [(800, 1216), (640, 1024), (736, 1120), (672, 992), (768, 1344)]


def forget_compiled_of_triton() -> None:
    for module in (gpu_channels, gpu_tiles):
        for function in vars(module).values():
            if isinstance(function, triton.JITFunction):
                function.device_caches.clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that were launched; gpu.compiled_kernels are those that were compiled."""
    names: list[str] = []

    def launch(source: Any, metadata: Any, *arguments: Any) -> None:
        names.append(metadata.name)

    monkeypatch.setattr(gpu, "compiled_kernels", {})
    forget_kernels(monkeypatch)
    monkeypatch.setattr(kernel_cache, "fast_path_back_end", lambda kind: gpu)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(triton.runtime.driver, "_active", stand_in_driver(90, launch))
    forget_compiled_of_triton()  # what the driver of an earlier test has compiled
    yield names
    gpu.compiled_kernels.clear()
    forget_kernels(monkeypatch)
    forget_compiled_of_triton()  # since Triton 3.8 a kernel is unloaded then, by the driver


def step(channels: int, height: int, width: int, channels_last: bool, batch: int = 8) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(batch, channels, height, width, dtype=torch.bfloat16).to(memory_format=memory_format)
    syncbn.SyncBatchNorm2d(channels)(x.requires_grad_()).backward(x.detach())


def join_fake_group(num_ranks: int) -> None:
    options = FakeProcessGroup.Options()
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore(), pg_options=options)


@pytest.mark.parametrize(("channels_last", "compiled"), [(True, 6), (False, 10)])  # and 2 around an all_reduce
@pytest.mark.parametrize(("num_ranks", "launches"), [(1, {6}), (2, {7, 8})])  # 7: a sum of one part
def test_a_resnet(launched: list[str], num_ranks: int, launches: set[int], channels_last: bool, compiled: int) -> None:
    if num_ranks > 1:
        join_fake_group(num_ranks)
    for channels, size in RESNET:
        launched.clear()
        step(channels, size, size, channels_last)
        assert len(launched) in launches, launched
    assert len(gpu.compiled_kernels) == compiled + 2 * (num_ranks > 1), "syncbn/kernels/gpu.py"
    if num_ranks > 1:
        dist.destroy_process_group()


def test_a_profiled_step_launches_the_same(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be another step that is measured."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    join_fake_group(2)
    step(64, 28, 28, True)
    not_profiled = [*launched]
    launched.clear()
    with torch.profiler.profile(acc_events=True) as profile:
        step(64, 28, 28, True)
    assert launched == not_profiled
    names = {event.name for event in profile.events()}
    assert {"syncbn.forward", "_StepBackward"} <= names
    assert not any(name.startswith("syncbn::") for name in names)  # no operators
    dist.destroy_process_group()


@pytest.mark.parametrize("channels_last", [True, False])
def test_other_sizes_compile_nothing(launched: list[str], channels_last: bool) -> None:
    """Nor do other numbers of samples."""
    compiled = set()
    for index, (height, width) in enumerate(DETECTOR):
        for stride in (8, 16, 32):
            step(16, height // stride, width // stride, channels_last, batch=1 + index)
        compiled.add(len(gpu.compiled_kernels))
    assert len(compiled) == 1


def test_kernels_that_do_nothing_are_found_out(launched: list[str]) -> None:
    """As are errors of the GPU that have not surfaced yet."""
    with pytest.raises(RuntimeError, match=r"the kernels compute wrong values: expected .* got"):
        select._try_triton(torch.device("cpu"))
    assert launched


@pytest.mark.parametrize("offsets", [(0, 1), (1, 0)])
def test_addresses_choose_the_kernel(launched: list[str], offsets: tuple[int, ...]) -> None:
    """A kernel for addresses that are multiples of 16 would fail at others."""
    storage, num_compiled = torch.empty(1 + 8 * 32), []
    for offset in offsets:
        syncbn.SyncBatchNorm1d(32)(storage[offset : offset + 8 * 32].view(8, 32))
        num_compiled.append(len(gpu.compiled_kernels))
    assert num_compiled[0] < num_compiled[1]


def test_what_triton_forgets_stays_loaded(launched: list[str]) -> None:
    """Since Triton 3.8 a kernel without references is unloaded from the GPU, and may not be launched."""
    unloaded: list[object] = []
    with mock.patch.object(triton.runtime.driver.active.utils, "unload_module", unloaded.append):
        for _ in range(2):
            step(8, 4, 4, channels_last=False)
            forget_compiled_of_triton()
            gc.collect()
        assert not unloaded
    assert len(launched) == 2 * 6


@pytest.mark.parametrize(("num_samples", "fits"), [(1, True), (2, False)])  # of 1 GiB
def test_amd_is_told_of_tensors_of_2_gib(monkeypatch: pytest.MonkeyPatch, num_samples: int, fits: bool) -> None:
    """Triton's back end for AMD asks how long a tensor's memory is, and compiles for offsets that fit in 31 bits."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    x = torch.empty(num_samples, 2**9, 2**10, 2**10, dtype=torch.bfloat16, device="meta")
    launch, kernel = gpu.Forward(ForwardConfig(Layout.of(x, 1), x.dtype, x.device)).normalize, mock.MagicMock()
    kernel.__getitem__.return_value.return_value = None  # as if the kernel were interpreted
    monkeypatch.setattr(launch, "kernel", kernel)
    launch(*[16] * len(launch.dtypes))
    found = HIPBackend.is_within_2gb(kernel.__getitem__.return_value.call_args.args[0])
    assert found == fits  # without the tensor, whose memory pytest would print
