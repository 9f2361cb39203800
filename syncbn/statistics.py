"""Computes per-channel values in float64: sums -> mean, variance -> running statistics.

C channels, n values per channel over all ranks; S = sum x and Q = sum x^2 per channel. Packed tensors:
    sums          (2C + 1,)  S, Q, n
    statistics    (3C + 4,)  mean, biased var, invstd = 1 / sqrt(var + eps), n four times
                  (5C + 4,)  for a relu without residual: also scale and shift, see kernels/reference.py
If C is a multiple of 4, each part begins at a multiple of 32 bytes, so that GPU threads load several values at once.

All tensors of this module are packed or per-channel, so the cost does not depend on the batch size.
"""

import torch
from torch import Tensor

from syncbn import torch_internals as internals
from syncbn.torch_internals import is_compiling

N_COPIES = 4  # n is stored four times in the statistics, for the alignment of scale and shift
FLOAT64_DEVICE_TYPES = "cpu", "cuda"  # device types known to support float64


@internals.constant_in_graphs
def supports_float64(device: torch.device) -> bool:
    """Return whether the device supports float64. Apple's MPS and some Intel GPUs do not."""
    if device.type in FLOAT64_DEVICE_TYPES:
        return True
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):  # MPS raises TypeError.
        return False
    return True


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elementwise operations compute: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def from_sums(sums: Tensor, eps: float) -> Tensor:
    """Return the statistics, with mean = S / n and var = max(0, Q / n - mean^2).

    n = 0 gives mean 0 and var 0. The clamp removes the negative rounding error of constant channels, and keeps NaN.
    """
    num_values = sums[-1:]
    mean, mean_square = (sums[:-1] / num_values.clamp(min=1)).chunk(2)
    var = (mean_square - mean * mean).clamp(min=0)
    return pack(mean, var, (var + eps).rsqrt(), num_values)


def to_sums(statistics: Tensor, num_channels: int) -> Tensor:
    """Return the sums of these statistics: the inverse of from_sums. Sums of several batches can be added."""
    mean, var, _, num_values = unpack(statistics, num_channels)
    return torch.cat((mean * num_values, (var + mean * mean) * num_values, num_values))


def pack(mean: Tensor, var: Tensor, invstd: Tensor, num_values: Tensor) -> Tensor:
    """Return packed statistics: the inverse of unpack."""
    return torch.cat((mean, var, invstd, *[num_values] * N_COPIES))


def unpack(statistics: Tensor, num_channels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean, var and invstd (C,), and n (1,)."""
    mean, var, invstd = statistics[: 3 * num_channels].chunk(3)
    return mean, var, invstd, statistics[3 * num_channels : 3 * num_channels + 1]


def unpack_unbiased(statistics: Tensor, num_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (C,), unbiased variance var * n / (n - 1) (C,), and n (1,). For n <= 1 the variance is undefined."""
    mean, var, _, num_values = unpack(statistics, num_channels)
    return mean, var * (num_values / (num_values - 1).clamp(min=1)), num_values


def update_buffers(
    running_mean: Tensor | None, running_var: Tensor | None, counter: Tensor | None, statistics: Tensor,
    momentum: float | Tensor | None,
) -> None:  # fmt: skip
    """Compute running = (1 - momentum) * running + momentum * statistic in place, and increment the counter.

    The result is rounded once, to the buffer's dtype. With a momentum of None the running statistics are the average of
    all batches. running_var takes the unbiased variance, var * n / (n - 1). If n = 0, neither running statistic
    changes; if n = 1, only running_mean changes. The host does not read n.

    In a backward, where activation checkpointing recomputes a forward, the values are computed but not written. They
    are computed because selective checkpointing matches saved results by the order of calls. (Compiled graphs drop the
    updates of a recompute.)
    """
    if momentum is None and counter is not None:
        momentum = 1.0 / (counter + 1).to(statistics.dtype)  # The host does not wait for a GPU.
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
    if not buffers or (not is_compiling() and internals.inside_backward()):
        return
    is_plain_transform = not is_compiling() and internals.inside_functorch() and not internals.inside_vmap()
    if is_plain_transform or (is_compiling() and not internals.is_exporting()):
        internals.copy_together(buffers, values)
    else:
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
