"""Finds the kernels of an ordinary pass.

They are a function of shapes, strides, dtypes, devices and options alone, and hold no tensor, layer or group, so
nothing makes them invalid. There are none where kernels cannot read the tensors at their addresses. What was found
serves later calls with such tensors, see Found.
"""

import functools
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from syncbn.arguments import Options, Tensors, check
from syncbn.kernels.interface import BackwardKernels, BackwardKind, ForwardKernels, ForwardKind, Needed, Saved
from syncbn.kernels.select import ordinary_back_end
from syncbn.layout import Layout
from syncbn.statistics import num_statistics
from syncbn.torch_internals.autograd import Check, guards_work, is_wrapped, is_zero_tensor, lack_memory, new_check
from syncbn.torch_internals.state import PLAIN_OR_NONE


class Plan(NamedTuple):
    """How an ordinary forward runs."""

    kernels: ForwardKernels
    has_gaps: bool  # x or z must be copied first: it has gaps, or z another layout or dtype than x


MOST_KERNELS = 4096  # that are kept
MOST_KEYS = 4096  # of a Found; then all is forgotten
MOST_OF_A_KEY = 8  # kinds of tensors of one shape that may take turns: of two dtypes, with frozen weights
_is_present = partial(is_not, None)
_IS_NESTED, _NONE = repeat("is_nested"), repeat(None)


