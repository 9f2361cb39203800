"""Checks masks, which say which values of an input count, and sets the others to 0."""

import torch
from torch import Tensor


def check(mask: Tensor, x: Tensor, channel_dim: int) -> None:
    """Raises TypeError or ValueError unless `mask` is bool, (N,) or of the shape of x without the channels' dim."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"expected mask to be a bool tensor, got {type(mask).__name__}; use torch.as_tensor(mask)")
    if mask.dtype != torch.bool:
        raise TypeError(f"expected mask to be bool, True where a value counts, got {mask.dtype}; use mask != 0")
    wanted = list(x.shape)
    del wanted[channel_dim]
    # Not `in`, which is False for a static and an equal dynamic size under Dynamo.
    sizes_fit = all(size == 1 or size == other for size, other in zip(mask.shape, wanted, strict=False))
    if mask.ndim not in (1, len(wanted)) or not sizes_fit:
        raise ValueError(
            f"expected mask of shape {tuple(wanted)}, which is the input's {tuple(x.shape)} without the channels' "
            f"dim, with sizes of 1 where all values share it, or ({wanted[0]},); got {tuple(mask.shape)}"
        )
    check_device("mask", mask, x)


def check_device(name: str, given: Tensor, x: Tensor) -> None:
    """Raises ValueError unless `given` is on the device of x."""
    if given.device != x.device:
        raise ValueError(f"the input is on {x.device} but {name} on {given.device}; move one with .to(device)")


def apply(mask: Tensor | None, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor | None]:
    """x with 0 where the mask is False, and the mask as a view of the shape of x with one channel; x without a mask."""
    if mask is None:
        return x, None
    if mask.ndim == 1:
        mask = mask.view(-1, *(1,) * (x.ndim - 2))
    shape = list(x.shape)
    shape[channel_dim] = 1
    mask = mask.unsqueeze(channel_dim % x.ndim).expand(shape)
    return torch.where(mask, x, 0), mask
