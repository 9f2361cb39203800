"""Signs what a rank sends, so that ranks which have met in different layers or passes see it in the total.

The signature s of a call site and a pass is a positive number. Rank r sends 1, s_r and s_r^2 behind its sums. By Cauchy
and Schwarz sum 1 * sum s^2 = (sum s)^2 only where all s are the same. A rank that cannot tell its layer, as in a
compiled graph, sends zeros and is not counted.
"""

from __future__ import annotations

import zlib

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn.diagnosis import report
from syncbn.diagnosis.call_sites import CallSite, LayerCall
from syncbn.diagnosis.model_paths import may_be_one_layer
from syncbn.diagnosis.positions import Waiting
from syncbn.diagnosis.report import REMEDY, RanksDifferError
from syncbn.distributed.exchange import all_gather_json, by_rank

NUM_SIGNED = 4  # numbers that end a payload on CPU: the count, and the three of a signature
LARGEST_TOTAL = 2**26  # number of ranks * signature is less, so that its square is exact in float64


def largest_signature(num_ranks: int) -> int:
    """Of a group of so many ranks."""
    return LARGEST_TOTAL // num_ranks - 1


def signature(site: CallSite, pass_name: str) -> int:
    """A positive number that tells call sites of different paths, and passes, apart."""
    return 1 + zlib.crc32(f"{site.path} {pass_name}".encode()) % largest_signature(site.num_ranks)


def signed(
    call: LayerCall | None, pass_name: str, counted: bool, sums: Tensor, mode: TorchDispatchMode | None
) -> Tensor:
    """What stands behind the `sums` of a call: 1, s and s^2, or zeros.

    Before them comes 0 where `sums` end without a count: all payloads of a layer have one length, as gloo aborts where
    they have not. It is kept at the call site, but for one made under a dispatch mode, which may have no values.
    """
    if call is None or not call.site.signs:
        return sums.new_zeros(NUM_SIGNED - counted)
    s = signature(call.site, pass_name)
    result = sums.new_tensor((0, 1, s, s * s)[counted:])
    if mode is None:
        call.site.signatures[pass_name, counted] = result
    return result


def compare(waiting: Waiting, pass_name: str, everyone_signed: bool) -> None:
    """Find out why signatures differ. **Raises** RanksDifferError unless only the paths of one layer do."""
    call = waiting.call
    if call is None or not everyone_signed:  # there are ranks that would not take part in an all_gather
        raise RanksDifferError(report.where_all_are(waiting))
    gathered = all_gather_json((call.site.path, pass_name, waiting.doing), waiting.group)
    paths, pass_names, doings = zip(*gathered, strict=True)
    if len(set(pass_names)) > 1 or not may_be_one_layer(paths):
        ranks = dist.get_process_group_ranks(waiting.group)
        raise RanksDifferError(by_rank(ranks, [f"in {doing}" for doing in doings]) + f"\n{REMEDY}")
    call.site.signs = False  # from now on they would differ although the layer is the same
    call.site.signatures.clear()
