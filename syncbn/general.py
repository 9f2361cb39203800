"""Holds the Function of the general road, which calls operators on the kernels, else torch's operations.

gradients.py has its backward.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncbn.arguments import Options, Tensors, require_two_values
from syncbn.gradients import gradients
from syncbn.kernels.interface import TRAILER_NUMBERS, ForwardKind
from syncbn.kernels.select import apply_function, general_back_end
from syncbn.plan import kind_of
from syncbn.ranks.reduction import Reduction
from syncbn.torch_internals.state import inside_functorch, is_compiling
from syncbn.totals import total_with_count


def normalize(tensors: Tensors, options: Options, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """y and the statistics. The tensors are plain, without gaps and mask, and all have been checked."""
    constants = Constants(kind_of(tensors, options), reduction)
    inputs = tensors.input, tensors.weight, tensors.bias, tensors.z, tensors.num_values
    y, statistics = apply_function(SyncBatchNormFunction, constants, *inputs)
    return y, statistics


@dataclass(slots=True)
class Constants:
    """The arguments of the Function that are no tensors."""

    kind: ForwardKind
    reduction: Reduction


class SyncBatchNormFunction(torch.autograd.Function):
    """(constants, x, weight, bias, residual, num_values) -> y, statistics.

    x has no gaps; the residual has its dtype, strides and shape. num_values () is n of this rank where a mask has set
    the other values to 0. The statistics of all ranks, packed as in statistics.py, are not
    differentiable.

    Saved for backward and collectives: as in ordinary._Step; two all_reduces in backward with create_graph=True.
    """

    @staticmethod
    def forward(
        constants: Constants, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        num_values: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        kernels = general_back_end(constants.kind, x, weight, bias, residual).Forward(constants.kind)
        sums = total_with_count(kernels.forward_sums(x), num_values, constants.reduction, "forward")
        if num_values is not None or x.numel() <= constants.kind.layout.sizes[1]:  # else this rank alone has two values
            require_two_values(sums[-TRAILER_NUMBERS], x)
        return kernels.forward_outputs((x, weight, bias, residual), sums)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        constants, x, weight, *_ = inputs
        y, statistics = output
        ctx.kind, ctx.reduction = constants.kind, constants.reduction
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, statistics, y if constants.kind.masks_by_y else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:5]
        if is_compiling() and inside_functorch():  # Dynamo does not see what torch.func differentiates
            needed = True, True, True, ctx.kind.has_residual
        with ctx.reduction.noting_errors():
            return None, *gradients(ctx.kind, dy, ctx.saved_tensors, needed, ctx.reduction), None
