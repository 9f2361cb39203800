"""Holds the arguments of one batch norm, and checks them: ValueError or TypeError with the values and the remedy.

Nothing is changed before the checks have passed; a fault is raised on all ranks, see general.py.
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from syncbn.ranks.groups import GroupSpec, OfMesh
from syncbn.torch_internals.autograd import innermost
from syncbn.torch_internals.state import PLAIN_CLASSES, is_compiling

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PER_CHANNEL = "running_mean", "running_var", "weight", "bias"
# The fields of Arguments that are tensors, or None.
TENSORS = "input", *PER_CHANNEL, "z", "mask", "counter"
# The functions `_check_input_dim` that look at the number of dims alone; None: a function has no such check.
CHECKS_OF_DIMS = {None, *(layer._check_input_dim for layer in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))}
REMEDY = "correct num_features, channel_last or channel_dim"


@dataclass(slots=True)
class Arguments:
    """One input with its buffers, parameters and options; see `functional.sync_batch_norm`."""

    input: Tensor
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    momentum: float | Tensor | None = 0.0  # None: the average of all batches, which the counter counts
    eps: float = 1e-5
    channel_dim: int = 1
    z: Tensor | None = None
    relu: bool = False
    mask: Tensor | None = None
    num_channels: int | None = None  # of the layer; None for a function
    check_input_dim: Callable[[Tensor], Any] | None = None  # of a layer that takes some numbers of dims only
    process_group: GroupSpec | OfMesh = None
    counter: Tensor | None = None  # num_batches_tracked
    num_values: Tensor | None = None  # of a channel that count, (), once a mask has set the others to 0

    def check(self) -> None:
        """Raises ValueError or TypeError unless tensors and options fit together."""
        x = self.input
        check_input(x, self.channel_dim, self.check_input_dim)
        per_channel = {name: tensor for name, tensor in self.per_channel().items() if tensor is not None}
        check_channels(x, self.channel_dim, self.num_channels, per_channel)
        if (self.running_mean is None) != (self.running_var is None):
            raise ValueError("running_mean and running_var must either both be None or neither be None")
        if self.z is not None:
            check_like_input("z", self.z, x)
        if self.mask is not None:
            check_mask(self.mask, x, self.channel_dim)

    def check_numbers(self) -> None:
        """Raises ValueError or TypeError unless momentum is one number, or None, and eps is positive."""
        if type(self.momentum) is not float and (self.momentum is not None or self.counter is None):
            check_momentum(self.momentum)
        check_eps(self.eps)

    def require_running_stats(self) -> None:
        """Raises ValueError where there are no running statistics; `check` refuses one of them without the other."""
        if self.running_mean is None and self.running_var is None:
            raise ValueError("running_mean must be defined in evaluation mode; or pass training=True")

    def without_running_stats(self) -> Self:
        """The same arguments without running statistics and counter."""
        momentum = 0.0 if self.momentum is None else self.momentum
        return replace(self, running_mean=None, running_var=None, counter=None, momentum=momentum)

    def per_channel(self) -> dict[str, Tensor | None]:
        """The tensors (C,), by their names."""
        return {name: getattr(self, name) for name in PER_CHANNEL}


def check_input(x: Tensor, channel_dim: int, check_input_dim: Callable[[Tensor], Any] | None = None) -> None:
    """Raises ValueError or TypeError unless x is a dense float tensor of 2 or more dims that has `channel_dim`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a Tensor as input, got {type(x).__name__}")
    if x.dtype not in SUPPORTED_DTYPES:
        remedy = "call syncbn.revert_syncbn_model(model) before quantising" if x.is_quantized else "convert it first"
        raise TypeError(f"expected a float16, bfloat16, float32 or float64 input, got {x.dtype}; {remedy}")
    if x.is_nested:
        raise TypeError(
            f"expected a dense input, or one NestedTensor that is jagged, without holes between its sequences, got "
            f"layout {x.layout}; use torch.nested.as_nested_tensor(input.unbind(), layout=torch.jagged) or its values()"
        )
    _check_tensor("input", x, x)
    if check_input_dim is not None:
        try:
            check_input_dim(x)
        except ValueError as error:
            if type(error) is not ValueError:
                raise
            raise ValueError(f"{error}; its shape is {tuple(x.shape)}") from error
    if x.ndim < 2:
        raise ValueError(f"expected at least 2D input (got {x.ndim}D input of shape {tuple(x.shape)})")
    if not isinstance(channel_dim, int):
        raise TypeError(f"channel_dim must be an int, got {channel_dim!r}")
    if not -x.ndim <= channel_dim < x.ndim:
        raise ValueError(f"channel_dim={channel_dim} does not exist in an input of shape {tuple(x.shape)}")


