"""Declares what a back end of kernels offers: the four calls for tensors of one kind, two in each pass.

    forward_sums     x -> sum x, sum x^2 and n of each channel
    forward_outputs  their totals over all ranks -> y and the statistics; updates the running statistics
    backward_sums    dy, x -> sum dy, sum dy * (x - mean); grad_weight and grad_bias of this rank
    backward_outputs their totals over all ranks -> grad_x, and the gradient of a residual

An all_reduce of the sums stands between the two calls of a pass. reference.py defines the calls by torch operations;
cpu.py, gpu.py and operators.py must compute the same, without_float64.py to within 1e-5 and with sums, totals and
statistics on the CPU. Kernels compute: they know no ranks and refuse nothing but tensors without memory. What ranks
have sent is compared by the caller.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from syncbn.layout import Layout

# All sums end in a trailer: n in forward and 0 in backward; then 1, s and s^2 for a signature s, or zeros without one.
TRAILER_NUMBERS, SIGNATURE_NUMBERS = 4, 3
UNSIGNED = 0  # the signature s of sums without one; else 0 < s < 2^26, see diagnosis/sites.py
Saved: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # x, weight, statistics, y
Needed: TypeAlias = tuple[bool, bool, bool, bool]  # the gradients of x, weight, bias, residual
GradientPair: TypeAlias = tuple[Tensor | None, Tensor | None]  # of x, residual

NO_MEMORY = "the storage of a tensor was freed (resized to 0 bytes); give it memory before the call"


class Handle(NamedTuple):
    """What the first call of a pass leaves for the second on a GPU, which else makes scratch memory of its own."""

    scratch: Tensor  # for parts of sums, then for coefficients
    grad_weight: int = 0  # addresses of what backward_sums has returned, which the caller keeps alive
    grad_bias: int = 0


class Kind(NamedTuple):
    """What the tensors and options of a pass have in common with those of other calls; the same kernels serve them.

    C channels. x, y, dy and a residual have this layout, dtype and device; per-channel tensors are (C,).
    """

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    eps: float = 1.0
    relu: bool = False  # a relu is fused
    has_residual: bool = False  # with a fused relu, backward then knows by y which values passed it, else by x
    weight_dtype: torch.dtype | None = None  # of a tensor (C,), None where there is none; so the next
    bias_dtype: torch.dtype | None = None
    mean_dtype: torch.dtype | None = None
    var_dtype: torch.dtype | None = None
    grad_weight_dtype: torch.dtype | None = None  # None where it is not needed
    grad_bias_dtype: torch.dtype | None = None
    needs_x: bool = False  # backward_outputs computes the gradient of x
    needs_residual: bool = False  # and of a residual behind a fused relu
    has_counter: bool = False
    averages: bool = False  # momentum is None: the running statistics are the average of all batches

    def masks_by_x(self) -> bool:
        """Whether backward finds the mask of a fused relu by x, scale and shift, which then follow the statistics."""
        return self.relu and not self.has_residual


class Kernels(Protocol):
    """The kernels for one kind. The first call of a pass also returns a handle for the second."""

    kind: Kind

    def forward_sums(
        self, x: Tensor, signature: int = UNSIGNED, is_alone: bool = False
    ) -> tuple[Tensor, Handle | None]:
        """float64 (2C + 4,): the sums, n and the signature, which the general road leaves to the reduction. `is_alone`:
        no all_reduce follows, so that the sums may be in the back end's private format."""

    def forward_outputs(
        self, handle: Handle | None, x: Tensor, total: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, running_mean: Tensor | None = None, running_var: Tensor | None = None,
        counter: Tensor | None = None, momentum: float | None = 0.0,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """y; the statistics, packed as in statistics.py; and False if a signed total was found not to be finite.
        Running statistics and counter are updated in place."""

    def backward_sums(
        self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, is_alone: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Handle | None]:
        """float64 (2C + 4,): the sums, 0 and the signature; grad_weight and grad_bias, which may be complete only after
        backward_outputs if this rank `is_alone`."""

    def backward_outputs(self, handle: Handle | None, dy: Tensor, saved: Saved, total: Tensor) -> GradientPair:
        """grad_x, and dy behind the relu as the gradient of the residual; None where the kind does not need it."""


def require_memory(tensors: Sequence[Tensor]) -> None:
    """**Raises** RuntimeError if a tensor is a view of freed memory, as of a flat parameter of FSDP1: then its address
    is its offset. Kernels themselves refuse an address of 0."""
    if any(map(Tensor.storage_offset, tensors)) and any(map(is_freed, tensors)):
        raise RuntimeError(NO_MEMORY)


def is_freed(tensor: Tensor) -> bool:
    """Whether its memory was freed, as by a resize of its storage to 0 bytes."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
