"""Makes arguments of any kind plain tensors without gaps, and tells how to make the output what the input was."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from syncbn.arguments import SUPPORTED_DTYPES, TENSORS, Arguments
from syncbn.inputs import dtensors, masks, nested, subclasses
from syncbn.layout import Layout
from syncbn.torch_internals.autograd import jagged_parts
from syncbn.torch_internals.state import PLAIN_CLASSES, PLAIN_OR_NONE, is_compiling


def unwrap(arguments: Arguments, synchronises: bool = True) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """The arguments with plain tensors in place of subclasses, NestedTensors and DTensors, and a function that makes
    the output what the input was. If the call `synchronises`, a DTensor says over which ranks."""
    if PLAIN_OR_NONE.issuperset([type(getattr(arguments, name)) for name in TENSORS]):
        return arguments, subclasses.unchanged
    wrap: Callable[[Tensor], Tensor] = subclasses.unchanged
    if not is_compiling():  # Dynamo (torch 2.13) cannot trace x.as_subclass(Tensor)
        arguments, wrap = subclasses.unwrap(arguments)
    if type(arguments.input) not in PLAIN_CLASSES:
        jagged = jagged_parts(arguments.input)
        if jagged is not None:
            return nested.unwrap(arguments, jagged)
        if dtensors.is_dtensor(arguments.input):
            return dtensors.unwrap(arguments, synchronises)
    return arguments, wrap


def to_ordinary(arguments: Arguments) -> tuple[Arguments, Callable[[Tensor], Tensor]]:
    """Unwraps the arguments, applies a mask and copies what has gaps. **Raises** whatever a bad argument brings about,
    unexplained."""
    arguments, wrap = unwrap(arguments)
    if type(arguments.input) not in PLAIN_CLASSES or arguments.input.dtype not in SUPPORTED_DTYPES:
        return arguments, wrap
    if arguments.mask is None:
        return without_gaps(arguments), wrap
    arguments.check_saved()  # the mask, of which a plan knows nothing
    arguments, apply_mask = masks.apply(arguments)
    return without_gaps(arguments), lambda output: wrap(apply_mask(output))


def without_gaps(arguments: Arguments) -> Arguments:
    """The arguments with x and z in one layout without gaps, z in the dtype of x if it is of floats."""
    x, z = arguments.input, arguments.z
    if not is_compiling():  # where it would only add an operator to the graph
        x = x.resolve_neg()
    layout = Layout.of(x, arguments.channel_dim)
    if z is not None and z.dtype in SUPPORTED_DTYPES:
        z = layout.dense(z.to(x.dtype) if is_compiling() else z.resolve_neg().to(x.dtype))
    return replace(arguments, input=layout.dense(x), z=z)
