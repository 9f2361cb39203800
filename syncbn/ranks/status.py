"""Raises what kernels on a GPU have seen in the total of an all_reduce: some calls later, with all ranks' calls in it.

A kernel notes in status words what it saw. There are such words for each group, device and stream, as a stream runs
kernels in order. So the host also knows which all_reduces have ended, without a call of CUDA.

    tag                 names an all_reduce: its number in the group, from 1; in a CUDA graph < 0, for a layer and pass
    words               three int64 in pinned memory, which kernels write and the host reads:
      ENDED             the tag of the last all_reduce whose total a kernel has read
      FAULT             the tag of the first faulty all_reduce, and the kind of the fault
      LOCAL_NOT_FINITE  the tag of the first forward to which this rank gave NaN or infinity; the host sets it to 0
    state               FAULT again, in the GPU's memory: after a fault kernels update no running statistics
    begun               the last all_reduces that the host has begun: which layer a tag means

The program raises at its next all_reduce. If it has none within a second, as while it waits for the GPU, the watchdog
logs the error. Either writes what this rank did in the faulty all_reduce to the store, and reads the other ranks' calls
there. A fault is final: each later all_reduce of the group raises it again, and kernels update no running statistics.
So a rank whose layer has another number, as it has reloaded its model, stops the job, where on a CPU the ranks agree on
a number.
"""

import bisect
import copy
import ctypes
import operator
import threading
import time
from collections import deque
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from syncbn.kernels.interface import BAD_ARGUMENT, ENDED, FAULT, LOCAL_NOT_FINITE, ONE_VALUE, RANKS_DIFFER, Mailbox
from syncbn.ranks import report
from syncbn.ranks.collective import IN_CUDA_GRAPH, Collective
from syncbn.ranks.sites import GroupState, Site
from syncbn.ranks.watchdog import log
from syncbn.texts import ONE_VALUE_PER_CHANNEL, in_words

MOST_KEPT = 1024  # all_reduces that a status can name, some ten steps of a ResNet-50


def captured_tag(site: Site, pass_name: str) -> int:
    """The tag of an all_reduce in a CUDA graph, where a number would be a constant: that of the layer and pass."""
    return -2 * site.index - (pass_name == "forward")


class GroupStatus:
    """What kernels have seen in the totals of a group, on all devices and streams."""

    def __init__(self, state: GroupState) -> None:
        self.group = state
        self.of_streams: dict[tuple[torch.device, int | None], StreamStatus] = {}  # None: while a stream captures
        self.explaining = threading.RLock()  # a fault: the program and the watchdog may, for several streams
        self.call: report.Call | None = None  # of this rank in the all_reduce with the fault
        self.fault: Exception | None = None  # that a GPU has met
        self.is_reported = False  # the program has raised the fault, or the watchdog has logged it


_statuses: WeakKeyDictionary[dist.ProcessGroup, GroupStatus] = WeakKeyDictionary()


def status_of(state: GroupState) -> GroupStatus:
    """The status of a group, which must exist."""
    group = state.group()
    assert group is not None
    status = _statuses.get(group)
    if status is None:
        status = _statuses[group] = GroupStatus(state)
    return status


_memory: list[Tensor] = []  # of all status words, never released: queued kernels and CUDA graphs may still write to it


