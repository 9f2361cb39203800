"""Finds the kernels of an ordinary pass, once for all calls whose arguments are of the same kinds.

A plan is a function of its key alone: of shapes, strides, dtypes, devices and options. It holds no tensor, layer or
group, so nothing makes it invalid. There is none where kernels cannot read the tensors at their addresses, and none for
wrong arguments. Most calls do not look up a plan: the kernels of the last call serve them, see Recent in guards.py.
"""

from collections.abc import Iterable
from functools import partial
from operator import attrgetter, is_not
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from syncbn.arguments import CHECKS_OF_DIMS, Options, Tensors
from syncbn.checks import check
from syncbn.kernels.interface import BackwardKernels, BackwardKind, ForwardKernels, ForwardKind, Needed, Saved, is_freed
from syncbn.kernels.select import ordinary_back_end
from syncbn.layout import Layout
from syncbn.statistics import num_statistics
from syncbn.torch_internals.autograd import is_zero_tensor
from syncbn.torch_internals.state import PLAIN_OR_NONE


class Plan(NamedTuple):
    """How an ordinary forward runs."""

    kernels: ForwardKernels
    has_gaps: bool  # x or z must be copied first: it has gaps, or z another layout or dtype than x


MOST_PLANS = 4096  # then all are forgotten
_Key: TypeAlias = tuple[object, ...]
_plans: dict[_Key, Any] = {}  # of forwards Plan or None, of backwards BackwardKernels or None

_NUMBERS = {float, int, NoneType}  # classes of momentum
_is_present = partial(is_not, None)
_facts = attrgetter("shape", "dtype", "device")  # of a tensor


def recent_forward(tensors: Tensors, options: Options) -> ForwardKernels | None:
    """The kernels of the last forward with these options if they serve this one too, without a look at the plans."""
    x, z, weight, bias, mean, var, counter, mask, num_values = tensors
    if z is mask is num_values is None:
        kernels: ForwardKernels | None = options.recent.found_for(x, weight, bias, mean, var, counter)
        return kernels
    return None


def note_forward(kernels: ForwardKernels, tensors: Tensors, options: Options) -> None:
    """Keep the kernels for `recent_forward`; they take these tensors as they are."""
    x, z, *others, _, num_values = tensors
    if z is num_values is None:
        options.recent.note(kernels, x, *others)


def recent_backward(forward: ForwardKernels, dy: Tensor, saved: Saved, needed: Needed) -> BackwardKernels | None:
    """The same of the last backward behind these kernels."""
    found = forward.recent.found_for(dy, *saved[:3])
    return found[0] if found is not None and found[1] == needed else None


def forward_plan(tensors: Tensors, options: Options) -> Plan | None:
    """The plan for a forward of plain tensors without a mask, or None."""
    try:
        key = *map(type, tensors), _kinds(tensors), options.plan_key
        plan: Plan | None = _plans[key]
    except KeyError:
        classes = type(options.eps), type(options.relu), type(options.momentum) in _NUMBERS
        if options.check_input_dim not in CHECKS_OF_DIMS or classes != (float, bool, True):
            return None  # the key has objects of users, which may not be kept
        try:
            check(tensors, options, None)
            options.normalized(tensors)
            plan = _new_forward_plan(tensors, options)
        except Exception:  # the general road says what is wrong, on all ranks
            return None
        _remember(key, plan)
    except (RuntimeError, TypeError):  # no strides or memory; a bad option
        return None
    return plan


def backward_plan(forward: ForwardKernels, dy: Tensor, saved: Saved, needed: Needed) -> BackwardKernels | None:
    """The kernels for the gradients `needed` behind an ordinary forward by these kernels, or None.

    dy has the strides of x. x, weight, the statistics and y (None unless relu is fused behind a residual) were `saved`.
    """
    kind, tensors = forward.kind, (dy, *saved)
    classes = (*map(type, tensors),)
    if not PLAIN_OR_NONE.issuperset(classes):
        return None
    try:
        key = classes, _kinds(tensors), kind.layout, kind.relu, kind.bias_dtype, needed
        plan: BackwardKernels | None = _plans[key]
    except KeyError:
        plan = _new_backward_plan(kind, dy, saved, needed)
        _remember(key, plan)
    except RuntimeError:  # a hook has made a sparse tensor of what was saved, or freed its memory
        return None
    if saved[3] is None:  # y
        forward.recent.note((plan, needed), dy, *saved[:3])
    return plan


def _kinds(tensors: tuple[Tensor | None, ...]) -> tuple[object, ...]:
    """The part of a key that tensors give, beside their classes: shapes, dtypes, devices and strides.

    **Raises** RuntimeError where the values of a tensor are not at its address; data_ptr does so by itself for sparse
    tensors and torch.func's wrappers. Also for an inference tensor outside of inference mode, as autograd cannot
    save it.
    """
    # Not by a comprehension or `any`, which would be calls; `in` is none.
    present: list[Any] = [*filter(_is_present, tensors)]
    is_odd = 0 in map(Tensor.data_ptr, present) or True in map(bool, map(Tensor.storage_offset, present))
    if True in map(Tensor.is_neg, present) or (is_odd and not all(map(_has_memory, present))):
        raise RuntimeError("a tensor whose values are not at its address")
    if True in map(Tensor.is_inference, present) and not torch.is_inference_mode_enabled():
        raise RuntimeError("an inference tensor")
    return (*map(_facts, present), *map(Tensor.stride, present))


def _has_memory(tensor: Tensor) -> bool:
    """False for zero tensors and freed storage. (An empty tensor has the address 0, a view of freed storage its
    offset.)"""
    return not (is_zero_tensor(tensor) or is_freed(tensor))


def _remember(key: _Key, plan: Plan | BackwardKernels | None) -> None:
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[key] = plan


def _new_forward_plan(tensors: Tensors, options: Options) -> Plan | None:
    """Makes a plan; None where no kernel can read the tensors at their addresses."""
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
    back_end = ordinary_back_end(kind)
    has_gaps = not _are_dense((x, z), kind.layout) or (z is not None and z.dtype != x.dtype)
    return None if back_end is None else Plan(back_end.Forward(kind), has_gaps)


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
    channels = kind.layout.sizes[1]
    if any(tensor is not None and _facts(tensor) != _facts(dy) for tensor in (x, y)):
        return None
    if _facts(statistics) != ((num_statistics(channels, kind.masks_by_x),), torch.float64, dy.device):
        return None
    if weight is not None and (weight.shape, weight.device) != ((channels,), dy.device):
        return None
    if not (_are_dense((dy, x, y), kind.layout) and _are_contiguous((weight, statistics))):
        return None
    backward = kind_of_backward(kind, dy, weight, needed)
    back_end = ordinary_back_end(backward)
    return None if back_end is None else back_end.Backward(backward)


def _are_dense(tensors: Iterable[Tensor | None], layout: Layout) -> bool:
    """Whether kernels can read these at their addresses, in this layout."""
    return all(tensor is None or layout.dense(tensor) is tensor for tensor in tensors)


def _are_contiguous(per_channel: Iterable[Tensor | None]) -> bool:
    """Whether kernels can read these per-channel values at their addresses."""
    return all(tensor is None or tensor.is_contiguous() for tensor in per_channel)
