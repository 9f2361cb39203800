"""Computes per-channel values in float64: sums -> mean, variance -> running statistics.

C channels, n values of a channel over all ranks; S = sum x and Q = sum x^2 of a channel. Packed:
    sums          (2C + 1,)  S, Q, n
    statistics    (3C + 4,)  mean, biased var, invstd = 1 / sqrt(var + eps), n four times
                  (5C + 4,)  of a relu without residual: then scale and shift, see kernels/reference.py
A thread of a GPU loads several of them at once, as they begin at a multiple of 32 bytes if C is a multiple of 4.

All tensors here have that size, so the cost does not depend on the batch. Knows no ranks, no layout.
"""

import torch
from torch import Tensor

from syncbn.torch_internals import (
    constant_in_graphs,
    copy_together,
    inside_functorch,
    inside_vmap,
    is_compiling,
    is_exporting,
)

N_COPIES = 4  # that n stands in the statistics
FLOAT64_DEVICE_TYPES = "cpu", "cuda"  # Device types that are known to have float64.


@constant_in_graphs
def supports_float64(device: torch.device) -> bool:
    """Whether the device has float64: Apple's MPS and some of Intel's GPUs do not."""
    if device.type in FLOAT64_DEVICE_TYPES:
        return True
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):  # TypeError: MPS's
        return False
    return True


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which maps compute values of this dtype: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def from_sums(sums: Tensor, eps: float) -> Tensor:
    """The statistics: mean = S / n and var = max(0, Q / n - mean^2).

    n = 0 gives mean 0 and var 0. The clamp removes the negative rounding residue of constant channels and lets NaN
    through.
    """
    num_values = sums[-1:]
    mean, mean_square = (sums[:-1] / num_values.clamp(min=1)).chunk(2)
    var = (mean_square - mean * mean).clamp(min=0)
    return pack(mean, var, (var + eps).rsqrt(), num_values)


def to_sums(statistics: Tensor, num_channels: int) -> Tensor:
    """The inverse of from_sums. Sums of several batches can be added; statistics cannot."""
    mean, var, _, num_values = unpack(statistics, num_channels)
    return torch.cat((mean * num_values, (var + mean * mean) * num_values, num_values))


def pack(mean: Tensor, var: Tensor, invstd: Tensor, num_values: Tensor) -> Tensor:
    """The inverse of unpack."""
    return torch.cat((mean, var, invstd, *[num_values] * N_COPIES))


def unpack(statistics: Tensor, num_channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mean, var and invstd (C,), and n (1,)."""
    mean, var, invstd = statistics[: 3 * num_channels].chunk(3)
    return mean, var, invstd, statistics[3 * num_channels : 3 * num_channels + 1]


def num_statistics(num_channels: int, relu: bool) -> int:
    """The number of packed statistics; `relu`: with the scale and shift of a relu without residual."""
    return (5 if relu else 3) * num_channels + N_COPIES


def unpack_unbiased(statistics: Tensor, num_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """mean (C,), the unbiased variance var * n / (n - 1) (C,), which is meaningless for n <= 1, and n (1,)."""
    mean, var, _, num_values = unpack(statistics, num_channels)
    return mean, var * (num_values / (num_values - 1).clamp(min=1)), num_values


def update_buffers(
    running_mean: Tensor | None, running_var: Tensor | None, counter: Tensor | None, statistics: Tensor,
    momentum: float | Tensor | None, updates: bool = True,
) -> None:  # fmt: skip
    """running = (1 - momentum) * running + momentum * statistic, in place, rounded once to the buffer's dtype; and the
    batch is counted. Without momentum the running statistics are the average of all batches.

    running_var takes the unbiased variance, var * n / (n - 1). With n = 0 values nothing changes, with n = 1
    running_var stays; the host does not read n. Without `updates` nothing changes, but the same operators run:
    selective checkpointing matches saved results by call order.
    """
    if momentum is None and counter is not None:
        momentum = 1.0 / (counter + 1).to(statistics.dtype)  # without waiting for a GPU
    elif isinstance(momentum, Tensor):
        momentum = momentum.detach().to(statistics.dtype)
    buffers: list[Tensor] = []
    values: list[Tensor] = []
    if running_mean is not None and running_var is not None and momentum is not None:
        mean, var, num_values = unpack_unbiased(statistics.detach(), len(running_mean))
        for running, statistic, enough in ((running_mean, mean, num_values > 0), (running_var, var, num_values > 1)):
            wide = running.to(statistics.dtype)
            updated = torch.where(enough, (1 - momentum) * wide + momentum * statistic, wide)
            buffers.append(running)
            values.append(updated.to(running.dtype))
    if counter is not None:
        buffers.append(counter)
        values.append(counter + 1)
    if not (buffers and updates):
        return
    in_graph = is_compiling() and not is_exporting()
    in_transform = not is_compiling() and inside_functorch() and not inside_vmap()
    if in_graph or in_transform:
        copy_together(buffers, values)
    else:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
