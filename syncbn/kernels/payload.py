"""Signs payloads by torch operations: the sums of a pass, which end in a trailer of n and the signature."""

import torch
from torch import Tensor

from syncbn.kernels.interface import MIXER, SIGNATURE_ELEMENTS, TRAILER_ELEMENTS, UNSIGNED


def with_num_values(sums: Tensor, num_values: Tensor | None) -> Tensor:
    """Return `sums` with `num_values`, of shape (), instead of the n in the trailer, or unchanged if it is None."""
    if num_values is None:
        return sums
    return torch.cat((sums[:-TRAILER_ELEMENTS], num_values.double().view(1), sums[-SIGNATURE_ELEMENTS:]))


def sign(sums: Tensor, signature: int, forward_total: Tensor | None = None) -> Tensor:
    """Return a copy of `sums` with the signature in its trailer, mixed with the total of the forward, or `sums`
    unchanged if `signature` is UNSIGNED."""
    if signature == UNSIGNED:
        return sums
    s = sums.new_full((1,), signature)
    if type(forward_total) is Tensor:  # not a FakeTensor, which has no values
        s = signature_of_call(signature, forward_total)
    return torch.cat((sums[: -SIGNATURE_ELEMENTS], torch.ones_like(s), s, s.square()))


def signature_of_call(signature: int, forward_total: Tensor) -> Tensor:
    """Return the signature of a backward, float64 (1,): `signature` mixed with the sums in the forward's total.

    The total is the same on all ranks and differs from call to call of a layer. bits_i is the bit pattern of the i-th
    sum, read as an int64, or 0 for NaN, whose bits may differ between ranks. h = sum of bits_i * (2 i + 1). The result
    is signature XOR (h * MIXER >> 40) in all bits below the highest bit of the signature, which is kept.
    """
    sums = forward_total[: -TRAILER_ELEMENTS]
    bits = torch.where(sums.isnan(), 0, sums.view(torch.int64))
    mixed = (bits * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum(0, keepdim=True) * MIXER
    highest = 1 << signature.bit_length() - 1
    return ((mixed >> 40 ^ signature) & highest - 1 | highest).to(torch.float64)
