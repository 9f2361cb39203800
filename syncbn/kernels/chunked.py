"""Runs the reference part by part, so that its float64 copies stay small.

For eager mode on devices without other kernels. reference.py defines the functions, by the same names.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from syncbn.kernels import reference
from syncbn.layout import Layout
from syncbn.statistics import update_running_stats as update_running_stats

PART_VALUES = 2**18  # 2 MB in float64


def forward_sums(x: Tensor, layout: Layout) -> Tensor:
    sums = x.new_zeros(2 * layout.sizes[1] + 1, dtype=torch.float64)
    for of_part, x_part in _parts(layout, x):
        sums += reference.forward_sums(x_part, of_part)
    return sums


def forward_outputs(
    x: Tensor, layout: Layout, total: Tensor, weight: Any, bias: Any, residual: Any, *options: Any
) -> Any:
    y = torch.empty_like(x)
    for of_part, x_part, y_part, residual_part in _parts(layout, x, y, residual):
        values, statistics = reference.forward_outputs(x_part, of_part, total, weight, bias, residual_part, *options)
        y_part.copy_(values)
    return y, statistics


def backward_sums(dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, statistics: Tensor, *dtypes: Any) -> Any:
    sums = torch.zeros_like(statistics[: 2 * layout.sizes[1]])
    for of_part, dy_part, x_part, y_part in _parts(layout, dy, x, y):
        sums += reference.backward_sums(dy_part, x_part, y_part, of_part, statistics, None, None)[0]
    return sums, *reference.gradients_of_parameters(sums, statistics, *dtypes)


def backward_outputs(
    dy: Tensor, x: Tensor, y: Tensor | None, layout: Layout, total: Tensor, statistics: Tensor, weight: Any,
    of_residual: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    grads = torch.empty_like(x), torch.empty_like(x) if of_residual else None
    for of_part, dy_part, x_part, y_part, *grad_parts in _parts(layout, dy, x, y, *grads):
        values = reference.backward_outputs(dy_part, x_part, y_part, of_part, total, statistics, weight, of_residual)
        for grad_part, value in zip(grad_parts, values, strict=True):
            if value is not None:
                grad_part.copy_(value)
    return grads


def _parts(layout: Layout, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yields the layout of each part, and each tensor's view of it, (outer, channel, inner)."""
    outer, channels, inner = layout.sizes
    folded = [None if one is None else layout.fold(one) for one in tensors]
    rows = max(1, PART_VALUES // max(1, channels * inner))
    columns = max(1, PART_VALUES // max(1, channels * rows))
    for row in range(0, max(1, outer), rows):
        for column in range(0, max(1, inner), columns):
            views = [None if one is None else one[row : row + rows, :, column : column + columns] for one in folded]
            yield Layout(1, False, views[0].shape), *views  # type: ignore[union-attr, arg-type]
