"""Finds the kernels of an ordinary pass.

They are a function of shapes, strides, dtypes, devices and options alone, and hold no tensor, layer or group, so
nothing makes them invalid. There are none where kernels cannot read the tensors at their addresses. What was found
serves later calls with such tensors, see Found in guards.py.
"""

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from syncbn.arguments import Options, Tensors
from syncbn.checks import check
from syncbn.kernels.interface import BackwardKernels, BackwardKind, ForwardKernels, ForwardKind, Needed, Saved
from syncbn.kernels.select import ordinary_back_end
from syncbn.layout import Layout
from syncbn.statistics import num_statistics
from syncbn.torch_internals.autograd import is_wrapped, is_zero_tensor
from syncbn.torch_internals.guards import Found, lack_memory
from syncbn.torch_internals.state import PLAIN_OR_NONE


class Plan(NamedTuple):
    """How an ordinary forward runs."""

    kernels: ForwardKernels
    has_gaps: bool  # x or z must be copied first: it has gaps, or z another layout or dtype than x


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
    back_end = ordinary_back_end(kind)
    has_gaps = not _are_dense((x, z), kind.layout) or (z is not None and z.dtype != x.dtype)
    return None if back_end is None else Plan(back_end.Forward.of(kind), has_gaps)


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
        needs_x=needed[0], needs_residual=needed[3] and kind.masks_by_y, single_rank=kind.single_rank,
    )  # fmt: skip


def _new_backward_plan(forward: ForwardKind, dy: Tensor, saved: Saved, needed: Needed) -> BackwardKernels | None:
    """Finds the kernels; None where hooks have rounded or moved what was saved."""
    x, weight, statistics, y = saved
    if not (PLAIN_OR_NONE.issuperset(map(type, (dy, *saved))) and _are_readable((dy, *saved))):
        return None
    channels = forward.layout.sizes[1]
    if any(tensor is not None and _facts(tensor) != _facts(dy) for tensor in (x, y)):
        return None
    if _facts(statistics) != ((num_statistics(channels, forward.masks_by_x),), torch.float64, dy.device):
        return None
    if weight is not None and (weight.shape, weight.device) != ((channels,), dy.device):
        return None
    if not (_are_dense((dy, x, y), forward.layout) and _are_contiguous((weight, statistics))):
        return None
    kind = kind_of_backward(forward, dy, weight, needed)
    back_end = ordinary_back_end(kind)
    return None if back_end is None else back_end.Backward.of(kind)


def _are_dense(tensors: Iterable[Tensor | None], layout: Layout) -> bool:
    """Whether kernels can read these at their addresses, in this layout."""
    return all(tensor is None or layout.dense(tensor) is tensor for tensor in tensors)


def _are_contiguous(per_channel: Iterable[Tensor | None]) -> bool:
    """Whether kernels can read these per-channel values at their addresses."""
    return all(tensor is None or tensor.is_contiguous() for tensor in per_channel)
