"""Runs the calls that torch.func or forward mode transforms, by torch's operations, which have rules for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from syncbn.distributed.side_reductions import DifferentiableReduction
from syncbn.kernels.select import is_transformed


def apply(function: type[torch.autograd.Function], call: Any, *tensors: Any) -> Any:
    """The outputs of a Function of a side road. It has no rule for vmap and forward mode; its forward, traced through,
    has."""
    if is_transformed(*tensors):
        return function.forward(dataclasses.replace(call, reduction=DifferentiableReduction(call.reduction)), *tensors)
    return function.apply(call, *tensors)  # type: ignore[no-untyped-call]
