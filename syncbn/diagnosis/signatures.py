"""Signs what a rank sends, so that ranks which have met in different layers or passes see it in the total.

The signature s of a call site and a pass is a positive number, made from the path of the layer, from its order (the
layer was the order-th to call on the group in training, as layers of two models may have one path) and from the dtype
of the input. Rank r sends 1, s_r and s_r^2 behind its sums, which kernels/plans.py compares. Two signatures of W ranks
are equal by chance in W of 2^26 cases. A rank that cannot tell its layer, as in a compiled graph, sends zeros and is
not counted.
"""

import zlib

import torch

from syncbn.kernels.plans import Signature

LARGEST_TOTAL = 2**26  # number of ranks * signature is less, so that its square is exact in float64


def largest_signature(num_ranks: int) -> int:
    """The largest signature in a group of so many ranks."""
    return LARGEST_TOTAL // num_ranks - 1


class Signatures(dict[tuple[str, torch.dtype | None], Signature]):
    """The signatures of a call site by name of the pass and dtype of the input."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.identity, self.num_ranks = "", num_ranks

    def __missing__(self, key: tuple[str, torch.dtype | None]) -> Signature:
        pass_name, dtype = key
        text = f"{self.identity} {pass_name} {dtype}"
        s = float(1 + zlib.crc32(text.encode()) % largest_signature(self.num_ranks))
        self[key] = signature = 1.0, s, s * s
        return signature

    def sign_as(self, identity: str) -> None:
        """Sign with this identity from now on."""
        self.identity = identity
        self.clear()
