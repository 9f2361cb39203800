"""Declares the interface of the kernels: two calls for the forward pass, two for the backward pass.

    forward_sums      x -> the payload of this rank (payload.py): sum x, sum x^2 per channel, n, count, signature
    forward_outputs   the total of all payloads -> y, statistics; updates the running statistics
    backward_sums     dy, x -> the payload of this rank: sum dy, sum dy * (x - mean) per channel, signature; and
                      grad_weight and grad_bias of this rank
    backward_outputs  the total of all payloads -> grad_x, and the gradient of a residual

The caller all_reduces the payload between the two calls of a pass. A back end is a module with two classes, Forward and
Backward, which have the methods declared below:

    cpu.py, gpu.py    direct kernels: they read and write the memory of plain tensors, past torch's dispatcher
    operators.py      the same kernels as torch operators, for whatever must see operators
    reference.py      torch operations, which define the results

Kernels do not communicate and do not validate their inputs. On CPUs the caller compares what the ranks have sent. On
GPUs the host does not wait for the total, so the kernel that reads the total makes the comparison and stores the result
in `StatusWords`.
"""

import enum
import functools
from abc import ABC, abstractmethod
from typing import Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from syncbn.kernels.layout import Layout
from syncbn.payload import UNSIGNED
from syncbn.statistics import N_COPIES

MAX_CACHED_KERNELS = 4096  # for both passes and all devices together

Inputs: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # x, weight, bias, residual
Buffers: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]  # running_mean, running_var, counter
NO_BUFFERS: Buffers = (None, None, None)
Saved: TypeAlias = tuple[Tensor, Tensor | None, Tensor, Tensor | None]  # x, weight, statistics, y
Needed: TypeAlias = tuple[bool, bool, bool, bool]  # which gradients to compute: x, weight, bias, residual
Config = TypeVar("Config")  # ForwardConfig or BackwardConfig
GradientPair: TypeAlias = tuple[Tensor | None, Tensor | None]  # grad_x, grad_residual
Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # of x, weight, bias, residual

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


class StatusWords(NamedTuple):
    """Addresses at which a GPU kernel stores what it finds in a total: int64 words for faults, and the id of the call.

    After any fault, kernels write neither running statistics nor num_batches_tracked. The torch operations of a
    dispatched call then also leave the running statistics unchanged, but still increment num_batches_tracked.
    """

    host_address: int  # address of ENDED, FAULT and LOCAL_NOT_FINITE in pinned memory, which the host reads
    device_address: int  # address of a copy of FAULT in the GPU's memory, which later kernels read
    # > 0: the number of this all_reduce. < 0: a constant that identifies layer and pass, in a CUDA graph; kernels then
    # store only faults. 0: there are no status words.
    sequence_number: int
    # In forward the address of a float64 in the GPU's memory, where the kernel stores the id of the call; otherwise 0.
    call_id: int = 0


Status: TypeAlias = StatusWords | None  # None on a CPU, and on a GPU whose kernels check no totals
Sums: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None]  # payload, grad_weight, grad_bias


class ReluMask(enum.Enum):
    """How backward finds out where the output of a fused relu is 0, and so is the gradient."""

    NONE = 0  # there is no relu
    FROM_X = 1  # from x, scale and shift, which forward then appends to the statistics
    FROM_Y = 2  # from y, which forward then saves, because a residual has been added


def num_statistics(num_channels: int, relu_mask: ReluMask) -> int:
    """Return the length of packed statistics, see statistics.py."""
    return (5 if relu_mask is ReluMask.FROM_X else 3) * num_channels + N_COPIES


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
    def relu_mask(self) -> ReluMask:
        """How backward finds out where the relu is 0."""
        if not self.relu:
            return ReluMask.NONE
        return ReluMask.FROM_Y if self.has_residual else ReluMask.FROM_X


class BackwardConfig(NamedTuple):
    """Configuration of the backward kernels. dy, x and y have this layout, dtype and device."""

    layout: Layout
    dtype: torch.dtype
    device: torch.device
    relu_mask: ReluMask = ReluMask.NONE
    weight_dtype: torch.dtype | None = None
    grad_weight_dtype: torch.dtype | None = None  # None: do not compute this gradient
    grad_bias_dtype: torch.dtype | None = None
    needs_x: bool = False  # compute the gradient of x
    needs_residual: bool = False  # compute the gradient of a residual before a fused relu
    single_rank: bool = False  # backward_outputs gets the sums of backward_sums unchanged, in the back end's own format


class Kernels(ABC, Generic[Config]):
    """The kernels of one pass for one config. They hold no tensor, layer or group."""

    is_direct = True  # whether they access memory past torch's dispatcher, so that no mode or transform sees them

    def __init__(self, config: Config) -> None:
        self.config = config

    @classmethod
    @functools.lru_cache(MAX_CACHED_KERNELS)
    def cached(cls, config: Config) -> Self:
        """Return the kernels of this class for `config`. The kernels for a config are created once."""
        return cls(config)


class ForwardKernels(Kernels[ForwardConfig]):
    # The kernels with `single_rank` for calls over one rank without a mask; None if they are these.
    for_single_rank: "ForwardKernels | None" = None

    @abstractmethod
    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, count: int = 0, status_words: Status = None) -> Tensor:
        """Return the payload, with this signature and count unless `signature` is UNSIGNED. `status_words` belong to
        the all_reduce that follows; only gpu.py reads them, in all methods."""

    @abstractmethod
    def forward_outputs(
        self, inputs: Inputs, total: Tensor, buffers: Buffers = NO_BUFFERS, momentum: float | None = 0.0,
        status_words: Status = None,
    ) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
        """Return y; the statistics, packed as in statistics.py; and False if the kernel has found that a total with
        signatures is not finite, else True.

        The buffers are updated in place. A momentum of None averages over all batches.
        """


class BackwardKernels(Kernels[BackwardConfig]):
    @abstractmethod
    def backward_sums(self, dy: Tensor, saved: Saved, signature: int = UNSIGNED, call_id: Tensor | None = None) -> Sums:
        """Return the payload, with this signature unless it is UNSIGNED; grad_weight; and grad_bias.

        `call_id`, (1,), is added to the signature. It is None on a CPU, where `signature` contains the id of the call.
        cpu.py does not read it.
        """

    @abstractmethod
    def backward_outputs(self, dy: Tensor, saved: Saved, total: Tensor, status_words: Status = None) -> GradientPair:
        """Return grad_x, and grad_residual, which is dy masked by the relu. Each is None if the config does not need
        it."""


class BackEnd(Protocol):
    """cpu.py, gpu.py, operators.py or reference.py."""

    @property
    def Forward(self) -> type[ForwardKernels]: ...  # noqa: N802
    @property
    def Backward(self) -> type[BackwardKernels]: ...  # noqa: N802
