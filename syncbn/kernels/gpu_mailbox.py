"""Looks at the total of an all_reduce in Triton, and notes in a mailbox what it saw: see Mailbox in interface.py.

gpu.py launches it. Stores go to the host's memory, where nobody waits for them. Uses only features of Triton 3.6.
"""

# Triton has types of its own, and reads this source: constants are upper case.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from syncbn.kernels import interface

ENDED, FAULT = tl.constexpr(interface.ENDED), tl.constexpr(interface.FAULT)
LOCAL_NOT_FINITE = tl.constexpr(interface.LOCAL_NOT_FINITE)
RANKS_DIFFER, BAD_ARGUMENT = tl.constexpr(interface.RANKS_DIFFER), tl.constexpr(interface.BAD_ARGUMENT)
ONE_VALUE = tl.constexpr(interface.ONE_VALUE)


SUMS = tl.constexpr(256)  # that are looked at at once
MAILBOX = ["host", "state", "tag"]  # integers, which are all 0 where there is no mailbox


@triton.jit
def words_at(address):
    """A pointer to them. The interpreter makes an int32 of an address of 0."""
    return tl.cast(tl.cast(address, tl.int64), tl.pointer_type(tl.int64))


@triton.jit
def note_unless_finite(first, second, host, tag):
    """Stores the number of the all_reduce if one of these sums of a rank is infinite or NaN, and the word is 0. Only
    then it is loaded, as that takes long from the host's memory."""
    is_nan = first * 0 + second * 0 != 0  # 0 times an infinite sum is NaN, and that is not 0
    tags = tl.full(first.shape, tag, tl.int64)
    words = words_at(host) + LOCAL_NOT_FINITE + tl.zeros_like(tags)
    is_free = tl.load(words, mask=tl.where(tag > 0, is_nan, False), other=1) == 0
    tl.store(words, tags, mask=is_free)


@triton.jit
def look(trailer, is_forward, host, state, tag):
    """Whether there is a fault, in this total or an earlier one. The first program notes the first fault, and that the
    all_reduce has ended. Without a mailbox nothing is a fault."""
    num_values, num_signed = tl.load(trailer), tl.load(trailer + 1)
    total, squares = tl.load(trailer + 2), tl.load(trailer + 3)
    kind = tl.where(tl.where(is_forward != 0, num_values, 0.0) == 1.0, ONE_VALUE, 0)
    kind = tl.where(num_values != num_values, BAD_ARGUMENT, kind)
    kind = tl.where(num_signed * squares != total * total, RANKS_DIFFER, kind)
    kind = tl.where(tag != 0, kind, 0)
    earlier = tl.load(words_at(state), mask=tag != 0, other=0)
    if tl.program_id(0) == 0:
        if tl.where(earlier == 0, kind, 0) != 0:
            fault = tl.cast(tag, tl.int64) * 4 + kind
            tl.store(words_at(state), fault)
            tl.store(words_at(host) + FAULT, fault)
        if tag > 0:
            tl.store(words_at(host) + ENDED, tag)
    return tl.where(earlier == 0, kind, 1) != 0


@triton.jit(do_not_specialize=[*MAILBOX, "is_forward", "num_sums"], do_not_specialize_on_alignment=["trailer", "sums"])
def look_at_total(trailer, sums, host: tl.int64, state: tl.int64, tag: tl.int64, is_forward, num_sums):
    """For a total that the kernels of a GPU do not read, and the sums of this rank in it. Behind a fault n becomes 0,
    and torch's operations then leave the running statistics as they are."""
    if look(trailer, is_forward, host, state, tag):
        tl.store(trailer, 0.0)
    for start in range(0, num_sums, SUMS):
        index = start + tl.arange(0, SUMS)
        numbers = tl.load(sums + index, mask=index < num_sums, other=0.0)
        note_unless_finite(numbers, numbers, host, tag)
