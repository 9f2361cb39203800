"""Issues the all-reduces of batch norm: what is sent, how often, and the mark of a faulty rank.

W ranks; C channels; n_r values per channel on rank r.

| pass     | sent by rank r                              | numbers | received everywhere       |
|----------|---------------------------------------------|---------|---------------------------|
| forward  | S_r = sum x, Q_r = sum x^2, n_r             | 2C + 1  | their sums over all ranks |
| backward | sum dy, sum dy * (x - mean)                 | 2C      | their sums over all ranks |

All numbers are float64: sums about zero, so that uneven and empty ranks need no special case. Each pass is exactly one
all_reduce when the group has two or more ranks, and none otherwise (`group` is None). A rank whose arguments are bad
cannot compute its sums but must not leave the others waiting: it joins the forward all_reduce with zeros and n_r = NaN,
which every rank sees in the total.

On CPU follow three numbers more (and 0 in backward, so that both passes send 2C + 4): 1, s_r and s_r^2, where s_r, the
signature, is a number of the layer and the pass. By Cauchy and Schwarz sum 1 * sum s^2 = (sum s)^2 only where all s are
the same; else ranks in different layers have met, and every rank sees it. On a GPU the host would have to wait to read
them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from syncbn import call_sites, torch_private
from syncbn.call_sites import LayerCall
from syncbn.exchange import all_gather_json, by_rank, raise_faults
from syncbn.report import REMEDY, RanksDifferError
from syncbn.watchdog import FIRST_WARNING_SECONDS, Waiting

NUM_SIGNED = 4  # numbers at the end of a payload on CPU: the count, and the three of a signature


class Interceptor:
    """Is asked before each all_reduce, between `intercepted_by` and its end."""

    # In its place all groups of as many ranks synchronise, where it is given.
    joined_group: dist.ProcessGroup | None = None
    first_warning_seconds: float = FIRST_WARNING_SECONDS  # of waiting

    def before_all_reduce(self, ranks: Ranks, sums: Tensor, pass_name: str, counted: bool) -> None:
        """This rank is about to add up `sums` over `ranks`; an exception leaves it out."""


_interceptors: list[Interceptor] = []


def push(interceptor: Interceptor) -> None:
    """From now on `interceptor` is asked before each all_reduce, after those that are there already."""
    _interceptors.append(interceptor)


@contextlib.contextmanager
def intercepted_by(interceptor: Interceptor) -> Iterator[None]:
    """Within, `interceptor` is asked."""
    push(interceptor)
    try:
        yield
    finally:
        _interceptors.remove(interceptor)


def joined_group() -> dist.ProcessGroup | None:
    """The group of the interceptor that has one."""
    return next((one.joined_group for one in _interceptors if one.joined_group is not None), None)


@dataclass(slots=True)
class Ranks:
    """The ranks that one call of a layer synchronises."""

    group: dist.ProcessGroup | None  # None where there is nothing to synchronise
    call: LayerCall | None = None  # in eager mode

    def all_reduce(self, sums: Tensor, pass_name: str, counted: bool = False) -> Tensor:
        """The sums of float64 `sums`, which it may overwrite, over the ranks; `counted` when the last is a count.

        **Raises** RuntimeError, in eager mode, when it fails, and on CPU when the ranks are in different layers or
        passes; and, when the count is NaN, on every rank what any rank reports through `raise_on_all`. The total is
        read on CPU in eager mode only: on a GPU that would stop the host, in a compiled graph it would split the graph.
        """
        return sums if self.group is None else self._all_reduce(sums, pass_name, counted)

    def raise_on_all(self, error: Exception, num_sums: int, device: torch.device, pass_name: str) -> NoReturn:
        """Join the all_reduce of `num_sums` numbers as a faulty rank, then raise `error` on every rank.

        On a GPU and in compiled graphs, where no rank reads the mark, `error` is raised on this rank alone.
        """
        if self.group is None or device.type != "cpu" or torch_private.is_compiling():
            raise error
        sums = torch.zeros(num_sums, dtype=torch.float64)
        sums[-1] = math.nan
        self._all_reduce(sums, pass_name, True, error)
        raise AssertionError("the mark of a fault was lost") from error

    def _all_reduce(self, sums: Tensor, pass_name: str, counted: bool, error: Exception | None = None) -> Tensor:
        assert self.group is not None
        for interceptor in _interceptors:
            interceptor.before_all_reduce(self, sums, pass_name, counted)
        compiling = torch_private.is_compiling()
        mode = None if compiling else torch_private.current_dispatch_mode()
        signed = sums.is_cpu
        payload = torch.cat((sums, self._signature(sums, pass_name, counted, mode))) if signed else sums
        if compiling:
            dist.all_reduce(payload, group=self.group)
            return payload[: len(sums)]
        first_warning = min([FIRST_WARNING_SECONDS, *[one.first_warning_seconds for one in _interceptors]])
        with Waiting(self.group, self.call, pass_name, first_warning) as waiting:
            if mode is None:
                dist.all_reduce(payload, group=self.group)
            else:
                payload = torch_private.all_reduce_operator(payload, self.group)
            if signed and type(payload) is Tensor:  # a subclass such as FakeTensor may have no values
                count, num_signed, total, squares = payload[-NUM_SIGNED:].tolist()
                if num_signed * squares != total * total:
                    self._compare_call_sites(waiting, pass_name, everyone_signed=num_signed == self.group.size())
                if math.isnan(count):
                    raise_faults(error, self.group, f"{waiting.doing}:\n")
        return payload[: len(sums)]

    def _signature(self, sums: Tensor, pass_name: str, counted: bool, mode: TorchDispatchMode | None) -> Tensor:
        """1, s and s^2; or zeros of a rank that cannot tell its layer, as in a compiled graph.

        Before them comes 0 where `sums` end without a count: all payloads of a layer have one length, as gloo aborts
        where they have not.
        """
        if self.call is None or not self.call.site.signs:
            return sums.new_zeros(NUM_SIGNED - counted)
        kept = self.call.site.signatures.get((pass_name, counted))
        if kept is None or mode is not None:  # in which a tensor may have no values
            s = self.call.site.signature(pass_name)
            kept = sums.new_tensor((0, 1, s, s * s)[counted:])
            if mode is None:
                self.call.site.signatures[pass_name, counted] = kept
        return kept

    def _compare_call_sites(self, waiting: Waiting, pass_name: str, everyone_signed: bool) -> None:
        """Of ranks whose signatures differ. **Raises** RanksDifferError unless only the paths of one layer do."""
        if self.call is None or not everyone_signed:  # there are ranks that would not take part in an all_gather
            raise RanksDifferError(waiting.where_all_are())
        gathered = all_gather_json((self.call.site.path, pass_name, waiting.doing), waiting.group)
        paths, pass_names, doings = zip(*gathered, strict=True)
        if len(set(pass_names)) > 1 or not call_sites.may_be_one_layer(paths):
            ranks = dist.get_process_group_ranks(waiting.group)
            raise RanksDifferError(by_rank(ranks, [f"in {doing}" for doing in doings]) + f"\n{REMEDY}")
        self.call.site.stop_signing()
