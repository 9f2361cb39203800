"""Makes plans: checks the arguments of a kind once, and works out their layout and their kernels."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from syncbn.arguments import Arguments
from syncbn.kernels import cpu, select
from syncbn.layout import Layout
from syncbn.statistics import has_scale_and_shift, num_statistics
from syncbn.torch_internals.autograd import is_wrapped, is_zero_tensor

Plan: TypeAlias = cpu.Plan  # or gpu.Plan, which imports triton

kind = attrgetter("shape", "dtype", "device")  # of a tensor
_NUMBERS = {float, int, type(None)}  # classes of momentum
# The functions `_check_input_dim` that look at the number of dims alone.
_CHECKS_OF_DIMS = {None, *(one._check_input_dim for one in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))}


def new_forward_plan(given: Arguments, check_of_dims: object) -> Plan | None:
    """The plan for arguments of these kinds, whose check of dims is the function `check_of_dims`. None where they are
    wrong, or where no kernel can read them at their addresses."""
    x, z, counter, per_channel = given.input, given.z, given.counter, given.per_channel()
    classes = type(given.eps), type(given.relu), type(given.momentum) in _NUMBERS
    if check_of_dims not in _CHECKS_OF_DIMS or classes != (float, bool, True):
        return None
    try:
        given.check()
        given.check_numbers()
    except Exception:  # the side road says what is wrong, on all ranks
        return None
    layout = Layout.of(x, given.channel_dim)
    if not (_are_dense((x, z), layout) and _are_in_a_row((*per_channel.values(), counter))):
        return None
    if z is not None and z.dtype != x.dtype:
        return None
    if counter is not None and kind(counter) != ((), torch.int64, x.device):
        return None
    flags = {"relu": given.relu, "has_residual": z is not None, "has_counter": counter is not None}
    dtypes = {
        f"{name.removeprefix('running_')}_dtype": getattr(one, "dtype", None) for name, one in per_channel.items()
    }
    return select.new_plan(x, layout, eps=given.eps, averages=given.momentum is None, **flags, **dtypes)


def new_backward_plan(
    layout: Layout, dy: Tensor, saved: tuple[Any, ...], needed: tuple[bool, ...], bias_dtype: torch.dtype | None
) -> Plan | None:
    """The plan for gradients, see plan.backward_plan; None where hooks have rounded or moved what was saved."""
    x, weight, statistics, y = saved
    channels = layout.sizes[1]
    relu = y is None and has_scale_and_shift(statistics, channels)
    if any(one is not None and kind(one) != kind(dy) for one in (x, y)):
        return None
    if kind(statistics) != ((num_statistics(channels, relu),), torch.float64, dy.device):
        return None
    if weight is not None and (weight.shape, weight.device) != ((channels,), dy.device):
        return None
    if not (_are_dense((dy, x, y), layout) and _are_in_a_row((weight, statistics))):
        return None
    weight_dtype = getattr(weight, "dtype", None)
    grad_weight_dtype, grad_bias_dtype = weight_dtype if needed[1] else None, bias_dtype if needed[2] else None
    dtypes = {"weight_dtype": weight_dtype, "grad_weight_dtype": grad_weight_dtype, "grad_bias_dtype": grad_bias_dtype}
    return select.new_plan(x, layout, relu=relu, has_y=y is not None, **dtypes)


def _are_dense(tensors: Iterable[Tensor | None], layout: Layout) -> bool:
    """Whether kernels can read these at their addresses, in this layout."""
    return all(one is None or (_has_values(one) and layout.dense(one) is one) for one in tensors)


def _are_in_a_row(tensors: Iterable[Tensor | None]) -> bool:
    """Whether kernels can read these numbers of channels at their addresses."""
    return all(one is None or (_has_values(one) and one.is_contiguous()) for one in tensors)


def _has_values(tensor: Tensor) -> bool:
    """Whether its memory holds its values."""
    return tensor.layout == torch.strided and not (tensor.is_neg() or is_zero_tensor(tensor) or is_wrapped(tensor))
