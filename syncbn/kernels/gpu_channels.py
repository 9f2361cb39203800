"""Triton kernels over per-channel values: they add partial sums, compute coefficients and update running statistics.
They also check the total of an all_reduce and store the result in status words, see StatusWords in interface.py.

Each program computes CHANNELS_PER_PROGRAM channels in float64. gpu.py launches the kernels. The code uses only features
of Triton 3.6.

`partials` are partial sums (num_parts, 2, channels), in forward followed by n, the number of values per channel. A
total over all ranks is passed as one part. No kernel waits for its stores to the status words in the host's memory.
"""

# Triton compiles this source and has types of its own. Constants are upper case. If a branch on a constant returns, the
# rest of the function must be in an explicit else.
# mypy: ignore-errors
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

from syncbn import payload
from syncbn.kernels import interface
from syncbn.statistics import N_COPIES

# Kernels can read values of other modules only as tl.constexpr.
N_COPIES = tl.constexpr(N_COPIES)
NUM_VALUES, COUNT, IS_SIGNED = map(tl.constexpr, (payload.NUM_VALUES, payload.COUNT, payload.IS_SIGNED))
SIGNATURE, SQUARE, NUM_IDS = map(tl.constexpr, (payload.SIGNATURE, payload.SQUARE, payload.NUM_IDS))
ENDED, FAULT, LOCAL_NOT_FINITE = map(tl.constexpr, (interface.ENDED, interface.FAULT, interface.LOCAL_NOT_FINITE))
FAULT_KINDS = interface.RANKS_DIFFER, interface.BAD_ARGUMENT, interface.ONE_VALUE
RANKS_DIFFER, BAD_ARGUMENT, ONE_VALUE = map(tl.constexpr, FAULT_KINDS)

CHANNELS_PER_PROGRAM = tl.constexpr(8)
PARTS_PER_STEP = tl.constexpr(128)  # parts that a program loads at once
SUMS_PER_STEP = tl.constexpr(256)  # sums that check_total loads at once
STATUS_WORDS = [
    "host_words",
    "device_word",
    "sequence_number",
    "call_id",
]  # the fields of StatusWords; all 0 if there are none
# Without these lists Triton would compile a kernel again for other values of the scalars, and for tensors at addresses
# that are not multiples of 16.
SIZES = ["num_parts", "num_sums", "channels", "masks_by_x", "needs_two_values", *STATUS_WORDS]
TENSORS = [
    "partials", "sums", "weight", "bias", "running_mean", "running_var", "counter", "counter_before", "statistics",
    "grad_weight", "grad_bias", "coefficients", "trailer",
]  # fmt: skip


@triton.jit
def store_trailer(trailer, num_values, count, signature):
    """Store the trailer of a payload: see `sign` in payload.py. If the signature s is 0, store n and zeros."""
    s = tl.cast(signature, tl.float64)  # Triton's interpreter passes an int32.
    tl.store(trailer + NUM_VALUES, num_values)
    tl.store(trailer + COUNT, tl.where(s != 0, tl.cast(count, tl.float64), 0.0))
    tl.store(trailer + IS_SIGNED, tl.where(s != 0, 1.0, 0.0).to(tl.float64))
    tl.store(trailer + SIGNATURE, s)
    tl.store(trailer + SQUARE, s * s)


@triton.jit
def int64_pointer(address):
    """Return a pointer to int64 words at this address. Triton's interpreter passes an address of 0 as an int32."""
    return tl.cast(tl.cast(address, tl.int64), tl.pointer_type(tl.int64))


@triton.jit
def float64_pointer(address):
    """Return a pointer to float64 values at this address, see `int64_pointer`."""
    return tl.cast(tl.cast(address, tl.int64), tl.pointer_type(tl.float64))


@triton.jit
def record_not_finite(first, second, host_words, sequence_number):
    """Store the sequence number in LOCAL_NOT_FINITE if one of these sums is not finite and the word is 0.

    The word is loaded only for sums that are not finite, because loads from the host's memory are slow.
    """
    is_nan = first * 0 + second * 0 != 0  # 0 times an infinite sum is NaN, which differs from 0
    sequence_numbers = tl.full(first.shape, sequence_number, tl.int64)
    words = int64_pointer(host_words) + LOCAL_NOT_FINITE + tl.zeros_like(sequence_numbers)
    is_free = tl.load(words, mask=tl.where(sequence_number > 0, is_nan, False), other=1) == 0
    tl.store(words, sequence_numbers, mask=is_free)


