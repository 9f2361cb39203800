"""Call the kernels of a back end as a rank does, and compare the results with float64."""

import importlib.metadata
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from torch import Tensor

from syncbn import payload
from syncbn.kernels.interface import NO_BUFFERS, BackEnd, BackwardConfig, Buffers, ForwardConfig, ReluMask, Status
from syncbn.kernels.layout import Layout

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EPS = 1e-5
Sizes: TypeAlias = tuple[int, int, int]  # outer, channels, inner

TRITON = pytest.param("triton", marks=pytest.mark.triton)
only_cpu = pytest.mark.parametrize("kernels", ["cpu"], indirect=True)


def is_triton(kernels: BackEnd) -> bool:
    return kernels.__name__ == "syncbn.kernels.gpu"


def is_interpreted(kernels: BackEnd) -> bool:
    """Return whether Triton's interpreter runs the kernels. The interpreter truncates values to bfloat16 and to
    subnormal values of float16, which a GPU rounds."""
    return is_triton(kernels) and torch.get_default_device().type == "cpu"


def interpret_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip two steps that take half of the time of Triton's interpreter and change no result.

    The interpreter checks each integer operation for overflow, but ignores the check without `debug`. In each function
    call the interpreter patches Triton's language, although the launch has patched it.
    """
    if not importlib.metadata.version("triton").startswith("3.6."):
        return  # Other versions may have other names.
    import triton.language
    from triton.runtime import interpreter

    from syncbn.kernels import gpu_channels, gpu_tiles

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function.rewrite()(*args, **kwargs)

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    # A launch patches the modules that are globals of the kernel. Triton's own functions need a patched `core`.
    for module in (gpu_channels, gpu_tiles):
        monkeypatch.setattr(module, "core", triton.language.core, raising=False)


def draw(num: int, sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(num, *sizes, dtype=torch.float64).to(dtype))


def draw_per_channel(num: int, num_channels: int) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(num, num_channels, dtype=torch.float64).tanh())


def total_of_mean_0_and_var_1(num_channels: int) -> Tensor:
    """Return the total of a batch with mean 0 and variance 1. With eps = 0, y is then x * weight + bias."""
    return payload.from_sums(torch.tensor([0.0, 1.0], dtype=torch.float64).repeat_interleave(num_channels), 1.0)


def forward_config(x: Tensor, **fields: Any) -> ForwardConfig:
    return ForwardConfig(Layout.of(x, 1), x.dtype, x.device, **fields)


def backward_config(x: Tensor, **fields: Any) -> BackwardConfig:
    return BackwardConfig(Layout.of(x, 1), x.dtype, x.device, **fields)


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
    kernels: BackEnd, x: Tensor, total: Tensor | None = None, *, eps: float = EPS, relu: bool = False,
    weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    buffers: Buffers = NO_BUFFERS, momentum: float | None = 0.0, status_words: Status = None, single_rank: bool = False,
) -> ForwardResult:  # fmt: skip
    """Run a forward of this rank. `total` is the sum of the payloads of all ranks, by default of this rank alone."""
    running_mean, running_var, counter = buffers
    config = forward_config(
        x, eps=eps, relu=relu, has_residual=residual is not None, weight_dtype=_dtype(weight), bias_dtype=_dtype(bias),
        mean_dtype=_dtype(running_mean), var_dtype=_dtype(running_var), has_counter=counter is not None,
        averages=momentum is None, single_rank=single_rank,
    )  # fmt: skip
    kernel = kernels.Forward(config)
    local = kernel.forward_sums(x)
    total = local if total is None else total
    y, statistics, _ = kernel.forward_outputs((x, weight, bias, residual), total, buffers, momentum, status_words)
    return ForwardResult(local, y, statistics)


def run_backward(
    kernels: BackEnd, dy: Tensor, x: Tensor, statistics: Tensor, total: Tensor | None = None, *, relu: bool = False,
    y: Tensor | None = None, weight: Tensor | None = None, needs_x: bool = True, needs_residual: bool = False,
    status_words: Status = None, single_rank: bool = False,
) -> BackwardResult:  # fmt: skip
    """Run a backward of this rank. The mask of a relu is computed from `y`, or from x if `y` is None."""
    relu_mask = ReluMask.NONE
    if relu:
        relu_mask = ReluMask.FROM_X if y is None else ReluMask.FROM_Y
    config = backward_config(
        x, relu_mask=relu_mask, weight_dtype=_dtype(weight), grad_weight_dtype=torch.float64,
        grad_bias_dtype=torch.bfloat16, needs_x=needs_x, needs_residual=needs_residual, single_rank=single_rank,
    )  # fmt: skip
    kernel, saved = kernels.Backward(config), (x, weight, statistics, y)
    local, grad_weight, grad_bias = kernel.backward_sums(dy, saved)
    gradients = kernel.backward_outputs(dy, saved, local if total is None else total, status_words)
    return BackwardResult(local, grad_weight, grad_bias, *gradients)


def run_both(
    kernels: BackEnd, dy: Tensor, x: Tensor, *, relu: bool = False, weight: Tensor | None = None,
    residual: Tensor | None = None, single_rank: bool = False, **arguments: Any,
) -> tuple[ForwardResult, BackwardResult]:  # fmt: skip
    """Run forward and backward of this rank alone. A `residual` requires `relu`, because backward computes its gradient
    from the mask of the relu. The other arguments are those of `run_forward`."""
    common = {"relu": relu, "weight": weight, "single_rank": single_rank}
    forward = run_forward(kernels, x, residual=residual, **common, **arguments)
    y, needs_residual = (None, False) if residual is None else (forward.y, True)
    return forward, run_backward(kernels, dy, x, forward.statistics, y=y, needs_residual=needs_residual, **common)


def assert_identical(actual: Any, expected: Any) -> None:
    """Compare tensors, or tuples of tensors, without a tolerance. NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def assert_elements_close(actual: Tensor, expected: Tensor) -> None:
    """Compare within one rounding to the dtype of `actual`, and several roundings of terms that may cancel, which the
    kernels compute in float32 or float64."""
    assert not actual.isnan().any(), "an element was left unwritten"
    eps = torch.finfo(actual.dtype).eps
    eps_of_terms = min(eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=32 * eps_of_terms)


def assert_sums_close(kernels: BackEnd, dtype: torch.dtype, actual: Tensor, terms: tuple[Tensor, Tensor]) -> None:
    """Compare the two sums of a payload with the sums of two float64 tensors, `terms`.

    Relative to the sum of the magnitudes, the error may be 1e-14, many roundings of float64. If kernels add the first
    few values in float32, the error may be 2^-22, four roundings of float32.
    """
    assert actual.dtype == torch.float64
    uses_float32 = dtype.itemsize == 2 or (dtype == torch.float32 and is_triton(kernels))
    for sums, term in zip(payload.sums(actual).chunk(2), terms, strict=True):
        allowed = (2.0**-22 if uses_float32 else 1e-14) * term.abs().sum((0, 2))
        assert ((sums - term.sum((0, 2))).abs() <= allowed).all()
