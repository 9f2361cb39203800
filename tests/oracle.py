"""The reference of the tests: batch norm of the whole batch on one process, in float64, by the definition.

scripts/accuracy.py prints errors on HARD_INPUTS, for which formulas of batch norm lose digits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

# Tolerances relative to the largest term of a sum. Elementwise kernels round three times. A float32 rounding is 6e-8.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


class Result(NamedTuple):
    """The results of forward and backward in one training step."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    grad_z: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    gradient_scale: float  # max |dy * weight * invstd|: grad_input may be a small difference of terms of this size.


@torch.enable_grad()
def full_batch(
    x: Tensor, dy: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, z: Tensor | None = None,
    relu: bool = False, eps: float = 1e-5, momentum: float = 0.1, channel_dim: int = 1,
) -> Result:  # fmt: skip
    """Compute a step, with running_mean 0 and running_var 1 before it. Autograd differentiates the two-pass formula."""
    leaves = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in (x, weight, bias, z)]
    x, weight, bias, z = leaves
    dims = [dim for dim in range(x.ndim) if dim != channel_dim % x.ndim]
    shape = [-1 if dim == channel_dim % x.ndim else 1 for dim in range(x.ndim)]
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().mean(dims, keepdim=True)
    scale = 1 / (var + eps).sqrt()
    if weight is not None:
        scale = scale * weight.view(shape)
    y = (x - mean) * scale
    if bias is not None:
        y = y + bias.view(shape)
    if z is not None:
        y = y + z
    if relu:
        y = y.relu()
    y.backward(dy.double())
    n = x.numel() // mean.numel()
    return Result(
        y.detach(),
        *(None if leaf is None else leaf.grad for leaf in leaves),
        momentum * mean.detach().flatten(),
        (1 - momentum) + momentum * var.detach().flatten() * n / (n - 1),
        (dy.double() * scale).abs().max().item() if dy.numel() else 0.0,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected| / max |expected|, or 0 for empty tensors. If a value is NaN, the result is NaN,
    which is not below any bound."""
    if not expected.numel():
        return 0.0
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def within_one_rounding(actual: Tensor, expected: Tensor, scale: float) -> bool:
    """Return whether `actual` is `expected`, computed in float32 with errors up to 1e-6 of `scale`, and then rounded to
    the dtype of `actual`."""
    expected = expected.double()
    finfo = torch.finfo(actual.dtype)
    # Subnormal numbers all have the spacing of the smallest normal number.
    rounding = finfo.eps / 2 * expected.abs().clamp(min=finfo.smallest_normal)
    return bool(((actual.double() - expected).abs() <= rounding + 1e-6 * scale).all())


def require_close(name: str, actual: Tensor, wanted: Tensor, scale: float, extra_tolerance: float = 0.0) -> None:
    """Assert that 16-bit values differ by at most `within_one_rounding`, and other values by at most
    (TOLERANCE + extra_tolerance) * scale."""
    assert actual.shape == wanted.shape, name
    if actual.dtype in TOLERANCE:
        error = (actual.double() - wanted).abs().max().item() if wanted.numel() else 0.0
        assert error <= (TOLERANCE[actual.dtype] + extra_tolerance) * scale, (name, error, scale)
    else:
        assert within_one_rounding(actual, wanted, scale), name


HARD_SHAPE = (16, 8, 9, 9)  # The block size of a kernel does not divide 9 * 9, so its last block is partly filled.
HARD_INPUTS = "N(0, 1)", "mean 1e4, std 1", "first value 1e6", "mean 10, std 1e-4"


def hard_case(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, dy, weight and bias. `case` is one of HARD_INPUTS, and describes x."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64, "device": "cpu"}  # The default device may be a GPU.
    x, dy = torch.randn(2, *HARD_SHAPE, **options)
    weight, bias = torch.randn(2, HARD_SHAPE[1], **options)
    if case == "mean 1e4, std 1":
        x += 1e4
    elif case == "first value 1e6":
        x[0, :, 0, 0] = 1e6
    elif case == "mean 10, std 1e-4":
        x = 10 + 1e-4 * x
    return x.to(dtype), dy.to(dtype), weight.to(dtype), bias.to(dtype)


class Errors(NamedTuple):
    relative: dict[str, float]  # the errors of a step compared with `full_batch`, by the name of the result
    mean_over_std: float  # the largest |mean| / std of a channel of the input


def errors_of_one_step(
    case: str, dtype: torch.dtype, batch_norm: Any, rank: int = 0, num_ranks: int = 1, device: Any = "cpu"
) -> Errors:
    """Run a step of `batch_norm`, a function with the arguments of F.batch_norm, on this rank's samples. Gradients of
    weight and bias are summed over the ranks."""
    x, dy, weight, bias = hard_case(case, dtype)
    expected = full_batch(x, dy, weight, bias)
    local = slice(rank, None, num_ranks)
    x_leaf, weight, bias = (tensor.to(device).detach().requires_grad_() for tensor in (x[local], weight, bias))
    running_mean, running_var = torch.zeros_like(weight.data), torch.ones_like(weight.data)
    y = batch_norm(x_leaf, running_mean, running_var, weight, bias, training=True)
    y.backward(dy[local].to(device))
    if num_ranks > 1:
        torch.distributed.all_reduce(weight.grad)
        torch.distributed.all_reduce(bias.grad)
    expected = expected._replace(output=expected.output[local], grad_input=expected.grad_input[local])
    gradients = {"grad_input": x_leaf.grad, "grad_weight": weight.grad, "grad_bias": bias.grad}
    actual = {"output": y.detach(), **gradients, "running_mean": running_mean, "running_var": running_var}
    channels = x.double().movedim(1, 0).flatten(1)
    mean_over_std = (channels.mean(1).abs() / channels.std(1)).max().item()
    errors = {name: relative_error(value.cpu(), getattr(expected, name)) for name, value in actual.items()}
    return Errors(errors, mean_over_std)
