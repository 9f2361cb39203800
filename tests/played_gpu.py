"""Plays a GPU on a CPU: the host reads no total, and what the kernels of a GPU note in mailboxes the player notes.

With TRITON_INTERPRET=1 the kernels of a GPU are interpreted and note it themselves.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
from equal_to_torch import forget_kernels
from torch import Tensor

from syncbn import kernel_cache, payload
from syncbn.kernels import cpu, select
from syncbn.kernels.interface import (
    BAD_ARGUMENT,
    ENDED,
    FAULT,
    LOCAL_NOT_FINITE,
    NO_BUFFERS,
    ONE_VALUE,
    RANKS_DIFFER,
    StatusWords,
)
from syncbn.payload import UNSIGNED
from syncbn.ranks import watchdog

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


class Player:
    """Notes at once, or as long as it is `behind` nothing."""

    behind = False

    def note(self, total: Tensor, needs_two_values: bool, status_words: StatusWords) -> bool:
        """As `check_trailer` in gpu_channels.py: whether there is a fault."""
        n, count, num_signed, signatures, squares = total[payload.TRAILER].tolist()
        if status_words.call_id:  # which a later kernel reads
            ctypes.c_double.from_address(status_words.call_id).value = count // max(1, num_signed) % payload.NUM_IDS
        if self.behind:
            return False
        kind = ONE_VALUE if needs_two_values and n == 1 else 0
        kind = BAD_ARGUMENT if n != n else kind
        kind = RANKS_DIFFER if num_signed * squares != signatures**2 else kind
        host = (ctypes.c_int64 * 3).from_address(status_words.host_address)
        state = ctypes.c_int64.from_address(status_words.device_address)
        if kind and not state.value:
            state.value = host[FAULT] = status_words.sequence_number * 4 + kind
        if status_words.sequence_number > 0:
            host[ENDED] = status_words.sequence_number
        return state.value != 0

    def check_total(self, total: Tensor, needs_two_values: bool, words: StatusWords, sums: Tensor | None) -> None:
        if self.note(total, needs_two_values, words):
            payload.num_values(total).zero_()
        if sums is not None:
            self.record_not_finite(payload.sums(sums), words)

    def record_not_finite(self, sums: Tensor, status_words: StatusWords) -> None:
        if status_words.sequence_number > 0 and not sums.isfinite().all():
            host = (ctypes.c_int64 * 3).from_address(status_words.host_address)
            host[LOCAL_NOT_FINITE] = host[LOCAL_NOT_FINITE] or status_words.sequence_number

    def forward_sums(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def play(kernels: Any, x: Tensor, signature: int = UNSIGNED, count: int = 0, status_words: Any = None) -> Any:
            sums = compute(kernels, x, signature, count)
            if status_words is not None:
                self.record_not_finite(sums, status_words)
            return sums

        return play

    def forward_outputs(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def play(
            kernels: Any,
            inputs: Any,
            total: Tensor,
            buffers: Any = NO_BUFFERS,
            momentum: Any = 0.0,
            status_words: Any = None,
        ) -> Any:
            if status_words is not None and self.note(total, True, status_words):
                buffers = [None if buffer is None else buffer.clone() for buffer in buffers]
            return (*compute(kernels, inputs, total, buffers, momentum)[:2], True)

        return play

    def backward_sums(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def play(kernels: Any, dy: Tensor, saved: Any, signature: int = UNSIGNED, call_id: Tensor | None = None) -> Any:
            if signature != UNSIGNED and call_id is not None:
                signature += int(call_id)
            return compute(kernels, dy, saved, signature)

        return play

    def backward_outputs(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def play(kernels: Any, dy: Tensor, saved: Any, total: Tensor, status_words: Any = None) -> Any:
            if status_words is not None:
                self.note(total, False, status_words)
            return compute(kernels, dy, saved, total)

        return play


def play(monkeypatch: pytest.MonkeyPatch) -> Player:
    """From now on."""
    player = Player()
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    monkeypatch.setattr(select, "checks_totals", lambda device: True)
    if IS_INTERPRETED:
        gpu = importlib.import_module("syncbn.kernels.gpu")
        monkeypatch.setattr(kernel_cache, "fast_path_back_end", lambda kind: gpu)
        forget_kernels(monkeypatch)
    else:
        for kernels, names in (
            (cpu.Forward, ("forward_sums", "forward_outputs")),
            (cpu.Backward, ("backward_sums", "backward_outputs")),
        ):
            for name in names:
                monkeypatch.setattr(kernels, name, getattr(player, name)(getattr(kernels, name)))
        monkeypatch.setattr(select, "check_total", player.check_total)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.05)
    return player
