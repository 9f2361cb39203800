"""Inputs on which batch norm's formulas lose digits, and the errors on them; scripts/accuracy.py prints them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from oracle import full_batch, relative_error
from torch import Tensor

SHAPE = (16, 8, 9, 9)  # 9 * 9: not a multiple of any block


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
    """x, dy, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *SHAPE, generator=generator, dtype=torch.float64, device="cpu")
    weight, bias = torch.randn(2, SHAPE[1], generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    return HARD_INPUTS[case](noise[0]).to(dtype), noise[1].to(dtype), weight, bias


# (input, running_mean, running_var, weight, bias, training=True) -> output with a graph; statistics move in place
BatchNormFunction = Callable[..., Tensor]


class Errors(NamedTuple):
    """max |a - b| / max |b| against the float64 oracle of the whole batch, by name; and how hard the input was."""

    relative: dict[str, float]
    mean_over_std: float


def errors_of_one_step(
    case: str, dtype: torch.dtype, batch_norm: BatchNormFunction, rank: int = 0, num_ranks: int = 1, device: Any = "cpu"
) -> Errors:
    """One step of `batch_norm` on this rank's samples. Gradients of weight and bias are summed over the ranks."""
    x, dy, weight, bias = hard_case(case, dtype)
    expected = full_batch(x, dy, weight, bias)
    mine = slice(rank, None, num_ranks)
    my_x, my_weight, my_bias = (given.to(device).detach().requires_grad_() for given in (x[mine], weight, bias))
    running_mean, running_var = torch.zeros_like(my_weight.data), torch.ones_like(my_weight.data)
    y = batch_norm(my_x, running_mean, running_var, my_weight, my_bias, training=True)
    y.backward(dy[mine].to(device))
    if num_ranks > 1:
        torch.distributed.all_reduce(my_weight.grad)
        torch.distributed.all_reduce(my_bias.grad)
    expected = expected._replace(output=expected.output[mine], grad_input=expected.grad_input[mine])
    gradients = {"grad_input": my_x.grad, "grad_weight": my_weight.grad, "grad_bias": my_bias.grad}
    actual = {"output": y.detach(), **gradients, "running_mean": running_mean, "running_var": running_var}
    channels = x.double().movedim(1, 0).flatten(1)
    mean_over_std = (channels.mean(1).abs() / channels.std(1)).max().item()
    errors = {name: relative_error(value.cpu(), getattr(expected, name)) for name, value in actual.items()}
    return Errors(errors, mean_over_std)
