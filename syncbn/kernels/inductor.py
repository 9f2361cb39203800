"""Tells Inductor, which compiles graphs, how to pass tensors to the operators, and fuses a relu into them.

Uses private names of Inductor. fallback.py imports this module while torch compiles.
"""

import functools
import operator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph
from torch._inductor.ir import ExternKernel, FlexibleLayout, as_storage_and_layout, get_stride_order
from torch._inductor.lowering import make_fallback
from torch._inductor.pattern_matcher import MULTIPLE, CallFunction, Ignored, Match, register_graph_pattern
from torch._inductor.virtualized import V
from torch.fx import Node
from torch.fx.node import map_arg

from syncbn.kernels.operators import backward_outputs, backward_sums, forward_outputs, forward_sums

_aten = torch.ops.aten
# The arguments of operators in each graph that is compiled: a tensor that several operators read is copied once.
_converted: WeakKeyDictionary[Any, dict[tuple[object, ...], Any]] = WeakKeyDictionary()


@functools.cache
def register_with_inductor() -> None:
    """Register both with Inductor, once."""
    for syncbn_operator in (forward_sums, forward_outputs, backward_sums, backward_outputs):
        make_fallback(syncbn_operator, functools.partial(_require_layout_of_x, syncbn_operator))
    tensors = [Ignored() for _ in range(5)]  # and the channels' dim, of whatever values
    outputs = CallFunction(forward_outputs, *tensors, None, Ignored(), False, _users=MULTIPLE)  # no residual, no relu
    relu = CallFunction(_aten.relu.default, CallFunction(operator.getitem, outputs, 0))  # the only user of y
    register_graph_pattern(relu, pass_dict=joint_graph.patterns)(_fuse_relu)


def _require_layout_of_x(syncbn_operator: Any, node: Node, *inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of an operator of ours, x without gaps, its dims in any order in memory, and dy, y and the residual in
    the same order. Inductor's own outputs take this layout; other tensors are copied."""
    names = [argument.name for argument in syncbn_operator._schema.arguments]
    arguments = dict(zip(names, inputs, strict=True))
    converted = _converted.setdefault(V.graph, {})
    try:
        with config.patch(comprehensive_padding=False):  # which makes gaps
            x = arguments["x"] = ExternKernel.realize_input(arguments["x"])
            strides = as_storage_and_layout(x)[1].stride
        order = get_stride_order(strides, V.graph.sizevars.shape_env)
        dense = FlexibleLayout.stride_ordered(x.get_size(), order)
        for name, source in zip(names, node.args, strict=True):
            if name in ("x", "dy", "y", "residual") and arguments[name] is not None:
                key = source, (*dense,)
                if key not in converted:
                    converted[key] = ExternKernel.require_exact_strides(arguments[name], dense)
                arguments[name] = converted[key]
    except (AttributeError, TypeError):  # another torch has other names; operators then copy what they cannot read
        return inputs, {}
    return (*arguments.values(),), {}


def _fuse_relu(match: Match, *_: object) -> None:
    """The relu of y becomes the operators' own; it masks dy in backward, for which statistics get longer.

    The bits stay the same: a relu commutes with rounding, and where dy is masked twice that is as once. Nothing is done
    where the statistics have readers for which their length could matter.
    """
    relu: Any = match.output_node()
    y = relu.args[0]
    forward = y.args[0]
    readers = [reader for output in forward.users if output is not y for reader in output.users]
    backwards = [reader for reader in readers if reader.target in (backward_sums, backward_outputs)]
    length = forward.meta["val"][1].shape[0]
    if not all(reader in backwards or _is_slice_within(reader, length) for reader in readers):
        return
    _set_argument(forward, "relu", True)
    forward.meta["val"] = forward.target(*map_arg(forward.args, lambda node: node.meta["val"]))
    for output in forward.users:
        output.meta["val"] = forward.meta["val"][output.args[1]]
    for backward in backwards:
        _set_argument(backward, "relu", True)
        dy = backward.args[0]
        if dy.target is _aten.where.self:
            is_zero, zero, unmasked_dy = dy.args
            if (is_zero.target, *is_zero.args) == (_aten.le.Scalar, relu, 0) and _is_zero(zero):
                _set_argument(backward, "dy", unmasked_dy)
    relu.replace_all_uses_with(y)
    relu.graph.erase_node(relu)


def _set_argument(node: Any, name: str, value: object) -> None:
    """Sets an argument of the operator that this node calls."""
    node.update_arg([argument.name for argument in node.target._schema.arguments].index(name), value)


def _is_slice_within(node: Any, length: int) -> bool:
    """Whether this node takes a part that ends within so many first values."""
    end = node.args[-1]
    return node.target is _aten.slice.Tensor and len(node.args) == 4 and isinstance(end, int) and end <= length


def _is_zero(node: Any) -> bool:
    return node.target in (_aten.scalar_tensor.default, _aten.full.default) and node.args[-1] == 0
