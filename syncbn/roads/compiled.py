"""Runs the calls in a compiled graph, or an exported program: nobody reads a total there, and nothing is signed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syncbn.arguments import Arguments
from syncbn.distributed import side_reductions
from syncbn.roads.watched import move_running_stats, normalize


def train(given: Arguments, caller: Any) -> tuple[Tensor, Tensor]:
    """y, and the statistics of all ranks, as step.train."""
    reduction = side_reductions.reduction_in_graph(given.process_group)
    given.check()
    given.check_numbers()
    y, statistics = normalize(given, reduction, apply)
    move_running_stats(given, statistics, moves=True)  # a graph recomputes no writes
    return y, statistics


def apply(function: type[torch.autograd.Function], call: Any, *tensors: Any) -> Any:
    """The outputs of a Function of a side road."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        return function.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return function.forward(call, *tensors)  # which Dynamo (torch 2.13) hands a context, if it is applied
