"""Computes what reference.py does, part by part, so that the float64 copies stay small: for eager mode without faster
kernels."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from syncbn.kernels import reference

PART_VALUES = 2**18  # of a part: 2 MB in float64, which caches hold
GPU_PART_VALUES = 2**24  # 128 MB: launches would take longer than what they do to smaller parts


class InParts(reference.Operations):
    def summed(self, terms: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *others: Tensor | None) -> Tensor:
        sums = x.new_zeros(2 * self.kind.layout.sizes[1], dtype=torch.float64)
        for part in self.parts(x, *others):
            sums += torch.cat([*map(reference.channel_sums, terms(*part))])
        return sums

    def mapped(self, function: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
        result = torch.empty_like(x)
        for result_part, *parts in self.parts(result, x, *others):
            assert result_part is not None
            result_part.copy_(function(*parts))
        return result

    def parts(self, *tensors: Tensor | None) -> Iterator[list[Tensor | None]]:
        """Yields the views of each part of these tensors, (outer, channel, inner)."""
        outer, channels, inner = self.kind.layout.sizes
        most_values = PART_VALUES if self.kind.device.type == "cpu" else GPU_PART_VALUES
        rows = max(1, most_values // max(1, channels * inner))
        columns = max(1, most_values // max(1, channels * rows))
        folded = self.folded(*tensors)
        for row in range(0, max(1, outer), rows):
            for column in range(0, max(1, inner), columns):
                part = slice(row, row + rows), slice(None), slice(column, column + columns)
                yield [None if tensor is None else tensor[part] for tensor in folded]


class Forward(InParts, reference.Forward):
    pass


class Backward(InParts, reference.Backward):
    pass