@triton.jit
def check_trailer(trailer, needs_two_values, host_words, device_word, sequence_number, call_id):
    """Return whether this total or an earlier total has a fault, or False without status words.

    The first program stores the first fault in FAULT, the sequence number in ENDED, and the id of the call at the
    address `call_id` unless it is 0.
    """
    num_values, num_signed = tl.load(trailer + NUM_VALUES), tl.load(trailer + IS_SIGNED)
    signature_sum, square_sum = tl.load(trailer + SIGNATURE), tl.load(trailer + SQUARE)
    fault_kind = tl.where(tl.where(needs_two_values != 0, num_values, 0.0) == 1.0, ONE_VALUE, 0)
    fault_kind = tl.where(num_values != num_values, BAD_ARGUMENT, fault_kind)
    fault_kind = tl.where(num_signed * square_sum != signature_sum * signature_sum, RANKS_DIFFER, fault_kind)
    fault_kind = tl.where(sequence_number != 0, fault_kind, 0)
    earlier_fault = tl.load(int64_pointer(device_word), mask=sequence_number != 0, other=0)
    if tl.program_id(0) == 0:
        if tl.where(earlier_fault == 0, fault_kind, 0) != 0:
            fault = tl.cast(sequence_number, tl.int64) * 4 + fault_kind
            tl.store(int64_pointer(device_word), fault)
            tl.store(int64_pointer(host_words) + FAULT, fault)
        if sequence_number > 0:
            tl.store(int64_pointer(host_words) + ENDED, sequence_number)
        if call_id != 0:
            mean_count = tl.load(trailer + COUNT) / tl.maximum(num_signed, 1.0)
            tl.store(float64_pointer(call_id), (mean_count.to(tl.int64) & (NUM_IDS - 1)).to(tl.float64))
    return tl.where(earlier_fault == 0, fault_kind, 1) != 0


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def check_total(
    trailer, sums, host_words: tl.int64, device_word: tl.int64, sequence_number: tl.int64, call_id: tl.int64,
    needs_two_values, num_sums,
):  # fmt: skip
    """Check a total that only torch operations read, and whether the `num_sums` sums of this rank are finite.

    After a fault, n in the trailer is set to 0, so that the torch operations do not update the running statistics.
    """
    if check_trailer(trailer, needs_two_values, host_words, device_word, sequence_number, call_id):
        tl.store(trailer + NUM_VALUES, 0.0)
    for start in range(0, num_sums, SUMS_PER_STEP):
        index = start + tl.arange(0, SUMS_PER_STEP)
        values = tl.load(sums + index, mask=index < num_sums, other=0.0)
        record_not_finite(values, values, host_words, sequence_number)


@triton.jit
def _load_parameter(pointer, channel, exists, default: tl.constexpr):
    """Return weight or bias in float64, or `default` if the pointer is None."""
    if pointer is None:
        return tl.full([], default, tl.float64)
    else:
        return tl.load(pointer + channel, mask=exists, other=0.0).to(tl.float64)


@triton.jit
def _store_rounded(pointer, index, value, exists):
    """Store a float64 in the dtype of the pointer. A 16-bit dtype is rounded from float32, as in torch."""
    if pointer.dtype.element_ty != tl.float64:
        value = value.to(tl.float32)
    tl.store(pointer + index, value, mask=exists)


@triton.jit
def _program_channels(channels):
    """Return the channels of this program and a mask of those that exist."""
    channel = tl.program_id(0) * CHANNELS_PER_PROGRAM + tl.arange(0, CHANNELS_PER_PROGRAM)
    return channel, channel < channels


@triton.jit
def _add_partials(partials, num_parts, channels):
    """Return the two sums of each channel over all parts."""
    channel, exists = _program_channels(channels)
    first = tl.zeros((PARTS_PER_STEP, CHANNELS_PER_PROGRAM), tl.float64)
    second = tl.zeros((PARTS_PER_STEP, CHANNELS_PER_PROGRAM), tl.float64)
    for first_part in range(0, num_parts, PARTS_PER_STEP):
        part = first_part + tl.arange(0, PARTS_PER_STEP)
        mask = (part < num_parts)[:, None] & exists[None, :]
        pointers = partials + 2 * tl.cast(part, tl.int64)[:, None] * channels + channel[None, :]
        first += tl.load(pointers, mask=mask, other=0.0)
        second += tl.load(pointers + channels, mask=mask, other=0.0)
    return tl.sum(first, 0), tl.sum(second, 0)


