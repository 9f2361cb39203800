"""Raises the error of a bad argument on every rank.

A rank with a bad argument cannot compute its sums but must not leave the other ranks waiting. It goes through these
steps, and through them too for any other error before the all_reduce of its forward:

1. A check in arguments.py, or anything else before the all_reduce, raises on this rank. The caller passes the error to
   `raise_on_all_ranks`.
2. This rank joins the all_reduce of the pass with sums of the likely number of channels, all 0, and n = NaN.
3. Every rank receives n = NaN. On CPUs each rank writes its own report to the store and reads those of the others
   (`_diagnose` in ranks/calls.py, ranks/report.py). This rank raises its error, and the other ranks an error that
   names this rank and contains the text of its error.
4. On GPUs a kernel finds the NaN and stores it in status words. The other ranks raise at a later call
   (ranks/status.py).

After this rank has begun the all_reduce it does not join again: the error is recorded, for the reports of ranks that
wait for this rank, and raised.
"""

import contextlib
import math
from numbers import Integral
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from syncbn import payload
from syncbn.arguments import Options, Tensors, check_training, require_float64
from syncbn.kernels import select
from syncbn.ranks.calls import Call, eager_call
from syncbn.ranks.sites import Caller
from syncbn.tracing import refuse_proxies


def check_on_all_ranks(tensors: Tensors, options: Options, caller: Caller, call: Call, needs_float64: bool) -> Options:
    """Check all arguments of a training step, and return the options with eps and momentum as floats. **Raises** on
    every rank if the arguments of this rank are invalid."""
    try:
        options = check_training(tensors, options, caller)
        if needs_float64:
            require_float64(tensors.input)
    except Exception as error:  # of any class: a subclass of a layer or of Tensor may raise anything
        raise_on_all_ranks(error, tensors, options, caller, call)
    return options


def raise_on_all_ranks(
    error: Exception, tensors: Tensors, options: Options, caller: Caller, call: Call | None,
    pass_name: str = "forward",
) -> NoReturn:  # fmt: skip
    """Raise `error`. Unless this rank has begun an all_reduce of this call, first join that of the other ranks with
    n = NaN, so that every rank raises. A `call` of None is selected here.

    On GPUs the other ranks raise at a later call. Only this rank raises in a compiled graph, in a trace of torch.fx, on
    a GPU without Triton, if no argument determines the number of channels, or if the group does not exist. In eager
    mode the reports of the other ranks contain `error` in these cases.
    """
    try:
        if call is None:
            with contextlib.suppress(Exception):  # The look-up of the group may be what has raised `error`.
                call = eager_call(options.process_group, caller, tensors.input)
        if call is None:
            raise error
        if not call.has_begun:
            refuse_proxies(tensors)
            num_channels, device = _likely_channels(tensors, options), _device_of(tensors)
            reads_nan = call.reads_trailer and (device.type == "cpu" or select.checks_totals(device))
            if num_channels is not None and reads_nan:
                _join(error, call, num_channels, device, pass_name)
        call.record_error(error)
        raise error
    finally:  # The traceback of `error` holds this frame. This reference cycle would keep the group alive.
        del error


def _join(error: Exception, call: Call, num_channels: int, device: torch.device, pass_name: str) -> None:
    """Issue the all_reduce of this pass with n = NaN. **Raises** RuntimeError if the ranks are in different layers or
    passes."""
    zeros = torch.zeros(2 * num_channels, dtype=torch.float64, device=device)
    with call.recording_errors():
        call.sign_and_all_reduce(payload.from_sums(zeros, math.nan), pass_name, error)


def _likely_channels(tensors: Tensors, options: Options) -> int | None:
    """Return the number of channels of most arguments, because one argument may be wrong. Return None if no argument
    has channels."""
    per_channel = [tensor for tensor in tensors.per_channel().values() if isinstance(tensor, Tensor)]
    votes = [tensor.numel() for tensor in per_channel if not is_lazy(tensor)]
    if not votes and isinstance(options.num_channels, Integral) and options.num_channels > 0:
        return options.num_channels
    with contextlib.suppress(Exception):  # The input may not be a tensor, or may not have this dim.
        votes.append(int(tensors.input.shape[options.channel_dim]))
    return max(votes, key=votes.count, default=None)  # In a tie a per-channel tensor wins.


def _device_of(tensors: Tensors) -> torch.device:
    """Return the device of the first argument that is a tensor."""
    arguments = *tensors.per_channel().values(), tensors.input
    return next((tensor.device for tensor in arguments if isinstance(tensor, Tensor)), torch.device("cpu"))
