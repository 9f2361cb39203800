"""Tests compilations, launches and machine code of a training step on a GPU. No GPU is needed."""

import os
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from equal_to_torch import clear_kernel_caches
from kernel_calls import run_both
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from gpu_static import GPUS, Launch, programs_at_once, read, recorded

import syncbn
from syncbn import kernel_cache
from syncbn.kernels import gpu, select

# Launches

# Channels and sizes of the layers of a ResNet-50 for 224 x 224 pixels.
RESNET = [(64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7)]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Treat CPU tensors as tensors of an H100. Return the launches of kernels, which are compiled but not run."""
    monkeypatch.setattr(kernel_cache, "fast_path_back_end", lambda config: gpu)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    clear_kernel_caches(monkeypatch)
    with recorded(90) as (_, launches):
        yield launches
    clear_kernel_caches(monkeypatch)


def step(channels: int, size: int, channels_last: bool, batch: int = 8) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(batch, channels, size, size, dtype=torch.bfloat16).to(memory_format=memory_format)
    syncbn.SyncBatchNorm2d(channels)(x.requires_grad_()).backward(x.detach())


@pytest.mark.parametrize(
    ("num_ranks", "channels_last", "num_launches", "num_compiled"),
    # Passes have 3 launches, on two ranks 4, but a forward with one partial sum per channel has 3.
    [(1, True, {6}, 6), (1, False, {6}, 10), (2, True, {8}, 8), (2, False, {7, 8}, 12)],
)
def test_a_resnet_compiles_and_launches_as_few_kernels_as_documented(
    launched: list[Launch], request: pytest.FixtureRequest, num_ranks: int, channels_last: bool,
    num_launches: set[int], num_compiled: int,
) -> None:  # fmt: skip
    """Kernels are compiled for dtypes and layouts, not for each size."""
    if num_ranks > 1:
        request.getfixturevalue("fake_group")
    launches = set()
    for batch, (channels, size) in enumerate(RESNET, start=4):  # Each layer gets another batch size, too.
        launched.clear()
        step(channels, size, channels_last, batch)
        launches.add(len(launched))
    assert launches == num_launches
    assert len(gpu.compiled_kernels) == num_compiled, "update the docstring of gpu.py"


@pytest.mark.parametrize("offsets", [(0, 0, 1), (1, 0)])  # In (0, 0, 1) the second call sets gpu.Launch.aligned.
def test_a_tensor_at_an_unaligned_address_gets_its_own_kernel(launched: list[Launch], offsets: tuple[int, ...]) -> None:
    """A kernel that is compiled for addresses that are multiples of 16 would fail at other addresses."""
    storage, num_compiled = torch.empty(1 + 8 * 32), []
    for offset in offsets:
        syncbn.SyncBatchNorm1d(32)(storage[offset:][: 8 * 32].view(8, 32))
        num_compiled.append(len(gpu.compiled_kernels))
    assert num_compiled[-2] < num_compiled[-1]


def test_a_profiled_step_launches_the_same_kernels(launched: list[Launch], fake_group: dist.ProcessGroup) -> None:
    """A profiler must measure the step that trains."""
    step(64, 28, channels_last=True)
    expected = [launch.metadata.name for launch in launched]
    launched.clear()
    with torch.profiler.profile(acc_events=True) as profile:
        step(64, 28, channels_last=True)
    assert [launch.metadata.name for launch in launched] == expected
    names = {event.name for event in profile.events()}
    assert {"syncbn.forward", "_StepBackward"} <= names
    assert not any(name.startswith("syncbn::") for name in names), "the step has called operators"


def test_a_gpu_whose_kernels_write_nothing_is_rejected(launched: list[Launch]) -> None:
    with pytest.raises(RuntimeError, match=r"the kernels compute wrong values: expected .* got"):
        select._try_triton(torch.device("cpu"))
    assert launched


# Machine code


def compile_step(capability: int, x: Tensor, options: str = "") -> list[Launch]:
    """Return the launches of forward and backward."""
    per_channel = x.new_empty(x.shape[1])
    tensors = {"weight": per_channel, "bias": per_channel, "residual": x if "residual" in options else None}
    with recorded(capability) as (module, launches):
        run_both(module, x, x, relu="relu" in options, buffers=(per_channel, per_channel, None), **tensors)
        return [*launches]


def tile_launches(launches: list[Launch]) -> list[Launch]:
    """Return the launches that process whole tensors, not per-channel values."""
    return [launch for launch in launches if "TILES" in launch.arguments]


@pytest.mark.parametrize(
    ("capability", "sizes", "dtype", "options", "bytes_per_load"),
    [
        (75, (64, 64, 3136), torch.float16, "relu residual", 8),
        (80, (64, 512, 4), torch.float32, "relu residual", 4),
        (80, (32, 512, 196), torch.float32, "", 16),
        (80, (6272, 512), torch.float32, "", 16),
        (86, (32, 256, 3136), torch.bfloat16, "", 8),
        (86, (100352, 256), torch.bfloat16, "", 8),
        (90, (32, 64, 12544), torch.float32, "", 16),
        (90, (401408, 64), torch.bfloat16, "", 8),
        (90, (100352, 64), torch.float32, "relu", 16),  # The mask of the relu is computed from x.
        (90, (32, 2048, 49), torch.float32, "relu", 4),  # 49 is not a multiple of 4.
        (90, (32, 2048, 49), torch.bfloat16, "", 2),
        (90, (64, 64, 3136), torch.bfloat16, "relu residual", 8),
        (90, (1, 1, 1), torch.bfloat16, "relu residual", 2),
        (90, (4, 8, 25), torch.float64, "relu residual", 8),
        (120, (32, 2048, 49), torch.float32, "", 4),
        (120, (1568, 2048), torch.float32, "", 16),
    ],
    ids=str,
)
def test_kernels_have_wide_loads_no_spills_no_float_division_and_no_atomic_additions(
    capability: int, sizes: tuple[int, ...], dtype: torch.dtype, options: str, bytes_per_load: int
) -> None:
    """A fixed order of additions gives the same bits in each run. scripts/gpu_static.py prints more of the code."""
    launches = compile_step(capability, torch.empty(sizes, dtype=dtype, device="meta"), options)
    assert len(launches) <= 8  # four of the forward, four of the backward
    for launch in launches:
        assert not re.search(r"\b(atom|red)\.", launch.assembly()), "atomic additions have no fixed order"
    for launch in tile_launches(launches):
        code, name = read(launch), launch.metadata.name
        assert code.widest_load == bytes_per_load, name
        assert code.spills == 0 or "residual" in options, name  # After a residual, sums of the backward may spill.
        assert capability not in GPUS or programs_at_once(capability, launch, code) >= 3, name
        if name != "partial_sums":  # normalize and input_gradient, which write outputs
            assert dtype == torch.float64 or ".f64" not in launch.assembly()
            assert "div.rn.f" not in launch.assembly()


def test_running_statistics_are_computed_without_fused_multiply_add() -> None:
    """A rank that uses torch operations rounds each product and each sum, and must get the same running statistics."""
    launches = compile_step(90, torch.empty((64, 64, 49), device="meta"))
    (launch,) = [launch for launch in launches if launch.metadata.name == "forward_channels"]
    operations = {*re.findall(r"\b(fma\S*|mul\S*|add\S*|sub\S*)\.f64", launch.assembly())}
    assert operations == {"mul.rn", "add.rn", "sub.rn"}, "without .rn the assembler may fuse"


@pytest.mark.parametrize("sizes", [(2**31 - 1, 1, 1), (1, 1, 2**31 + 5), (2**17, 2**10, 2**6)], ids=str)
def test_offsets_of_large_tensors_have_64_bits(sizes: tuple[int, ...]) -> None:
    launches = tile_launches(compile_step(90, torch.empty(sizes, device="meta")))
    assert len(launches) == 4
    for launch in launches:
        assert re.search(r"(mad\.lo|mul\.lo|mul\.wide)\S*64", launch.assembly()), "no product has 64 bits"


@pytest.mark.parametrize("divisor", [2, 3, 5, 7, 49, 98, 784, 12544, 2**20, 2**30 + 1])
def test_a_multiplication_and_a_shift_divide_exactly(divisor: int) -> None:
    """Kernels divide the index of a row, which is less than 2^31. The multiplier has 32 bits, passed as an int32."""
    multiplier, bit_shift = gpu._magic_division(divisor)
    assert -(2**31) <= multiplier < 2**31
    for n in (0, 1, divisor - 1, divisor, divisor + 1, 2**31 - 1, (2**31 - 1) // divisor * divisor - 1):
        assert (n * (multiplier % 2**32) >> 32) >> bit_shift == n // divisor  # The kernel reads the int32 as unsigned.
