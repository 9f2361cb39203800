"""Raises what kernels on a GPU have seen in the total of an all_reduce: some calls later, with all ranks' parts in it.

A kernel notes in a mailbox what it saw. There is one mailbox for each group, device and stream, as a stream runs
kernels in order. So the host also knows which all_reduces have ended, without a call of CUDA.

    tag                 names an all_reduce: its number in the group, from 1; in a CUDA graph < 0, for a layer and pass
    words               three int64 in pinned memory, which kernels write and the host reads:
      ENDED             the tag of the last all_reduce whose total a kernel has read
      FAULT             the tag of the first faulty all_reduce, and the kind of the fault
      LOCAL_NOT_FINITE  the tag of the first forward to which this rank gave NaN or infinity; the host sets it to 0
    state               FAULT again, in the GPU's memory: behind a fault kernels update no running statistics
    begun               the last all_reduces that the host has begun: which layer a tag means
    part                of this rank in the faulty all_reduce: its layer, call and pass, and its error if it has one

The program comes by at its next all_reduce, and raises. If it does not within a second, as while it waits for the GPU,
the watchdog logs the error. Either writes this rank's part in the faulty all_reduce to the store, and reads the others'
there. A fault is final: each later all_reduce of the group raises it again, and kernels update no running statistics.

Ranks may have different names for one layer. On CPU they agree by an all_gather. On a GPU each signs as the first rank
of the group does, which writes its name to the store in the layer's first call, see `agree_on_name`.
"""

import bisect
import copy
import ctypes
import operator
import time
from collections import deque
from weakref import finalize

import torch
from torch import Tensor

from syncbn.comm.text_exchange import by_rank, error_of_others
from syncbn.diagnosis import report
from syncbn.diagnosis.collective import IN_CUDA_GRAPH, Collective, RanksDifferError
from syncbn.diagnosis.sites import Site
from syncbn.diagnosis.watchdog import log
from syncbn.kernels.interface import BAD_ARGUMENT, ENDED, FAULT, LOCAL_NOT_FINITE, ONE_VALUE, RANKS_DIFFER
from syncbn.reductions.agreement import may_be_one_layer, part_in, require_one_layer
from syncbn.texts import ONE_VALUE_PER_CHANNEL, in_words

ANSWER_SECONDS = 5.0  # in which the other ranks write their parts
NAMING_SECONDS = 5.0  # in which the first rank is to come to a layer's first call
MOST_KEPT = 1024  # all_reduces that a mailbox can name, some ten steps of a ResNet-50

NOT_NAMED = (
    "syncbn: rank %d is in %s, at %s, the layer number %d of its group, and rank %d has not come to its layer of this "
    "number within %g s. On a GPU nothing tells whether ranks are in the same layer until it calls that in eager mode. "
    "If it is only late, do nothing; else call the same layers in the same order on all ranks, all of them uncompiled."
)


def captured_tag(site: Site, pass_name: str) -> int:
    """The tag of an all_reduce in a CUDA graph, where a number would be a constant: that of the layer and pass. (In the
    backward of a function that does not sign it is 0, which stands for no mailbox.)"""
    return -2 * site.order - (pass_name == "forward")


def agree_on_name(site: Site) -> None:
    """In a layer's first call on a GPU: sign from now on as the first rank of the group does, which may have another
    name for the layer. (Ranks in different layers keep their names, so that kernels find a fault.)

    A rank waits for the name of a late first rank in one layer, does not sign, and looks again in calls 2, 4, 8, ...
    """
    if site.num_calls & (site.num_calls - 1):
        return
    rank, state, first = site.rank, site.state, site.state.ranks[0]
    key = f"named/{state.name}/{site.order}"
    if rank.rank == first:
        rank.write(key, path := site.path)
    else:
        path = rank.wait_for([first], key, NAMING_SECONDS if state.awaits_names else 0.0)[0]
    site.is_agreed = path is not None
    if site.is_agreed and may_be_one_layer([path, site.path]):
        site.sign_as(path, site.order)
    elif not site.is_agreed and state.awaits_names:
        state.awaits_names = False
        log.warning(NOT_NAMED, rank.rank, site.name, site.first_line, site.order, first, NAMING_SECONDS)


_memory: list[Tensor] = []  # of all mailboxes, never given back: queued kernels and CUDA graphs may still write to it


