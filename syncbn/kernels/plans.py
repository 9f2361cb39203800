"""Defines what a plan of kernels offers, and the plan that is made of a kernel module's functions over tensors.

A plan is for tensors of one kind: their sizes, dtypes and options. Each pass has two calls, around the all_reduce:

    forward_sums     x -> sum x, sum x^2 and n of each channel
    forward_outputs  their totals over all ranks -> y, the statistics; the running statistics move
    backward_sums    dy, x -> sum dy, sum dy * (x - mean); grad_weight and grad_bias of this rank
    backward_outputs their totals over all ranks -> grad_x (and the gradient of a residual)

The first call also returns `at`, for the second one: addresses that it need not find out again; with kernels for GPUs
scratch memory, and the addresses of grad_weight and grad_bias, which the caller keeps alive until then. `is_alone` says
that no all_reduce follows: on a GPU the first call then returns the scratch memory, and the second adds its parts.

On CPU sums end in n (0 in backward) and a `signature`, three numbers that each rank brings: 1, s and s^2, or zeros. By
Cauchy and Schwarz sum 1 * sum s^2 = (sum s)^2 only where all s are the same. The second call compares their totals
before it writes anything, and returns a status; the outputs mean nothing unless it is OK. On a GPU the host would have
to wait to read them.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from syncbn.layout import Layout

Signature: TypeAlias = tuple[float, float, float]
UNSIGNED: Signature = 0.0, 0.0, 0.0
NUM_SIGNED = len(UNSIGNED)

NO_MEMORY = "a tensor has no memory of its own, as where its storage was resized to 0 bytes"


def require_memory(tensors: Sequence[Tensor]) -> None:
    """Raises RuntimeError where a tensor is a view of memory that was freed, as of a flat parameter of FSDP1: then its
    address is its offset. A kernel itself refuses an address of 0."""
    if any(map(Tensor.storage_offset, tensors)) and any(map(is_freed, tensors)):
        raise RuntimeError(NO_MEMORY)


def is_freed(tensor: Tensor) -> bool:
    """Whether its memory was freed, as by a resize of its storage to 0 bytes."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


# What the second call finds in the totals; cpu.cpp has the same numbers.
OK, RANKS_DIFFER, FAULT, ONE_VALUE, NOT_FINITE = 0, 4, 5, 6, 7


def status_of(behind: list[float]) -> int:
    """What the totals of n and of the signature say: ranks differ, or one has a fault, or a channel has one value."""
    num_values, num_signed, total, squares = behind
    if num_signed * squares != total * total:
        return RANKS_DIFFER
    if num_values != num_values:
        return FAULT
    return ONE_VALUE if num_values == 1 else OK


class TensorPlan:
    """A plan that calls the functions of a kernel module, which take tensors; see reference.py."""

    def __init__(self, kernels: ModuleType, layout: Layout, eps: float = 1.0, **options: Any) -> None:
        self.kernels, self.layout, self.eps, self.options = kernels, layout, eps, options
        self.relu, self.is_signed = bool(options.get("relu")), bool(options.get("is_signed"))

    @torch.no_grad()
    def forward_sums(self, x: Tensor, signature: Signature, is_alone: bool = False) -> tuple[Tensor, None]:
        sums: Tensor = self.kernels.forward_sums(x, self.layout)
        return torch.cat((sums, sums.new_tensor(signature))) if self.is_signed else sums, None

    @torch.no_grad()
    def forward_outputs(
        self, at: Any, x: Tensor, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, counter: Tensor | None,
        momentum: Any, compares: bool = True,
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        sums, status = self._checked(total, 1, compares)
        if compares and self.is_signed and not status and total[-NUM_SIGNED] != 0 and not sums.isfinite().all():
            status = NOT_FINITE
        if status:
            return total, total, status
        y, statistics = self.kernels.forward_outputs(x, self.layout, sums, weight, bias, residual, self.eps, self.relu)
        if counter is not None:
            counter.add_(1)
        if running_mean is not None:
            share = 1.0 / counter.to(torch.float64) if self.options["averages"] and counter is not None else momentum
            self.kernels.update_running_stats(running_mean, running_var, statistics, share)
        return y, statistics, OK

    def backward_sums(
        self, dy: Tensor, x: Tensor, y: Tensor | None, statistics: Tensor, signature: Signature,
        is_alone: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:  # fmt: skip
        dtypes = self.options["grad_weight_dtype"], self.options["grad_bias_dtype"]
        sums, *of_parameters = self.kernels.backward_sums(dy, x, y, self.layout, statistics, *dtypes)
        return torch.cat((sums, sums.new_tensor((0.0, *signature)))) if self.is_signed else sums, *of_parameters, None

    def backward_outputs(
        self, at: Any, dy: Tensor, x: Tensor, y: Tensor | None, total: Tensor, statistics: Tensor,
        weight: Tensor | None, needs_x: bool, of_residual: bool, compares: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, int]:  # fmt: skip
        sums, status = self._checked(total, 0, compares)
        if status or not (needs_x or of_residual):
            return None, None, status
        return *self.kernels.backward_outputs(dy, x, y, self.layout, sums, statistics, weight, of_residual), OK

    def _checked(self, total: Tensor, counted: int, compares: bool) -> tuple[Tensor, int]:
        """The sums of a total without the signature, and the status."""
        if not self.is_signed:
            return total, OK
        status = status_of(total[-1 - NUM_SIGNED :].tolist()) if compares else OK
        return total[: len(total) - NUM_SIGNED - (not counted)], status