@triton.jit
def _store_sums(sums, first, second, channels):
    channel, exists = _program_channels(channels)
    tl.store(sums + channel, first, mask=exists)
    tl.store(sums + channels + channel, second, mask=exists)


@triton.jit
def _update_running(running, statistic, channel, exists, enough, factor):
    """Compute running = (1 - factor) * running + factor * statistic if there are enough values per channel."""
    old = tl.load(running + channel, mask=exists, other=0.0).to(tl.float64)
    _store_rounded(running, channel, tl.where(enough, (1 - factor) * old + factor * statistic, old), exists)


@triton.jit
def _store_center(coefficients, mean, channel, exists):
    """Store center, the mean in the dtype of the coefficients, and return mean - center."""
    center = mean.to(coefficients.dtype.element_ty)
    tl.store(coefficients + channel, center, mask=exists)
    return mean - center.to(tl.float64)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def add_partials(partials, sums, signature: tl.float64, count: tl.float64, channels, num_parts):
    """Store the forward payload: the sums over all parts, and the trailer."""
    first, second = _add_partials(partials, num_parts, channels)
    num_values = tl.load(partials + 2 * tl.cast(num_parts, tl.int64) * channels + NUM_VALUES)
    _store_sums(sums, first, second, channels)
    if tl.program_id(0) == 0:
        store_trailer(sums + 2 * channels, num_values, count, signature)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def forward_channels(
    partials, weight, bias, running_mean, running_var, counter, counter_before, statistics, coefficients,
    momentum: tl.float64, host_words: tl.int64, device_word: tl.int64, sequence_number: tl.int64, call_id: tl.int64,
    channels, num_parts, masks_by_x, eps: tl.float64,
):  # fmt: skip
    """Store the statistics and the coefficients of y, and update the running statistics and the counter.

    With `counter_before`, a copy of the counter, the running statistics become the average over all batches. Unless
    masks_by_x is 0, scale and shift are appended to the statistics. Pass status words only if `partials` is a total, so
    that num_parts = 1.
    """
    channel, exists = _program_channels(channels)
    first, second = _add_partials(partials, num_parts, channels)
    trailer = partials + 2 * tl.cast(num_parts, tl.int64) * channels
    num_values = tl.load(trailer + NUM_VALUES)
    is_first = tl.program_id(0) == 0
    divisor = tl.maximum(num_values, 1.0)
    mean = first / divisor
    var = second / divisor - mean * mean
    var = tl.where(var < 0, 0.0, var)  # NaN is kept
    invstd = 1.0 / tl.sqrt(var + eps)
    tl.store(statistics + channel, mean, mask=exists)
    tl.store(statistics + channels + channel, var, mask=exists)
    tl.store(statistics + 2 * channels + channel, invstd, mask=exists)
    tl.store(statistics + 3 * channels + tl.arange(0, N_COPIES), num_values, mask=is_first)
    has_fault = check_trailer(trailer, 1, host_words, device_word, sequence_number, call_id)
    if counter is not None:
        tl.store(counter, tl.load(counter) + 1, mask=tl.where(has_fault, False, is_first))
    rest = _store_center(coefficients, mean, channel, exists)
    scale = _load_parameter(weight, channel, exists, 1.0) * invstd
    shift = _load_parameter(bias, channel, exists, 0.0) - rest * scale
    _store_rounded(coefficients, channels + channel, scale, exists)
    _store_rounded(coefficients, 2 * channels + channel, shift, exists)
    stores_relu = tl.where(masks_by_x != 0, exists, False)  # & would give an int32 in Triton's interpreter
    tl.store(statistics + N_COPIES + 3 * channels + channel, scale, mask=stores_relu)
    tl.store(statistics + N_COPIES + 4 * channels + channel, shift, mask=stores_relu)
    if running_mean is not None:
        factor = momentum if counter_before is None else 1.0 / (tl.load(counter_before) + 1).to(tl.float64)
        exists = tl.where(has_fault, False, exists)
        _update_running(running_mean, mean, channel, exists, num_values > 0, factor)
        unbiased_var = var * (num_values / tl.maximum(num_values - 1, 1.0))
        _update_running(running_var, unbiased_var, channel, exists, num_values > 1, factor)


