"""Folds a tensor of any number of dims to (outer, channel, inner), a dense one without a copy. Knows no ranks."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dims


class Layout(NamedTuple):
    """The place of the values of a tensor in memory. All tensors of a batch norm are folded by the layout of its input.

    (N, C, H, W) contiguous                   -> (N, C, H*W)
    (N, C, H, W) in channels_last             -> (N*H*W, C, 1)
    (N, H, W, C) contiguous, channel_dim = 3  -> (N*H*W, C, 1)

    Others are copied first, so that the output of a batch norm has the strides of nn.BatchNorm's.
    """

    channel_dim: int  # not negative
    channel_innermost: bool  # the tensor is in channels_last, and not contiguous
    sizes: tuple[int, int, int]  # outer, channel, inner

    @classmethod
    def of(cls, tensor: Tensor, channel_dim: int) -> Self:
        """The layout by which `tensor` folds without a copy if it is dense. `channel_dim` may count from the right."""
        channel_dim %= tensor.ndim
        outer, inner = math.prod(tensor.shape[:channel_dim]), math.prod(tensor.shape[channel_dim + 1 :])
        channel_innermost = channel_dim == 1 and not tensor.is_contiguous() and _is_channels_last(tensor)
        if channel_innermost:
            outer, inner = outer * inner, 1
        return cls(channel_dim, channel_innermost, (outer, tensor.shape[channel_dim], inner))

    def dense(self, tensor: Tensor) -> Tensor:
        """`tensor` itself where it can be folded as a view, else a copy of it that can.

        `contiguous` is not called on a contiguous tensor. It would return the tensor itself, and graphs of torch 2.11,
        in which everything that an autograd Function computes is an output, give no gradient to an output that is
        there twice.
        """
        if not self.channel_innermost:
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        channel_at_end = tensor.movedim(self.channel_dim, -1)
        if channel_at_end.is_contiguous():
            return tensor
        return channel_at_end.contiguous().movedim(-1, self.channel_dim)

    def fold(self, tensor: Tensor) -> Tensor:
        """The same values, contiguous, as (outer, channel, inner): a view when `tensor` is dense in this layout."""
        tensor = self.dense(tensor)
        if self.channel_innermost:
            tensor = tensor.movedim(self.channel_dim, -1)
        return tensor.view(self.sizes)

    def unfold(self, folded: Tensor, shape: torch.Size) -> Tensor:
        """A view of `folded` in the `shape` that was folded."""
        if not self.channel_innermost:
            return folded.view(shape)
        others = shape[: self.channel_dim] + shape[self.channel_dim + 1 :]
        return folded.view(*others, shape[self.channel_dim]).movedim(-1, self.channel_dim)


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether torch takes the strides for channels_last or channels_last_3d, gaps or none: then an operator's output is
    in this format. They do not descend in the order C, ..., N."""
    if tensor.ndim not in CHANNELS_LAST or 0 in tensor.shape:
        return False
    if tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.ndim]):
        return True
    least = 1
    for dim in (1, *range(tensor.ndim - 1, 1, -1), 0):
        if tensor.stride(dim) < least:
            return False
        least = tensor.stride(dim) * tensor.shape[dim]
    return True
