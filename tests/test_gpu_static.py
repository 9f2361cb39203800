"""Tests the machine code of the GPU kernels: registers, loads, divisions, the order of additions. No GPU is needed."""

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


@pytest.mark.parametrize(
    ("capability", "shape", "dtypes"),
    [
        (90, "32x64x112x112", ["float32", "bfloat16"]),
        (90, "32x2048x7x7", ["float32", "bfloat16"]),
        (80, "32x512x14x14", ["float32"]),
        (86, "32x256x56x56", ["bfloat16"]),
        (120, "32x2048x7x7", ["float32"]),
    ],
)
def test_kernels_load_wide_and_spill_no_registers(capability: int, shape: str, dtypes: list[str]) -> None:
    """The kernels that write outputs use no float64. scripts/gpu_static.py prints the same table."""
    for case, function, code, num_programs in table(capability, [shape], dtypes):
        row = function, case, code
        assert code.spills == 0, row
        if function.endswith("_outputs"):
            assert code.float64 == code.conversions == 0, row
        loads_single_values = case.shape[-1] == 7 and not case.channels_last  # because 7 * 7 is not a multiple of 4
        values_per_load = 1 if loads_single_values else 4
        assert code.widest_load == values_per_load * getattr(torch, case.dtype).itemsize, row
        assert num_programs >= 3, row


def compile_step(
    capability: int, x: Tensor, parameter_dtype: torch.dtype = torch.float32, has_residual: bool = False
) -> list[Launch]:
    """Return the launches of forward and backward with a relu."""
    weight, running_mean = x.new_empty(x.shape[1], dtype=parameter_dtype), x.new_empty(x.shape[1])
    layout = Layout.of(x, 1), x.dtype, x.device
    dtypes = parameter_dtype, parameter_dtype, x.dtype, x.dtype
    config = ForwardConfig(*layout, 1e-5, True, has_residual, *dtypes)
    needs = {"needs_x": True, "needs_residual": has_residual}
    with recorded(capability) as (module, launches):
        forward = module.Forward(config)
        backward = module.Backward(BackwardConfig(*layout, config.relu_mask, *[parameter_dtype] * 3, **needs))
        inputs, buffers = (x, weight, weight, x if has_residual else None), (running_mean, running_mean, None)
        y, statistics, _ = forward.forward_outputs(inputs, forward.forward_sums(x), buffers)
        saved = x, weight, statistics, y if has_residual else None
        sums, _, _ = backward.backward_sums(x, saved)
        backward.backward_outputs(x, saved, sums)
        return [*launches]


def of_whole_tensors(launches: list[Launch]) -> list[Launch]:
    """Return the launches that process all values, not per-channel values."""
    return [launch for launch in launches if "TILES" in launch.arguments]


@pytest.mark.parametrize(
    ("sizes", "capability", "dtype", "parameter_dtype", "has_residual"),
    [
        ((64, 64, 3136), 75, torch.float16, torch.float32, True),
        ((64, 512, 4), 80, torch.float32, torch.bfloat16, True),
        ((64, 64, 3136), 90, torch.bfloat16, torch.float32, True),
        ((1, 1, 1), 90, torch.bfloat16, torch.float32, True),
        ((4, 8, 25), 90, torch.float64, torch.float64, True),  # 25 is not a multiple of 4.
        ((100352, 64), 90, torch.float32, torch.float32, False),  # Without a residual x gives the mask of the relu.
        ((32, 2048, 49), 90, torch.float32, torch.float32, False),
    ],
    ids=str,
)
def test_kernels_add_in_a_fixed_order_and_divide_no_element(
    sizes: tuple[int, ...], capability: int, dtype: torch.dtype, parameter_dtype: torch.dtype, has_residual: bool
) -> None:
    """A fixed order of additions gives the same bits in each run."""
    x = torch.empty(sizes, dtype=dtype, device="meta")
    launches = compile_step(capability, x, parameter_dtype, has_residual)
    assert len(launches) <= 4 + 4
    for launch in launches:
        assert not re.search(r"\b(atom|red)\.", launch.assembly()), "atomic additions have no fixed order"
    for launch in of_whole_tensors(launches):
        assert has_residual or read(launch).spills == 0
        if launch.metadata.name != "partial_sums":
            assert dtype == torch.float64 or ".f64" not in launch.assembly()
            assert "div.rn.f" not in launch.assembly()


@pytest.mark.parametrize("capability", [80, 90])
def test_running_statistics_are_computed_without_fused_multiply_add(capability: int) -> None:
    """A rank that uses torch operations rounds each product and each sum, and must get the same running statistics."""
    launches = compile_step(capability, torch.empty((64, 64, 49), device="meta"))
    (launch,) = [launch for launch in launches if launch.metadata.name == "forward_channels"]
    operations = {*re.findall(r"\b(fma\S*|mul\S*|add\S*|sub\S*)\.f64", launch.assembly())}
    assert operations == {"mul.rn", "add.rn", "sub.rn"}, "without .rn the assembler may fuse"


@pytest.mark.parametrize("sizes", [(2**31 - 1, 1, 1), (1, 1, 2**31 + 5), (2**17, 2**10, 2**6)], ids=str)
def test_offsets_of_large_tensors_have_64_bits(sizes: tuple[int, ...]) -> None:
    launches = of_whole_tensors(compile_step(90, torch.empty(sizes, device="meta")))
    assert len(launches) == 4
    for launch in launches:
        assert re.search(r"(mad\.lo|mul\.lo|mul\.wide)\S*64", launch.assembly())


@pytest.mark.parametrize("divisor", [2, 3, 5, 7, 49, 98, 784, 12544, 2**20, 2**30 + 1])
def test_a_multiplication_and_a_shift_divide_exactly(divisor: int) -> None:
    """Kernels divide offsets below 2^31 so. The multiplier is passed as an int32."""
    multiplier, bit_shift = gpu._magic_division(divisor)
    assert -(2**31) <= multiplier < 2**31
    for n in (0, 1, divisor - 1, divisor, divisor + 1, 2**31 - 1, (2**31 - 1) // divisor * divisor - 1):
        assert (n * (multiplier % 2**32) >> 32) >> bit_shift == n // divisor
