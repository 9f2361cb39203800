"""Defines the payload of an all_reduce: the sums of a pass and a trailer. No other module knows the positions.

C channels, W ranks. A payload is float64 (2C + 5,). Rank r sends its elements, and every rank receives the total, which
is their sum over all ranks:

| element    | forward                                      | other passes, such as backward              |
|------------|----------------------------------------------|---------------------------------------------|
| 0 to 2C    | sum x, sum x^2                               | sum dy, sum dy * (x - mean)                 |
| NUM_VALUES | n_r; NaN if rank r has a bad argument        | 0                                           |
| COUNT      | how many times rank r has called the layer   | 0                                           |
| IS_SIGNED  | 1                                            | 1                                           |
| SIGNATURE  | s_r, for layer, pass, settings (sites.py)    | s_r + the id of the call                    |
| SQUARE     | the square of SIGNATURE                      | the square of SIGNATURE                     |

The sums are not centred, so uneven and empty ranks are not special cases. A rank that does not sign, as in a compiled
graph, sends zeros after NUM_VALUES. By the Cauchy-Schwarz inequality sum 1 * sum s^2 = (sum s)^2 holds only if all
signatures are equal. On a CPU the host reads the trailer of the total (`EagerCall.all_reduce`), on a GPU a kernel.

**The id of a call** tells the backwards of two calls of one layer apart:

    id = floor(sum of the counts / number of signed ranks) mod 256, from the total of the call's first forward

Sums of small integers are exact in any order of addition, so the id is the same on all ranks even if their counts
differ, and the next call of all ranks has the next id. A rank counts each training call of the layer on the group in
eager mode when the call begins: also a call in torch.no_grad, a recompute of activation checkpointing, and a call that
raises an error before or after its all_reduce. A rank does not count calls in compiled graphs.

The id stays with the call, in `Call.call_id`, and is not saved for backward. Under checkpointing with
use_reentrant=False, saved tensors come from the recomputed forward. Ranks that run two backwards in different orders
would recompute different calls together, and give them one id. Without an id a rank does not sign a backward: if no
rank has signed the forward, if this rank could not read its total, or if the forward was itself made in a backward, as
in the recompute of checkpointing with use_reentrant=True. The forwards of recomputes are compared like all others.

The C++ kernels (cpu.cpp) repeat the names of the positions; the Triton kernels (gpu_channels.py) read them here.
"""

import torch
from torch import Tensor

# Positions in the trailer, which ends a payload.
NUM_VALUES, COUNT, IS_SIGNED, SIGNATURE, SQUARE = range(5)
TRAILER_ELEMENTS = 5
TRAILER = slice(-TRAILER_ELEMENTS, None)
BYTES_PER_ELEMENT = 8
NUM_IDS = 256  # number of ids of calls
UNSIGNED = 0  # in place of a signature; ranks/sites.py computes signatures, 0 < s < 2^26
MAX_COUNT = 2**53  # Larger numbers are not exact in float64, and are no counts.


def num_elements(num_channels: int) -> int:
    """Return the length of a payload."""
    return 2 * num_channels + TRAILER_ELEMENTS


def num_channels(payload: Tensor) -> int:
    """Return the number of channels of a payload."""
    return (len(payload) - TRAILER_ELEMENTS) // 2


def sums(payload: Tensor) -> Tensor:
    """Return a view of the two sums of each channel: (2C,)."""
    return payload[:-TRAILER_ELEMENTS]


def num_values(payload: Tensor) -> Tensor:
    """Return a view of n: ()."""
    return payload[NUM_VALUES - TRAILER_ELEMENTS]


def sums_and_num_values(payload: Tensor) -> Tensor:
    """Return a view of the sums and n, packed as in statistics.py: (2C + 1,)."""
    return payload[: NUM_VALUES + 1 - TRAILER_ELEMENTS]


def from_sums(sums: Tensor, num_values: Tensor | float = 0.0) -> Tensor:
    """Return a payload without a signature. `num_values` is a number, or a tensor of one element."""
    n = num_values.double().view(1) if isinstance(num_values, Tensor) else sums.new_full((1,), num_values)
    return torch.cat((sums, n, sums.new_zeros(TRAILER_ELEMENTS - 1)))


def with_num_values(payload: Tensor, num_values: Tensor) -> Tensor:
    """Return a copy of the payload with this n, of shape ()."""
    n = num_values.double().view(1)
    return torch.cat((payload[:-TRAILER_ELEMENTS], n, payload[NUM_VALUES + 1 - TRAILER_ELEMENTS :]))


def sign(payload: Tensor, signature: int, count: int = 0, call_id: Tensor | None = None) -> Tensor:
    """Return a copy of the payload with this signature and count, or the payload itself if `signature` is UNSIGNED.

    `call_id`, (1,), is the id of the call on a GPU. On a CPU `signature` contains the id.
    """
    if signature == UNSIGNED:
        return payload
    counts, is_signed, s = (payload.new_full((1,), number) for number in (count, 1, signature))
    s = s if call_id is None else s + call_id
    return torch.cat((sums_and_num_values(payload), counts, is_signed, s, s.square()))


def is_incomplete(total: Tensor) -> bool:
    """Return whether the last element is missing: a rank has sent another length, see ranks/collective.py."""
    return bool(total[-1].isnan())
