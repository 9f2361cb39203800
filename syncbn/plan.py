"""Finds the plan of a pass: what depends on the kinds of its arguments alone, checked and worked out once.

A plan is a function of its key alone: of shapes, strides, dtypes, devices and options. It holds no tensor, layer or
group, so nothing makes it invalid. Arguments that are wrong, or that kernels cannot read at their addresses, get no
plan: they take a side road, which copies them or says what is wrong. new_plans.py makes the plans.
"""

from typing import Any

import torch
from torch import Tensor

from syncbn.arguments import Arguments
from syncbn.kernels.plans import require_memory
from syncbn.layout import Layout
from syncbn.new_plans import Plan, kind, new_backward_plan, new_forward_plan
from syncbn.torch_internals.autograd import is_wrapped, is_zero_tensor
from syncbn.torch_internals.state import PLAIN_CLASSES

MOST_PLANS = 4096  # then all are forgotten
_plans: dict[tuple[Any, ...], Plan] = {}

_PLAIN = {*PLAIN_CLASSES, type(None)}


def forward_plan(given: Arguments) -> Plan | None:
    """The plan for arguments of these kinds, or None."""
    if given.mask is not None:
        return None
    tensors = given.input, given.z, given.weight, given.bias, given.running_mean, given.running_var, given.counter
    classes = (*map(type, tensors),)
    if not _PLAIN.issuperset(classes):
        return None
    check: Any = given.check_input_dim
    try:
        key = (
            classes, _kinds(tensors), type(given.momentum), type(given.eps), given.eps,
            type(given.relu), given.relu, type(given.channel_dim), given.channel_dim, given.num_channels,
            None if check is None else check.__func__,
        )  # fmt: skip
        return _plans[key]
    except KeyError:
        return _remember(key, new_forward_plan(given, key[-1]))
    except (AttributeError, RuntimeError, TypeError):  # a check of the instance; no strides or memory; a bad option
        return None


def backward_plan(
    layout: Layout, dy: Tensor, saved: tuple[Any, ...], needed: tuple[bool, ...], bias_dtype: torch.dtype | None
) -> Plan | None:
    """The plan for the gradients `needed` of x, weight, bias and residual, or None.

    x, weight, the statistics and y (None unless relu is fused behind a residual) were `saved`. dy lies as x does.
    """
    tensors = (dy, *saved)
    classes = (*map(type, tensors),)
    if not _PLAIN.issuperset(classes):
        return None
    try:
        key = classes, _kinds(tensors), layout, needed, bias_dtype
        return _plans[key]
    except KeyError:
        return _remember(key, new_backward_plan(layout, dy, saved, needed, bias_dtype))
    except RuntimeError:  # a hook has made a sparse tensor of what was saved, or freed its memory
        return None


def _kinds(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """The part of a key that tensors give, beside their classes: shapes, dtypes, devices, strides, and whether their
    memory holds their values. **Raises** RuntimeError where one has no memory."""
    there = [one for one in tensors if one is not None]
    require_memory(there)
    return (
        *map(kind, there), *map(Tensor.stride, there), *map(Tensor.is_neg, there), *map(is_zero_tensor, there),
        *map(is_wrapped, there),
    )  # fmt: skip


def _remember(key: tuple[Any, ...], plan: Plan | None) -> Plan | None:
    if plan is not None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan
