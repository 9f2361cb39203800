"""Declares the interface of the kernels: two calls for the forward pass, two for the backward pass.

    forward_sums      x -> sum x, sum x^2 and n per channel, local
    forward_outputs   their totals over all ranks -> y, statistics; updates the running statistics
    backward_sums     dy, x -> sum dy, sum dy * (x - mean) per channel, local; grad_weight and grad_bias of this rank
    backward_outputs  their totals over all ranks -> grad_x, and the gradient of a residual

The caller all_reduces the sums between the two calls of a pass. A back end is a module with two classes, Forward and
Backward:

    reference.py      torch operations, which define the results; the fallback uses them
    operators.py      torch operators on top of cpu.py and gpu.py, for compiled graphs and other calls of the fallback
    cpu.py, gpu.py    the kernels of the fast path, with the methods declared below; they also append the elements of
                      the signature to the sums, and update the running statistics

Kernels do not communicate and do not validate their inputs. On CPUs the caller compares what the ranks have sent. On
GPUs the host does not wait for the total, so the kernel that reads the total makes the comparison and stores the result
in `StatusWords`.
"""

import functools
import math
from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

# The sums of each pass end in a trailer of four elements: n in forward or 0 in backward, and three elements of a
# signature s: 1, s, s^2, or zeros without a signature.
TRAILER_ELEMENTS, SIGNATURE_ELEMENTS = 4, 3
UNSIGNED = 0  # for sums without a signature; ranks/sites.py computes signatures, 0 < s < 2^26
MIXER = 0x9E3779B97F4A7C15 - 2**64  # odd, as an int64; reference.py's signature_of_call multiplies by it
MAX_CACHED_KERNELS = 4096  # for both passes and all devices together
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # keyed by the number of dims

Inputs: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # x, weight, bias, residual
Buffers: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]  # running_mean, running_var, counter
NO_BUFFERS: Buffers = (None, None, None)
Saved: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # x, weight, statistics, y
Needed: TypeAlias = tuple[bool, bool, bool, bool]  # which gradients to compute: x, weight, bias, residual
Config = TypeVar("Config")  # ForwardConfig or BackwardConfig
GradientPair: TypeAlias = tuple[Tensor | None, Tensor | None]  # grad_x, grad_residual

# Indices into the status words of the host.
ENDED = 0  # sequence number of the last all_reduce whose total a kernel has read
FAULT = 1  # sequence number * 4 + fault kind of the first fault, 0 without a fault; divmod(word, 4) splits it again
# Sequence number of the first forward with non-finite local sums since the host cleared this word. This is a warning,
# not an error.
LOCAL_NOT_FINITE = 2
# Fault kinds. Where several apply, RANKS_DIFFER takes precedence over BAD_ARGUMENT, and BAD_ARGUMENT over ONE_VALUE.
RANKS_DIFFER = 1  # the ranks have different signatures
BAD_ARGUMENT = 2  # n is NaN: a rank with a bad argument sends NaN
ONE_VALUE = 3  # a forward has exactly one value per channel


