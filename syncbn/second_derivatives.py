"""Computes gradients that can be differentiated again (create_graph=True, torch.func), by torch operations.

The gradient of a sum over ranks is another sum over ranks: `sum_over_ranks` is differentiable any number of times, and
each derivative issues one more all_reduce, with a pass name of its own.
"""

from typing import Any

import torch
from torch import Tensor

from syncbn import payload
from syncbn.kernels import reference
from syncbn.kernels.interface import BackwardConfig, ForwardConfig, Gradients, Saved
from syncbn.ranks.calls import Call
from syncbn.ranks.report import WITH_GRAPH
from syncbn.statistics import unpack
from syncbn.torch_internals import is_compiling


def graph_gradients(forward: ForwardConfig, config: BackwardConfig, dy: Tensor, saved: Saved, call: Call) -> Gradients:
    """Return gradients that can be differentiated again. Issues two all_reduces.

    The saved statistics are constants to autograd, so mean and variance are computed again from x, with an additional
    all_reduce. This all_reduce has its own pass name, because a rank without create_graph does not issue it.
    """
    x, weight, statistics, y = saved
    fold, num_values = config.layout.fold, unpack(statistics, config.layout.sizes[1])[3].clamp(min=1)
    sums = sum_over_ranks(reference.Forward(forward).forward_sums(x), call, WITH_GRAPH)
    mean, mean_square = (payload.sums(sums) / num_values).chunk(2)
    xmu = reference.subtract_mean(fold(x), mean)
    invstd = ((mean_square - mean.square()).clamp(min=0) + forward.eps).rsqrt()
    dy = reference.apply_relu_mask(config, fold(dy), fold(x), None if y is None else fold(y), statistics)
    wide_dy = dy.double()
    sum_dy, sum_dy_xmu = reference.channel_sums(wide_dy), reference.channel_sums(wide_dy * xmu)
    sums = sum_over_ranks(payload.from_sums(torch.cat((sum_dy, sum_dy_xmu))), call, "backward")
    mean_dy, mean_dy_xmu = (payload.sums(sums) / num_values).chunk(2)
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


def sum_over_ranks(sent: Tensor, call: Call, pass_name: str) -> Tensor:
    """Return the sum of the payload `sent` over the ranks, by one all_reduce, which may overwrite `sent`.

    In eager mode with gradients the sums in the result are differentiable any number of times; the rest of the result
    is 0. **Raises** RuntimeError inside vmap and forward mode.
    """
    call.refuse_transforms(sent)
    if call.group is None or is_compiling() or not torch.is_grad_enabled():
        return call.sign_and_all_reduce(sent, pass_name)
    total = _SumOverRanks.apply(payload.sums(sent), call, pass_name)  # type: ignore[no-untyped-call]
    return payload.from_sums(total)


class _SumOverRanks(torch.autograd.Function):
    """Sum over all ranks: (sums, call, pass_name) -> total, both without a trailer."""

    @staticmethod
    def forward(sums: Tensor, call: Call, pass_name: str) -> Tensor:
        return payload.sums(call.sign_and_all_reduce(payload.from_sums(sums), pass_name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.call, ctx.pass_name = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        pass_name = f"derivative of {ctx.pass_name}"
        return _SumOverRanks.apply(grad_total, ctx.call, pass_name), None, None  # type: ignore[no-untyped-call]
