"""The reference of the tests: batch norm of the whole batch on one process, in float64, by the definition.

scripts/accuracy.py prints errors on HARD_INPUTS, for which formulas of batch norm lose digits.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Dtype of x -> largest error before a result is rounded, relative to the largest term of its sum. Below float64 a few
# terms are first added in float32, and elements are rounded to float32 several times, each time by 6e-8.
TOLERANCE = {torch.float64: 1e-12} | dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 9e-7)


def batch_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, z: Tensor | None = None, relu: bool = False,
    eps: float = 1e-5, channel_dim: int = 1, mask: Tensor | None = None, running: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output, which is 0 where `mask` is False, and mean (C,), biased variance (C,) and n, by the two-pass
    formula.

    `mask` can be broadcast to x. `running`: the running mean and variance, with which evaluation normalises.
    """
    dims = [dim for dim in range(x.ndim) if dim != channel_dim % x.ndim]
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.expand_as(x)
    x = torch.where(mask, x, 0)  # The mask may hide NaN and infinity.
    n = mask.sum(dims, keepdim=True).clamp(min=1)
    mean = x.sum(dims, keepdim=True) / n
    var = torch.where(mask, x - mean, 0).square().sum(dims, keepdim=True) / n
    if running is not None:
        mean, var = (tensor.view(mean.shape) for tensor in running)
    y = (x - mean) / (var + eps).sqrt()
    if weight is not None:
        y = y * weight.view(mean.shape)
    if bias is not None:
        y = y + bias.view(mean.shape)
    if z is not None:
        y = y + z
    if relu:
        y = y.relu()
    return torch.where(mask, y, 0), mean.flatten(), var.flatten(), n.flatten()[0]


class Result(NamedTuple):
    """The results of forward and backward in one training step."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    grad_z: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    mean_square: Tensor  # E[x^2] of each channel
    cancellation: float  # max E[x^2] / (var + eps): how much larger are the terms whose difference is the variance
    gradient_scale: float  # max |dy * weight * invstd|: grad_input may be a small difference of terms of this size.


def full_batch(
    x: Tensor, dy: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, z: Tensor | None = None,
    relu: bool = False, eps: float = 1e-5, channel_dim: int = 1, mask: Tensor | None = None, momentum: float = 0.1,
) -> Result:  # fmt: skip
    """Compute a step by autograd, with running_mean 0 and running_var 1 before it. For `mask` see `batch_norm`."""
    leaves = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in (x, weight, bias, z)]
    dy = dy.double() if mask is None else torch.where(mask, dy.double(), 0)
    with torch.enable_grad():
        y, *statistics = batch_norm(*leaves, relu, eps, channel_dim, mask)
    y.backward(dy)
    mean, var, n = (tensor.detach() for tensor in statistics)
    scale = (var + eps).rsqrt() * (1 if weight is None else weight.detach())
    mean_square = mean.square() + var
    return Result(
        y.detach(),
        *(None if leaf is None else leaf.grad for leaf in leaves),
        momentum * mean,
        (1 - momentum) + momentum * var * n / (n - 1).clamp(min=1),
        mean_square,
        largest(mean_square / (var + eps)),
        largest(dy.movedim(channel_dim, -1) * scale),
    )


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value, or 0 for an empty tensor."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected| / max |expected|, or 0 for empty tensors. If a value is NaN, the result is NaN,
    which is not below any bound."""
    if not expected.numel():
        return 0.0
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def within_one_rounding(actual: Tensor, expected: Tensor, scale: float, tolerance: float = 1e-6) -> bool:
    """Return whether `actual` is `expected`, computed with errors up to `tolerance * scale`, and then rounded to the
    dtype of `actual`."""
    expected = expected.double()
    finfo = torch.finfo(actual.dtype)
    # Subnormal numbers all have the spacing of the smallest normal number.
    rounding = finfo.eps / 2 * expected.abs().clamp(min=finfo.smallest_normal)
    return bool(((actual.double() - expected).abs() <= rounding + tolerance * scale).all())


HARD_SHAPE = (16, 8, 9, 9)  # The block size of a kernel does not divide 9 * 9, so its last block is partly filled.
# Mean and standard deviation of each input.
HARD_INPUTS = {
    "N(0, 1)": (0, 1),
    "mean 1e4, std 1": (1e4, 1),
    "mean 10, std 1e-4": (10, 1e-4),
    "first value 1e6": (0, 1),  # The other values are N(0, 1).
}


def hard_case(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, dy, weight and bias. `case` is one of HARD_INPUTS, and describes x."""
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64, "device": "cpu"}  # The default device may be a GPU.
    x, dy = torch.randn(2, *HARD_SHAPE, **options)
    weight, bias = torch.randn(2, HARD_SHAPE[1], **options)
    mean, std = HARD_INPUTS[case]
    x = mean + std * x
    if case == "first value 1e6":
        x[0, :, 0, 0] = 1e6
    return x.to(dtype), dy.to(dtype), weight.to(dtype), bias.to(dtype)


def errors_of_one_step(
    case: str, dtype: torch.dtype, function: Any, samples: slice = slice(None), device: Any = "cpu"
) -> dict[str, float]:
    """Run a step of `function`, which takes the arguments of F.batch_norm, with these samples of a hard case. Return
    the errors compared with `full_batch`, by the name of the result. Gradients of weight and bias are summed over the
    ranks."""
    tensors = hard_case(case, dtype)
    expected = full_batch(*tensors)
    x, dy, weight, bias = (tensor.to(device) for tensor in tensors)
    x, weight, bias = (tensor.requires_grad_() for tensor in (x[samples], weight, bias))
    running_mean, running_var = torch.zeros_like(weight.data), torch.ones_like(weight.data)
    y = function(x, running_mean, running_var, weight, bias, training=True)
    y.backward(dy[samples])
    if dist.is_initialized():
        dist.all_reduce(weight.grad)
        dist.all_reduce(bias.grad)
    expected = expected._replace(output=expected.output[samples], grad_input=expected.grad_input[samples])
    gradients = {"grad_input": x.grad, "grad_weight": weight.grad, "grad_bias": bias.grad}
    actual = {"output": y.detach(), **gradients, "running_mean": running_mean, "running_var": running_var}
    return {name: relative_error(value.cpu(), getattr(expected, name)) for name, value in actual.items()}
