"""Runs the calls in a compiled graph, or an exported program."""

from __future__ import annotations

from typing import Any

import torch


def apply(function: type[torch.autograd.Function], call: Any, *tensors: Any) -> Any:
    """The outputs of a Function of a side road."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        return function.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return function.forward(call, *tensors)  # which Dynamo (torch 2.13) hands a context, if it is applied
