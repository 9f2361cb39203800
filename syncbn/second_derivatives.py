"""Computes gradients that can be differentiated again (create_graph=True, torch.func), by torch operations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn.dispatched import refuse_transforms
from syncbn.kernels import reference
from syncbn.kernels.interface import (
    SIGNATURE_ELEMENTS,
    TRAILER_ELEMENTS,
    BackwardConfig,
    ForwardConfig,
    Gradients,
    Saved,
)
from syncbn.ranks.reduction import Reduction
from syncbn.ranks.report import WITH_GRAPH
from syncbn.torch_internals import is_compiling


def graph_gradients(
    forward: ForwardConfig, config: BackwardConfig, dy: Tensor, saved: Saved, reduction: Reduction
) -> Gradients:
    """Return gradients that can be differentiated again. Issues two all_reduces.

    The saved statistics are constants to autograd, so mean and variance are computed again from x, with an additional
    all_reduce. This all_reduce has its own pass name, because a rank without create_graph does not issue it.
    """
    x, weight, statistics, y = saved
    kernels, num_values = reference.Forward(forward), statistics[3 * config.layout.sizes[1]].clamp(min=1)
    fold = config.layout.fold
    sums = sum_over_ranks(kernels.forward_sums(x), reduction, WITH_GRAPH)
    mean, mean_square = (sums[:-TRAILER_ELEMENTS] / num_values).chunk(2)
    xmu = reference.subtract_mean(fold(x), mean)
    invstd = ((mean_square - mean.square()).clamp(min=0) + forward.eps).rsqrt()
    dy = reference.apply_relu_mask(config, fold(dy), fold(x), None if y is None else fold(y), statistics)
    wide_dy = dy.double()
    sum_dy, sum_dy_xmu = reference.channel_sums(wide_dy), reference.channel_sums(wide_dy * xmu)
    sums = sum_over_ranks(torch.cat((sum_dy, sum_dy_xmu, sum_dy.new_zeros(TRAILER_ELEMENTS))), reduction, "backward")
    mean_dy, mean_dy_xmu = (sums[:-TRAILER_ELEMENTS] / num_values).chunk(2)
    scale = invstd if weight is None else invstd * weight.double()
    wide_grad_x = (wide_dy - mean_dy[:, None] - xmu * (invstd.square() * mean_dy_xmu)[:, None]) * scale[:, None]
    grad_x, grad_residual = (config.layout.unfold(wide, x.shape).to(x.dtype) for wide in (wide_grad_x, wide_dy))
    weight_dtype, bias_dtype = config.grad_weight_dtype, config.grad_bias_dtype
    return (
        grad_x if config.needs_x else None,
        None if weight_dtype is None else (sum_dy_xmu * invstd).to(weight_dtype),
        None if bias_dtype is None else sum_dy.to(bias_dtype),
        grad_residual if config.needs_residual else None,
    )


def sum_over_ranks(sums: Tensor, reduction: Reduction, pass_name: str) -> Tensor:
    """Return the sum of `sums` over the ranks, by one all_reduce, which may overwrite `sums`.

    `sums` is float64 and ends in a trailer. In eager mode with gradients the result is differentiable any number of
    times: the gradient of a sum over ranks is another sum over ranks, by another all_reduce. **Raises** RuntimeError
    inside vmap and forward mode.
    """
    refuse_transforms(reduction, sums)
    if reduction.group is None or is_compiling() or not torch.is_grad_enabled():
        return reduction.sign_and_all_reduce(sums, pass_name)
    result = _SumOverRanks.apply(sums[:-SIGNATURE_ELEMENTS], reduction, pass_name)  # type: ignore[no-untyped-call]
    n = result[-1:].detach()
    return torch.cat((result[:-1], n, sums.new_zeros(SIGNATURE_ELEMENTS)))


class _SumOverRanks(torch.autograd.Function):
    """Sum over all ranks: (sums, reduction, pass_name) -> total. Its last element is n, or 0 in derivative passes."""

    @staticmethod
    def forward(sums: Tensor, reduction: Reduction, pass_name: str) -> Tensor:
        return reduction.sign_and_all_reduce(F.pad(sums, (0, SIGNATURE_ELEMENTS)), pass_name)[:-SIGNATURE_ELEMENTS]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.reduction, ctx.pass_name = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        pass_name = f"derivative of {ctx.pass_name}"
        return _SumOverRanks.apply(grad_total, ctx.reduction, pass_name), None, None  # type: ignore[no-untyped-call]