class Layout(NamedTuple):
    """The view of a non-overlapping and dense tensor as (outer, channel, inner). All tensors of a call have x's layout.

    (N, C, H, W) contiguous                   -> (N, C, H*W)
    (N, C, H, W) in channels_last             -> (N*H*W, C, 1)
    (N, H, W, C) contiguous, channel_dim = 3  -> (N*H*W, C, 1)

    Tensors with other strides are copied first, so that the output has the strides of nn.BatchNorm's output.
    """

    channel_dim: int  # not negative
    channel_innermost: bool  # the tensor is in channels_last, and not contiguous
    sizes: tuple[int, int, int]  # outer, channel, inner

    @classmethod
    def of(cls, tensor: Tensor, channel_dim: int) -> Self:
        """Return the layout of `tensor`. A negative `channel_dim` counts from the last dim."""
        channel_dim %= tensor.ndim
        outer, inner = math.prod(tensor.shape[:channel_dim]), math.prod(tensor.shape[channel_dim + 1 :])
        channel_innermost = channel_dim == 1 and not tensor.is_contiguous() and _is_channels_last(tensor)
        if channel_innermost:
            outer, inner = outer * inner, 1
        return cls(channel_dim, channel_innermost, (outer, tensor.shape[channel_dim], inner))

    def dense(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if `fold` can view it, else a dense copy in this layout.

        `contiguous` is not called on a contiguous tensor, because it would return the tensor itself. In graphs of torch
        2.11 that tensor would then be an output of an autograd Function twice, and get no gradient.
        """
        if not self.channel_innermost:
            return tensor if tensor.is_contiguous() else tensor.contiguous()
        channel_at_end = tensor.movedim(self.channel_dim, -1)
        if channel_at_end.is_contiguous():
            return tensor
        return channel_at_end.contiguous().movedim(-1, self.channel_dim)

    def fold(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as a contiguous (outer, channel, inner): a view if `tensor` is dense in this layout."""
        tensor = self.dense(tensor)
        if self.channel_innermost:
            tensor = tensor.movedim(self.channel_dim, -1)
        return tensor.view(self.sizes)

    def unfold(self, folded: Tensor, shape: torch.Size) -> Tensor:
        """Return a view of `folded` with the original `shape`. The inverse of `fold`."""
        if not self.channel_innermost:
            return folded.view(shape)
        others = shape[: self.channel_dim] + shape[self.channel_dim + 1 :]
        return folded.view(*others, shape[self.channel_dim]).movedim(-1, self.channel_dim)


def _is_channels_last(tensor: Tensor) -> bool:
    """Return whether torch treats the strides as channels_last or channels_last_3d. Torch does so even if the tensor is
    not dense: the outputs of its operators are then in this format."""
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


class StatusWords(NamedTuple):
    """Addresses of int64 words in which a GPU kernel stores what it finds in a total. After any fault, kernels write
    neither running statistics nor the counter."""

    host_address: int  # address of ENDED, FAULT and LOCAL_NOT_FINITE in pinned memory, which the host reads
    device_address: int  # address of a copy of FAULT in the GPU's memory, which later kernels read
    # > 0: the number of this all_reduce. < 0: a constant that identifies layer and pass, in a CUDA graph; kernels then
    # store only faults. 0: there are no status words.
    sequence_number: int


class ForwardConfig(NamedTuple):
    """Configuration of the forward kernels.

    C channels. x, y and a residual have this layout, dtype and device; per-channel tensors are (C,).
    """

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    eps: float = 1.0
    relu: bool = False  # apply relu last
    has_residual: bool = False  # add a residual before the relu
    weight_dtype: torch.dtype | None = None  # None without the tensor; the same for the three dtypes below
    bias_dtype: torch.dtype | None = None
    mean_dtype: torch.dtype | None = None
    var_dtype: torch.dtype | None = None
    has_counter: bool = False
    averages: bool = False  # momentum is None: the running statistics are the average of all batches
    single_rank: bool = False  # forward_outputs gets the result of forward_sums unchanged, in the back end's own format

    @property
    def masks_by_x(self) -> bool:
        """Whether backward computes the mask of a fused relu from x, scale and shift. Forward then appends scale and
        shift to the statistics."""
        return self.relu and not self.has_residual

    @property
    def masks_by_y(self) -> bool:
        """Whether backward computes the mask of a fused relu from y. Forward then saves y."""
        return self.relu and self.has_residual


class BackwardConfig(NamedTuple):
    """Configuration of the backward kernels. dy, x and y have this layout, dtype and device."""

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    masks_by_x: bool = False  # as in ForwardConfig; masks_by_x and masks_by_y are never both True
    masks_by_y: bool = False
    weight_dtype: torch.dtype | None = None
    grad_weight_dtype: torch.dtype | None = None  # None: do not compute this gradient
    grad_bias_dtype: torch.dtype | None = None
    needs_x: bool = False  # compute the gradient of x
    needs_residual: bool = False  # compute the gradient of a residual before a fused relu
    single_rank: bool = False  # backward_outputs gets the sums of backward_sums unchanged, in the back end's own format


class Kernels(ABC, Generic[Config]):
    """The fast path's kernels of one pass for one config. They hold no tensor, layer or group."""

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    @functools.lru_cache(MAX_CACHED_KERNELS)
    def cached(cls, config: Config) -> Self:
        """Return the kernels of this class for `config`. The kernels for a config are created once."""
        return cls(config)


class ForwardKernels(Kernels[ForwardConfig]):
    def __init__(self, config: ForwardConfig) -> None:
        super().__init__(config)
        # The kernels for calls over one rank without a mask. A back end may replace them by kernels with `single_rank`.
        self.for_single_rank: ForwardKernels = self

    @abstractmethod
    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, status_words: StatusWords | None = None) -> Tensor:
        """Return float64 (2C + 4,): sum x, sum x^2, n and the signature. `status_words` belong to the all_reduce that
        follows; CPU kernels ignore them in all methods."""

    @abstractmethod
    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | None = 0.0,
        status_words: StatusWords | None = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """Return y; the statistics, packed as in statistics.py; and False if the total carries signatures and is known
        not to be finite, else True.

        The buffers are updated in place. A momentum of None averages over all batches.
        """


class BackwardKernels(Kernels[BackwardConfig]):
    @abstractmethod
    def backward_sums(
        self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, forward_total: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return float64 (2C + 4,): sum dy, sum dy * (x - mean), 0 and the signature; grad_weight; and grad_bias.

        The signature is mixed with `forward_total`, the total of this call's forward: see signature_of_call in
        reference.py.
        """

    @abstractmethod
    def backward_outputs(
        self, dy: Tensor, saved: Saved, total: Tensor, status_words: StatusWords | None = None
    ) -> GradientPair:
        """Return grad_x, and grad_residual, which is dy masked by the relu. Each is None if the config does not need
        it."""


class FastPathBackEnd(Protocol):
    """A back end of the fast path: cpu.py or gpu.py."""

    @property
    def Forward(self) -> type[ForwardKernels]: ...  # noqa: N802
    @property
    def Backward(self) -> type[BackwardKernels]: ...  # noqa: N802
