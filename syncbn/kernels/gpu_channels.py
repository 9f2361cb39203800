"""Triton kernels over per-channel values: they add partial sums, compute coefficients and update running statistics.
They also check the total of an all_reduce and store the result in status words, see StatusWords in interface.py.

Each program handles CHANNELS channels and computes in float64. gpu.py launches the kernels. Uses only features of
Triton 3.6.

`parts` are partial sums (num_parts, 2, channels), in forward followed by n, the number of values per channel. The total
over all ranks counts as one part. Stores to the status words in the host's memory are not waited for.
"""

# Triton has types of its own, and reads this source: constants are upper case, branches on them need their else.
# mypy: ignore-errors
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

from syncbn.kernels import interface
from syncbn.statistics import N_COPIES

N_COPIES = tl.constexpr(N_COPIES)
ENDED, FAULT = tl.constexpr(interface.ENDED), tl.constexpr(interface.FAULT)
LOCAL_NOT_FINITE = tl.constexpr(interface.LOCAL_NOT_FINITE)
RANKS_DIFFER, BAD_ARGUMENT = tl.constexpr(interface.RANKS_DIFFER), tl.constexpr(interface.BAD_ARGUMENT)
ONE_VALUE = tl.constexpr(interface.ONE_VALUE)

CHANNELS, PARTS = tl.constexpr(8), tl.constexpr(128)  # that a program adds at once
MIXED = tl.constexpr(1024)  # sums whose bits a program mixes at once
MIXER = tl.constexpr(interface.MIXER)
SUMS = tl.constexpr(256)  # that look_at_total looks at at once
STATUS_WORDS = ["host", "state", "sequence_number"]  # integers, all 0 without status words
# Triton would compile anew for other values of these, and for tensors that begin between multiples of 16 bytes.
SIZES = ["num_parts", "channels", "of_relu", *STATUS_WORDS]
TENSORS = [
    "parts", "sums", "weight", "bias", "running_mean", "running_var", "counter", "counter_before", "statistics",
    "grad_weight", "grad_bias", "coefficients",
]  # fmt: skip


@triton.jit
def store_trailer(trailer, num_values, signature):
    """n, 1, s and s^2, or n and zeros."""
    s = tl.cast(signature, tl.float64)  # to the interpreter it is an int32
    tl.store(trailer, num_values)
    tl.store(trailer + 1, tl.where(s != 0, 1.0, 0.0).to(tl.float64))
    tl.store(trailer + 2, s)
    tl.store(trailer + 3, s * s)


@triton.jit
def words_at(address):
    """A pointer to them. The interpreter makes an int32 of an address of 0."""
    return tl.cast(tl.cast(address, tl.int64), tl.pointer_type(tl.int64))


@triton.jit
def note_unless_finite(first, second, host, sequence_number):
    """Stores the number of the all_reduce if one of these sums of a rank is infinite or NaN, and the word is 0. Only
    then it is loaded, as that takes long from the host's memory."""
    is_nan = first * 0 + second * 0 != 0  # 0 times an infinite sum is NaN, and that is not 0
    sequence_numbers = tl.full(first.shape, sequence_number, tl.int64)
    words = words_at(host) + LOCAL_NOT_FINITE + tl.zeros_like(sequence_numbers)
    is_free = tl.load(words, mask=tl.where(sequence_number > 0, is_nan, False), other=1) == 0
    tl.store(words, sequence_numbers, mask=is_free)


