"""What the GPU kernels compile to, on a machine without a GPU: no spills, wide loads, no float64 where it costs."""

import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import gpu_static

from syncbn.kernels import gpu
from syncbn.layout import Layout

FUNCTIONS = gpu_static.FUNCTIONS.split()


@pytest.mark.parametrize(
    ("capability", "shape", "fraction"),
    [
        (90, "32x64x112x112", 0.8),
        (90, "32x2048x7x7", 0.8),  # no wide loads where 49 values are together
        (80, "32x512x14x14", 0.8),
        (86, "32x256x56x56", 0.9),  # 1/64 of float32's rate for float64, as cards for games have it
        (120, "32x2048x7x7", 0.8),  # and these
    ],
)
def test_promises_of_the_table(capability: int, shape: str, fraction: float) -> None:
    for row in gpu_static.table(capability, [shape], ["float32", "bfloat16"], FUNCTIONS):
        case, function, predicted = row
        code = predicted.code
        assert not code.spills, row
        assert (code.float64, code.conversions) == (0, 0) or not function.endswith("_outputs"), row
        values = 1 if case.shape[-1] == 7 and not case.channels_last else 4
        assert code.widest_load == values * getattr(torch, case.dtype).itemsize, row
        assert predicted.blocks >= 3, row
        assert predicted.fraction >= fraction, row


def launches_of_a_step(
    capability: int, x: Tensor, parameter: torch.dtype, *, affine: bool = True, residual: bool = True
) -> dict[str, list[gpu_static.Launch]]:
    """Those of each function of forward and backward: affine ones with a relu and, unless told, with a residual."""
    layout, channels, found = Layout.of(x, 1), x.shape[1], {}
    weight = x.new_empty(channels, dtype=parameter) if affine else None
    z = x if affine and residual else None

    def call(name: str, *arguments: object) -> Any:
        launches.clear()
        result = getattr(kernels, name)(*arguments)
        found.setdefault(name, []).extend(launches)
        return result

    with gpu_static.recorded(capability) as (kernels, launches):
        sums = call("forward_sums", x, layout)
        y, statistics = call("forward_outputs", x, layout, sums, weight, weight, z, 1e-5, affine)
        dtype = parameter if affine else None
        sums, _, _ = call("backward_sums", x, x, None if z is None else y, layout, statistics, dtype, None)
        call("backward_outputs", x, x, None if z is None else y, layout, sums, statistics, weight, z is not None)
        for momentum in (0.1, x.new_empty(())):
            call("update_running_stats", x.new_empty(channels), x.new_empty(channels), statistics, momentum)
    return found


@pytest.mark.parametrize("sizes", [(32, 256, 784), (100352, 64), (32, 2048, 49)], ids=str)
def test_a_relu_without_a_residual(sizes: tuple[int, ...]) -> None:
    """What tells from x where values passed costs neither spills nor, for each value, float64."""
    launches = launches_of_a_step(90, torch.empty(sizes, device="meta"), torch.float32, residual=False)
    for function in ("backward_sums", "backward_outputs"):
        tiled = gpu_static.over_whole_tensor(launches[function])
        predicted = gpu_static.predict(tiled, 90)
        assert tiled.arguments["RELU"]
        assert not predicted.code.spills
        assert predicted.fraction >= 0.8
        assert function == "backward_sums" or ".f64" not in tiled.assembly()


@pytest.mark.parametrize(
    ("sizes", "capability", "dtype", "parameter"),
    [
        ((64, 64, 3136), 75, torch.float16, torch.float32),
        ((64, 512, 4), 80, torch.float32, torch.bfloat16),
        ((3, 8, 49), 80, torch.float32, torch.bfloat16),  # not a multiple of 4
        ((64, 64, 3136), 90, torch.bfloat16, torch.float32),
        ((1, 1, 1), 90, torch.bfloat16, torch.float32),
        ((4, 8, 25), 90, torch.float64, torch.float64),
    ],
    ids=str,
)
def test_all_launches_compile(
    sizes: tuple[int, ...], capability: int, dtype: torch.dtype, parameter: torch.dtype
) -> None:
    """In the same order each time, and without a division for each value of a map."""
    launches = launches_of_a_step(capability, torch.empty(sizes, dtype=dtype, device="meta"), parameter)
    assert sum(map(len, launches.values())) <= 5 + 4 + 1  # forward with running statistics, backward, other momentum
    for function, of_function in launches.items():
        for launch in of_function:
            assert not re.search(r"\b(atom|red)\.", launch.assembly()), "their order would change results"
        if function.endswith("_outputs"):
            assembly = gpu_static.over_whole_tensor(of_function).assembly()
            assert dtype == torch.float64 or ".f64" not in assembly
            assert "div.rn.f" not in assembly


@pytest.mark.parametrize("sizes", [(2**31 - 1, 1, 1), (1, 1, 2**31 + 5), (2**17, 2**10, 2**6)], ids=str)
def test_more_values_than_an_int32_counts(sizes: tuple[int, ...]) -> None:
    launches = launches_of_a_step(90, torch.empty(sizes, device="meta"), torch.float32, affine=False)
    for function in FUNCTIONS:
        assembly = gpu_static.over_whole_tensor(launches[function]).assembly()
        assert re.search(r"(mad\.lo|mul\.lo|mul\.wide)\S*64", assembly)


@pytest.mark.parametrize("number", [2, 3, 5, 7, 49, 98, 784, 12544, 2**20, 2**30 + 1])
def test_division(number: int) -> None:
    multiplier, shift = gpu._division(number)
    assert -(2**31) <= multiplier < 2**31
    for one in (0, 1, number - 1, number, number + 1, 12345 * number - 1, 12345 * number, 2**31 - 1):
        assert one >= 2**31 or (one * (multiplier % 2**32) >> 32) >> shift == one // number
