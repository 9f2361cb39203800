"""Declares what a back end offers. Four kernels: sums and outputs, forward and backward.

    forward_sums     x -> sum x, sum x^2 and n of each channel
    forward_outputs  their totals over all ranks -> y and the statistics
    backward_sums    dy, x -> sum dy, sum dy * (x - mean); grad_weight and grad_bias of this rank
    backward_outputs their totals over all ranks -> grad_x, and the gradient of a residual

An all_reduce of the sums stands between the two calls of a pass. A back end is a module with two classes, Forward and
Backward. reference.py defines the calls by torch operations, for the general road; operators.py must compute the same.
So must cpu.py and gpu.py, for the ordinary road: their calls, which are declared here, also
sign the sums and update the running statistics.

Kernels compute: they know no ranks and refuse nothing. What ranks have sent is compared by the caller; on a GPU, where
the host does not wait for a total, the kernel that reads it compares, and notes what it found in a Mailbox.
"""

import functools
import math
from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

# All sums end in a trailer: n in forward and 0 in backward; then 1, s and s^2 for a signature s, or zeros without one.
TRAILER_NUMBERS, SIGNATURE_NUMBERS = 4, 3
MIXER = 0x9E3779B97F4A7C15 - 2**64  # odd, 64 bits, as an int64: see signature_of_call in reference.py
MOST_KERNELS = 4096  # in the cache of a pass
UNSIGNED = 0  # the signature s of sums without one; else 0 < s < 2^26, see ranks/sites.py

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dims

Inputs: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # x, weight, bias, residual
Buffers: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]  # running_mean, running_var, counter
NO_BUFFERS: Buffers = (None, None, None)
Saved: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # x, weight, statistics, y
Needed: TypeAlias = tuple[bool, bool, bool, bool]  # the gradients of x, weight, bias, residual
Kind = TypeVar("Kind")  # ForwardKind or BackwardKind
GradientPair: TypeAlias = tuple[Tensor | None, Tensor | None]  # of x, residual

# The words of a mailbox's `host`, by index.
ENDED = 0  # the tag of the last all_reduce whose total was looked at
FAULT = 1  # tag * 4 + kind of the first fault, else 0; `divmod(word, 4)` gives both back, of negative tags too
# The tag of the first all_reduce of a forward to which this rank gave a sum that is infinite or NaN, since the host has
# set the word to 0. That is no fault.
LOCAL_NOT_FINITE = 2
# The kinds of faults, in the order in which they are looked for.
RANKS_DIFFER = 1  # ranks have different signatures
BAD_ARGUMENT = 2  # n is NaN, which a rank with a bad argument sends
ONE_VALUE = 3  # a forward has exactly 1 value per channel


