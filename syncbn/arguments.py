"""Holds and checks the arguments of a batch norm: the options of a layer and the tensors of a call.

A check raises a ValueError or TypeError that gives the values and the remedy. No tensor is changed before all checks
have passed. The callers raise the error on all ranks, see bad_argument.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from numbers import Real
from types import NoneType
from typing import Any, NamedTuple, Self, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn import torch_internals as internals
from syncbn.kernels.select import reason_forced
from syncbn.ranks.groups import GroupSpec
from syncbn.ranks.sites import FLAGS, CopiedAsNone, to_bool, validate_environment
from syncbn.statistics import supports_float64
from syncbn.texts import shorten

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PER_CHANNEL_NAMES = "running_mean", "running_var", "weight", "bias"
DimCheck: TypeAlias = Callable[[Any, Tensor], Any]  # (layer, input)
NO_DIM_CHECK: DimCheck = _BatchNorm._check_input_dim  # This raises NotImplementedError; SyncBatchNorm skips it.
# These checks read only the number of dims.
TORCH_DIM_CHECKS = {NO_DIM_CHECK, *(cls._check_input_dim for cls in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))}
PLAIN_MOMENTUM_TYPES = {float, int, NoneType}

# Remedies for tensors that a layer does not accept; {0} is the name of the argument.
DTENSOR_REMEDY = (
    "pass {0}.to_local(), and process_group=mesh.get_group() or another group of the ranks that share the batch; "
    "DTensor.from_local(output, mesh, placements, shape=input.shape, stride=input.stride()) wraps the output"
)
PARAMETER_REMEDY = "pass {0}.to_local(), or call the whole module that fully_shard has wrapped, not a layer in it"
NESTED_TENSOR_REMEDY = (
    "pass {0}.values() of a NestedTensor with layout=torch.jagged; "
    "torch.nested.nested_tensor_from_jagged(output, input.offsets()) wraps the output"
)


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
    num_values: Tensor | None = None  # (), the n of this rank; present once a mask has been applied

    def per_channel(self) -> dict[str, Tensor | None]:
        """Return the tensors of shape (C,) by name."""
        return {name: getattr(self, name) for name in PER_CHANNEL_NAMES}

    def has_mask(self) -> bool:
        """Return whether the call has a mask, which may have been applied already."""
        return self.mask is not None or self.num_values is not None

    def differentiable(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the tensors that may get gradients, in the order of kernels: x, weight, bias, residual."""
        return self.input, self.weight, self.bias, self.z

    def buffers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return running_mean, running_var and the counter."""
        return self.running_mean, self.running_var, self.counter

    def without_running_stats(self) -> Self:
        """Return the tensors without running statistics and counter."""
        return self._replace(running_mean=None, running_var=None, counter=None)


@dataclass(frozen=True, slots=True, eq=False)
class Options(CopiedAsNone):
    """The arguments of a batch norm that are not tensors; see `functional.sync_batch_norm`."""

    momentum: float | Tensor | None = 0.0  # None averages over all batches, which `Tensors.counter` counts.
    eps: float = 1e-5
    channel_dim: int = 1
    relu: bool = False
    num_channels: int | None = None  # num_features of a layer: the expected C if there are no per-channel tensors.
    check_input_dim: DimCheck = NO_DIM_CHECK
    process_group: GroupSpec = None
    channel_last: bool = False  # set by layers; True goes with channel_dim=-1
    track_running_stats: bool = True  # set by layers; kept here so that `check` sees it
    layer_values: tuple[object, ...] = ()  # The values from which a layer has built these options.
    # The options on which kernels depend. None if an option has an unusual type: no kernels are cached.
    cache_key: tuple[object, ...] | None = field(init=False)

    def __post_init__(self) -> None:
        # Kernels do not depend on the momentum, so its type is enough for the key. The exception is an int: an int may
        # be too large for a float, so each int is part of the key and is checked when it is new.
        momentum = self.momentum if type(self.momentum) is int else type(self.momentum)
        key = momentum, self.eps, self.relu, self.channel_dim, self.num_channels, self.check_input_dim
        classes = type(self.momentum) in PLAIN_MOMENTUM_TYPES, *map(type, key[1:4])
        are_bools = type(self.channel_last) is type(self.track_running_stats) is bool
        is_plain = not internals.is_compiling() and are_bools and classes == (True, float, bool, int)
        is_plain = is_plain and type(self.num_channels) in (int, NoneType)
        object.__setattr__(self, "cache_key", key if is_plain and self.check_input_dim in TORCH_DIM_CHECKS else None)

    def with_float_numbers(self, tensors: Tensors) -> Self:
        """Return the options with eps and momentum as floats; a tensor momentum is kept. **Raises** TypeError or
        ValueError unless eps is a positive real number and momentum is one real number. Momentum may be None if there
        is a counter or there are no running statistics."""
        momentum, eps = self.momentum, validated_eps(self.eps)
        number = tensors.counter if momentum is None else momentum
        if isinstance(number, Tensor):
            name = "num_batches_tracked" if momentum is None else "momentum"
            if number.numel() != 1:
                raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(number.shape)}")
            if number.ndim or not number.is_cpu:  # A CPU tensor of shape () works with tensors on any device.
                check_device(name, number, tensors.input)
        elif number is not None or tensors.running_mean is not None:
            momentum = to_float("momentum", momentum)
        return self if momentum is self.momentum and eps is self.eps else replace(self, momentum=momentum, eps=eps)


def check_module(model: nn.Module) -> None:
    """**Raises** TypeError unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {model!r} of type {type(model).__name__}; pass the model")