def check_channels(x: Tensor, channel_dim: int, num_channels: int | None, per_channel: dict[str, Tensor]) -> None:
    """Raises ValueError or TypeError unless `per_channel` are float tensors (C,) on the device of x, with C as in x."""
    actual = x.shape[channel_dim]
    for name, tensor in per_channel.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected {name} to be a Tensor of shape ({actual},), got {type(tensor).__name__}")
        _check_tensor(name, tensor, x)
        if tensor.shape != (actual,):
            raise ValueError(
                f"{_not_as_many(tensor.numel(), x, channel_dim)}: {name} should contain {actual} elements not "
                f"{tensor.numel()}, shape ({actual},) not {tuple(tensor.shape)}; {REMEDY}"
            )
    if num_channels is not None and actual != num_channels:
        raise ValueError(f"{_not_as_many(num_channels, x, channel_dim)}; {REMEDY}")


def _not_as_many(expected: int, x: Tensor, channel_dim: int) -> str:
    where = f"in dim {channel_dim} of the input, got {x.shape[channel_dim]} (input shape {tuple(x.shape)})"
    return f"expected {expected} channels {where}"


def check_like_input(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raises TypeError or ValueError unless `tensor` is a float tensor of the shape and device of x."""
    _check_dtype(name, tensor)
    if tensor.shape != x.shape:
        raise ValueError(
            f"expected {name} of the input's shape {tuple(x.shape)}, got {tuple(tensor.shape)}; expand() it first"
        )
    _check_tensor(name, tensor, x)


def check_mask(mask: Tensor, x: Tensor, channel_dim: int) -> None:
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
    _check_device("mask", mask, x)


def _check_tensor(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raises TypeError or ValueError unless `tensor` is a dense float tensor on the device of x, and no DTensor."""
    _check_dtype(name, tensor)
    if type(tensor) not in PLAIN_CLASSES and hasattr(tensor, "device_mesh"):
        raise TypeError(f"{name} is a DTensor, expected this rank's values as a plain tensor: pass {name}.to_local()")
    if tensor.layout != torch.strided:
        raise TypeError(f"expected a dense {name}, got layout {tensor.layout}; use {name}.to_dense()")
    _check_device(name, tensor, x)


def _check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raises ValueError unless `tensor` is on the device of x."""
    if tensor.device != x.device:
        raise ValueError(f"the input is on {x.device} but {name} on {tensor.device}; move one with .to(device)")


def _check_dtype(name: str, tensor: Tensor) -> None:
    """Raises TypeError unless `tensor` is a float tensor."""
    dtype = getattr(tensor, "dtype", type(tensor).__name__)
    if dtype not in SUPPORTED_DTYPES:
        remedy = f"a mask is passed as mask=, not as {name}" if dtype is torch.bool else "convert it first"
        raise TypeError(f"expected {name} to be a float tensor, got {dtype}; {remedy}")


def check_num_features(num_features: int) -> None:
    """Raises TypeError unless `num_features` is an int, ValueError unless it is positive."""
    if isinstance(num_features, bool) or not isinstance(num_features, numbers.Integral):
        raise TypeError(f"num_features must be an int, the number of channels, got {num_features!r}; pass int(...)")
    if num_features < 1:
        raise ValueError(f"num_features must be positive, got {num_features}")


def check_momentum(momentum: float | Tensor | None) -> None:
    """Raises TypeError unless `momentum` is a number or a tensor, ValueError for a tensor of several numbers."""
    if not isinstance(momentum, Tensor):
        _check_number("momentum", momentum)
    elif momentum.numel() != 1:
        raise ValueError(f"momentum must be one number, got a tensor of shape {tuple(momentum.shape)}")


def check_eps(eps: float) -> None:
    """Raises TypeError unless `eps` is a number, ValueError unless it is positive."""
    if type(eps) is not float:
        _check_number("eps", eps)
    if not eps > 0:
        raise ValueError(f"batch_norm eps must be positive during training, but got {eps}")


def require_two_values(num_values: Tensor, x: Tensor, name: str = "") -> None:
    """Raises F.batch_norm's ValueError when the whole group has one value per channel.

    On a GPU the host would stop to read that, a compiled graph would break, and a subclass such as FakeTensor may have
    no values. Then nothing is raised.
    """
    can_read = not is_compiling() and num_values.is_cpu and type(num_values) is Tensor
    if can_read and 1 in innermost(num_values).flatten().tolist():
        raise ValueError(
            f"{name}Expected more than 1 value per channel when training, got 1 over all ranks "
            f"(input size on this rank {tuple(x.shape)}). Use a larger batch or eval()."
        )


def _check_number(name: str, number: float | None) -> None:
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise TypeError(f"{name} must be a number, got {number!r} of type {type(number).__name__}")