class StreamStatus:
    """The status words of a group on a device and stream. A stream that captures a CUDA graph borrows the words of the
    last stream, as nothing may be allocated then."""

    def __init__(self, site: Site, device: torch.device, stream: int) -> None:
        host = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")  # a test has no GPU
        state = torch.zeros(1, dtype=torch.int64, device=device)
        _memory.extend((host, state))
        self.host, self.state = host.data_ptr(), state.data_ptr()
        self.words = (ctypes.c_int64 * 3).from_address(self.host)
        self.begun: deque[Collective] = deque(maxlen=MOST_KEPT)  # their numbers, which ascend, are the tags
        self._oldest: Collective | None = None
        self.rank, self.of_group = site.rank, status_of(site.state)
        self._key = f"fault/{site.state.name}"  # of the ranks' calls
        if not self.of_group.of_streams:  # torch gives names of groups again after destroy_process_group
            self.rank.erase(self._key)
        self.of_group.of_streams[device, stream] = self.of_group.of_streams[device, None] = self
        self.rank.watched.add(self)

    def mailbox(self, tag: int) -> Mailbox:
        """Where kernels note what they see in the total with this tag. **Raises** what they have seen in an earlier
        total."""
        if self.words[FAULT] or self.of_group.fault is not None:
            raise self.error()
        return Mailbox(self.host, self.state, tag)

    def unfinished(self) -> Collective | None:
        """The oldest all_reduce that has begun and not ended."""
        ended, oldest = self.words[ENDED], self._oldest
        if not self.begun or self.begun[-1].number <= ended:
            self._oldest = None
        elif oldest is None or oldest.number <= ended:
            begun = [*self.begun]
            self._oldest = begun[bisect.bisect(begun, ended, key=operator.attrgetter("number"))]
            if oldest is not None:  # until now the GPU may have been behind
                self._oldest.start = time.monotonic()
        return self._oldest

    def has_ended(self) -> bool:
        """Whether the group is gone, and no later step can raise what kernels have seen."""
        return self.of_group.group.group() is None

    def look(self, is_last: bool = False) -> None:
        """The watchdog looks: warns of NaN, and logs a fault that the program does not raise before the next look."""
        tag = self.words[LOCAL_NOT_FINITE]
        if tag and self.begun and tag <= self.begun[-1].number:  # the kernel may be ahead of the host's all_reduce
            self.words[LOCAL_NOT_FINITE] = 0
            noted = self._collective(tag)
            if noted is not None:
                noted.warn_not_finite()
        if self.words[FAULT] and not self.of_group.is_reported:
            was_explained = self.of_group.fault is not None
            self._explain()  # while the other ranks answer
            if was_explained or is_last:
                log.error("syncbn: rank %d meets a fault on the GPU.\n%s", self.rank.rank, in_words(self.error()))

    def error(self) -> Exception:
        """What every rank of the group raises because of a fault that kernels have noted."""
        self.of_group.is_reported = True
        return copy.deepcopy(self._explain())  # the traceback of an error keeps the tensors of its step, and the group

    def _explain(self) -> Exception:
        of_group = self.of_group
        with of_group.explaining:
            if of_group.fault is None:
                words = [of_stream.words[FAULT] for of_stream in [*of_group.of_streams.values()]]
                tag, kind = divmod(min(filter(None, words)), 4)  # the first of all streams, on each rank the same
                call = self.write_call(tag)
                of_group.fault = self._explained(kind, tag, call).with_traceback(None)
                after = f", noticed after {self.begun[-1].doing()}" if self.begun else ""
                of_group.fault.add_note(f"The results of {call.doing} and all later ones are void{after}.")
        return of_group.fault

    def write_call(self, tag: int, error: Exception | None = None) -> report.Call:
        """Write what this rank did in the all_reduce with this tag, once; with its `error`, if that is the fault."""
        of_group = self.of_group
        with of_group.explaining:
            if of_group.call is None:
                collective = self._collective(tag)
                of_group.call = report.Call(f"all_reduce {tag}") if collective is None else collective.described(error)
                self.rank.write(self._key, of_group.call)
        return of_group.call

    def _collective(self, tag: int) -> Collective | None:
        """The all_reduce with this tag; None if it is too old, or its layer is gone."""
        if tag > 0:
            of_streams = [*self.of_group.of_streams.values()]
            return next((begun for one in of_streams for begun in [*one.begun] if begun.number == tag), None)
        sites, pass_name = [*self.of_group.group.sites.values()], "forward" if tag % 2 else "backward"
        return next((Collective(site, IN_CUDA_GRAPH, pass_name) for site in sites if site.index == -tag // 2), None)

    def _explained(self, kind: int, tag: int, call: report.Call) -> Exception:
        ranks = self.of_group.group.ranks
        calls = report.exchange(self.rank, ranks, self._key, call)
        if kind == ONE_VALUE:
            doing = next(other.doing for other in calls if other is not None)
            return ValueError(f"syncbn: {ONE_VALUE_PER_CHANNEL} in {doing}. Use a larger batch or eval().")
        error = report.explain(self.rank, ranks, self._collective(tag), calls, kind == RANKS_DIFFER, can_renumber=False)
        return error or RuntimeError(report.BAD_ARGUMENT if kind == BAD_ARGUMENT else report.DIFFERENT_LAYERS)
