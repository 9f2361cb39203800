"""Launches the kernels for CUDA tensors, and decides how they go over a tensor. Their code is in gpu_kernels.py.

Launches: channel_sums 2, or 1 for a small tensor, gradient_sums 2, the others 1 each. Nothing waits for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from syncbn import moments
from syncbn.kernels import gpu_kernels
from syncbn.layout import Layout

SHORTEST_RUN = 32  # columns
TILE = 4096  # values
COLUMNS_OF_RUN = 512  # of a tile, at most where there are rows enough for the rest
COLUMNS_OF_ROW = 128  # of a tile, at most
SUMMING_PROGRAMS = 1024  # about as many as run at once on a large GPU
MAPPING_PROGRAMS = 8192
CHANNELS = 8  # of a program that adds the parts, or has one number a channel
FUSED = {"enable_fp_fusion": True}  # a * b + c as one operation; Triton 3.9 warns unless told, as its default changes


class Plan(NamedTuple):
    """How a kernel goes over a tensor."""

    grid: tuple[int, int]  # spans, and programs of each, its parts
    sizes: dict[str, int]  # outer, channels, inner, columns, num_tiles, tiles_of_program
    constants: dict[str, Any]  # of the kernel, and its warps
    of_parts: dict[str, int]  # num_parts, width, inner, channels: for the kernel that adds the parts
    blocks: tuple[int]  # its grid


@functools.lru_cache(1024)
def _plan(sizes: tuple[int, int, int], dtype: torch.dtype, most_programs: int) -> Plan:
    outer, channels, inner = sizes
    if outer * inner == 0:
        outer, inner = 0, 1
    in_runs = inner >= SHORTEST_RUN
    columns = channels * inner
    rows = triton.next_power_of_2(max(1, outer))
    width = min(triton.next_power_of_2(inner), max(COLUMNS_OF_RUN, TILE // rows)) if in_runs else COLUMNS_OF_ROW
    width = min(width, triton.next_power_of_2(max(1, columns)))
    height = min(rows, TILE // width)
    spans = max(1, channels if in_runs else triton.cdiv(columns, width))
    num_tiles = triton.cdiv(outer, height) * (triton.cdiv(inner, width) if in_runs else 1)
    parts = max(1, min(num_tiles, most_programs // spans))
    tiles_of_program = triton.cdiv(num_tiles, parts)
    parts = triton.cdiv(num_tiles, tiles_of_program) if num_tiles else 1
    return Plan(
        (spans, parts),
        {
            "outer": outer,
            "channels": channels,
            "inner": inner,
            "columns": columns,
            "num_tiles": num_tiles,
            "tiles_of_program": tiles_of_program,
        },
        {
            "IN_RUNS": in_runs,
            "ROWS": height,
            "COLUMNS": width,
            "INDEX": tl.int32 if outer * columns < 2**31 else tl.int64,
            "COMPUTE": tl.float64 if dtype == torch.float64 else tl.float32,
            "num_warps": min(8, max(1, height * width // 512)),
        }
        | FUSED,
        {
            "num_parts": parts,
            "width": channels if in_runs else columns,
            "inner": 1 if in_runs else inner,
            "channels": channels,
        },
        _blocks_of(channels),
    )


@functools.lru_cache(1024)
def _two(number: float) -> tuple[float, float]:
    """Two float32 whose sum is the number, to 48 bits."""
    high = ctypes.c_float(number).value
    return high, number - high


def channel_sums(x: Tensor, layout: Layout) -> Tensor:
    plan = _plan(layout.sizes, x.dtype, SUMMING_PROGRAMS)
    channels = plan.sizes["channels"]
    with _device_of(x):
        parts = _empty_parts(x, plan)
        gpu_kernels.parts_of_sums[plan.grid](x, None, None, None, parts, **plan.sizes, **plan.constants)
        if parts.numel() == 2 * channels + 1:  # one part, with one column a channel: the sums themselves
            return parts
        sums = _empty_numbers(x, 2 * channels + 1)
        gpu_kernels.sums[plan.blocks](parts, sums, **plan.of_parts, CHANNELS=CHANNELS, **FUSED)
    return sums


def forward_coefficients(
    sums: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    channels = len(sums) // 2
    with _device_of(sums):
        statistics = _empty_numbers(sums, 3 * channels + 1)
        coefficients = sums.new_empty(3 * channels, dtype=moments.compute_dtype(dtype))
        gpu_kernels.forward_coefficients[_blocks_of(channels)](
            sums, _dense(weight), _dense(bias), statistics, coefficients, *_two(eps), channels,
            CHANNELS=CHANNELS, **FUSED,
        )  # fmt: skip
    return statistics, coefficients


def normalize(x: Tensor, layout: Layout, coefficients: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    plan = _plan(layout.sizes, x.dtype, MAPPING_PROGRAMS)
    with _device_of(x):
        y = torch.empty_like(x)
        gpu_kernels.normalize[plan.grid](x, residual, y, coefficients, **plan.sizes, RELU=relu, **plan.constants)
    return y


def gradient_sums(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    layout: Layout,
    statistics: Tensor,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    plan = _plan(layout.sizes, x.dtype, SUMMING_PROGRAMS)
    channels = plan.sizes["channels"]
    with _device_of(x):
        parts, sums = _empty_parts(x, plan), _empty_numbers(x, 2 * channels)
        grad_weight = None if weight_dtype is None else x.new_empty(channels, dtype=weight_dtype)
        grad_bias = None if bias_dtype is None else x.new_empty(channels, dtype=bias_dtype)
        gpu_kernels.parts_of_sums[plan.grid](x, dy, y, statistics, parts, **plan.sizes, **plan.constants)
        gpu_kernels.gradient_sums[plan.blocks](
            parts, statistics, sums, grad_weight, grad_bias,
            **plan.of_parts, CHANNELS=CHANNELS, COMPUTE=plan.constants["COMPUTE"], **FUSED,
        )  # fmt: skip
    return sums, grad_weight, grad_bias


def backward_coefficients(sums: Tensor, statistics: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    channels = len(sums) // 2
    with _device_of(sums):
        coefficients = sums.new_empty(4 * channels, dtype=moments.compute_dtype(dtype))
        gpu_kernels.backward_coefficients[_blocks_of(channels)](
            sums, statistics, _dense(weight), coefficients, channels, CHANNELS=CHANNELS, **FUSED
        )
    return coefficients


def input_gradient(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, coefficients: Tensor, of_residual: bool
) -> tuple[Tensor, Tensor | None]:
    plan = _plan(layout.sizes, x.dtype, MAPPING_PROGRAMS)
    with _device_of(x):
        grad_x, grad_residual = torch.empty_like(x), torch.empty_like(x) if of_residual else None
        gpu_kernels.input_gradient[plan.grid](
            dy, x, y, grad_x, grad_residual, coefficients, **plan.sizes, **plan.constants
        )
    return grad_x, grad_residual


def update_running_stats(
    running_mean: Tensor, running_var: Tensor, statistics: Tensor, momentum: float | Tensor, moves: bool = True
) -> None:
    if isinstance(momentum, Tensor):
        moments.update_running_stats(running_mean, running_var, statistics, momentum, moves)
        return
    if not moves:
        return
    channels = running_mean.numel()
    with _device_of(running_mean):
        gpu_kernels.update_running_stats[_blocks_of(channels)](
            running_mean, running_var, statistics, *_two(momentum), running_mean.stride(0), running_var.stride(0),
            channels, CHANNELS=CHANNELS, **FUSED,
        )  # fmt: skip


def _device_of(x: Tensor) -> AbstractContextManager[object]:
    """Makes the GPU of x the current one, on which Triton launches."""
    return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]


def _empty_parts(x: Tensor, plan: Plan) -> Tensor:
    """For the parts of the two sums, and the number of a channel's values."""
    return _empty_numbers(x, 2 * plan.of_parts["width"] * plan.of_parts["num_parts"] + 1)


def _empty_numbers(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=torch.float64)


def _blocks_of(channels: int) -> tuple[int]:
    return (max(1, triton.cdiv(channels, CHANNELS)),)


def _dense(of_channels: Tensor | None) -> Tensor | None:
    return None if of_channels is None else of_channels.contiguous()
