"""Uses private names of Inductor, which compiles graphs; torch.compile loads it."""

from collections.abc import Callable, Collection
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph
from torch._inductor.ir import ExternKernel, FlexibleLayout, as_storage_and_layout, get_stride_order
from torch._inductor.lowering import make_fallback
from torch._inductor.pattern_matcher import MULTIPLE as MULTIPLE
from torch._inductor.pattern_matcher import CallFunction as CallFunction
from torch._inductor.pattern_matcher import Ignored as Ignored
from torch._inductor.pattern_matcher import Match as Match
from torch._inductor.pattern_matcher import register_graph_pattern
from torch._inductor.virtualized import V
from torch.fx import Node

Handler: TypeAlias = Callable[..., None]
# The arguments of operators in each graph that is compiled: a tensor that several operators read is copied once.
_given: WeakKeyDictionary[Any, dict[tuple[object, ...], Any]] = WeakKeyDictionary()


def give_in_one_order(operator: torch._ops.OpOverload, leader: str, followers: Collection[str]) -> None:
    """Makes Inductor pass an operator the leader without gaps, its dims in any order in memory, and the followers,
    which have its shape, in the same order. Inductor's own outputs take this layout; other tensors are copied."""
    names = [argument.name for argument in operator._schema.arguments]

    def laid_out(node: Node, *inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            return in_one_order(node, inputs), {}
        except (AttributeError, TypeError):  # another torch has other names; operators then copy what they cannot read
            return inputs, {}

    def in_one_order(node: Node, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        with config.patch(comprehensive_padding=False):  # which makes gaps
            first = ExternKernel.realize_input(inputs[names.index(leader)])
            strides = as_storage_and_layout(first)[1].stride
        order = get_stride_order(strides, V.graph.sizevars.shape_env)
        dense = FlexibleLayout.stride_ordered(first.get_size(), order)
        arguments: dict[str, Any] = dict(zip(names, inputs, strict=True)) | {leader: first}
        given = _given.setdefault(V.graph, {})
        for name, source in zip(names, node.args, strict=True):
            if name in (leader, *followers) and arguments[name] is not None:
                key = source, (*dense,)
                if key not in given:
                    given[key] = ExternKernel.require_exact_strides(arguments[name], dense)
                arguments[name] = given[key]
        return (*arguments.values(),)

    make_fallback(operator, laid_out)


def in_joint_graphs(pattern: CallFunction) -> Callable[[Handler], Handler]:
    """Makes Inductor call the decorated function for each match in a graph of forward and backward together."""
    return register_graph_pattern(pattern, pass_dict=joint_graph.patterns)
