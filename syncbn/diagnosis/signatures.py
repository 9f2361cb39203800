"""Signs what a rank sends, so that ranks which have met in different layers or passes see it in the total.

The signature s of a call site and a pass is a positive number, made from the path of the layer and from its order: the
layer was the order-th to call on the group in training, as layers of two models may have one path. Rank r sends 1, s_r
and s_r^2 behind its sums, which kernels/plans.py compares. A rank that cannot tell its layer, as in a compiled graph,
sends zeros and is not counted.
"""

from __future__ import annotations

import zlib

from syncbn.kernels.plans import UNSIGNED, Signature

LARGEST_TOTAL = 2**26  # number of ranks * signature is less, so that its square is exact in float64


def largest_signature(num_ranks: int) -> int:
    """Of a group of so many ranks."""
    return LARGEST_TOTAL // num_ranks - 1


class Signatures(dict[str, Signature]):
    """Those of a call site by the name of the pass; zeros where it does not sign."""

    def __init__(self, num_ranks: int | None) -> None:
        super().__init__()
        self.identity, self.num_ranks = "", num_ranks  # None: it does not sign

    def __missing__(self, pass_name: str) -> Signature:
        signature = UNSIGNED
        if self.num_ranks is not None:
            s = float(1 + zlib.crc32(f"{self.identity} {pass_name}".encode()) % largest_signature(self.num_ranks))
            signature = 1.0, s, s * s
        self[pass_name] = signature
        return signature

    def sign_as(self, identity: str) -> None:
        """From now on sign with this identity."""
        self.identity = identity
        self.clear()