@triton.jit
def _sums_and_gradients(
    partials, statistics, grad_weight, grad_bias, channels, num_parts, COMPUTE: tl.constexpr
):  # fmt: skip
    """Return the sums of dy and of dy * (x - mean) over all parts, and store the gradients of weight and bias."""
    channel, exists = _program_channels(channels)
    sum_dy, sum_dy_xmu = _add_partials(partials, num_parts, channels)
    mean = tl.load(statistics + channel, mask=exists, other=0.0)
    rest = mean - mean.to(COMPUTE).to(tl.float64)  # because partial sums use x - center
    sum_dy_xmu -= tl.where(rest != 0, rest * sum_dy, 0.0)  # 0 times an infinite sum is NaN
    if grad_weight is not None:
        invstd = tl.load(statistics + 2 * channels + channel, mask=exists, other=0.0)
        _store_rounded(grad_weight, channel, sum_dy_xmu * invstd, exists)
    if grad_bias is not None:
        _store_rounded(grad_bias, channel, sum_dy, exists)
    return sum_dy, sum_dy_xmu


@triton.jit
def _store_coefficients(sum_dy, sum_dy_xmu, statistics, weight, coefficients, channels, masks_by_x):
    """Store the coefficients of grad_x, computed from the sums of all ranks."""
    channel, exists = _program_channels(channels)
    mean = tl.load(statistics + channel, mask=exists, other=0.0)
    invstd = tl.load(statistics + 2 * channels + channel, mask=exists, other=0.0)
    divisor = tl.maximum(tl.load(statistics + 3 * channels), 1.0)
    a = _load_parameter(weight, channel, exists, 1.0) * invstd
    b = -a * invstd * invstd * (sum_dy_xmu / divisor)
    rest = _store_center(coefficients, mean, channel, exists)
    _store_rounded(coefficients, channels + channel, a, exists)
    _store_rounded(coefficients, 2 * channels + channel, b, exists)
    _store_rounded(coefficients, 3 * channels + channel, -a * (sum_dy / divisor) - b * rest, exists)
    stores_relu = tl.where(masks_by_x != 0, exists, False)
    for index in tl.static_range(3, 5):
        value = tl.load(statistics + N_COPIES + index * channels + channel, mask=stores_relu, other=0.0)
        _store_rounded(coefficients, (index + 1) * channels + channel, value, stores_relu)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def gradient_sums(
    partials, sums, statistics, grad_weight, grad_bias, signature: tl.float64, call_id: tl.int64, channels, num_parts,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store the backward payload, which is the sums over all parts and the trailer; and the gradients of weight and
    bias. Unless the address `call_id` is 0, the id of the call is added to the signature."""
    first, second = _sums_and_gradients(partials, statistics, grad_weight, grad_bias, channels, num_parts, COMPUTE)
    _store_sums(sums, first, second, channels)
    if tl.program_id(0) == 0:
        s, zero = tl.cast(signature, tl.float64), tl.full([], 0.0, tl.float64)
        if call_id != 0:
            s = tl.where(s != 0, s + tl.load(float64_pointer(call_id)), 0.0)
        store_trailer(sums + 2 * channels, zero, zero, s)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def backward_channels(
    sums, statistics, weight, coefficients, host_words: tl.int64, device_word: tl.int64, sequence_number: tl.int64,
    call_id: tl.int64, channels, masks_by_x,
):  # fmt: skip
    """Check the total and store the coefficients of grad_x."""
    check_trailer(sums + 2 * channels, 0, host_words, device_word, sequence_number, call_id)
    first, second = _add_partials(sums, 1, channels)
    _store_coefficients(first, second, statistics, weight, coefficients, channels, masks_by_x)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=TENSORS)
def backward_channels_single_rank(
    partials, statistics, grad_weight, grad_bias, weight, coefficients, channels, num_parts, masks_by_x,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Do the work of gradient_sums and backward_channels in one launch, for a single rank."""
    first, second = _sums_and_gradients(partials, statistics, grad_weight, grad_bias, channels, num_parts, COMPUTE)
    _store_coefficients(first, second, statistics, weight, coefficients, channels, masks_by_x)
