"""Raises a fault in one rank's arguments on every rank, so that none is left waiting, with the name of the layer."""

import contextlib
import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from syncbn.arguments import Arguments
from syncbn.diagnosis.layer_names import path_in_model, quoted
from syncbn.ranks.side_reductions import Reduction
from syncbn.roads import traced
from syncbn.torch_internals.autograd import innermost
from syncbn.torch_internals.state import inside_vmap, is_compiling


def raise_on_all_ranks(error: Exception, inputs: Sequence[Arguments], reduction: Reduction, pass_name: str) -> NoReturn:
    """Join the all_reduce of the others as a faulty rank, and raise `error` on every rank.

    Only this rank raises on a GPU, in a compiled graph, in a trace of torch.fx, and where the arguments do not tell how
    many numbers the others send.
    """
    for one in inputs:
        traced.refuse_proxies(one)
    known = [number for one in inputs if (number := _likely_channels(one)) is not None]
    others_wait = reduction.group is not None and not is_compiling()
    if not others_wait or len(known) < len(inputs) or _device_of(inputs[0]).type != "cpu":
        raise error  # no rank would read the mark
    sums = torch.zeros(2 * sum(known) + len(inputs), dtype=torch.float64)
    if inside_vmap() and isinstance(x := inputs[0].input, Tensor):  # the others send a stack
        sums = x.new_zeros(len(sums), dtype=torch.float64)
    sums[-1] = math.nan
    reduction.total(innermost(sums).flatten(), pass_name, counted=True, error=error)
    raise AssertionError("internal error: no rank reported the bad argument") from error


def raise_with_name(error: Exception, layer: nn.Module) -> NoReturn:
    """Raise `error`, from the forward of `layer`, with the layer's name before it, unless it names the layer already.

    Exceptions of other classes are re-raised unchanged. So are all exceptions in a compiled graph: it has no frames
    from which the name could be found.
    """
    if is_compiling() or type(error) not in (RuntimeError, TypeError, ValueError):
        raise error
    name = quoted(path_in_model(layer)) or type(layer).__name__
    if any(f"{name}{after}" in str(error) for after in (" forward", " backward", ":")):
        raise error
    error.args = (f"{name}: {error}",)
    raise error


def _likely_channels(arguments: Arguments) -> int | None:
    """The number of channels that most arguments have, as one of them is wrong; None if only a bad input tells it."""
    if arguments.num_channels is not None:
        return arguments.num_channels
    votes = [given.numel() for given in arguments.per_channel().values() if isinstance(given, Tensor)]
    with contextlib.suppress(Exception):  # of whatever class a subclass's _check_input_dim raises
        if not votes:
            arguments.check()
        votes.append(arguments.input.shape[arguments.channel_dim])
    return max(votes, key=votes.count, default=None)  # the first of equals: a per-channel tensor's


def _device_of(arguments: Arguments) -> torch.device:
    """The device of the first argument that is a tensor."""
    given = (*arguments.per_channel().values(), arguments.input)
    return next((tensor.device for tensor in given if isinstance(tensor, Tensor)), torch.device("cpu"))
