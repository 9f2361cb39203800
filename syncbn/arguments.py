"""Holds the arguments of a batch norm, options of a layer and tensors of a call, and makes its numbers floats."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.ranks.groups import GroupSpec
from syncbn.texts import in_short
from syncbn.torch_internals.state import is_compiling

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PER_CHANNEL = "running_mean", "running_var", "weight", "bias"
CheckOfDims: TypeAlias = Callable[[Any, Tensor], Any]  # (layer, input)
ANY_DIMS: CheckOfDims = _BatchNorm._check_input_dim  # not implemented: SyncBatchNorm takes any number of dims
# The checks that look at the number of dims alone.
CHECKS_OF_DIMS = {ANY_DIMS, *(layer._check_input_dim for layer in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))}
NUMBERS = {float, int, NoneType}  # classes of a usual momentum


class Tensors(NamedTuple):
    """The tensors of a call; see `functional.sync_batch_norm`."""

    input: Tensor
    z: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    counter: Tensor | None = None  # num_batches_tracked
    mask: Tensor | None = None
    num_values: Tensor | None = None  # n of this rank, (), where a mask has set the other values to 0

    def per_channel(self) -> dict[str, Tensor | None]:
        """The tensors (C,), by their names."""
        return {name: getattr(self, name) for name in PER_CHANNEL}

    def has_mask(self) -> bool:
        """Whether some values do not count, before or after the mask has set them to 0."""
        return self.mask is not None or self.num_values is not None

    def without_running_stats(self) -> Self:
        """The same tensors without running statistics and counter."""
        return self._replace(running_mean=None, running_var=None, counter=None)


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The arguments of a batch norm that are no tensors; see `functional.sync_batch_norm`. A layer makes them anew when
    one of them changes."""

    momentum: float | Tensor | None = 0.0  # None: the average of all batches, which the counter counts
    eps: float = 1e-5
    channel_dim: int = 1
    relu: bool = False
    num_channels: int | None = None  # num_features, for calls without a tensor (C,); None for a function
    check_input_dim: CheckOfDims = ANY_DIMS
    process_group: GroupSpec = None
    plan_key: tuple[object, ...] | None = field(init=False)  # what plans depend on; None: objects of users, no plan

    def __post_init__(self) -> None:
        momentum = self.momentum if type(self.momentum) is int else type(self.momentum)  # an int may be too large
        key = momentum, self.eps, self.relu, self.channel_dim, self.num_channels, self.check_input_dim
        classes = type(self.momentum) in NUMBERS, *map(type, key[1:4])
        has_plan = not is_compiling() and classes == (True, float, bool, int) and self.check_input_dim in CHECKS_OF_DIMS
        object.__setattr__(self, "plan_key", key if has_plan else None)

    def normalized(self, tensors: Tensors) -> Self:
        """The same options with eps and momentum as floats; a momentum in a tensor stays. **Raises** TypeError or
        ValueError unless each is one real number, and eps is positive. Beside running statistics a momentum of None
        needs a counter."""
        momentum, eps = self.momentum, as_eps(self.eps)
        number = tensors.counter if momentum is None else momentum
        if isinstance(number, Tensor):
            name = "num_batches_tracked" if momentum is None else "momentum"
            if number.numel() != 1:
                raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(number.shape)}")
            if number.ndim or not number.is_cpu:  # A tensor () on the CPU works beside tensors on any device.
                check_device(name, number, tensors.input)
        elif number is not None or tensors.running_mean is not None:
            momentum = as_float("momentum", momentum)
        return self if momentum is self.momentum and eps is self.eps else replace(self, momentum=momentum, eps=eps)


def num_channels_of(layer: _BatchNorm) -> int:
    """The number of channels of a layer, from its tensors, else from num_features."""
    tensors = [getattr(layer, name) for name in PER_CHANNEL]
    sizes = (len(tensor) for tensor in tensors if tensor is not None and not nn.parameter.is_lazy(tensor))
    return next(sizes, layer.num_features)


def check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    """**Raises** ValueError unless `tensor` is on the device of x."""
    if tensor.device != x.device:
        raise ValueError(f"the input is on {x.device} but {name} on {tensor.device}; move one with .to(device)")


def as_eps(eps: float) -> float:
    """`eps` as a float. **Raises** TypeError unless it is a number, ValueError unless it is positive and not too
    large."""
    eps = as_float("eps", eps)
    check_eps(eps, training=True)
    return eps


def check_eps(eps: float, training: bool) -> None:
    """**Raises** ValueError unless `eps` is positive; in evaluation it may be 0."""
    if not (eps > 0 or (eps == 0 and not training)):  # NaN is neither
        kind = "positive during training" if training else "non-negative"
        raise ValueError(f"batch_norm eps must be {kind}, but got {eps}")


def as_float(name: str, number: object) -> float:
    """Return `number` as a float. **Raises** TypeError unless it is a float or an int, ValueError if it is too
    large."""
    if not isinstance(number, (float, int)):
        raise TypeError(f"{name} must be a float, got {number!r} of type {type(number).__name__}; pass float({name})")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} must fit into a float, got {in_short(number)}") from None
