"""Declares what a reduction offers: it adds up over the ranks, one all_reduce each pass, and is chosen once for a call.

There are three: `OneRank`, `EagerReduction` for a group in eager mode, and `GraphReduction` for one in a compiled
graph. Calls that are not ordinary add up by `total` of totals.py, whose results have derivatives.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | numbers | received everywhere       |
|----------|---------------------------------------------|---------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, trailer         | 2C + 4  | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean), trailer        | 2C + 4  | their sums over all ranks |

All numbers are float64, and the sums are not centred, so that uneven and empty ranks need no special case. Each pass is
exactly one collective when the group has two or more ranks, and none otherwise: an all_reduce, which small groups of
gloo make by an exchange, see comm/all_reduce.py. A rank with bad arguments cannot compute its sums but must not leave
the others waiting: it joins the forward all_reduce with zeros and n_r = NaN, which every rank sees in the total.

Each payload ends in a trailer of four numbers: n in forward and 0 in backward, and a signature, see diagnosis/sites.py.
On CPU every rank reads the total's trailer, and sees there whether ranks in different layers have met. On a GPU a
kernel does, and every rank raises some calls later, see faults.py.
"""

import contextlib
from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.diagnosis.sites import Signatures
from syncbn.kernels.interface import Mailbox

NO_SIGNATURES = Signatures(1)  # a site without an identity sends zeros


class Reduction(ABC):
    """The ranks that a call synchronises."""

    group: dist.ProcessGroup | None  # None for one rank
    num_ranks: int | None  # None in a graph, where it is unused
    signatures: Signatures
    forward_total: Tensor | None = None  # of this call, if there are other ranks, until its graph is freed
    is_read = False  # whether a rank with an error may join with NaN: ranks, or their GPUs, read the totals

    @abstractmethod
    def all_reduce(self, payload: Tensor, pass_name: str, mailbox: Mailbox | None = None) -> Tensor:
        """The total of `payload`, which it may overwrite, and which ends in a trailer. With a `mailbox` kernels look at
        it.

        **Raises** RuntimeError when the all_reduce fails, and where ranks in different layers or passes have met; if a
        rank has a fault, a ValueError or TypeError with the texts of the faulty ranks.
        """

    def total(self, sums: Tensor, pass_name: str, error: Exception | None = None) -> Tensor:
        """`all_reduce` of float64 `sums` whose trailer is not signed yet. A rank with an `error` has NaN in the place
        of n, and raises this error."""
        return self.all_reduce(sums, pass_name)

    def mailbox(self, pass_name: str, device: torch.device) -> Mailbox | None:
        """The mailbox of the next all_reduce, on a GPU. **Raises** what kernels have seen in an earlier total."""
        return None

    # One rank tells nobody, and a graph cannot: in these the rest does nothing.

    def end_backward(self) -> None:  # noqa: B027
        """A backward that makes no graph of its own has added up: `forward_total` is let go if its graph is."""

    def warn_unless_finite(self, sums: Tensor) -> None:  # noqa: B027
        """A total of forward has NaN or infinity. Warns, once for a layer, if these `sums` of this rank have."""

    def note_error(self, error: BaseException) -> None:  # noqa: B027
        """This rank is about to raise `error`, perhaps without the all_reduce for which the others wait. Their reports
        have the error."""

    def noting_errors(self) -> contextlib.AbstractContextManager[None]:
        """The context of a pass. Calls `note_error` if the pass raises."""
        return contextlib.nullcontext()


class OneRank(Reduction):
    """One rank: there is nothing to add up."""

    group = None
    num_ranks = 1
    signatures = NO_SIGNATURES

    def all_reduce(self, payload: Tensor, pass_name: str, mailbox: Mailbox | None = None) -> Tensor:
        return payload


ONE_RANK = OneRank()
