"""Tests that the GPU kernels compile without spills, narrow loads and needless float64. No GPU is needed."""

import os
import re

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from gpu_static import Launch, read, recorded, table

from syncbn.kernels import gpu
from syncbn.kernels.interface import BackwardConfig, ForwardConfig, Layout

Launches = tuple[list[Launch], list[Launch]]


@pytest.mark.parametrize(
    ("capability", "shape", "dtypes"),
    [
        (90, "32x64x112x112", ["float32", "bfloat16"]),
        (90, "32x2048x7x7", ["float32", "bfloat16"]),  # loads of a single value, because 49 is odd
        (80, "32x512x14x14", ["float32"]),
        (86, "32x256x56x56", ["bfloat16"]),
        (120, "32x2048x7x7", ["float32"]),
    ],
)
def test_kernels_load_wide_and_spill_no_registers(capability: int, shape: str, dtypes: list[str]) -> None:
    """The rows of the table that scripts/gpu_static.py prints."""
    for case, function, code, programs in table(capability, [shape], dtypes):
        row = function, case, code
        assert not code.spills, row
        assert (code.float64, code.conversions) == (0, 0) or not function.endswith("_outputs"), row
        values_per_load = 1 if case.shape[-1] == 7 and not case.channels_last else 4
        assert code.widest_load == values_per_load * getattr(torch, case.dtype).itemsize, row
        assert programs >= 3, row


def compile_step(
    capability: int, x: Tensor, parameter: torch.dtype = torch.float32, residual: bool = False
) -> Launches:
    """Return all launches of forward and backward with a relu; and the four that cover the whole tensor."""
    weight, running_mean, z = x.new_empty(x.shape[1], dtype=parameter), x.new_empty(x.shape[1]), x if residual else None
    layout = Layout.of(x, 1), x.dtype, x.device
    config = ForwardConfig(*layout, 1e-5, True, residual, parameter, parameter, x.dtype, x.dtype)
    needs = {"needs_x": True, "needs_residual": residual}
    with recorded(capability) as (module, launches):
        forward = module.Forward(config)
        backward = module.Backward(BackwardConfig(*layout, config.relu_mask, parameter, parameter, parameter, **needs))
        sums, buffers = forward.forward_sums(x), (running_mean, running_mean, None)
        y, statistics, _ = forward.forward_outputs((x, weight, weight, z), sums, buffers)
        saved = x, weight, statistics, y if residual else None
        sums, _, _ = backward.backward_sums(x, saved)
        backward.backward_outputs(x, saved, sums)
        return [*launches], [launch for launch in launches if "TILES" in launch.arguments]


@pytest.mark.parametrize(
    ("sizes", "capability", "dtype", "parameter", "residual"),
    [
        ((64, 64, 3136), 75, torch.float16, torch.float32, True),
        ((64, 512, 4), 80, torch.float32, torch.bfloat16, True),
        ((3, 8, 49), 80, torch.float32, torch.bfloat16, True),  # 49 is not a multiple of 4.
        ((64, 64, 3136), 90, torch.bfloat16, torch.float32, True),
        ((1, 1, 1), 90, torch.bfloat16, torch.float32, True),
        ((4, 8, 25), 90, torch.float64, torch.float64, True),
        ((100352, 64), 90, torch.float32, torch.float32, False),  # Without a residual x gives the mask of the relu.
        ((32, 2048, 49), 90, torch.float32, torch.float32, False),
    ],
    ids=str,
)
def test_kernels_add_in_a_fixed_order_and_divide_no_element(
    sizes: tuple[int, ...], capability: int, dtype: torch.dtype, parameter: torch.dtype, residual: bool
) -> None:
    x = torch.empty(sizes, dtype=dtype, device="meta")
    launches, tile_launches = compile_step(capability, x, parameter, residual)
    assert len(launches) <= 4 + 4
    for launch in launches:
        assert not re.search(r"\b(atom|red)\.", launch.assembly()), "the order of atomic operations changes results"
    for launch in tile_launches:
        assert residual or not read(launch).spills
        if launch.metadata.name != "partial_sums":
            assert dtype == torch.float64 or ".f64" not in launch.assembly()
            assert "div.rn.f" not in launch.assembly()


@pytest.mark.parametrize("capability", [80, 90])
def test_running_stats_are_rounded_as_in_torch(capability: int) -> None:
    """No product is fused with a sum, because torch operations of another rank round both."""
    launches, _ = compile_step(capability, torch.empty((64, 64, 49), device="meta"))
    (launch,) = [launch for launch in launches if launch.metadata.name == "forward_channels"]
    operations = {*re.findall(r"\b(fma\S*|mul\S*|add\S*|sub\S*)\.f64", launch.assembly())}
    assert operations == {"mul.rn", "add.rn", "sub.rn"}, "without .rn the assembler may fuse"


@pytest.mark.parametrize("sizes", [(2**31 - 1, 1, 1), (1, 1, 2**31 + 5), (2**17, 2**10, 2**6)], ids=str)
def test_offsets_beyond_int32_have_64_bits(sizes: tuple[int, ...]) -> None:
    _, tile_launches = compile_step(90, torch.empty(sizes, device="meta"))
    assert len(tile_launches) == 4
    assert all(re.search(r"(mad\.lo|mul\.lo|mul\.wide)\S*64", launch.assembly()) for launch in tile_launches)


@pytest.mark.parametrize("divisor", [2, 3, 5, 7, 49, 98, 784, 12544, 2**20, 2**30 + 1])
def test_a_multiplication_and_a_shift_divide_exactly(divisor: int) -> None:
    multiplier, bit_shift = gpu._magic_division(divisor)
    assert -(2**31) <= multiplier < 2**31
    for n in (0, 1, divisor - 1, divisor, divisor + 1, 12345 * divisor - 1, 12345 * divisor, 2**31 - 1):
        assert n >= 2**31 or (n * (multiplier % 2**32) >> 32) >> bit_shift == n // divisor
