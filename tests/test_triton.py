"""Tests what only Triton's kernels do. test_kernels.py tests their results.

The host does not wait for a total, so the kernels that read a total store faults and the id of the call in status
words. Without a GPU run TRITON_INTERPRET=1 pytest -m triton tests/test_triton.py
"""

import math
from unittest.mock import patch

import pytest
import torch
from kernel_calls import TRITON, Sizes, assert_identical, draw, forward_config, run_backward, run_both, run_forward
from torch import Tensor

from syncbn import payload
from syncbn.kernels import interface, select
from syncbn.kernels.interface import BAD_ARGUMENT, ONE_VALUE, RANKS_DIFFER, BackEnd, ReluMask, StatusWords

pytestmark = pytest.mark.parametrize("kernels", [TRITON], indirect=True)
NO_FAULT = 0
LARGEST_SIGNATURE = 2**26 - 1
CHANNELS = 9  # The kernels that read a total process 8 channels in each program.
TWO_PARTS = [(70, 3, 37), (140, 40, 1)]  # sizes whose sums are added from two partial sums


class StatusMemory:
    """The status words of a stream: three words that the host reads, and a copy of the fault for later kernels."""

    def __init__(self) -> None:
        self.device_word = torch.zeros(1, dtype=torch.int64)
        self.host_words = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=self.device_word.is_cuda)
        self.call_id = torch.full((1,), math.nan, dtype=torch.float64)

    def addresses(self, sequence_number: int) -> StatusWords:
        words = self.host_words.data_ptr(), self.device_word.data_ptr()
        return StatusWords(*words, sequence_number, self.call_id.data_ptr())

    def read(self) -> tuple[int, tuple[int, int], int]:
        """Return ENDED; the sequence number and the kind of FAULT; and LOCAL_NOT_FINITE."""
        if self.device_word.is_cuda:
            torch.cuda.synchronize()
        ended, fault, not_finite = self.host_words.tolist()
        return ended, divmod(fault, 4), not_finite


def make_total(signatures: list[int], num_values: float, counts: list[int] | None = None) -> Tensor:
    """Return the total of ranks with these signatures and counts. A rank with a signature of 0 does not sign."""
    total = payload.from_sums(torch.ones(2 * CHANNELS, dtype=torch.float64), num_values)
    zeros = torch.zeros_like(total)
    for signature, count in zip(signatures, counts or [3] * len(signatures), strict=True):
        total = total + payload.sign(zeros, signature, count)
    return total


def new_buffers() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(CHANNELS), torch.full((CHANNELS,), 5.0), torch.tensor(3)


def read_total(
    kernels: BackEnd, reader: str, total: Tensor, status_words: StatusWords, momentum: float | None = 1.0
) -> tuple[Tensor, ...]:
    """Run the kernel `reader` on this total. Return y and new buffers, which a forward may have updated. Unless the
    reader is a forward, y is x."""
    statistics = torch.ones(interface.num_statistics(CHANNELS, ReluMask.FROM_Y), dtype=torch.float64)
    y = x = torch.ones(8, CHANNELS, 1)
    buffers = new_buffers()
    if reader == "forward":
        y = run_forward(kernels, x, total, buffers=buffers, momentum=momentum, status_words=status_words).y
    elif reader.startswith("backward"):
        run_backward(kernels, x, x, statistics, total, needs_x=reader == "backward", status_words=status_words)
    else:
        kernels.check_total(total, reader == "check_total of a forward", status_words)
    return y, *buffers


READERS = ["forward", "check_total of a forward", "backward", "backward without grad_x", "check_total of a backward"]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("sequence_number", [2**40 + 1, -6])  # more than 32 bits; negative: in a CUDA graph
@pytest.mark.parametrize(
    ("signatures", "num_values", "kind"),
    [
        ([5, 5], 8, NO_FAULT), ([LARGEST_SIGNATURE] * 2, 8, NO_FAULT),
        ([5, 6], 8, RANKS_DIFFER), ([LARGEST_SIGNATURE, LARGEST_SIGNATURE - 1], 8, RANKS_DIFFER),
        ([5, 0], 8, NO_FAULT), ([0, 0], 8, NO_FAULT),  # Ranks that do not sign are not compared.
        ([5, 0], math.nan, BAD_ARGUMENT), ([5, 6], math.nan, RANKS_DIFFER),
        ([5, 5], 1, ONE_VALUE), ([5, 6], 1, RANKS_DIFFER), ([5, 5], 2, NO_FAULT), ([5, 5], 0, NO_FAULT),
    ],
    ids=str,
)  # fmt: skip
def test_each_kernel_that_reads_a_total_stores_the_fault(
    kernels: BackEnd, reader: str, sequence_number: int, signatures: list[int], num_values: float, kind: int
) -> None:
    """Running statistics change unless there is a fault or n = 0. n = 1 is a fault only in a forward. From a CUDA graph
    the host cannot learn which all_reduce has ended."""
    if kind == ONE_VALUE and "backward" in reader:
        kind = NO_FAULT
    status, total = StatusMemory(), make_total(signatures, num_values)
    _, running_mean, running_var, counter = read_total(kernels, reader, total, status.addresses(sequence_number))
    fault = (sequence_number, kind) if kind else (0, NO_FAULT)
    assert status.read() == (max(0, sequence_number), fault, 0)
    if reader == "forward":
        assert counter == (3 if kind else 4)
        changed = torch.full((CHANNELS,), kind == NO_FAULT and num_values > 0)
        assert torch.equal(running_mean != 0, changed)
        assert torch.equal(running_var != 5, changed)
    elif reader.startswith("check_total"):  # After a fault n is set to 0, so torch operations update no statistic.
        assert payload.num_values(total) == (0 if kind else num_values)


