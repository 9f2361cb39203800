"""What users pass: each check raises ValueError or TypeError with the values and the remedy, before anything is sent or
changed. And what the arguments tell when one of them is bad.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_all(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    channel_dim: int,
    z: Tensor | None,
    mask: Tensor | None,
    num_channels: int | None,
    check_input_dim: Callable[[Tensor], Any] | None,
) -> None:
    check_input(input, channel_dim, check_input_dim)
    per_channel = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    check_channels(input, channel_dim, num_channels, per_channel)
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if z is not None:
        check_like_input("z", z, input)
    if mask is not None:
        _check_mask(mask, input, channel_dim)


def require_running_stats(running_mean: Tensor | None, running_var: Tensor | None) -> None:
    if running_mean is None or running_var is None:
        raise ValueError("running_mean must be defined in evaluation mode, and running_var; or pass training=True")


def check_input(input: Tensor, channel_dim: int, check_input_dim: Callable[[Tensor], Any] | None) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"expected a Tensor as input, got {type(input).__name__}")
    if hasattr(input, "device_mesh"):
        raise TypeError("the input is a DTensor, expected this rank's values as a plain tensor: pass input.to_local()")
    if input.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"expected a float16, bfloat16, float32 or float64 input, got {input.dtype}; convert it first")
    if input.layout != torch.strided:
        raise TypeError(f"expected a dense input, got layout {input.layout}; use input.to_dense()")
    if check_input_dim is not None:
        check_input_dim(input)
    if input.ndim < 2:
        raise ValueError(f"expected at least 2D input (got {input.ndim}D input of shape {tuple(input.shape)})")
    if not isinstance(channel_dim, int):
        raise TypeError(f"channel_dim must be an int, got {channel_dim!r}")
    if not -input.ndim <= channel_dim < input.ndim:
        raise ValueError(f"channel_dim={channel_dim} does not exist in an input of shape {tuple(input.shape)}")


def check_channels(
    input: Tensor, channel_dim: int, num_channels: int | None, per_channel: dict[str, Tensor | None]
) -> None:
    actual, shape = input.shape[channel_dim], tuple(input.shape)
    for name, given in per_channel.items():
        if given is None:
            continue
        if not isinstance(given, Tensor):
            raise TypeError(f"expected {name} to be a Tensor of shape ({actual},), got {type(given).__name__}")
        if given.dtype not in SUPPORTED_DTYPES:
            raise TypeError(f"expected {name} to be a float tensor, got {given.dtype}; convert it first")
        if given.shape != (actual,):
            raise ValueError(
                f"expected {given.numel()} channels in dim {channel_dim} of the input, got {actual} (input shape "
                f"{shape}): {name} should contain {actual} elements not {given.numel()}, shape ({actual},) not "
                f"{tuple(given.shape)}; correct num_features, channel_last or channel_dim"
            )
        if given.device != input.device:
            raise ValueError(f"the input is on {input.device} but {name} on {given.device}; move one with .to(device)")
    if num_channels is not None and actual != num_channels:
        raise ValueError(
            f"expected {num_channels} channels in dim {channel_dim} of the input, got {actual} (input shape {shape}); "
            "correct num_features, channel_last or channel_dim"
        )


def likely_channels(input: Tensor, channel_dim: int, *per_channel: Tensor | None) -> int | None:
    """What most arguments say that C is, for when one is wrong; None when no per-channel tensor says anything."""
    said = [given.numel() for given in per_channel if isinstance(given, Tensor)]
    if said and (channels := channels_of(input, channel_dim)) is not None:
        said.append(channels)
    return max(said, key=said.count, default=None)  # the first of equals: a per-channel tensor's


def channels_of(input: Tensor, channel_dim: int) -> int | None:
    if isinstance(input, Tensor) and isinstance(channel_dim, int) and -input.ndim <= channel_dim < input.ndim:
        return input.shape[channel_dim]
    return None


def device_of(*given: Tensor | None) -> torch.device:
    return next((tensor.device for tensor in given if isinstance(tensor, Tensor)), torch.device("cpu"))


def check_like_input(name: str, given: Tensor, input: Tensor) -> None:
    if not isinstance(given, Tensor) or given.dtype not in SUPPORTED_DTYPES:
        got = getattr(given, "dtype", type(given).__name__)
        hint = f"; a mask is passed as mask=, not as {name}" if got is torch.bool else ""
        raise TypeError(f"expected {name} to be a float tensor, got {got}{hint}")
    if given.shape != input.shape:
        raise ValueError(
            f"expected {name} of the input's shape {tuple(input.shape)}, got {tuple(given.shape)}; expand() it first"
        )
    if given.device != input.device:
        raise ValueError(f"the input is on {input.device} but {name} on {given.device}; move one with .to(device)")


def _check_mask(mask: Tensor, input: Tensor, channel_dim: int) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"expected mask to be a bool tensor, got {type(mask).__name__}; use torch.as_tensor(mask)")
    if mask.dtype != torch.bool:
        raise TypeError(f"expected mask to be bool, True where a value counts, got {mask.dtype}; use mask != 0")
    wanted = list(input.shape)
    del wanted[channel_dim]
    # Not `in`, which is False for a static and an equal dynamic size under Dynamo.
    sizes_fit = all(size == 1 or size == other for size, other in zip(mask.shape, wanted, strict=False))
    if mask.ndim not in (1, len(wanted)) or not sizes_fit:
        raise ValueError(
            f"expected mask of shape {tuple(wanted)}, which is the input's {tuple(input.shape)} without the channels' "
            f"dim, with sizes of 1 where all values share it, or ({wanted[0]},); got {tuple(mask.shape)}"
        )
    if mask.device != input.device:
        raise ValueError(f"the input is on {input.device} but mask on {mask.device}; move one with .to(device)")


def check_momentum(momentum: float | Tensor) -> None:
    """**Raises** TypeError unless `momentum` is a number or a tensor, ValueError for a tensor of several numbers."""
    if not isinstance(momentum, Tensor):
        _check_number("momentum", momentum)
    elif momentum.numel() != 1:
        raise ValueError(f"momentum must be one number, got a tensor of shape {tuple(momentum.shape)}")


def check_eps(eps: float) -> None:
    """**Raises** TypeError unless `eps` is a number, ValueError unless it is positive."""
    _check_number("eps", eps)
    if not eps > 0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")


def _check_number(name: str, number: float) -> None:
    if type(number) is not float and (isinstance(number, bool) or not isinstance(number, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {number!r} of type {type(number).__name__}")


def as_list(name: str, given: Iterable[Any]) -> list[Any]:
    if isinstance(given, Tensor):
        raise TypeError(f"expected {name} to be a list of tensors, got one tensor; use {name}.unbind()")
    return list(given)
