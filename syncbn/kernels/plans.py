"""Defines what a plan of kernels offers: the kernels for one kind of tensors, ready to be called.

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
from typing import TypeAlias

from torch import Tensor

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
