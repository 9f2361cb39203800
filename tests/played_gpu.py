"""Let a CPU play a GPU: kernels, not the host, check the total of an all_reduce, and store faults in status words.

With TRITON_INTERPRET=1 Triton's interpreter runs the GPU kernels. Otherwise the reference computes, and `check_total`
below checks the totals.
"""

import ctypes
import importlib.util
import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
from equal_to_torch import clear_kernel_caches
from torch import Tensor

from syncbn import kernel_cache, payload, torch_internals
from syncbn.kernels import reference, select
from syncbn.kernels.interface import BAD_ARGUMENT, ENDED, FAULT, LOCAL_NOT_FINITE, ONE_VALUE, RANKS_DIFFER, StatusWords

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def check_total(total: Tensor, needs_two_values: bool, words: StatusWords, sums: Tensor | None) -> None:
    """Store in the status words what a total shows, like the kernel `check_total` in gpu_channels.py."""
    num_values, count, num_signed, signature_sum, square_sum = total[payload.TRAILER].tolist()
    host_words = (ctypes.c_int64 * 3).from_address(words.host_address)
    device_word = ctypes.c_int64.from_address(words.device_address)
    if words.call_id:
        ctypes.c_double.from_address(words.call_id).value = count // max(1, num_signed) % payload.NUM_IDS
    fault_kind = 0
    if num_signed * square_sum != signature_sum**2:
        fault_kind = RANKS_DIFFER
    elif math.isnan(num_values):
        fault_kind = BAD_ARGUMENT
    elif needs_two_values and num_values == 1:
        fault_kind = ONE_VALUE
    if fault_kind and not device_word.value:
        device_word.value = host_words[FAULT] = words.sequence_number * 4 + fault_kind
    if words.sequence_number > 0:
        host_words[ENDED] = words.sequence_number
        if sums is not None and not payload.sums(sums).isfinite().all():
            host_words[LOCAL_NOT_FINITE] = host_words[LOCAL_NOT_FINITE] or words.sequence_number


class Forward(reference.Forward):
    """The reference, which updates no buffer after a fault, like the GPU kernels."""

    def forward_outputs(self, inputs: Any, total: Tensor, buffers: Any, momentum: Any, status_words: Any) -> Any:
        if status_words is not None and ctypes.c_int64.from_address(status_words.device_address).value:
            buffers = None, None, None
        return super().forward_outputs(inputs, total, buffers, momentum)


def play(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Treat all tensors as tensors of a GPU until the end of the test. Return an object whose `stream` is the handle of
    the current stream. A test sets it to None for a stream that captures a CUDA graph."""
    gpu, back_end = SimpleNamespace(stream=0), SimpleNamespace(Forward=Forward, Backward=reference.Backward)
    if IS_INTERPRETED:
        back_end = importlib.import_module("syncbn.kernels.gpu")
    clear_kernel_caches(monkeypatch)
    for target, name, value in (
        (Tensor, "is_cuda", True), (Tensor, "is_cpu", False),
        (select, "checks_totals", lambda device: True),
        (select, "check_total", select.check_total if IS_INTERPRETED else check_total),
        (kernel_cache, "fast_path_back_end", lambda config: back_end),
        (torch_internals, "stream_handle", lambda device: gpu.stream),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    return gpu
