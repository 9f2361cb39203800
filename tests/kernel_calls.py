"""Call the kernels of a back end as one of several ranks, and compare the results with float64."""

from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn import payload
from syncbn.kernels.interface import BackEnd, BackwardConfig, ForwardConfig, ReluMask
from syncbn.kernels.layout import Layout

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EPS = 1e-5
Sizes: TypeAlias = tuple[int, int, int]  # outer, channels, inner

TRITON = pytest.param("triton", marks=pytest.mark.triton)
only_triton = pytest.mark.parametrize("kernels", [TRITON], indirect=True)
only_cpu = pytest.mark.parametrize("kernels", ["cpu"], indirect=True)


def is_triton(kernels: BackEnd) -> bool:
    return "gpu" in kernels.__name__


def is_interpreted(kernels: BackEnd) -> bool:
    """Return whether Triton's interpreter runs the kernels. It truncates where GPUs round to a narrower dtype or to a
    subnormal value."""
    return is_triton(kernels) and torch.get_default_device().type == "cpu"


def draw(num: int, sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(num, *sizes, dtype=torch.float64).to(dtype))


def draw_per_channel(num: int, num_channels: int) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(num, num_channels, dtype=torch.float64).tanh())


def forward_config(x: Tensor, eps: float = EPS, relu: bool = False, **others: Any) -> ForwardConfig:
    return ForwardConfig(Layout.of(x, 1), x.dtype, x.device, eps, relu, **others)


def backward_config(x: Tensor, **others: Any) -> BackwardConfig:
    return BackwardConfig(Layout.of(x, 1), x.dtype, x.device, **others)


def pad_trailer(sums: Tensor, num_channels: int) -> Tensor:
    """Return a payload without a signature."""
    return F.pad(sums, (0, payload.num_elements(num_channels) - len(sums)))


def forward(
    kernels: BackEnd, x: Tensor, total: Tensor | None = None, eps: float = EPS, relu: bool = False,
    weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return S, Q and n of this rank; y; and the statistics. `total` is S, Q and n of all ranks, by default this
    rank's."""
    dtypes = {"weight_dtype": getattr(weight, "dtype", None), "bias_dtype": getattr(bias, "dtype", None)}
    kernel = kernels.Forward(forward_config(x, eps, relu, has_residual=residual is not None, **dtypes))
    sums = payload.sums_and_num_values(kernel.forward_sums(x))
    total = pad_trailer(sums if total is None else total, x.shape[1])
    y, statistics, _ = kernel.forward_outputs((x, weight, bias, residual), total)
    return sums, y, statistics


def backward(
    kernels: BackEnd, dy: Tensor, saved: Any, total: Tensor | None = None, relu: bool = False, residual: bool = False
) -> list[Tensor]:
    """Return the sums of this rank; the gradients of weight (float64), bias (bfloat16) and x; and with `residual` that
    of the residual. `saved` is x, weight, statistics and y. `total` is the sums of all ranks, by default this rank's.
    """
    x, weight, _, y = saved
    config = backward_config(
        x, relu_mask=(ReluMask.FROM_X if y is None else ReluMask.FROM_Y) if relu else ReluMask.NONE,
        weight_dtype=getattr(weight, "dtype", None), grad_weight_dtype=torch.float64, grad_bias_dtype=torch.bfloat16,
        needs_x=True, needs_residual=residual,
    )  # fmt: skip
    kernel = kernels.Backward(config)
    sums, grad_weight, grad_bias = kernel.backward_sums(dy, saved)
    total = pad_trailer(payload.sums(sums) if total is None else total, x.shape[1])
    grad_x, grad_residual = kernel.backward_outputs(dy, saved, total)
    assert (grad_residual is not None) == residual
    return [payload.sums(sums), grad_weight, grad_bias, grad_x, *([grad_residual] if residual else [])]


def forward_backward(kernels: BackEnd, dy: Tensor, x: Tensor, relu: bool = False, **tensors: Tensor) -> list[Tensor]:
    """Return the results of `forward` and `backward` for a single rank. A relu after a residual is masked by y."""
    sums, y, statistics = forward(kernels, x, relu=relu, **tensors)
    masks_by_y = relu and "residual" in tensors
    saved = x, tensors.get("weight"), statistics, y if masks_by_y else None
    return [sums, y, statistics, *backward(kernels, dy, saved, relu=relu, residual=masks_by_y)]


def sums_for(mean: Tensor, invstd: Tensor, num_values: float = 8.0) -> Tensor:
    """Return S, Q and n of a batch with this mean and, if eps is 0, this invstd."""
    mean_square = invstd**-2 + mean.square()
    return torch.cat((mean * num_values, mean_square * num_values, torch.tensor([num_values], dtype=torch.float64)))


def assert_elements_close(actual: Tensor, expected: Tensor) -> None:
    """Compare within some roundings of the result's dtype, or of float32, in which elements are computed."""
    assert not actual.isnan().any(), "an element was left unwritten"
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=32 * min(eps, torch.finfo(torch.float32).eps))


def assert_sums_close(actual: Tensor, terms: tuple[Tensor, Tensor], dtype: torch.dtype, kernels: BackEnd) -> None:
    """Compare with the packed sums of both terms. Some 16-bit terms, and in Triton float32 terms, are first added in
    float32."""
    assert actual.dtype == torch.float64
    in_float32 = dtype.itemsize == 2 or (dtype == torch.float32 and is_triton(kernels))
    for sums, term in zip(actual.chunk(2), terms, strict=True):
        allowed = (2.0**-22 if in_float32 else 1e-14) * term.abs().sum((0, 2))
        assert ((sums - term.sum((0, 2))).abs() <= allowed).all()
