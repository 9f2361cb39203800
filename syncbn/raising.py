"""Raises an error in the arguments of one rank on all ranks."""

import contextlib
import math
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from syncbn import inputs
from syncbn.arguments import Options, Tensors
from syncbn.kernels import select
from syncbn.kernels.interface import TRAILER_NUMBERS
from syncbn.ranks.reduction import Reduction


def raise_on_all_ranks(
    error: Exception, tensors: Tensors, options: Options, reduction: Reduction, pass_name: str
) -> NoReturn:
    """Join the all_reduce of the others with NaN in the place of n, and raise `error` on every rank.

    On a GPU the others raise at a later call. Only this rank raises in a compiled graph, in a trace of torch.fx, on a
    GPU without Triton, and where no argument has channels. In eager mode its position then has the error.
    """
    inputs.refuse_proxies(tensors)
    num_channels, device = _likely_channels(tensors, options), _device_of(tensors)
    if not reduction.is_read or num_channels is None or not (device.type == "cpu" or select.looks_at_totals(device)):
        reduction.note_error(error)
        raise error  # no rank would read the NaN
    sums = torch.zeros(2 * num_channels + TRAILER_NUMBERS, dtype=torch.float64, device=device)
    sums[-TRAILER_NUMBERS] = math.nan
    with reduction.noting_errors():
        reduction.total(sums, pass_name, error)
    raise AssertionError("internal error: no rank reported the bad argument") from error


def _likely_channels(tensors: Tensors, options: Options) -> int | None:
    """The number of channels that most arguments have, since one of them is wrong; None if none has channels."""
    per_channel = [tensor for tensor in tensors.per_channel().values() if isinstance(tensor, Tensor)]
    votes = [tensor.numel() for tensor in per_channel if not is_lazy(tensor)]
    if not votes and isinstance(options.num_channels, Integral) and options.num_channels > 0:
        return options.num_channels
    with contextlib.suppress(Exception):  # no tensor; no such dim; sequences of different lengths
        votes.append(int(tensors.input.shape[options.channel_dim]))
    return max(votes, key=votes.count, default=None)  # the first of equals: a per-channel tensor's


def _device_of(tensors: Tensors) -> torch.device:
    """The device of the first argument that is a tensor."""
    candidates = *tensors.per_channel().values(), tensors.input
    return next((tensor.device for tensor in candidates if isinstance(tensor, Tensor)), torch.device("cpu"))
