"""Checks the numbers that a user passes: ValueError or TypeError with the value."""

import numbers
from typing import overload

import torch
from torch import Tensor

SHOWN_CHARACTERS = 60  # of a value in an error


def check_num_features(num_features: int) -> None:
    """Raises TypeError unless `num_features` is an int, ValueError unless it is positive."""
    if isinstance(num_features, bool) or not isinstance(num_features, numbers.Integral):
        raise TypeError(f"num_features must be an int, the number of channels, got {num_features!r}; pass int(...)")
    if num_features < 1:
        raise ValueError(f"num_features must be positive, got {num_features}")


@overload
def as_momentum(momentum: float | None) -> float: ...
@overload
def as_momentum(momentum: Tensor) -> Tensor: ...
def as_momentum(momentum: float | Tensor | None) -> float | Tensor:
    """`momentum` as a float; a tensor as it is. Raises TypeError unless it is a real number, ValueError for several, or
    one that is too large."""
    if not isinstance(momentum, Tensor):
        return _as_float("momentum", momentum)
    check_one_number("momentum", momentum)
    return momentum


def check_one_number(name: str, tensor: Tensor) -> None:
    """Raises ValueError or TypeError unless `tensor` is one real number."""
    if tensor.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(tensor.shape)}")
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be a number, got a tensor of {tensor.dtype}")


def as_eps(eps: float) -> float:
    """`eps` as a float. Raises TypeError unless it is a number, ValueError unless it is positive and not too large."""
    if type(eps) is not float:
        eps = _as_float("eps", eps)
    if not eps > 0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")
    return eps


def _as_float(name: str, number: float | None) -> float:
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(f"{name} must be a number, got {in_short(number)} of type {type(number).__name__}")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} must fit into a float, got {in_short(number)}") from None


def in_short(value: object) -> str:
    """The value as Python shows it, cut."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4,300 digits
        text = f"a large {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
