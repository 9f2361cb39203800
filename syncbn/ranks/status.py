"""Raises the faults that GPU kernels find in the total of an all_reduce.

The host does not wait for a GPU, so the fault surfaces some calls later, with the reports of all ranks. Kernels store
faults in status words. Each combination of group, device and stream has its own words. A stream runs its kernels in
order, so the words also tell the host, without a call to CUDA, which all_reduces have ended.

    sequence number   identifies an all_reduce of the group, from 1; in a CUDA graph a negative number that identifies
                      layer and pass
    words             three int64 in pinned memory, which kernels write and the host reads:
      ENDED             sequence number of the last all_reduce whose total a kernel has read
      FAULT             sequence number of the first faulty all_reduce, and the kind of the fault
      LOCAL_NOT_FINITE  sequence number of the first forward with non-finite local sums; the host clears it
    device word       a copy of FAULT in the GPU's memory: after a fault, kernels update no running statistics
    recent            the last all_reduces that the host has begun, to find the layer of a sequence number

The program raises the fault at its next all_reduce. The watchdog, which polls once a second, logs a fault that the
program has not raised by the second poll, for example because the program waits for the GPU. The program or the
watchdog, whichever is first, writes this rank's report of the faulty all_reduce to the store and reads the reports of
the other ranks. A fault is final: every later all_reduce of the group raises it again. If one rank reloads its model,
its layers get new instance numbers. On GPUs this is a fault, which ends the job; on CPUs the ranks agree on new
numbers.
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

from syncbn.kernels.interface import BAD_ARGUMENT, ENDED, FAULT, LOCAL_NOT_FINITE, ONE_VALUE, RANKS_DIFFER, StatusWords
from syncbn.ranks import report
from syncbn.ranks.collective import IN_CUDA_GRAPH, Collective
from syncbn.ranks.sites import GroupState, Site
from syncbn.ranks.watchdog import log
from syncbn.texts import ONE_VALUE_PER_CHANNEL, format_error

MAX_PENDING = 1024  # number of recent all_reduces whose layers are kept; about ten steps of a ResNet-50


def captured_sequence_number(site: Site, pass_name: str) -> int:
    """Return the negative number that identifies the layer and pass of an all_reduce in a CUDA graph. A counter is of
    no use there, because the graph would capture it as a constant."""
    return -2 * site.index - (pass_name == "forward")


class GroupStatus:
    """The status of a group: its status words on all devices and streams, and the fault that they have shown."""

    def __init__(self, state: GroupState) -> None:
        self.group_state = state
        self.streams: dict[tuple[torch.device, int | None], StreamStatus] = {}  # None: any capturing stream
        self.lock = threading.RLock()  # held while the program or the watchdog resolves a fault
        self.call: report.CallReport | None = None  # this rank's report of the faulty all_reduce
        self.fault: Exception | None = None  # the error for the first fault
        self.is_reported = False  # whether the program has raised the fault, or the watchdog has logged it


_statuses: WeakKeyDictionary[dist.ProcessGroup, GroupStatus] = WeakKeyDictionary()


def status_of(state: GroupState) -> GroupStatus:
    """Return the status of a group that exists."""
    group = state.group()
    assert group is not None
    status = _statuses.get(group)
    if status is None:
        status = _statuses[group] = GroupStatus(state)
    return status


_memory: list[Tensor] = []  # all status words, never released: queued kernels and CUDA graphs may still write to them


class StreamStatus:
    """The status words of a group on a device and stream. A stream that captures a CUDA graph uses the words of
    the latest StreamStatus, because nothing may be allocated during a capture."""

    def __init__(self, site: Site, device: torch.device, stream: int) -> None:
        words = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")  # tests use the CPU
        device_word = torch.zeros(1, dtype=torch.int64, device=device)
        _memory.extend((words, device_word))
        self.host_address, self.device_address = words.data_ptr(), device_word.data_ptr()
        self.words = (ctypes.c_int64 * 3).from_address(self.host_address)
        self.recent: deque[Collective] = deque(maxlen=MAX_PENDING)  # in ascending order of their sequence numbers
        self._oldest: Collective | None = None
        self.rank, self.group_status = site.rank, status_of(site.group_state)
        self._key = f"fault/{site.group_state.name}"
        if not self.group_status.streams:  # torch reuses the name of a destroyed group, which may have had a fault.
            self.rank.erase(self._key)
        self.group_status.streams[device, stream] = self.group_status.streams[device, None] = self
        self.rank.gpu_statuses.add(self)

    def status_words(self, sequence_number: int, call_id: int) -> StatusWords:
        """Return the status words for the all_reduce with this sequence number; `call_id` is that of `StatusWords`.
        **Raises** the fault of an earlier total."""
        if self.words[FAULT] or self.group_status.fault is not None:
            raise self.error()
        return StatusWords(self.host_address, self.device_address, sequence_number, call_id)

    def unfinished(self) -> Collective | None:
        """Return the oldest all_reduce that has begun and not ended, or None."""
        ended, oldest = self.words[ENDED], self._oldest
        if not self.recent or self.recent[-1].sequence_number <= ended:
            self._oldest = None
        elif oldest is None or oldest.sequence_number <= ended:
            recent = [*self.recent]
            self._oldest = recent[bisect.bisect(recent, ended, key=operator.attrgetter("sequence_number"))]
            if oldest is not None:  # The GPU may have reached this all_reduce only now.
                self._oldest.start = time.monotonic()
        return self._oldest

    def poll(self, is_last: bool = False) -> None:
        """Warn of non-finite sums, and log a fault that the program has not raised since the previous poll. If
        `is_last`, or if the group has been released, log each fault: no later step can raise it."""
        if self.group_status.group_state.group() is None:
            is_last = True
            self.rank.gpu_statuses.discard(self)
        sequence_number = self.words[LOCAL_NOT_FINITE]
        # A kernel may have set the word before the host has added the all_reduce to `recent`.
        if sequence_number and self.recent and sequence_number <= self.recent[-1].sequence_number:
            self.words[LOCAL_NOT_FINITE] = 0
            collective = self._collective(sequence_number)
            if collective is not None:
                collective.warn_not_finite()
        if self.words[FAULT] and not self.group_status.is_reported:
            was_resolved = self.group_status.fault is not None
            self._resolve_fault()  # now, while the other ranks answer
            if was_resolved or is_last:
                text = "syncbn: rank %d has detected a fault on the GPU.\n%s"
                log.error(text, self.rank.rank, format_error(self.error()))

    def error(self) -> Exception:
        """Return the error that every rank of the group raises for the fault."""
        self.group_status.is_reported = True
        # A copy, because the traceback of a raised error refers to the tensors of its step and to the group.
        return copy.deepcopy(self._resolve_fault())

    def _resolve_fault(self) -> Exception:
        """Return the error for the first fault of all streams, which is the same fault on every rank."""
        status = self.group_status
        with status.lock:
            if status.fault is None:
                first = min(filter(None, (stream.words[FAULT] for stream in [*status.streams.values()])))
                sequence_number, fault_kind = divmod(first, 4)
                call = self.write_report(sequence_number)
                status.fault = self._make_error(fault_kind, sequence_number, call).with_traceback(None)
                after = f"; this was detected after {self.recent[-1].description()}" if self.recent else ""
                status.fault.add_note(f"The results of {call.description} and of all later calls are invalid{after}.")
        return status.fault

    def write_report(self, sequence_number: int) -> report.CallReport:
        """Write this rank's report of the all_reduce with this sequence number, unless a report has been written."""
        status = self.group_status
        with status.lock:
            if status.call is None:
                collective = self._collective(sequence_number)
                unknown = report.CallReport(f"all_reduce {sequence_number}")
                status.call = unknown if collective is None else collective.to_report()
                self.rank.write(self._key, status.call)
        return status.call

    def _collective(self, sequence_number: int) -> Collective | None:
        """Return the all_reduce with this sequence number; None if it is too old, or if its layer has been released."""
        if sequence_number > 0:
            recent = (collective for stream in [*self.group_status.streams.values()] for collective in [*stream.recent])
            return next((collective for collective in recent if collective.sequence_number == sequence_number), None)
        sites = [*self.group_status.group_state.sites.values()]
        pass_name = "forward" if sequence_number % 2 else "backward"
        site = next((site for site in sites if site.index == -sequence_number // 2), None)
        return None if site is None else Collective(site, IN_CUDA_GRAPH, pass_name)

    def _make_error(self, fault_kind: int, sequence_number: int, call: report.CallReport) -> Exception:
        ranks = self.group_status.group_state.ranks
        calls = report.gather_calls(self.rank, ranks, self._key, call)
        if fault_kind == ONE_VALUE:
            description = next(other.description for other in calls if other is not None)
            return ValueError(f"syncbn: {ONE_VALUE_PER_CHANNEL} in {description}. Use a larger batch or eval().")
        wait, ranks_differ = self._collective(sequence_number), fault_kind == RANKS_DIFFER
        error = report.explain(self.rank, ranks, wait, calls, ranks_differ, can_renumber=False)
        return error or RuntimeError(report.TITLE_ARGUMENT if fault_kind == BAD_ARGUMENT else report.TITLE_LAYERS)
