"""Caches direct kernels by the metadata of tensors.

Kernels depend only on shapes, strides, dtypes, devices and options. They hold no tensor, layer or group, so cache
entries never become stale.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from syncbn import torch_internals as internals
from syncbn.arguments import Options, Tensors, check
from syncbn.kernels import interface
from syncbn.kernels.interface import BackwardConfig, BackwardKernels, ForwardConfig, ForwardKernels, Needed
from syncbn.kernels.layout import Layout
from syncbn.kernels.select import fast_path_back_end
from syncbn.ranks.sites import validate_environment

Value = TypeVar("Value")

MAX_KEYS = 4096  # A cache with this many keys is cleared before the next key is added.
MAX_ENTRIES_PER_KEY = 8  # Calls of one shape may alternate, for example between two dtypes or with frozen weights.
_is_present = partial(is_not, None)
_IS_NESTED, _NONE = repeat("is_nested"), repeat(None)
_metadata = attrgetter("shape", "dtype", "device")


class Cache(Generic[Value]):
    """A cache of values that depend only on a key and on the dtypes, devices, sizes and strides of tensors.

    The full key is `call_key`, the shape of the first tensor, and for each tensor whether it is None. A guard compares
    the rest of the metadata.
    """

    def __init__(self, select: Callable[..., Value | None]) -> None:
        self.select: Callable[..., Value | None] = select
        self.entries: dict[tuple[object, ...], tuple[tuple[internals.Guard, Value], ...]] = {}

    def get(self, call_key: Hashable, tensors: tuple[Any, ...], *arguments: Any) -> Value | None:
        """Return the cached value whose guard accepts the tensors, which are plain tensors or None. If no guard accepts
        them, return `select(tensors, *arguments)`, and cache the result unless it is None.

        Return None if the first tensor is None, if a tensor is a NestedTensor, on which a guard for strided tensors
        would abort, or if the storage of a tensor was freed.
        """
        are_nested = (*map(getattr, tensors, _IS_NESTED, _NONE),)
        if tensors[0] is None or True in are_nested:
            return None
        present, key = [*filter(_is_present, tensors)], (call_key, tensors[0].shape, are_nested)
        for guard, value in self.entries.get(key, ()):
            if guard(*present):
                # A guard does not detect freed storage. data_ptr() of a tensor in freed storage is the storage offset
                # in bytes: 0, or more if the tensor is a view, for example of a flat parameter.
                may_be_freed = 0 in map(Tensor.data_ptr, present) or {*map(Tensor.storage_offset, present)} != {0}
                return None if may_be_freed and internals.any_freed(present) else value
        return self._select(key, tensors, arguments)

    def _select(self, key: tuple[Any, ...], tensors: tuple[Any, ...], arguments: tuple[Any, ...]) -> Value | None:
        """Select a value, and cache it under the key unless it is None."""
        for index, tensor in enumerate(tensors):
            if tensor is not None and id(tensor) in map(id, tensors[:index]):  # A guard rejects a repeated tensor.
                return self.get(key[0], (*tensors[:index], tensor.detach(), *tensors[index + 1 :]), *arguments)
        selected = self.select(tensors, *arguments)
        if selected is not None and internals.guards_work():
            if len(self.entries) >= MAX_KEYS:
                self.entries.clear()
            guard = internals.make_guard(*filter(_is_present, tensors))
            self.entries[key] = ((guard, selected), *self.entries.get(key, ()))[:MAX_ENTRIES_PER_KEY]
        return selected


def _select_forward(tensors: tuple[Any, ...], options: Options) -> tuple[ForwardKernels, bool] | None:
    """Select the kernels for a forward of plain tensors, whose mask has not been applied, and return whether
    `make_dense` must copy x or z first. Return None if kernels cannot use the tensors or options. **Raises** ValueError
    or TypeError if an argument is invalid."""
    if options.cache_key is None or not _are_readable(tensors):
        return None
    x, z, *per_channel, mask, _ = tensors = Tensors._make(tensors)
    check(tensors, options, None)
    validate_environment()
    options.with_float_numbers(tensors)
    mean, var, counter = tensors.running_mean, tensors.running_var, tensors.counter
    if not _are_contiguous(per_channel) or (counter is not None and _metadata(counter) != ((), torch.int64, x.device)):
        return None
    config = forward_config(tensors, options)._replace(  # Direct kernels also update the buffers.
        mean_dtype=None if mean is None else mean.dtype, var_dtype=None if var is None else var.dtype,
        has_counter=counter is not None, averages=options.momentum is None and counter is not None,
    )  # fmt: skip
    back_end = fast_path_back_end(config)
    # The strides of an input to which a mask has been applied may depend on the strides of the mask.
    needs_copy = mask is not None or not _are_dense((x, z), config.layout) or (z is not None and z.dtype != x.dtype)
    return None if back_end is None else (back_end.Forward.cached(config), needs_copy)


def _select_backward(tensors: tuple[Any, ...], forward: ForwardConfig, needed: Needed) -> BackwardKernels | None:
    """Select the kernels that compute the gradients `needed`. `tensors` are dy, with the strides of x, and the saved
    tensors: x, weight, statistics and y (or None). Return None if kernels cannot use a tensor, for example because
    saved_tensors_hooks have changed its dtype or device."""
    dy, x, weight, statistics, y = tensors
    if not (internals.PLAIN_OR_NONE.issuperset(map(type, tensors)) and _are_readable(tensors)):
        return None
    channels = forward.layout.sizes[1]
    if any(tensor is not None and _metadata(tensor) != _metadata(dy) for tensor in (x, y)):
        return None
    if _metadata(statistics) != ((interface.num_statistics(channels, forward.relu_mask),), torch.float64, dy.device):
        return None
    if weight is not None and (weight.shape, weight.device) != ((channels,), dy.device):
        return None
    if not (_are_dense((dy, x, y), forward.layout) and _are_contiguous((weight, statistics))):
        return None
    config = backward_config(forward, dy, weight, needed)
    back_end = fast_path_back_end(config)
    return None if back_end is None else back_end.Backward.cached(config)


# forward_cache is keyed by `Options.cache_key`, backward_cache by (forward kernels, needed).
forward_cache, backward_cache = Cache(_select_forward), Cache(_select_backward)


def forward_config(tensors: Tensors, options: Options) -> ForwardConfig:
    """Return the config for plain, checked arguments. Its fields for the buffers keep their defaults."""
    x, weight, bias = tensors.input, tensors.weight, tensors.bias
    return ForwardConfig(
        Layout.of(x, options.channel_dim), x.dtype, x.device, options.eps, bool(options.relu),
        tensors.z is not None, None if weight is None else weight.dtype, None if bias is None else bias.dtype,
    )  # fmt: skip


def backward_config(config: ForwardConfig, dy: Tensor, weight: Tensor | None, needed: Needed) -> BackwardConfig:
    """Return the config for the gradients `needed`, after a forward with `config`."""
    weight_dtype = None if weight is None else weight.dtype
    return BackwardConfig(
        config.layout, dy.dtype, dy.device, config.relu_mask, weight_dtype,
        weight_dtype if needed[1] else None, config.bias_dtype if needed[2] else None,
        needs_x=needed[0], needs_residual=needed[3] and config.relu_mask is interface.ReluMask.FROM_Y,
        single_rank=config.single_rank,
    )  # fmt: skip


def _are_readable(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether kernels can read each tensor at its data pointer, and autograd can save each tensor (an inference
    tensor only in inference mode)."""
    present = [tensor for tensor in tensors if tensor is not None]
    checks = Tensor.is_neg, internals.is_zero_tensor, internals.is_wrapped, internals.is_batched_gradient
    if any(tensor.layout != torch.strided or any(check(tensor) for check in checks) for tensor in present):
        return False
    has_inference = any(tensor.is_inference() for tensor in present) and not torch.is_inference_mode_enabled()
    return not (has_inference or internals.any_freed(present))


def _are_dense(tensors: Iterable[Tensor | None], layout: Layout) -> bool:
    """Return whether all tensors are dense in this layout, so that no copy is needed."""
    return all(tensor is None or layout.dense(tensor) is tensor for tensor in tensors)


def _are_contiguous(per_channel: Iterable[Tensor | None]) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in per_channel)
