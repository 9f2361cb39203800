"""Let a CPU play a GPU: kernels, not the host, check the total of an all_reduce, and store faults in status words.

With TRITON_INTERPRET=1 Triton's interpreter runs the GPU kernels. Otherwise the C++ kernels compute, and the functions
below check the totals.
"""

import ctypes
import importlib.util
import math
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from equal_to_torch import clear_kernel_caches
from torch import Tensor

from syncbn import kernel_cache, payload, torch_internals
from syncbn.kernels import cpu, select
from syncbn.kernels.interface import BAD_ARGUMENT, ENDED, FAULT, LOCAL_NOT_FINITE, ONE_VALUE, RANKS_DIFFER, StatusWords
from syncbn.payload import UNSIGNED
from syncbn.ranks import report, watchdog

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def check_trailer(total: Tensor, needs_two_values: bool, words: StatusWords) -> bool:
    """Store the fault of a total, if any. Return whether this or an earlier total has a fault. See `check_trailer` in
    gpu_channels.py."""
    num_values, count, num_signed, signature_sum, square_sum = total[payload.TRAILER].tolist()
    host_words = (ctypes.c_int64 * 3).from_address(words.host_address)
    device_word = ctypes.c_int64.from_address(words.device_address)
    if words.call_id:
        ctypes.c_double.from_address(words.call_id).value = count // max(1, num_signed) % payload.NUM_IDS
    kind = 0
    if num_signed * square_sum != signature_sum**2:
        kind = RANKS_DIFFER
    elif math.isnan(num_values):
        kind = BAD_ARGUMENT
    elif needs_two_values and num_values == 1:
        kind = ONE_VALUE
    if kind and not device_word.value:
        device_word.value = host_words[FAULT] = words.sequence_number * 4 + kind
    if words.sequence_number > 0:
        host_words[ENDED] = words.sequence_number
    return device_word.value != 0


def check_finite(sums: Tensor, words: StatusWords) -> None:
    host_words = (ctypes.c_int64 * 3).from_address(words.host_address)
    if words.sequence_number > 0 and not payload.sums(sums).isfinite().all():
        host_words[LOCAL_NOT_FINITE] = host_words[LOCAL_NOT_FINITE] or words.sequence_number


def check_total(total: Tensor, needs_two_values: bool, words: StatusWords, sums: Tensor | None) -> None:
    if check_trailer(total, needs_two_values, words):
        payload.num_values(total).zero_()  # With n = 0 dispatched kernels do not update running statistics.
    if sums is not None:
        check_finite(sums, words)


class Forward(cpu.Forward):
    def forward_sums(self, x: Tensor, signature: int = UNSIGNED, count: int = 0, status_words: Any = None) -> Tensor:
        sums = super().forward_sums(x, signature, count)
        if status_words is not None:
            check_finite(sums, status_words)
        return sums

    def forward_outputs(self, inputs: Any, total: Tensor, buffers: Any, momentum: Any, status_words: Any) -> Any:
        if status_words is not None and check_trailer(total, True, status_words):
            buffers = [None if buffer is None else buffer.clone() for buffer in buffers]  # Only the copies change.
        y, statistics, _ = super().forward_outputs(inputs, total, buffers, momentum)
        return y, statistics, True  # True: the status words report sums that are not finite.


class Backward(cpu.Backward):
    def backward_sums(self, dy: Tensor, saved: Any, signature: int = UNSIGNED, call_id: Tensor | None = None) -> Any:
        if signature != UNSIGNED and call_id is not None:
            signature += int(call_id)
        return super().backward_sums(dy, saved, signature)

    def backward_outputs(self, dy: Tensor, saved: Any, total: Tensor, status_words: Any = None) -> Any:
        if status_words is not None:
            check_trailer(total, False, status_words)
        return super().backward_outputs(dy, saved, total)


def play(
    monkeypatch: pytest.MonkeyPatch, poll_seconds: float = 0.05, answer_seconds: float = report.ANSWER_SECONDS
) -> SimpleNamespace:
    """Treat all tensors as tensors of a GPU until the end of the test. Return an object whose `stream` is the handle of
    the current stream. A test sets it to None for a stream that captures a CUDA graph."""
    gpu, back_end = SimpleNamespace(stream=0), sys.modules[__name__]
    is_available = IS_INTERPRETED or cpu.load() is None
    if IS_INTERPRETED:
        back_end = importlib.import_module("syncbn.kernels.gpu")
    clear_kernel_caches(monkeypatch)
    for target, name, value in (
        (Tensor, "is_cuda", True), (Tensor, "is_cpu", False),
        (select, "checks_totals", lambda device: True), (select, "check_total", back_end.check_total),
        (kernel_cache, "fast_path_back_end", lambda config: back_end if is_available else None),
        (torch_internals, "stream_handle", lambda device: gpu.stream),
        (watchdog, "POLL_SECONDS", poll_seconds), (report, "ANSWER_SECONDS", answer_seconds),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    return gpu