@pytest.mark.parametrize("momentum", [1.0, None])
def test_after_a_fault_outputs_are_right_but_no_buffer_changes(kernels: BackEnd, momentum: float | None) -> None:
    """Later faults are not stored."""
    status, good, differing = StatusMemory(), make_total([5, 5], 8), make_total([5, 6], 8)
    y, *_ = read_total(kernels, "forward", good, status.addresses(1), momentum)
    read_total(kernels, "backward", make_total([5, 5], math.nan), status.addresses(2))
    for sequence_number, total in ((3, good), (-2, differing), (4, differing), (5, good)):  # -2: in a CUDA graph
        results = read_total(kernels, "forward", total, status.addresses(sequence_number), momentum)
        assert all(map(torch.equal, results, (y, *new_buffers())))
    read_total(kernels, "check_total of a forward", good, status.addresses(6))
    assert payload.num_values(good) == 0  # because of the fault in call 2
    assert status.read() == (6, (2, BAD_ARGUMENT), 0)


@pytest.mark.parametrize("reader", ["forward", "check_total of a forward"])
@pytest.mark.parametrize(
    ("counts", "call_id"),
    [([], 0), ([7], 7), ([256], 0), ([7, 8], 7), ([7, 7, 6], 6), ([2**40 + 255] * 3, 255), ([1023] * 99, 255)],
    ids=str,
)
def test_the_id_of_a_call_is_the_mean_count_of_signed_ranks(
    kernels: BackEnd, reader: str, counts: list[int], call_id: int
) -> None:
    """The mean is rounded down, modulo 256."""
    status = StatusMemory()
    read_total(kernels, reader, make_total([5] * len(counts), 20, counts), status.addresses(1))
    assert status.call_id.item() == call_id


@pytest.mark.parametrize(
    ("value", "sizes"),
    [(math.inf, (4, 3, 5)), (1e30, TWO_PARTS[0]), (math.nan, TWO_PARTS[1])],  # 1e30^2 is infinite in float32.
    ids=str,
)
def test_the_first_forward_with_non_finite_sums_is_stored(kernels: BackEnd, sizes: Sizes, value: float) -> None:
    """The host warns and clears the word. Then the next forward with non-finite sums is stored."""
    status, x = StatusMemory(), torch.ones(sizes)
    forward_sums = kernels.Forward(forward_config(x)).forward_sums

    def stored(*sequence_numbers: int) -> int:
        """Return LOCAL_NOT_FINITE after forwards with these sequence numbers."""
        for number in sequence_numbers:
            forward_sums(x, 5, 1, status.addresses(number))
        return status.read()[2]

    assert stored(2) == 0
    x[-1, -1, -1] = value
    assert stored(-3) == 0  # A CUDA graph does not store its number.
    assert stored(3, 4) == 3
    status.host_words.zero_()
    assert stored(5) == 5


@pytest.mark.parametrize("sizes", [(5, 2, 49), *TWO_PARTS], ids=str)
def test_the_kernels_for_a_single_rank_return_the_same_bits(kernels: BackEnd, sizes: Sizes) -> None:
    """A single rank needs fewer launches: the kernel that reads the total adds the partial sums."""
    dy, x, weight, bias = *draw(2, sizes, torch.float32), torch.rand(sizes[1]), torch.rand(sizes[1])
    options = {"relu": True, "weight": weight, "bias": bias}
    forward, backward = run_both(kernels, dy, x, **options)
    single_forward, single_backward = run_both(kernels, dy, x, single_rank=True, **options)
    # The payload of a single rank contains partial sums.
    assert_identical(single_forward[1:], forward[1:])
    assert_identical(single_backward[1:], backward[1:])


@pytest.mark.parametrize("sizes", [(1, 1, 20_000), (600, 33, 1)], ids=str)
def test_a_program_may_process_many_tiles(kernels: BackEnd, sizes: Sizes) -> None:
    """Large tensors have more tiles than programs. A program then adds several float32 sums in float64, and elementwise
    kernels process the tiles in reverse order."""
    dy, x = draw(2, sizes, torch.float32)
    expected = run_both(kernels, dy, x, relu=True)
    with patch.multiple(kernels, MAX_PARTS=1, ELEMENTWISE_PROGRAMS=1):
        assert kernels.Forward(forward_config(x)).num_parts == 1
        actual = run_both(kernels, dy, x, relu=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)  # The order of the additions differs.


def test_a_gpu_with_right_values_is_accepted(kernels: BackEnd) -> None:
    """test_gpu_static.py tests a GPU with wrong values."""
    select._try_triton(torch.get_default_device())