class Layout(NamedTuple):
    """The place of the values of a tensor in memory. All tensors of a batch norm are folded by the layout of its input.

    (N, C, H, W) contiguous                   -> (N, C, H*W)
    (N, C, H, W) in channels_last             -> (N*H*W, C, 1)
    (N, H, W, C) contiguous, channel_dim = 3  -> (N*H*W, C, 1)

    Others are copied first, so that the output of a batch norm has the strides of nn.BatchNorm's.
    """

    channel_dim: int  # not negative
    channel_innermost: bool  # the tensor is in channels_last, and not contiguous
    sizes: tuple[int, int, int]  # outer, channel, inner

    @classmethod
    def of(cls, tensor: Tensor, channel_dim: int) -> Self:
        """The layout by which `tensor` folds without a copy if it is dense. `channel_dim` may count from the right."""
        channel_dim %= tensor.ndim
        outer, inner = math.prod(tensor.shape[:channel_dim]), math.prod(tensor.shape[channel_dim + 1 :])
        channel_innermost = channel_dim == 1 and not tensor.is_contiguous() and _is_channels_last(tensor)
        if channel_innermost:
            outer, inner = outer * inner, 1
        return cls(channel_dim, channel_innermost, (outer, tensor.shape[channel_dim], inner))

    def dense(self, tensor: Tensor) -> Tensor:
        """`tensor` itself where it can be folded as a view, else a copy of it that can.

        `contiguous` is not called on a contiguous tensor. It would return the tensor itself, and graphs of torch 2.11,
        in which everything that an autograd Function computes is an output, give no gradient to an output that is
        there twice.
        """
        if not self.channel_innermost:
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        channel_at_end = tensor.movedim(self.channel_dim, -1)
        if channel_at_end.is_contiguous():
            return tensor
        return channel_at_end.contiguous().movedim(-1, self.channel_dim)

    def fold(self, tensor: Tensor) -> Tensor:
        """The same values, contiguous, as (outer, channel, inner): a view when `tensor` is dense in this layout."""
        tensor = self.dense(tensor)
        if self.channel_innermost:
            tensor = tensor.movedim(self.channel_dim, -1)
        return tensor.view(self.sizes)

    def unfold(self, folded: Tensor, shape: torch.Size) -> Tensor:
        """A view of `folded` in the `shape` that was folded."""
        if not self.channel_innermost:
            return folded.view(shape)
        others = shape[: self.channel_dim] + shape[self.channel_dim + 1 :]
        return folded.view(*others, shape[self.channel_dim]).movedim(-1, self.channel_dim)


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether torch takes the strides for channels_last or channels_last_3d, gaps or none: then an operator's output is
    in this format. They do not descend in the order C, ..., N."""
    if tensor.ndim not in CHANNELS_LAST or 0 in tensor.shape:
        return False
    if tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.ndim]):
        return True
    least = 1
    for dim in (1, *range(tensor.ndim - 1, 1, -1), 0):
        if tensor.stride(dim) < least:
            return False
        least = tensor.stride(dim) * tensor.shape[dim]
    return True


class Mailbox(NamedTuple):
    """Words where a kernel notes what it saw of a total: addresses of int64 in memory that both host and GPU write and
    read. Behind a fault, an earlier one too, kernels write neither running statistics nor counter."""

    host: int  # address of 3 words: ENDED, FAULT, LOCAL_NOT_FINITE
    state: int  # address of 1 word on the device: the first fault as in `host`, which kernels read
    tag: int  # of this all_reduce: its number, > 0; < 0 in a captured graph, where a number would be a constant: then
    # faults alone are noted; 0 without a mailbox


class ForwardKind(NamedTuple):
    """What the tensors and options of a forward have in common with those of other calls: one Forward serves them.

    C channels. x, y and a residual have this layout, dtype and device; per-channel tensors are (C,).
    """

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    eps: float = 1.0
    relu: bool = False  # a relu is fused
    has_residual: bool = False  # a residual is added before the relu
    weight_dtype: torch.dtype | None = None  # of a tensor (C,), None where there is none; so the next
    bias_dtype: torch.dtype | None = None
    mean_dtype: torch.dtype | None = None
    var_dtype: torch.dtype | None = None
    has_counter: bool = False
    averages: bool = False  # momentum is None: the running statistics are the average of all batches
    single_rank: bool = False  # The second call gets the sums as the first returned them, in any format.

    @property
    def masks_by_x(self) -> bool:
        """Whether backward masks dy by x, scale and shift, which then follow the statistics."""
        return self.relu and not self.has_residual

    @property
    def masks_by_y(self) -> bool:
        """Whether backward masks dy by y, which is then saved."""
        return self.relu and self.has_residual


class BackwardKind(NamedTuple):
    """The same of a backward, for a Backward. dy, x and y have this layout, dtype and device."""

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    masks_by_x: bool = False  # behind a fused relu; at most one of the two
    masks_by_y: bool = False
    weight_dtype: torch.dtype | None = None
    grad_weight_dtype: torch.dtype | None = None  # None where it is not needed
    grad_bias_dtype: torch.dtype | None = None
    needs_x: bool = False  # backward_outputs computes the gradient of x
    needs_residual: bool = False  # and of a residual behind a fused relu
    single_rank: bool = False  # The second call gets the sums as the first returned them, in any format.


class Kernels(ABC, Generic[Kind]):
    """The kernels of a pass for one kind, on the ordinary road. They hold no tensor, layer or group."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    @classmethod
    @functools.lru_cache(MOST_KERNELS)
    def of(cls, kind: Kind) -> Self:
        """Return the cached kernels of this class for `kind`."""
        return cls(kind)


class ForwardKernels(Kernels[ForwardKind]):
    def __init__(self, kind: ForwardKind) -> None:
        super().__init__(kind)
        # The kernels for calls of one rank without a mask. A back end may replace them by kernels with `single_rank`.
        self.for_single_rank: ForwardKernels = self

    @abstractmethod
    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, mailbox: Mailbox | None = None) -> Tensor:
        """float64 (2C + 4,): the sums, n and the signature. `mailbox` is that of the all_reduce that follows; cpu.py
        ignores it, here and in other calls."""

    @abstractmethod
    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | None = 0.0,
        mailbox: Mailbox | None = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """y; the statistics, packed as in statistics.py; and False if a signed total was found not to be finite.
        The buffers are updated in place; momentum None makes the running statistics the average of all batches."""


class BackwardKernels(Kernels[BackwardKind]):
    @abstractmethod
    def backward_sums(
        self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, forward_total: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """float64 (2C + 4,), as forward_sums but with 0 in the place of n; grad_weight and grad_bias.
        `forward_total`: that of the forward of this call, which signature_of_call of reference.py takes."""

    @abstractmethod
    def backward_outputs(self, dy: Tensor, saved: Saved, total: Tensor, mailbox: Mailbox | None = None) -> GradientPair:
        """grad_x, and dy behind the relu as the gradient of the residual; None where the kind does not need it."""


class BackEnd(Protocol):
    """cpu.py or gpu.py."""

    @property
    def Forward(self) -> type[ForwardKernels]: ...  # noqa: N802
    @property
    def Backward(self) -> type[BackwardKernels]: ...  # noqa: N802
