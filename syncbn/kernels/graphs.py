"""Tells Inductor how to treat the operators in a compiled graph, as it cannot look into them."""

import functools
import operator
from typing import Any

import torch
from torch.fx.node import map_arg

from syncbn.torch_internals.inductor import (
    MULTIPLE,
    CallFunction,
    Ignored,
    Match,
    give_in_one_order,
    in_joint_graphs,
)

_aten, _ours = torch.ops.aten, torch.ops.syncbn
_FORWARD, _BACKWARDS = (
    _ours.forward_outputs_v3.default,
    (_ours.backward_sums_v3.default, _ours.backward_outputs_v3.default),
)


@functools.cache
def tell_inductor() -> None:
    """Tell it once."""
    for ours in (_ours.forward_sums_v3.default, _FORWARD, *_BACKWARDS):
        give_in_one_order(ours, "x", ("dy", "y", "residual"))
    tensors = [Ignored() for _ in range(5)]  # and the channels' dim, of whatever values
    outputs = CallFunction(_FORWARD, *tensors, None, Ignored(), False, _users=MULTIPLE)  # no residual, no relu
    relu = CallFunction(_aten.relu.default, CallFunction(operator.getitem, outputs, 0))  # the only user of y
    in_joint_graphs(relu)(fuse_relu)


def fuse_relu(match: Match, *_: object) -> None:
    """The relu of y becomes the operators' own; it masks dy in backward, for which statistics get longer.

    The bits stay the same: a relu commutes with rounding, and where dy is masked twice that is as once. Nothing is done
    where the statistics have readers for which their length could matter.
    """
    relu: Any = match.output_node()
    y = relu.args[0]
    forward = y.args[0]
    readers = [reader for output in forward.users if output is not y for reader in output.users]
    backwards = [reader for reader in readers if reader.target in _BACKWARDS]
    length = forward.meta["val"][1].shape[0]
    if not all(reader in backwards or _is_slice_within(reader, length) for reader in readers):
        return
    _set(forward, "relu", True)
    forward.meta["val"] = forward.target(*map_arg(forward.args, lambda node: node.meta["val"]))
    for output in forward.users:
        output.meta["val"] = forward.meta["val"][output.args[1]]
    for backward in backwards:
        _set(backward, "relu", True)
        dy = backward.args[0]
        if dy.target is _aten.where.self:
            is_zero, zero, behind_relu = dy.args
            if (is_zero.target, *is_zero.args) == (_aten.le.Scalar, relu, 0) and _is_zero(zero):
                _set(backward, "dy", behind_relu)
    relu.replace_all_uses_with(y)
    relu.graph.erase_node(relu)


def _set(node: Any, name: str, value: object) -> None:
    """Sets an argument of the operator that this node calls."""
    node.update_arg([argument.name for argument in node.target._schema.arguments].index(name), value)


def _is_slice_within(node: Any, length: int) -> bool:
    """Whether this node takes a part that ends within so many first values."""
    end = node.args[-1]
    return node.target is _aten.slice.Tensor and len(node.args) == 4 and isinstance(end, int) and end <= length


def _is_zero(node: Any) -> bool:
    return node.target in (_aten.scalar_tensor.default, _aten.full.default) and node.args[-1] == 0
