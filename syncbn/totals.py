"""Adds up over the ranks for calls that are not ordinary: the totals have derivatives."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncbn.kernels.interface import SIGNATURE_NUMBERS, TRAILER_NUMBERS
from syncbn.kernels.select import is_transformed
from syncbn.ranks.reduction import Reduction
from syncbn.torch_internals.state import inside_vmap_or_forward_mode, is_compiling

TRANSFORMED = (
    "torch.func.vmap, forward mode (jvp) and is_grads_batched=True are not supported over several ranks; loop over "
    "samples or gradients, use torch.autograd.functional, or set process_group=1"
)


def total(sums: Tensor, reduction: Reduction, pass_name: str) -> Tensor:
    """The totals of float64 `sums` with a trailer, which it may overwrite, by one all_reduce.

    In eager mode with gradients the totals are differentiable any number of times: the sum is linear, so its gradient
    is a sum over the ranks, too, by one all_reduce. **Raises** RuntimeError inside vmap and forward mode.
    """
    # In compiled graphs `is_transformed` is False.
    if reduction.group is not None and (inside_vmap_or_forward_mode() or is_transformed(sums)):
        raise RuntimeError(TRANSFORMED)
    if reduction.group is None or is_compiling() or not torch.is_grad_enabled():
        return reduction.total(sums, pass_name)
    result = _Total.apply(sums[:-SIGNATURE_NUMBERS], reduction, pass_name)  # type: ignore[no-untyped-call]
    n = result[-1:].detach()
    return torch.cat((result[:-1], n, sums.new_zeros(SIGNATURE_NUMBERS)))


def total_with_count(sums: Tensor, num_values: Tensor | None, reduction: Reduction, pass_name: str) -> Tensor:
    """The totals of these sums, with `num_values` in the place of n unless it is None."""
    if num_values is not None:
        trailer = -TRAILER_NUMBERS
        sums = torch.cat((sums[:trailer], num_values.double().view(1), sums[trailer + 1 :]))
    return total(sums, reduction, pass_name)


class _Total(torch.autograd.Function):
    """(sums and n, reduction, pass_name) -> their totals. In derivative passes 0 stands in the place of n."""

    @staticmethod
    def forward(sums: Tensor, reduction: Reduction, pass_name: str) -> Tensor:
        return reduction.total(F.pad(sums, (0, SIGNATURE_NUMBERS)), pass_name)[:-SIGNATURE_NUMBERS]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.reduction, ctx.pass_name = inputs

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        pass_name = f"derivative of {ctx.pass_name}"
        return _Total.apply(grad_total, ctx.reduction, pass_name), None, None  # type: ignore[no-untyped-call]