class Found:
    """A cache of values that depend on a fact and on the dtypes, devices, sizes and strides of tensors alone.

    The key is the fact, the shape of the first tensor and which tensors are None; a check of each value compares the
    rest.
    """

    def __init__(self) -> None:
        self.by_key: dict[tuple[object, ...], tuple[tuple[Check, Any], ...]] = {}

    def get(self, fact: Hashable, tensors: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the cached value if its check accepts the tensors, None if the memory of one of them was freed. Else
        return the value of `make`, which is cached unless it is None.

        **Raises** any exception if the first tensor is not a Tensor, or the fact is not hashable.
        """
        present = [*filter(_is_present, tensors)]
        # A NestedTensor has True in its key, under which nothing is cached: the check would abort on a strided one.
        key = fact, tensors[0].shape, *map(getattr, tensors, _IS_NESTED, _NONE)
        for is_equal, found in self.by_key.get(key, ()):
            if is_equal(*present):
                return None if lack_memory(present) else found
        for index, tensor in enumerate(tensors):
            if tensor is not None and id(tensor) in map(id, tensors[:index]):  # no check accepts a tensor twice
                return self.get(fact, (*tensors[:index], tensor.detach(), *tensors[index + 1 :]), make)
        found = make()
        if found is not None and guards_work():
            if len(self.by_key) >= MOST_KEYS:
                self.by_key.clear()
            self.by_key[key] = ((new_check(*present), found), *self.by_key.get(key, ()))[:MOST_OF_A_KEY]
        return found


_found = Found()  # plans of forwards, and kernels of backwards
_facts = attrgetter("shape", "dtype", "device")  # of a tensor


def forward_plan(tensors: Tensors, options: Options) -> Plan | None:
    """The plan for a forward of plain tensors without a mask, or None. **Raises** any exception for bad arguments."""
    if options.plan_key is None:
        return None
    plan: Plan | None = _found.get(options.plan_key, tensors, lambda: _new_forward_plan(tensors, options))
    return plan


def backward_plan(forward: ForwardKernels, dy: Tensor, saved: Saved, needed: Needed) -> BackwardKernels | None:
    """The kernels for the gradients `needed` behind an ordinary forward by these kernels, or None.

    dy has the strides of x. x, weight, the statistics and y (None unless relu is fused behind a residual) were `saved`.
    """
    kernels: BackwardKernels | None = _found.get(
        (forward, needed), (dy, *saved), lambda: _new_backward_plan(forward.kind, dy, saved, needed)
    )
    return kernels


def _are_readable(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the values of the tensors are at their addresses, and autograd can save them: an inference tensor only in
    inference mode."""
    present = [tensor for tensor in tensors if tensor is not None]
    if any(one.layout != torch.strided or one.is_neg() or is_zero_tensor(one) or is_wrapped(one) for one in present):
        return False
    has_inference = any(tensor.is_inference() for tensor in present) and not torch.is_inference_mode_enabled()
    return not (has_inference or lack_memory(present))


def _new_forward_plan(tensors: Tensors, options: Options) -> Plan | None:
    """Makes a plan; None where no kernel can read the tensors at their addresses. **Raises** what is wrong with the
    arguments."""
    if not _are_readable(tensors):
        return None
    check(tensors, options, None)
    options.normalized(tensors)
    x, z, counter, per_channel = tensors.input, tensors.z, tensors.counter, tensors.per_channel()
    if not _are_contiguous((*per_channel.values(), counter)):
        return None
    if counter is not None and _facts(counter) != ((), torch.int64, x.device):
        return None
    kind = kind_of(tensors, options)
    mean, var = per_channel["running_mean"], per_channel["running_var"]
    kind = kind._replace(  # these kernels update the buffers
        mean_dtype=None if mean is None else mean.dtype, var_dtype=None if var is None else var.dtype,
        has_counter=counter is not None, averages=options.momentum is None and counter is not None,
    )  # fmt: skip
    kernels = _forward_kernels(kind)
    has_gaps = not _are_dense((x, z), kind.layout) or (z is not None and z.dtype != x.dtype)
    return None if kernels is None else Plan(kernels, has_gaps)


def kind_of(tensors: Tensors, options: Options) -> ForwardKind:
    """The kind of plain arguments that have been checked, without their buffers."""
    x, weight, bias = tensors.input, tensors.weight, tensors.bias
    return ForwardKind(
        Layout.of(x, options.channel_dim), x.dtype, x.device, options.eps, bool(options.relu),
        tensors.z is not None, None if weight is None else weight.dtype, None if bias is None else bias.dtype,
    )  # fmt: skip


def kind_of_backward(kind: ForwardKind, dy: Tensor, weight: Tensor | None, needed: Needed) -> BackwardKind:
    """The kind of the gradients `needed` of x, weight, bias and residual, behind a forward of this kind."""
    weight_dtype = None if weight is None else weight.dtype
    return BackwardKind(
        kind.layout, dy.dtype, dy.device, kind.masks_by_x, kind.masks_by_y, weight_dtype,
        weight_dtype if needed[1] else None, kind.bias_dtype if needed[2] else None,
        needs_x=needed[0], needs_residual=needed[3] and kind.masks_by_y,
    )  # fmt: skip


def _new_backward_plan(kind: ForwardKind, dy: Tensor, saved: Saved, needed: Needed) -> BackwardKernels | None:
    """Finds the kernels; None where hooks have rounded or moved what was saved."""
    x, weight, statistics, y = saved
    if not (PLAIN_OR_NONE.issuperset(map(type, (dy, *saved))) and _are_readable((dy, *saved))):
        return None
    channels = kind.layout.sizes[1]
    if any(tensor is not None and _facts(tensor) != _facts(dy) for tensor in (x, y)):
        return None
    if _facts(statistics) != ((num_statistics(channels, kind.masks_by_x),), torch.float64, dy.device):
        return None
    if weight is not None and (weight.shape, weight.device) != ((channels,), dy.device):
        return None
    if not (_are_dense((dy, x, y), kind.layout) and _are_contiguous((weight, statistics))):
        return None
    return _backward_kernels(kind_of_backward(kind, dy, weight, needed))


@functools.lru_cache(MOST_KERNELS)
def _forward_kernels(kind: ForwardKind) -> ForwardKernels | None:
    back_end = ordinary_back_end(kind)
    return None if back_end is None else back_end.Forward(kind)


@functools.lru_cache(MOST_KERNELS)
def _backward_kernels(kind: BackwardKind) -> BackwardKernels | None:
    back_end = ordinary_back_end(kind)
    return None if back_end is None else back_end.Backward(kind)


def _are_dense(tensors: Iterable[Tensor | None], layout: Layout) -> bool:
    """Whether kernels can read these at their addresses, in this layout."""
    return all(tensor is None or layout.dense(tensor) is tensor for tensor in tensors)


def _are_contiguous(per_channel: Iterable[Tensor | None]) -> bool:
    """Whether kernels can read these per-channel values at their addresses."""
    return all(tensor is None or tensor.is_contiguous() for tensor in per_channel)