def layer_channels(layer: _BatchNorm) -> int:
    """Return the number of channels from the layer's tensors or, if it has none, from num_features."""
    tensors = [getattr(layer, name) for name in PER_CHANNEL_NAMES]
    sizes = (len(tensor) for tensor in tensors if tensor is not None and not nn.parameter.is_lazy(tensor))
    return next(sizes, layer.num_features)


def check_training(tensors: Tensors, options: Options, layer: object) -> Options:
    """Check all arguments of a training step, and return the options with eps and momentum as floats. **Raises** any
    error of the checks below or of a subclass's `_check_input_dim`."""
    check(tensors, options, layer)
    if not internals.is_compiling():
        reason_forced()  # checks SYNCBN_KERNELS
        validate_environment()
        check_storage(tensors)
        check_writable("running_mean", tensors.running_mean)
        check_writable("running_var", tensors.running_var)
        check_writable("num_batches_tracked", tensors.counter)
    check_saved(tensors)
    return options.with_float_numbers(tensors)


def check(tensors: Tensors, options: Options, layer: object) -> None:
    """**Raises** ValueError or TypeError unless tensors and options fit together. `with_float_numbers` checks eps and
    momentum."""
    x, channel_dim = tensors.input, options.channel_dim
    for name, flag in zip(FLAGS, (options.channel_last, options.track_running_stats, options.relu), strict=True):
        if type(flag) is not bool and type(to_bool(flag)) is not bool:
            raise TypeError(f"{name} must be a bool, got {shorten(flag)} of type {type(flag).__name__}; pass a bool")
    check_input(x, channel_dim, options.check_input_dim, layer)
    per_channel = {name: tensor for name, tensor in tensors.per_channel().items() if tensor is not None}
    check_channels(x, channel_dim, options.num_channels, per_channel)
    if (tensors.running_mean is None) != (tensors.running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    if tensors.z is not None:
        check_like_input("z", tensors.z, x)
    if tensors.mask is not None:
        check_mask(tensors.mask, x, channel_dim)


def check_saved(tensors: Tensors) -> None:
    """**Raises** ValueError if autograd would have to save an inference tensor, which it cannot do."""
    if internals.is_compiling() or torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        return
    inputs = tensors.input, tensors.weight, tensors.bias, tensors.z
    if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in inputs):
        for name in ("input", "weight", "mask"):
            tensor = getattr(tensors, name)
            if isinstance(tensor, Tensor) and tensor.is_inference():
                raise ValueError(
                    f"{name} was made in torch.inference_mode(), so autograd cannot save it for backward; use "
                    f"{name}.clone() outside of inference_mode, or create it in torch.no_grad() instead"
                )


