"""Catches spills, narrow loads and float64 where it costs in what the GPU kernels compile to, without a GPU."""

import itertools
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
from syncbn.kernels.interface import BackwardConfig, ForwardConfig, Layout

FUNCTIONS = gpu_static.FUNCTIONS


@pytest.mark.parametrize(
    ("capability", "shape"),
    [
        (90, "32x64x112x112"),
        (90, "32x2048x7x7"),  # no wide loads where 49 values are together
        (80, "32x512x14x14"),
        (86, "32x256x56x56"),
        (120, "32x2048x7x7"),
    ],
)
def test_promises_of_the_table(capability: int, shape: str) -> None:
    for case, function, code, programs in gpu_static.table(capability, [shape], gpu_static.DTYPES):
        row = function, case, code
        assert not code.spills, row
        assert (code.float64, code.conversions) == (0, 0) or not function.endswith("_outputs"), row
        values = 1 if case.shape[-1] == 7 and not case.channels_last else 4
        assert code.widest_load == values * getattr(torch, case.dtype).itemsize, row
        assert programs >= 3, row


def launches_of_a_step(
    capability: int, x: Tensor, parameter: torch.dtype, *, affine: bool = True, residual: bool = True
) -> dict[str, list[gpu_static.Launch]]:
    """Those of each call of forward and backward: affine ones with a relu and, by default, with a residual."""
    weight = x.new_empty(x.shape[1], dtype=parameter) if affine else None
    z, dtype, running = x if affine and residual else None, parameter if affine else None, x.new_empty(x.shape[1])
    of_both = Layout.of(x, 1), x.dtype, x.device
    kind = ForwardConfig(*of_both, 1e-5, affine, z is not None, dtype, dtype, x.dtype, x.dtype)
    of_backward = BackwardConfig(*of_both, kind.relu_mask, dtype, dtype, needs_x=True, needs_residual=z is not None)
    found: dict[str, list[gpu_static.Launch]] = {}

    def call(kernels: Any, name: str, *arguments: object) -> Any:
        launches.clear()
        result = getattr(kernels, name)(*arguments)
        found[name] = [*launches]
        return result

    with gpu_static.recorded(capability) as (module, launches):
        forward, backward = module.Forward(kind), module.Backward(of_backward)
        sums = call(forward, "forward_sums", x)
        y, statistics, _ = call(forward, "forward_outputs", (x, weight, weight, z), sums, (running, running, None))
        saved = x, weight, statistics, None if z is None else y
        sums, _, _ = call(backward, "backward_sums", x, saved)
        call(backward, "backward_outputs", x, saved, sums)
    return found


@pytest.mark.parametrize(
    ("sizes", "capability", "dtype", "parameter", "residual"),
    [
        ((64, 64, 3136), 75, torch.float16, torch.float32, True),
        ((64, 512, 4), 80, torch.float32, torch.bfloat16, True),
        ((3, 8, 49), 80, torch.float32, torch.bfloat16, True),  # not a multiple of 4
        ((64, 64, 3136), 90, torch.bfloat16, torch.float32, True),
        ((1, 1, 1), 90, torch.bfloat16, torch.float32, True),
        ((4, 8, 25), 90, torch.float64, torch.float64, True),
        ((100352, 64), 90, torch.float32, torch.float32, False),  # finds the mask of the relu in x
        ((32, 2048, 49), 90, torch.float32, torch.float32, False),
    ],
    ids=str,
)
def test_all_launches_compile(
    sizes: tuple[int, ...], capability: int, dtype: torch.dtype, parameter: torch.dtype, residual: bool
) -> None:
    """In the same order each time, and without a division for each value of a map."""
    x = torch.empty(sizes, dtype=dtype, device="meta")
    launches = launches_of_a_step(capability, x, parameter, residual=residual)
    assert sum(map(len, launches.values())) <= 4 + 4
    for launch in itertools.chain(*launches.values()):
        assert not re.search(r"\b(atom|red)\.", launch.assembly()), "their order would change results"
    for function in FUNCTIONS:
        launch = gpu_static.over_whole_tensor(launches[function])
        assert residual or not gpu_static.read(launch).spills
        if function.endswith("_outputs"):
            assert dtype == torch.float64 or ".f64" not in launch.assembly()
            assert "div.rn.f" not in launch.assembly()


@pytest.mark.parametrize("capability", [80, 90])
def test_running_stats_are_rounded_as_by_torch(capability: int) -> None:
    """No product is fused with a sum: a rank in the fallback has each rounded."""
    launches = launches_of_a_step(capability, torch.empty((64, 64, 49), device="meta"), torch.float32)
    (launch,) = [one for one in launches["forward_outputs"] if one.metadata.name == "forward_channels"]
    operations = {*re.findall(r"\b(fma\S*|mul\S*|add\S*|sub\S*)\.f64", launch.assembly())}
    assert operations == {"mul.rn", "add.rn", "sub.rn"}  # without .rn the assembler may fuse


@pytest.mark.parametrize("sizes", [(2**31 - 1, 1, 1), (1, 1, 2**31 + 5), (2**17, 2**10, 2**6)], ids=str)
def test_more_values_than_an_int32_counts(sizes: tuple[int, ...]) -> None:
    launches = launches_of_a_step(90, torch.empty(sizes, device="meta"), torch.float32, affine=False)
    for function in FUNCTIONS:
        assembly = gpu_static.over_whole_tensor(launches[function]).assembly()
        assert re.search(r"(mad\.lo|mul\.lo|mul\.wide)\S*64", assembly)


@pytest.mark.parametrize("number", [2, 3, 5, 7, 49, 98, 784, 12544, 2**20, 2**30 + 1])
def test_division(number: int) -> None:
    multiplier, shift = gpu._magic_division(number)
    assert -(2**31) <= multiplier < 2**31
    for n in (0, 1, number - 1, number, number + 1, 12345 * number - 1, 12345 * number, 2**31 - 1):
        assert n >= 2**31 or (n * (multiplier % 2**32) >> 32) >> shift == n // number
