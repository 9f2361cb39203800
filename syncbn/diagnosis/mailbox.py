"""Keeps the words of mailboxes, and reads there which all_reduces on a GPU have ended, without a call of CUDA.

A kernel notes in a mailbox what it saw of a total. There is one mailbox for each group, device and stream, as a stream
runs kernels in order. Its memory is never given back: queued kernels and CUDA graphs may still write to it.

    tag                 names an all_reduce: its number in the group, from 1; in a CUDA graph < 0, for a layer and pass
    words               three int64 in pinned memory, which kernels write and the host reads:
      ENDED             the tag of the last all_reduce whose total a kernel has read
      FAULT             the tag of the first faulty all_reduce, and the kind of the fault
      LOCAL_NOT_FINITE  the tag of the first forward to which this rank gave NaN or infinity; the host sets it to 0
    state               FAULT again, in the GPU's memory: behind a fault kernels update no running statistics
    begun               the last all_reduces that the host has begun: which layer a tag means
    part                of this rank in the faulty all_reduce: its layer, call and pass, and its error if it has one
    look                the watchdog reads the words, once a second
    tell                this rank writes its part to the store, where the others read it
    error               what the ranks raise, made of all parts
"""

import bisect
import ctypes
import operator
import time
from abc import ABC, abstractmethod
from collections import deque

import torch
from torch import Tensor

from syncbn.diagnosis.positions import Wait
from syncbn.kernels.interface import ENDED

MOST_KEPT = 1024  # all_reduces that a mailbox can name, some ten steps of a ResNet-50

_memory: list[Tensor] = []  # of all mailboxes


class Box(ABC):
    """The words of a mailbox, and the last all_reduces that have begun with it."""

    def __init__(self, device: torch.device) -> None:
        host = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")  # a test has no GPU
        state = torch.zeros(1, dtype=torch.int64, device=device)
        _memory.extend((host, state))
        self.host, self.state = host.data_ptr(), state.data_ptr()
        self.words = (ctypes.c_int64 * 3).from_address(self.host)
        self.begun: deque[Wait] = deque(maxlen=MOST_KEPT)  # their numbers, which ascend, are the tags
        self._oldest: Wait | None = None

    def unfinished(self) -> Wait | None:
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

    @abstractmethod
    def look(self) -> None:
        """The watchdog looks: tells what kernels have noted."""

    @abstractmethod
    def tell(self, tag: int, error: Exception | None = None) -> None:
        """Write this rank's part in the all_reduce with this tag, once; with its `error`, if that is the fault."""

    @abstractmethod
    def error(self) -> Exception:
        """What every rank of the group raises because of a fault that kernels have noted."""
