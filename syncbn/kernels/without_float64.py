"""Computes on devices without float64, as Apple's MPS: sums in float32 around a mean, per-channel values on the CPU.

Sums, totals and statistics are those of the other back ends, in float64, but on the CPU: so is what ranks send.
"""

import torch
from torch import Tensor

from syncbn.kernels import reference
from syncbn.kernels.interface import UNSIGNED, Signature
from syncbn.statistics import to_float64


class Kernels(reference.Kernels):
    """See interface.Kernels. x, dy, y, residual, parameters and buffers are on the device; the host waits for it."""

    wide = torch.float32

    def forward_sums(self, x: Tensor, signature: Signature = UNSIGNED, is_alone: bool = False) -> tuple[Tensor, None]:
        """sum x = n center + sum (x - center) and sum x^2 = sum (x - center)^2 + 2 center sum (x - center) +
        n center^2, with the mean of x, in float32, as center."""
        (folded,) = self._folded(x)
        assert folded is not None
        values, num_values = folded.to(torch.float32), folded.shape[0] * folded.shape[2]
        center = _mean(values)
        centered = values - center.unsqueeze(1)
        wide_center, sum_centered = to_float64(center), self.total(centered)
        sum_x = num_values * wide_center + sum_centered
        sum_square = self.total(centered.square()) + wide_center * (sum_centered + sum_x)
        return torch.cat((sum_x, sum_square, sum_x.new_full((1,), num_values))), None

    def total(self, values: Tensor) -> Tensor:
        """The float32 sum of what is left of the values after their mean has been taken off, and the mean."""
        mean = _mean(values)
        num_values = values.shape[0] * values.shape[2]
        return num_values * to_float64(mean) + to_float64((values - mean.unsqueeze(1)).sum((0, 2)))

    def minus_mean(self, x: Tensor, mean: Tensor) -> Tensor:
        center = mean.detach().to(torch.float32)
        return x.to(torch.float32) - self.column(center) - self.column(mean - center)


def _mean(values: Tensor) -> Tensor:
    """Of folded values, float32 (C,), a constant to autograd; 0 where there are none."""
    return values.detach().sum((0, 2)) / max(1, values.shape[0] * values.shape[2])