@triton.jit
def look(trailer, is_forward, host, state, sequence_number):
    """Whether there is a fault, in this total or an earlier one. The first program notes the first fault, and that the
    all_reduce has ended. Without status words nothing is a fault."""
    num_values, num_signed = tl.load(trailer), tl.load(trailer + 1)
    total, squares = tl.load(trailer + 2), tl.load(trailer + 3)
    fault_kind = tl.where(tl.where(is_forward != 0, num_values, 0.0) == 1.0, ONE_VALUE, 0)
    fault_kind = tl.where(num_values != num_values, BAD_ARGUMENT, fault_kind)
    fault_kind = tl.where(num_signed * squares != total * total, RANKS_DIFFER, fault_kind)
    fault_kind = tl.where(sequence_number != 0, fault_kind, 0)
    earlier = tl.load(words_at(state), mask=sequence_number != 0, other=0)
    if tl.program_id(0) == 0:
        if tl.where(earlier == 0, fault_kind, 0) != 0:
            fault = tl.cast(sequence_number, tl.int64) * 4 + fault_kind
            tl.store(words_at(state), fault)
            tl.store(words_at(host) + FAULT, fault)
        if sequence_number > 0:
            tl.store(words_at(host) + ENDED, sequence_number)
    return tl.where(earlier == 0, fault_kind, 1) != 0


@triton.jit(
    do_not_specialize=[*STATUS_WORDS, "is_forward", "num_sums"], do_not_specialize_on_alignment=["trailer", "sums"]
)
def look_at_total(trailer, sums, host: tl.int64, state: tl.int64, sequence_number: tl.int64, is_forward, num_sums):
    """For a total that the kernels of a GPU do not read, and the sums of this rank in it. Behind a fault n becomes 0,
    and torch's operations then leave the running statistics as they are."""
    if look(trailer, is_forward, host, state, sequence_number):
        tl.store(trailer, 0.0)
    for start in range(0, num_sums, SUMS):
        index = start + tl.arange(0, SUMS)
        numbers = tl.load(sums + index, mask=index < num_sums, other=0.0)
        note_unless_finite(numbers, numbers, host, sequence_number)


@triton.jit
def _number(pointer, channel, exists, default: tl.constexpr):
    """A parameter of a channel, which may be None."""
    if pointer is None:
        return tl.full([], default, tl.float64)
    else:
        return tl.load(pointer + channel, mask=exists, other=0.0).to(tl.float64)


@triton.jit
def _store_number(pointer, index, number, exists):
    """Rounded by way of float32, as torch rounds a float64."""
    if pointer.dtype.element_ty != tl.float64:
        number = number.to(tl.float32)
    tl.store(pointer + index, number, mask=exists)