def check_input(x: Tensor, channel_dim: int, check_input_dim: DimCheck = NO_DIM_CHECK, layer: object = None) -> None:
    """**Raises** ValueError or TypeError unless x is a dense float tensor of 2 or more dims that has `channel_dim`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a Tensor as input, got {type(x).__name__}")
    if x.dtype not in SUPPORTED_DTYPES:
        remedy = "call syncbn.revert_syncbn_model(model) before quantising" if x.is_quantized else "convert it first"
        raise TypeError(f"expected a float16, bfloat16, float32 or float64 input, got {x.dtype}; {remedy}")
    _check_tensor("input", x, x)
    if check_input_dim is not NO_DIM_CHECK:
        check_input_dim(layer, x)
    if x.ndim < 2:
        raise ValueError(f"expected at least 2D input (got {x.ndim}D input of shape {tuple(x.shape)})")
    if not isinstance(channel_dim, int):
        raise TypeError(f"channel_dim must be an int, got {channel_dim!r}")
    if not -x.ndim <= channel_dim < x.ndim:
        raise ValueError(f"channel_dim={channel_dim} does not exist in an input of shape {tuple(x.shape)}")


def check_channels(x: Tensor, channel_dim: int, num_channels: int | None, per_channel: dict[str, Tensor]) -> None:
    """**Raises** ValueError or TypeError unless each tensor in `per_channel` is a float tensor of shape (C,) on the
    device of x. If `per_channel` is empty, C must be `num_channels`, unless that number is None or 0 (a lazy layer)."""
    actual = x.shape[channel_dim]
    for name, tensor in per_channel.items():
        _check_tensor(name, tensor, x)
    shapes = [tuple(tensor.shape) for tensor in per_channel.values()] or [(num_channels or actual,)]
    shape = shapes[0]
    if len(shape) == 1 and shape != (actual,) and all(other == shape for other in shapes):
        raise ValueError(
            f"expected {shape[0]} channels in dim {channel_dim} of the input, got {actual} (input shape "
            f"{tuple(x.shape)}); correct num_features, channel_last or channel_dim"
        )
    for name, tensor in per_channel.items():
        if tensor.shape != (actual,):
            raise ValueError(
                f"expected {name} of shape ({actual},), as the input has {actual} channels in dim {channel_dim} (input "
                f"shape {tuple(x.shape)}), got {tuple(tensor.shape)}; pass a tensor of that shape"
            )


def check_like_input(name: str, tensor: Tensor, x: Tensor) -> None:
    """**Raises** TypeError or ValueError unless `tensor` is a float tensor of the shape and device of x."""
    _check_tensor(name, tensor, x)
    if tensor.shape != x.shape:
        raise ValueError(
            f"expected {name} of the input's shape {tuple(x.shape)}, got {tuple(tensor.shape)}; expand() it first"
        )


def check_mask(mask: Tensor, x: Tensor, channel_dim: int) -> None:
    """**Raises** TypeError or ValueError unless `mask` is bool and has shape (N,) or x's shape without the channel dim.
    Any size of the mask may be 1 instead."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"expected mask to be a bool tensor, got {type(mask).__name__}; use torch.as_tensor(mask)")
    if mask.dtype != torch.bool:
        raise TypeError(f"expected mask to be bool, True where a value counts, got {mask.dtype}; use mask != 0")
    wanted = list(x.shape)
    del wanted[channel_dim]
    # Under Dynamo, `size in (1, other)` is False for a static size and an equal dynamic size.
    sizes_fit = all(size == 1 or size == other for size, other in zip(mask.shape, wanted, strict=False))
    if mask.ndim not in (1, len(wanted)) or not sizes_fit:
        raise ValueError(
            f"expected mask of shape {tuple(wanted)} (the input's {tuple(x.shape)} without the channel dim; a dim of "
            f"size 1 is broadcast) or ({wanted[0]},), got {tuple(mask.shape)}"
        )
    check_device("mask", mask, x)


