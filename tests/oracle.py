"""The reference of the tests: batch norm of the whole batch on one process, in float64, by the definition.

scripts/accuracy.py prints errors on HARD_INPUTS, for which formulas of batch norm lose digits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Relative to the largest value, or the largest term of a sum. An elementwise step rounds three times (6e-8 in float32).
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
    # max |dy * weight * invstd|: for few values grad_input is a small difference of terms of this size.
    gradient_scale: float


@torch.enable_grad()
def full_batch(
    x: Tensor, dy: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, z: Tensor | None = None,
    relu: bool = False, eps: float = 1e-5, momentum: float = 0.1, channel_dim: int = 1,
) -> Result:  # fmt: skip
    """Compute a step from running_mean 0 and running_var 1, with the gradients of autograd for the two-pass formula."""
    leaves = [None if given is None else given.detach().double().requires_grad_() for given in (x, weight, bias, z)]
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
    num_values = x.numel() // mean.numel()
    unbiased = var.flatten() * num_values / (num_values - 1)
    return Result(
        y.detach(),
        *(None if leaf is None else leaf.grad for leaf in leaves),
        momentum * mean.detach().flatten(),
        (1 - momentum) + momentum * unbiased.detach(),
        (dy.double() * scale).abs().max().item() if dy.numel() else 0.0,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |a - b| / max |b|, the measure of all accuracy promises; 0 for empty tensors, and NaN never passes."""
    if not expected.numel():
        return 0.0
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def within_one_rounding(actual: Tensor, expected: Tensor, scale: float) -> bool:
    """Return whether `actual` is `expected` rounded to its dtype, with 1e-6 of `scale` for the float32 steps before."""
    expected = expected.double()
    finfo = torch.finfo(actual.dtype)
    rounding = finfo.eps / 2 * expected.abs().clamp(min=finfo.smallest_normal)
    return bool(((actual.double() - expected).abs() <= rounding + 1e-6 * scale).all())


def require_promised(name: str, actual: Tensor, wanted: Tensor, scale: float, lost: float = 0.0) -> None:
    """Check the promise for the dtype, relative to `scale`, plus `lost` in sums; 16-bit values within one rounding."""
    assert actual.shape == wanted.shape, name
    if actual.dtype in TOLERANCE:
        error = (actual.double() - wanted).abs().max().item() if wanted.numel() else 0.0
        assert error <= (TOLERANCE[actual.dtype] + lost) * scale, (name, error, scale)
    else:
        assert within_one_rounding(actual, wanted, scale), name


HARD_SHAPE = (16, 8, 9, 9)  # 9 * 9 is not a multiple of any block size


def _outlier(x: Tensor) -> Tensor:
    x[0, :, 0, 0] = 1e6
    return x


HARD_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "N(0, 1)": lambda x: x,
    "mean 1e4, std 1": lambda x: x + 1e4,
    "first value 1e6": _outlier,
    "mean 10, std 1e-4": lambda x: 10 + 1e-4 * x,
}


def hard_case(case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, dy, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *HARD_SHAPE, generator=generator, dtype=torch.float64, device="cpu")
    weight, bias = torch.randn(2, HARD_SHAPE[1], generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    return HARD_INPUTS[case](noise[0]).to(dtype), noise[1].to(dtype), weight, bias


# f(input, running_mean, running_var, weight, bias, training=True) returns the output and updates the statistics.
BatchNormFunction = Callable[..., Tensor]


class Errors(NamedTuple):
    """Relative errors compared with `full_batch`, by name, and the largest |mean| / std of a channel of the input."""

    relative: dict[str, float]
    mean_over_std: float


def errors_of_one_step(
    case: str, dtype: torch.dtype, batch_norm: BatchNormFunction, rank: int = 0, num_ranks: int = 1, device: Any = "cpu"
) -> Errors:
    """Run a step of `batch_norm` on this rank's samples. Gradients of weight and bias are summed over the ranks."""
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
