"""Views tensors of any layout as (outer, channel, inner), the one view that kernels have of them."""

import math
from typing import NamedTuple, Self

import torch
from torch import Tensor

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # keyed by the number of dims


class Layout(NamedTuple):
    """The view of a non-overlapping and dense tensor as (outer, channel, inner). All tensors of a call have x's layout.

    (N, C, H, W) contiguous                   -> (N, C, H*W)
    (N, C, H, W) in channels_last             -> (N*H*W, C, 1)
    (N, H, W, C) contiguous, channel_dim = 3  -> (N*H*W, C, 1)

    Tensors with other strides are copied first, so that the output has the strides of nn.BatchNorm's output.
    """

    channel_dim: int  # not negative
    channel_innermost: bool  # the tensor is in channels_last, and not contiguous
    sizes: tuple[int, int, int]  # outer, channel, inner

    @classmethod
    def of(cls, tensor: Tensor, channel_dim: int) -> Self:
        """Return the layout of `tensor`. A negative `channel_dim` counts from the last dim."""
        channel_dim %= tensor.ndim
        outer, inner = math.prod(tensor.shape[:channel_dim]), math.prod(tensor.shape[channel_dim + 1 :])
        channel_innermost = channel_dim == 1 and not tensor.is_contiguous() and _is_channels_last(tensor)
        if channel_innermost:
            outer, inner = outer * inner, 1
        return cls(channel_dim, channel_innermost, (outer, tensor.shape[channel_dim], inner))

    def dense(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if `fold` can view it, else a dense copy in this layout.

        `contiguous` is not called on a contiguous tensor, because it would return the tensor itself. In graphs of torch
        2.11 that tensor would then be an output of an autograd Function twice, and get no gradient.
        """
        if not self.channel_innermost:
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        channel_at_end = tensor.movedim(self.channel_dim, -1)
        if channel_at_end.is_contiguous():
            return tensor
        return channel_at_end.contiguous().movedim(-1, self.channel_dim)

    def fold(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as a contiguous (outer, channel, inner): a view if `tensor` is dense in this layout."""
        tensor = self.dense(tensor)
        if self.channel_innermost:
            tensor = tensor.movedim(self.channel_dim, -1)
        return tensor.view(self.sizes)

    def unfold(self, folded: Tensor, shape: torch.Size) -> Tensor:
        """Return a view of `folded` with the original `shape`. The inverse of `fold`."""
        if not self.channel_innermost:
            return folded.view(shape)
        others = shape[: self.channel_dim] + shape[self.channel_dim + 1 :]
        return folded.view(*others, shape[self.channel_dim]).movedim(-1, self.channel_dim)


def _is_channels_last(tensor: Tensor) -> bool:
    """Return whether torch treats the strides as channels_last or channels_last_3d. Torch does so even if the tensor is
    not dense: the outputs of its operators are then in this format."""
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
