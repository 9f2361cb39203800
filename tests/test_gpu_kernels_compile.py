"""Every GPU kernel compiles for old and new GPUs, on a machine without one, and reads and writes 128 bits at a time.

Maps of float32 and 16-bit values compute nothing in float64, which is slow on most GPUs, and divide by nothing.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from syncbn.kernels import gpu, gpu_kernels

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
NUMBERS = "*fp64"
OF_PARTS = {"num_parts": 16, "width": 64, "inner": 1, "channels": 64, "CHANNELS": gpu.CHANNELS}
TWO = {"eps": 1e-5, "eps_rest": 1e-12}


def ptx(kernel: Any, capability: int, *, num_warps: int = 4, enable_fp_fusion: bool = True, **arguments: Any) -> str:
    """The assembly for arguments that are pointers' types, numbers, None, or constants with upper-case names."""
    signature: dict[str, str] = {}
    constants, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        argument = arguments[name]
        if name.isupper() or argument is None or (type(argument) is int and argument == 1):  # as a launch does
            signature[name], constants[index,] = "constexpr", argument
            continue
        kind = "i64" if isinstance(argument, int) and argument >= 2**31 else "i32"
        signature[name] = {str: argument, float: "fp32", int: kind}[type(argument)]
        if isinstance(argument, str) or (isinstance(argument, int) and argument % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [(70, torch.float16), (80, torch.float32), (90, torch.bfloat16), (90, torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(64, 64, 3136), (200_704, 256, 1), (64, 512, 4), (2**20, 64, 64)], ids=str)
def test_kernels_of_values(capability: int, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    values = POINTERS[dtype]
    of_maps = {"x": values, "y": values, "coefficients": NUMBERS if dtype == torch.float64 else "*fp32"}
    arguments = {
        gpu_kernels.parts_of_sums: {"x": values, "dy": None, "y": None, "statistics": None, "parts": NUMBERS},
        gpu_kernels.normalize: {"residual": values, "RELU": True} | of_maps,
        gpu_kernels.input_gradient: {"dy": values, "grad_x": values, "grad_residual": values} | of_maps,
    }
    plan = gpu._plan(sizes, dtype, gpu.SUMMING_PROGRAMS)
    assert (plan.constants["INDEX"] == tl.int64) == (sizes[0] * sizes[1] * sizes[2] >= 2**31)
    for kernel, own in arguments.items():
        assembly = ptx(kernel, capability, **plan.sizes, **plan.constants, **own)
        assert not re.search(r"\b(atom|red)\.", assembly), "their order would change results"
        wide = "v2.b64" if dtype == torch.float64 else "v4.b32"
        assert re.search(rf"ld\.global\.\S*{re.escape(wide)}", assembly), "read piece by piece"
        if kernel is not gpu_kernels.parts_of_sums:
            assert re.search(rf"st\.global\.\S*{re.escape(wide)}", assembly), "written piece by piece"
            assert dtype == torch.float64 or ".f64" not in assembly
            assert "div.rn.f" not in assembly
    of_gradients = {"x": values, "dy": values, "y": values, "statistics": NUMBERS, "parts": NUMBERS}
    ptx(gpu_kernels.parts_of_sums, capability, **plan.sizes, **plan.constants, **of_gradients)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 8, 25), (1, 8, 40), (2**31 + 5, 1, 1), (1, 1, 2**31 + 5)], ids=str)
def test_sizes_of_one_and_of_more_than_an_int32(sizes: tuple[int, int, int]) -> None:
    """A launch makes a constant of a size of 1, which is no tensor of Triton's."""
    plan = gpu._plan(sizes, torch.float32, gpu.SUMMING_PROGRAMS)
    x, grid = "*fp32", {**plan.sizes, **plan.constants}
    of_gradients = {"x": x, "dy": x, "y": x, "statistics": NUMBERS, "parts": NUMBERS}
    ptx(gpu_kernels.parts_of_sums, 90, **(of_gradients | {"dy": None, "y": None, "statistics": None}), **grid)
    ptx(gpu_kernels.parts_of_sums, 90, **of_gradients, **grid)
    ptx(gpu_kernels.sums, 90, parts=NUMBERS, sums=NUMBERS, **plan.of_parts, CHANNELS=gpu.CHANNELS)
    of_maps = {"x": x, "y": x, "coefficients": "*fp32"} | grid
    ptx(gpu_kernels.normalize, 90, residual=None, RELU=False, **of_maps)
    ptx(gpu_kernels.input_gradient, 90, dy=x, grad_x=x, grad_residual=None, **of_maps)


@pytest.mark.parametrize("parameter", ["*fp32", "*bf16", "*fp64"])
def test_kernels_of_channels(parameter: str) -> None:
    ptx(gpu_kernels.sums, 90, parts=NUMBERS, sums=NUMBERS, **OF_PARTS)
    of_gradients = {"parts": NUMBERS, "statistics": NUMBERS, "sums": NUMBERS, "grad_weight": parameter}
    ptx(gpu_kernels.gradient_sums, 90, **of_gradients, grad_bias=parameter, COMPUTE=tl.float32, **OF_PARTS)
    of_sums = {
        "sums": NUMBERS,
        "statistics": NUMBERS,
        "coefficients": "*fp32",
        "channels": 64,
        "CHANNELS": gpu.CHANNELS,
    }
    ptx(gpu_kernels.forward_coefficients, 90, **of_sums, **TWO, weight=parameter, bias=parameter)
    ptx(gpu_kernels.forward_coefficients, 90, **of_sums, **TWO, weight=None, bias=None)
    ptx(gpu_kernels.backward_coefficients, 90, **of_sums, weight=parameter)

    buffers = {"running_mean": parameter, "running_var": parameter, "mean_stride": 1, "var_stride": 1}
    momentum = {"momentum": 0.1, "momentum_rest": 1e-9}
    ptx(
        gpu_kernels.update_running_stats,
        90,
        **buffers,
        **momentum,
        statistics=NUMBERS,
        channels=64,
        CHANNELS=gpu.CHANNELS,
    )