class Box:
    """The mailbox of a group on a device and stream. A stream that captures a CUDA graph has that of another, as no
    memory may be allocated."""

    def __init__(self, site: Site, device: torch.device, stream: int) -> None:
        host = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")  # a test has no GPU
        state = torch.zeros(1, dtype=torch.int64, device=device)
        _memory.extend((host, state))
        self.host, self.state = host.data_ptr(), state.data_ptr()
        self.words = (ctypes.c_int64 * 3).from_address(self.host)
        self.begun: deque[Collective] = deque(maxlen=MOST_KEPT)  # their numbers, which ascend, are the tags
        self._oldest: Collective | None = None
        self.rank, self.group_state = site.rank, site.state
        self._key = f"fault/{site.state.name}"  # of the ranks' parts
        if not site.state.boxes:  # torch gives names of groups again after destroy_process_group
            self.rank.write(self._key, None)
        site.state.boxes[device, stream] = site.state.boxes[device, None] = self
        self.rank.boxes.add(self)
        finalize(site.state.group(), self.rank.boxes.discard, self).atexit = False

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

    def look(self) -> None:
        """The watchdog looks: warns of NaN, and logs a fault that the program does not raise."""
        tag = self.words[LOCAL_NOT_FINITE]
        if tag and self.begun and tag <= self.begun[-1].number:  # the kernel may be ahead of the host's all_reduce
            self.words[LOCAL_NOT_FINITE] = 0
            noted = self._collective(tag)
            if noted is not None:
                noted.warn_not_finite()
        if self.words[FAULT] and not self.group_state.has_told_fault:
            if self.group_state.fault is None:  # now, while the other ranks answer
                self._explain()
            else:  # nor has the program come by since the previous look
                log.error("syncbn: rank %d meets a fault on the GPU.\n%s", self.rank.rank, in_words(self.error()))

    def error(self) -> Exception:
        """What every rank of the group raises because of a fault that kernels have noted."""
        self.group_state.has_told_fault = True
        return copy.deepcopy(self._explain())  # the traceback of an error keeps the tensors of its step, and the group

    def _explain(self) -> Exception:
        state = self.group_state
        with state.explaining:
            if state.fault is None:
                words = [box.words[FAULT] for box in [*state.boxes.values()]]
                tag, kind = divmod(min(filter(None, words)), 4)  # the first of all streams, on each rank the same
                self.tell(tag)
                state.fault = self._explained(kind).with_traceback(None)
                after = f", noticed after {self.begun[-1].position().doing}" if self.begun else ""
                assert state.part is not None
                state.fault.add_note(f"The results of {state.part['doing']} and all later ones are void{after}.")
        return state.fault

    def tell(self, tag: int, error: Exception | None = None) -> None:
        """Write this rank's part in the all_reduce with this tag, once; with its `error`, if that is the fault."""
        state = self.group_state
        with state.explaining:
            if state.part is None:
                collective = self._collective(tag)
                state.part = {"doing": f"all_reduce {tag}"} if collective is None else part_in(collective)
                if error is not None:
                    state.part |= {"error": in_words(error), "is TypeError": isinstance(error, TypeError)}
                self.rank.write(self._key, state.part)

    def _collective(self, tag: int) -> Collective | None:
        """The all_reduce with this tag; None if it is too old, or its layer is gone."""
        if tag > 0:
            boxes = [*self.group_state.boxes.values()]
            return next((begun for box in boxes for begun in [*box.begun] if begun.number == tag), None)
        sites, pass_name = [*self.group_state.sites.values()], "forward" if tag % 2 else "backward"
        return next((Collective(site, IN_CUDA_GRAPH, pass_name) for site in sites if site.order == -tag // 2), None)

    def _explained(self, kind: int) -> Exception:
        ranks = self.group_state.ranks
        parts = self.rank.wait_for(ranks, self._key, ANSWER_SECONDS)
        parts[ranks.index(self.rank.rank)] = self.group_state.part  # also if the store is gone
        answers = [part for part in parts if part is not None]
        faults = [(part["is TypeError"], part["error"]) if part and "error" in part else None for part in parts]
        doing = answers[0]["doing"]
        if kind == ONE_VALUE:
            return ValueError(f"syncbn: {ONE_VALUE_PER_CHANNEL} in {doing}. Use a larger batch or eval().")
        if kind == RANKS_DIFFER and len(answers) == len(parts) and all("path" in part for part in answers):
            try:
                require_one_layer(ranks, answers, has_fault=any(faults))
            except RanksDifferError as error:
                return error
        if any(faults):
            return error_of_others(faults, ranks, f" in {doing}")
        unknown = f"has not answered within {ANSWER_SECONDS:g} s, and may run a compiled model"
        where = by_rank(ranks, [unknown if part is None else f"in {part['doing']}" for part in parts])
        if kind == BAD_ARGUMENT:
            return RuntimeError(f"syncbn: another rank has a bad argument.\n{where}")
        return RanksDifferError(f"{report.DIFFERENT_LAYERS}{where}\n{report.OTHER_LAYERS}")
