"""Applies masks, which say which values of an input count: the others are set to 0, in the output too."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from syncbn.arguments import Arguments, check_mask
from syncbn.inputs.subclasses import unchanged


def apply(arguments: Arguments) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """The arguments with x = 0 where the mask is False and `num_values` in its place, and a function that sets the
    output to 0 there. Gradients at these places become 0 in both. **Raises** as `check_mask`."""
    if arguments.mask is None:
        return arguments, unchanged
    mask = expanded(arguments.mask, arguments.input, arguments.channel_dim)
    masked = replace(arguments, input=torch.where(mask, arguments.input, 0), mask=None, num_values=mask.sum())
    return masked, lambda output: torch.where(mask, output, 0)


def expanded(mask: Tensor, x: Tensor, channel_dim: int) -> Tensor:
    """The mask as a view of the shape of x with one channel. **Raises** as `check_mask`."""
    check_mask(mask, x, channel_dim)
    if mask.ndim == 1:
        mask = mask.view(-1, *(1,) * (x.ndim - 2))
    shape = list(x.shape)
    shape[channel_dim] = 1
    return mask.unsqueeze(channel_dim % x.ndim).expand(shape)
