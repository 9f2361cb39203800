"""Makes Inductor pass tensors to the operators in the layout of x, and fuse a relu into the operators.

The module uses private names of Inductor. dispatched.py imports it while torch compiles.
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
_FILLS = _aten.scalar_tensor.default, _aten.full.default
# The converted arguments of operators in each graph, so that a tensor that several operators read is copied once.
_converted: WeakKeyDictionary[Any, dict[tuple[object, ...], Any]] = WeakKeyDictionary()


@functools.cache
def register_with_inductor() -> None:
    """Register the layouts and the fusion with Inductor, once per process."""
    for syncbn_operator in (forward_sums, forward_outputs, backward_sums, backward_outputs):
        make_fallback(syncbn_operator, functools.partial(_require_layout_of_x, syncbn_operator))
    tensors = [Ignored() for _ in range(5)]  # x, channel_dim, total, weight and bias: any values
    outputs = CallFunction(forward_outputs, *tensors, None, Ignored(), False, _users=MULTIPLE)  # no residual, no relu
    relu = CallFunction(_aten.relu.default, CallFunction(operator.getitem, outputs, 0))  # the only user of y
    register_graph_pattern(relu, pass_dict=joint_graph.patterns)(_fuse_relu)


def _require_layout_of_x(syncbn_operator: Any, node: Node, *inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of an operator: x non-overlapping and dense, and dy, y and residual with the same strides.

    Inductor writes its own outputs with these strides, and copies other tensors.
    """
    names = [argument.name for argument in syncbn_operator._schema.arguments]
    arguments = dict(zip(names, inputs, strict=True))
    converted = _converted.setdefault(V.graph, {})
    try:
        with config.patch(comprehensive_padding=False):  # padding would make x not dense
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
    except (AttributeError, TypeError):  # Without these private names the operators copy tensors.
        return inputs, {}
    return (*arguments.values(),), {}


def _fuse_relu(match: Match, *_: object) -> None:
    """Fuse the relu of y into forward_outputs and the backward operators.

    The fused forward_outputs appends scale and shift to the statistics, and the backward operators compute the mask of
    dy from them. The results keep their bits: a relu commutes with rounding, and masking dy twice is the same as once.
    The relu is not fused if another reader of the statistics could depend on their length.
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
            is_mask = (is_zero.target, *is_zero.args) == (_aten.le.Scalar, relu, 0)
            if is_mask and zero.target in _FILLS and zero.args[-1] == 0:
                _set_argument(backward, "dy", unmasked_dy)
    relu.replace_all_uses_with(y)
    relu.graph.erase_node(relu)


def _set_argument(node: Any, name: str, value: object) -> None:
    """Set the argument `name` of the operator that this node calls."""
    node.update_arg([argument.name for argument in node.target._schema.arguments].index(name), value)


def _is_slice_within(node: Any, length: int) -> bool:
    """Return whether this node is a slice that ends at or before `length`."""
    end = node.args[-1]
    return node.target is _aten.slice.Tensor and len(node.args) == 4 and isinstance(end, int) and end <= length
