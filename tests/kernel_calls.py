"""Call the kernels of a back end as a rank does."""

from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from syncbn import payload
from syncbn.kernels import cpu
from syncbn.kernels.interface import NO_BUFFERS, BackEnd, BackwardConfig, Buffers, ForwardConfig, ReluMask, Status
from syncbn.kernels.layout import Layout
from syncbn.payload import UNSIGNED

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EPS = 1e-5
# The largest signature, a count of more than 32 bits, and the id of a call: what `signed` kernels write in payloads.
SIGNATURE, COUNT, CALL_ID = 2**26 - 1, 2**40 + 1, 200
Sizes: TypeAlias = tuple[int, int, int]  # outer, channels, inner

TRITON = pytest.param("triton", marks=pytest.mark.triton)


def is_triton(kernels: BackEnd) -> bool:
    return kernels.__name__ == "syncbn.kernels.gpu"


def is_interpreted(kernels: BackEnd) -> bool:
    """Return whether Triton's interpreter runs the kernels. It truncates values to bfloat16 and to subnormal float16,
    where a GPU rounds."""
    return is_triton(kernels) and torch.get_default_device().type == "cpu"


def draw(num: int, sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(num, *sizes, dtype=torch.float64).to(dtype))


def unaligned(tensor: Tensor) -> Tensor:
    """Return a copy that begins one byte after a multiple of the element size, like a tensor that is mapped from a
    file."""
    buffer = bytearray(1 + tensor.nbytes)
    return torch.frombuffer(buffer, dtype=tensor.dtype, offset=1).view(tensor.shape).copy_(tensor)


def draw_per_channel(num: int, num_channels: int) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(num, num_channels, dtype=torch.float64).tanh())


def total_of_mean_0_and_var_1(num_channels: int) -> Tensor:
    """Return the total of a batch with mean 0 and variance 1. With eps = 0, y is then x * weight + bias."""
    return payload.from_sums(torch.tensor([0.0, 1.0], dtype=torch.float64).repeat_interleave(num_channels), 1.0)


def forward_config(x: Tensor, **fields: Any) -> ForwardConfig:
    return ForwardConfig(Layout.of(x, 1), x.dtype, x.device, **fields)


class ForwardResult(NamedTuple):
    payload: Tensor
    y: Tensor
    statistics: Tensor


class BackwardResult(NamedTuple):
    payload: Tensor
    grad_weight: Tensor  # float64
    grad_bias: Tensor  # bfloat16
    grad_x: Tensor | None
    grad_residual: Tensor | None


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def run_forward(
    kernels: BackEnd, x: Tensor, total: Tensor | None = None, *, weight: Tensor | None = None,
    bias: Tensor | None = None, residual: Tensor | None = None, buffers: Buffers = NO_BUFFERS,
    momentum: float | None = 0.0, status_words: Status = None, signed: bool = False, **fields: Any,
) -> ForwardResult:  # fmt: skip
    """Run a forward of this rank. `total` is the sum of the payloads of all ranks, by default of this rank alone.
    `fields` are fields of the config that do not follow from the other arguments."""
    running_mean, running_var, counter = buffers
    fields = {"eps": EPS, "has_counter": counter is not None, "averages": momentum is None} | fields
    config = forward_config(
        x, has_residual=residual is not None, weight_dtype=_dtype(weight), bias_dtype=_dtype(bias),
        mean_dtype=_dtype(running_mean), var_dtype=_dtype(running_var), **fields,
    )  # fmt: skip
    kernel = kernels.Forward(config)
    local = kernel.forward_sums(x, SIGNATURE, COUNT) if signed else kernel.forward_sums(x)
    total = local if total is None else total
    y, statistics, _ = kernel.forward_outputs((x, weight, bias, residual), total, buffers, momentum, status_words)
    return ForwardResult(local, y, statistics)


def run_backward(
    kernels: BackEnd, dy: Tensor, x: Tensor, statistics: Tensor, total: Tensor | None = None, *, relu: bool = False,
    y: Tensor | None = None, weight: Tensor | None = None, status_words: Status = None, signed: bool = False,
    needs_x: bool = True, **fields: Any,
) -> BackwardResult:  # fmt: skip
    """Run a backward of this rank. The mask of a relu is computed from `y`, or from x if `y` is None."""
    relu_mask = ReluMask.NONE
    if relu:
        relu_mask = ReluMask.FROM_X if y is None else ReluMask.FROM_Y
    layout, dtypes = Layout.of(x, 1), (_dtype(weight), torch.float64, torch.bfloat16)
    config = BackwardConfig(layout, x.dtype, x.device, relu_mask, *dtypes, needs_x=needs_x, **fields)
    kernel, saved = kernels.Backward(config), (x, weight, statistics, y)
    signature: tuple[int, Tensor | None] = (UNSIGNED, None)
    if signed:  # cpu.py gets a signature that already contains the id of the call.
        call_id = torch.tensor([CALL_ID], dtype=torch.float64)
        signature = (SIGNATURE + CALL_ID, None) if kernels is cpu else (SIGNATURE, call_id)
    local, grad_weight, grad_bias = kernel.backward_sums(dy, saved, *signature)
    gradients = kernel.backward_outputs(dy, saved, local if total is None else total, status_words)
    return BackwardResult(local, grad_weight, grad_bias, *gradients)


def run_both(
    kernels: BackEnd, dy: Tensor, x: Tensor, *, relu: bool = False, residual: Tensor | None = None,
    needs_residual: bool = True, totals: tuple[Tensor | None, Tensor | None] = (None, None), bias: Tensor | None = None,
    buffers: Buffers = NO_BUFFERS, eps: float = EPS, **common: Any,
) -> tuple[ForwardResult, BackwardResult]:  # fmt: skip
    """Run forward and backward of this rank. Backward computes the gradient of a residual if there is a relu: without
    one the gradient is dy."""
    common["relu"] = relu
    forward = run_forward(kernels, x, totals[0], residual=residual, bias=bias, buffers=buffers, eps=eps, **common)
    y = None if residual is None else forward.y
    needs_residual = needs_residual and relu and residual is not None
    backward = run_backward(kernels, dy, x, forward.statistics, totals[1], y=y, needs_residual=needs_residual, **common)
    return forward, backward


def assert_identical(actual: Any, expected: Any) -> None:
    """Compare tensors, or tuples of tensors, without a tolerance. NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
