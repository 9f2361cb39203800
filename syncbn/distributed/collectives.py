"""Issues the all-reduces of batch norm: what is sent, how often, and the mark of a faulty rank.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | numbers | received everywhere       |
|----------|---------------------------------------------|---------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, n_r             | 2C + 1  | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean)                 | 2C      | their sums over all ranks |

All numbers are float64, and the sums are not centred, so that uneven and empty ranks need no special case. Each pass is
exactly one all_reduce when the group has two or more ranks, and none otherwise (`group` is None). A rank with bad
arguments cannot compute its sums but must not leave the others waiting: it joins the forward all_reduce with zeros and
n_r = NaN, which every rank sees in the total.

On CPU follow three numbers more (and 0 in backward, so that both passes send 2C + 4), in which every rank sees whether
ranks in different layers have met: see signatures.py. On a GPU the host would have to wait to read them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn import torch_private
from syncbn.diagnosis import signatures
from syncbn.diagnosis.call_sites import LayerCall
from syncbn.diagnosis.positions import Waiting
from syncbn.diagnosis.signatures import NUM_SIGNED
from syncbn.diagnosis.waits import FIRST_WARNING_SECONDS, event_behind
from syncbn.distributed.exchange import raise_faults


class Interceptor:
    """Something that is asked before each all_reduce while it is on the stack `interceptors`."""

    # If set, this group replaces every group of as many ranks (syncbn.join).
    joined_group: dist.ProcessGroup | None = None
    first_warning_seconds: float = FIRST_WARNING_SECONDS  # of waiting

    def before_all_reduce(self, ranks: Ranks, sums: Tensor, pass_name: str, counted: bool) -> None:
        """This rank is about to add up `sums` over `ranks`; an exception leaves it out."""


interceptors: list[Interceptor] = []


def push(interceptor: Interceptor) -> None:
    """From now on `interceptor` is asked before each all_reduce, after those that are there already."""
    interceptors.append(interceptor)


@contextlib.contextmanager
def intercepted_by(interceptor: Interceptor) -> Iterator[None]:
    """Within, `interceptor` is asked."""
    push(interceptor)
    try:
        yield
    finally:
        interceptors.remove(interceptor)


def joined_group() -> dist.ProcessGroup | None:
    """The group of the interceptor that has one."""
    return next((one.joined_group for one in interceptors if one.joined_group is not None), None)


@dataclass(slots=True)
class Ranks:
    """The ranks that one call of a layer synchronises."""

    group: dist.ProcessGroup | None  # None where there is nothing to synchronise
    call: LayerCall | None = None  # in eager mode

    def all_reduce(self, sums: Tensor, pass_name: str, counted: bool = False, error: Exception | None = None) -> Tensor:
        """The totals over the ranks of float64 `sums`, which it may overwrite; `counted` when the last is a count.

        A rank with an `error` sends NaN for the count. **Raises** on every rank, in eager mode, RuntimeError when it
        fails; on CPU also when the ranks are in different layers or passes, and the errors of all ranks. The total is
        read on CPU in eager mode only: on a GPU that would stop the host, in a compiled graph it would split the graph.
        """
        if self.group is None:
            return sums
        for interceptor in interceptors:
            interceptor.before_all_reduce(self, sums, pass_name, counted)
        compiling = torch_private.is_compiling()
        mode = None if compiling else torch_private.current_dispatch_mode()
        payload = sums
        if sums.is_cpu:
            signature = None if self.call is None else self.call.site.signatures.get((pass_name, counted))
            if signature is None or mode is not None:
                signature = signatures.signed(self.call, pass_name, counted, sums, mode)
            payload = torch.cat((sums, signature))
        if compiling:
            if torch_private.inside_vmap_or_forward_mode():  # Dynamo would lose the total
                raise RuntimeError(
                    "compiled graphs with vmap or forward mode over ranks: compile without fullgraph=True"
                )
            dist.all_reduce(payload, group=torch_private.group_in_graph(self.group))
            return payload[: len(sums)]
        first_warning = min([FIRST_WARNING_SECONDS, *[one.first_warning_seconds for one in interceptors]])
        with Waiting(self.group, self.call, pass_name, first_warning) as waiting:
            if mode is None:
                dist.all_reduce(payload, group=self.group)
            else:
                payload = torch_private.all_reduce_operator(payload, self.group)
            values = type(payload) is Tensor  # a subclass such as FakeTensor may have none
            if payload.is_cuda and values:
                waiting.rank.on_gpu.add(waiting, event_behind(payload.device))
            if payload.is_cpu and values:
                count, num_signed, total, squares = payload[-NUM_SIGNED:].tolist()
                if num_signed * squares != total * total:
                    signatures.compare(waiting, pass_name, everyone_signed=num_signed == self.group.size())
                if math.isnan(count):
                    raise_faults(error, self.group, f"{waiting.doing}:\n")
        return payload[: len(sums)]