@triton.jit
def _channels(channels):
    """The channels of the program, and which of them exist."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    return channel, channel < channels


@triton.jit
def _total(parts, num_parts, channels):
    """The two sums of each channel over all parts."""
    channel, exists = _channels(channels)
    first = tl.zeros((PARTS, CHANNELS), tl.float64)
    second = tl.zeros((PARTS, CHANNELS), tl.float64)
    for first_part in range(0, num_parts, PARTS):
        part = first_part + tl.arange(0, PARTS)
        mask = (part < num_parts)[:, None] & exists[None, :]
        pointers = parts + 2 * tl.cast(part, tl.int64)[:, None] * channels + channel[None, :]
        first += tl.load(pointers, mask=mask, other=0.0)
        second += tl.load(pointers + channels, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _store_sums(sums, first, second, channels):
    channel, exists = _channels(channels)
    tl.store(sums + channel, first, mask=exists)
    tl.store(sums + channels + channel, second, mask=exists)


@triton.jit
def _update(running, statistic, channel, exists, enough, share):
    """A running statistic by the one of a batch, which has this share in it, where there are enough values."""
    old = tl.load(running + channel, mask=exists, other=0.0).to(tl.float64)
    _store_number(running, channel, tl.where(enough, (1 - share) * old + share * statistic, old), exists)


@triton.jit
def _store_split(coefficients, mean, channel, exists):
    """Stores the center, in the dtype of the coefficients; returns what it lacks of the mean."""
    center = mean.to(coefficients.dtype.element_ty)
    tl.store(coefficients + channel, center, mask=exists)
    return mean - center.to(tl.float64)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def add_parts(parts, sums, signature: tl.float64, channels, num_parts):
    """Makes a payload of the parts: the sums, n and the signature."""
    first, second = _total(parts, num_parts, channels)
    num_values = tl.load(parts + 2 * tl.cast(num_parts, tl.int64) * channels)
    _store_sums(sums, first, second, channels)
    if tl.program_id(0) == 0:
        store_trailer(sums + 2 * channels, num_values, signature)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def forward_channels(
    parts, weight, bias, running_mean, running_var, counter, counter_before, statistics, coefficients,
    momentum: tl.float64, host: tl.int64, state: tl.int64, sequence_number: tl.int64, channels, num_parts, of_relu,
    eps: tl.float64,
):  # fmt: skip
    """Adds up the parts, stores the statistics and the coefficients of y, and updates the running statistics, which
    average all batches if there is a copy of the counter. Unless of_relu is 0, scale and shift follow the statistics.
    With status words there is one part, the total of an all_reduce."""
    channel, exists = _channels(channels)
    first, second = _total(parts, num_parts, channels)
    trailer = parts + 2 * tl.cast(num_parts, tl.int64) * channels
    num_values = tl.load(trailer)
    is_first = tl.program_id(0) == 0
    count = tl.maximum(num_values, 1.0)
    mean = first / count
    var = second / count - mean * mean
    var = tl.where(var < 0, 0.0, var)  # NaN stays
    invstd = 1.0 / tl.sqrt(var + eps)
    tl.store(statistics + channel, mean, mask=exists)
    tl.store(statistics + channels + channel, var, mask=exists)
    tl.store(statistics + 2 * channels + channel, invstd, mask=exists)
    tl.store(statistics + 3 * channels + tl.arange(0, N_COPIES), num_values, mask=is_first)
    has_fault = look(trailer, 1, host, state, sequence_number)
    if counter is not None:
        tl.store(counter, tl.load(counter) + 1, mask=tl.where(has_fault, False, is_first))
    rest = _store_split(coefficients, mean, channel, exists)
    scale = _number(weight, channel, exists, 1.0) * invstd
    shift = _number(bias, channel, exists, 0.0) - rest * scale
    _store_number(coefficients, channels + channel, scale, exists)
    _store_number(coefficients, 2 * channels + channel, shift, exists)
    keeps = tl.where(of_relu != 0, exists, False)  # with &, Triton's interpreter makes an int32
    tl.store(statistics + N_COPIES + 3 * channels + channel, scale, mask=keeps)
    tl.store(statistics + N_COPIES + 4 * channels + channel, shift, mask=keeps)
    if running_mean is not None:
        share = momentum if counter_before is None else 1.0 / (tl.load(counter_before) + 1).to(tl.float64)
        exists = tl.where(has_fault, False, exists)
        _update(running_mean, mean, channel, exists, num_values > 0, share)
        unbiased_var = var * (num_values / tl.maximum(num_values - 1, 1.0))
        _update(running_var, unbiased_var, channel, exists, num_values > 1, share)


@triton.jit
def _sums_and_gradients(
    parts, statistics, grad_weight, grad_bias, channels, num_parts, COMPUTE: tl.constexpr
):  # fmt: skip
    """The sums of dy and of dy * (x - mean) over all parts; stores the gradients of the parameters."""
    channel, exists = _channels(channels)
    sum_dy, sum_dy_xmu = _total(parts, num_parts, channels)
    mean = tl.load(statistics + channel, mask=exists, other=0.0)
    rest = mean - mean.to(COMPUTE).to(tl.float64)  # the parts are about the center, not the mean
    sum_dy_xmu -= tl.where(rest != 0, rest * sum_dy, 0.0)  # 0 times an infinite sum is NaN
    if grad_weight is not None:
        invstd = tl.load(statistics + 2 * channels + channel, mask=exists, other=0.0)
        _store_number(grad_weight, channel, sum_dy_xmu * invstd, exists)
    if grad_bias is not None:
        _store_number(grad_bias, channel, sum_dy, exists)
    return sum_dy, sum_dy_xmu


@triton.jit
def _store_coefficients(sum_dy, sum_dy_xmu, statistics, weight, coefficients, channels, of_relu):
    """Those of grad_x, by the sums of all ranks."""
    channel, exists = _channels(channels)
    mean = tl.load(statistics + channel, mask=exists, other=0.0)
    invstd = tl.load(statistics + 2 * channels + channel, mask=exists, other=0.0)
    count = tl.maximum(tl.load(statistics + 3 * channels), 1.0)
    a = _number(weight, channel, exists, 1.0) * invstd
    b = -a * invstd * invstd * (sum_dy_xmu / count)
    rest = _store_split(coefficients, mean, channel, exists)
    _store_number(coefficients, channels + channel, a, exists)
    _store_number(coefficients, 2 * channels + channel, b, exists)
    _store_number(coefficients, 3 * channels + channel, -a * (sum_dy / count) - b * rest, exists)
    keeps = tl.where(of_relu != 0, exists, False)  # scale and shift, which follow the statistics
    for row in tl.static_range(3, 5):
        number = tl.load(statistics + N_COPIES + row * channels + channel, mask=keeps, other=0.0)
        _store_number(coefficients, (row + 1) * channels + channel, number, keeps)


@triton.jit
def _signature_of_call(signature, forward_total, channels):
    """See reference.py. An address of 0 changes nothing."""
    s = tl.cast(signature, tl.float64)  # to the interpreter it is an int32
    mixed = tl.zeros((MIXED,), tl.int64)
    for first in range(0, 2 * channels, MIXED):
        index = tl.cast(first + tl.arange(0, MIXED), tl.int64)
        exists = tl.where(forward_total != 0, index < 2 * channels, False)
        bits = tl.load(words_at(forward_total) + index, mask=exists, other=0)
        number = bits.to(tl.float64, bitcast=True)
        mixed += tl.where(number == number, bits, 0) * (2 * index + 1)
    bits_of_highest = s.to(tl.int64, bitcast=True) & -(2**52)  # without the fraction of the float64
    highest = bits_of_highest.to(tl.float64, bitcast=True).to(tl.int64)
    of_call = ((tl.sum(mixed, 0) * MIXER >> 40) ^ s.to(tl.int64)) & (highest - 1) | highest
    return tl.where(tl.where(forward_total != 0, s, 0.0) != 0, of_call.to(tl.float64), s)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def gradient_sums(
    parts, sums, statistics, grad_weight, grad_bias, signature: tl.float64, forward_total: tl.int64, channels,
    num_parts, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Makes a payload of the parts: the sums, 0 and the signature."""
    first, second = _sums_and_gradients(parts, statistics, grad_weight, grad_bias, channels, num_parts, COMPUTE)
    _store_sums(sums, first, second, channels)
    if tl.program_id(0) == 0:
        signature = _signature_of_call(signature, forward_total, channels)
        store_trailer(sums + 2 * channels, tl.full([], 0.0, tl.float64), signature)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def backward_channels(
    sums, statistics, weight, coefficients, host: tl.int64, state: tl.int64, sequence_number: tl.int64, channels,
    of_relu,
):  # fmt: skip
    look(sums + 2 * channels, 0, host, state, sequence_number)
    first, second = _total(sums, 1, channels)
    _store_coefficients(first, second, statistics, weight, coefficients, channels, of_relu)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def backward_channels_of_parts(
    parts, statistics, grad_weight, grad_bias, weight, coefficients, channels, num_parts, of_relu,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """gradient_sums and backward_channels of one rank alone, in one launch."""
    first, second = _sums_and_gradients(parts, statistics, grad_weight, grad_bias, channels, num_parts, COMPUTE)
    _store_coefficients(first, second, statistics, weight, coefficients, channels, of_relu)
