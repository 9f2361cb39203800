"""Computes on devices without float64, as Apple's MPS: sums in float32 around a mean, per-channel values on the CPU.

x, dy, y, residual, parameters and buffers are on the device, for which the host waits. Sums, totals and statistics are
those of the other back ends, in float64, but on the CPU: so is what ranks send.
"""

import torch
from torch import Tensor

from syncbn.kernels import reference
from syncbn.statistics import to_float64


class InFloat32(reference.Operations):
    wide = torch.float32

    def channel_sums(self, values: Tensor) -> Tensor:
        """The float32 sum of what is left of the values after their mean has been taken off, and the mean."""
        num_values = values.shape[0] * values.shape[2]
        mean = values.detach().sum((0, 2)) / max(1, num_values)
        return num_values * to_float64(mean) + to_float64((values - mean.unsqueeze(1)).sum((0, 2)))

    def minus_mean(self, x: Tensor, mean: Tensor) -> Tensor:
        center = mean.detach().to(torch.float32)
        return x.to(torch.float32) - self.column(center) - self.column(mean - center)


class Forward(InFloat32, reference.Forward):
    def forward_sums(self, x: Tensor) -> Tensor:
        """sum x = m center + sum d and sum x^2 = sum d^2 + 2 center sum d + m center^2, over the m values that are not
        0, which a mask may have made, with their mean in float32 as center and d = x - center."""
        (folded,) = self.folded(x)
        assert folded is not None
        values = folded.to(torch.float32)
        is_counted = values != 0
        counts, num_counted = is_counted.to(torch.float32), is_counted.sum((0, 2))
        center = values.detach().sum((0, 2)) / num_counted.clamp(min=1)
        # Of values that are 0 too, as autograd is to see that their sum and that of their squares depend on them.
        centered = values - counts * center.unsqueeze(1)
        wide_center, num_counted = to_float64(center), to_float64(num_counted)
        sum_x = num_counted * wide_center + self.channel_sums(centered)
        sum_centered = self.channel_sums(counts * centered)
        sum_square = self.channel_sums(centered.square()) + wide_center * (2 * sum_centered + num_counted * wide_center)
        return self.with_trailer(torch.cat((sum_x, sum_square)))


class Backward(InFloat32, reference.Backward):
    pass