def _check_tensor(name: str, tensor: Tensor, x: Tensor) -> None:
    """**Raises** TypeError or ValueError unless `tensor` is a strided float tensor on the device of x. DTensors and
    NestedTensors are refused."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected {name} to be a float tensor, got {type(tensor).__name__}; use torch.as_tensor")
    if tensor.dtype not in SUPPORTED_DTYPES:
        remedy = f"a mask is passed as mask=, not as {name}" if tensor.dtype is torch.bool else "convert it first"
        raise TypeError(f"expected {name} to be a float tensor, got {tensor.dtype}; {remedy}")
    if type(tensor) not in internals.PLAIN_CLASSES and hasattr(tensor, "device_mesh"):
        remedy = DTENSOR_REMEDY if tensor.ndim > 1 else PARAMETER_REMEDY
        raise TypeError(f"{name} is a DTensor; {remedy.format(name)}")
    if tensor.is_nested:
        raise TypeError(f"{name} is a NestedTensor; {NESTED_TENSOR_REMEDY.format(name)}")
    if tensor.layout != torch.strided:
        raise TypeError(f"expected a dense {name}, got layout {tensor.layout}; use {name}.to_dense()")
    check_device(name, tensor, x)


def check_storage(tensors: Iterable[Tensor | None]) -> None:
    """**Raises** RuntimeError if the storage of a plain tensor was freed."""
    internals.require_storage([tensor for tensor in tensors if _is_plain(tensor)])


def check_writable(name: str, buffer: Tensor | None) -> None:
    """**Raises** ValueError or TypeError unless this buffer can be updated in place. A Tensor subclass is not checked,
    because its own operators raise errors."""
    if buffer is None or (isinstance(buffer, Tensor) and not _is_plain(buffer)):
        return
    if not isinstance(buffer, Tensor) or buffer.dtype == torch.bool:
        got = f"a tensor of {buffer.dtype}" if isinstance(buffer, Tensor) else shorten(buffer)
        raise TypeError(f"expected {name} to be a tensor of numbers, got {got}; use torch.tensor(0)")
    reasons = {
        "several of its elements share one memory location, as after expand()": internals.overlaps_itself(buffer),
        "it is a tensor of zeros without memory": internals.is_zero_tensor(buffer),
        "it was made in torch.inference_mode()": buffer.is_inference() and not torch.is_inference_mode_enabled(),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{name} cannot be updated in place, as {reason}; replace it by {name}.clone()")


def require_float64(x: Tensor) -> None:
    """**Raises** TypeError if the device of x does not support float64."""
    if not supports_float64(x.device):
        what = f"the sums are float64, which {x.device} does not support"
        raise TypeError(f"{what}; train on the CPU, or on one rank with a layer that gets no mask")


def _is_plain(tensor: object) -> TypeGuard[Tensor]:
    """Return whether this is a Tensor or Parameter that torch.func has not wrapped."""
    return type(tensor) in internals.PLAIN_CLASSES and isinstance(tensor, Tensor) and not internals.is_wrapped(tensor)


def check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    """**Raises** ValueError unless `tensor` is on the device of x."""
    if tensor.device != x.device:
        raise ValueError(f"the input is on {x.device} but {name} on {tensor.device}; move one with .to(device)")


def validated_eps(eps: float) -> float:
    """Return `eps` as a float. **Raises** TypeError if `eps` is not a number, and ValueError if it is not positive or
    too large."""
    eps = to_float("eps", eps)
    check_eps(eps, training=True)
    return eps


def check_eps(eps: float, training: bool) -> None:
    """**Raises** ValueError unless `eps` is positive; in evaluation it may be 0."""
    if not (eps > 0 or (eps == 0 and not training)):  # This refuses NaN too.
        kind = "positive during training" if training else "non-negative"
        raise ValueError(f"batch_norm eps must be {kind}, but got {eps}")


def to_float(name: str, number: object) -> float:
    """Return `number` as a float. **Raises** TypeError if `number` is not a real number, and ValueError if it is too
    large."""
    if not isinstance(number, Real):
        raise TypeError(f"{name} must be a float, got {number!r} of type {type(number).__name__}; pass a float")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} must fit into a float, got {shorten(number)}") from None
