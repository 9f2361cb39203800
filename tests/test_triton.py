"""Tests what only Triton's kernels do: they store faults and the id of a call in status words, because the host does
not wait for a total; they need fewer launches for a single rank; and they are tried once, with options of the GPU.

test_kernels.py tests their results. Without a GPU: TRITON_INTERPRET=1 pytest -m triton tests/test_triton.py
"""

import functools
import math
from unittest.mock import patch

import pytest
import torch
from kernel_calls import Sizes, backward_config, draw, forward_backward, forward_config, only_triton
from torch import Tensor

from syncbn import payload
from syncbn.kernels import interface, select
from syncbn.kernels.interface import BackEnd, BackwardConfig, ForwardConfig, ReluMask, StatusWords
from syncbn.kernels.layout import Layout

pytestmark = only_triton
RUNS, ROWS = (70, 3, 37), (140, 40, 1)  # sizes whose sums have two parts
NAN = math.nan
LARGE = 2**25 - 1  # the largest signature of two ranks
NO_FAULT, RANKS_DIFFER, BAD_ARGUMENT, ONE_VALUE = 0, interface.RANKS_DIFFER, interface.BAD_ARGUMENT, interface.ONE_VALUE
C = 20  # channels: three programs


def make_total(sums: list[float], n: float, num_signed: float, signature: float, square: float) -> Tensor:
    """Return a total with a count of 3."""
    return torch.tensor([*sums, n, 3.0, num_signed, signature, square], dtype=torch.float64)


class Batch:
    """A batch of 8 values per channel, its buffers, and status words. `forward`, `backward` and `check` run a kernel
    that reads a total with the given trailer."""

    def __init__(self, kernels: BackEnd) -> None:
        self.kernels, self.state = kernels, torch.zeros(1, dtype=torch.int64)
        self.host = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=self.state.is_cuda)
        self.x, self.buffers = torch.ones(2, C, 4), (torch.zeros(C), torch.ones(C), torch.tensor(3))

    def status_words(self, sequence_number: int) -> StatusWords | None:
        return StatusWords(self.host.data_ptr(), self.state.data_ptr(), sequence_number) if sequence_number else None

    def read(self) -> list[int]:
        """Return the words of the host: ENDED, FAULT and LOCAL_NOT_FINITE."""
        if self.state.is_cuda:
            torch.cuda.synchronize()
        return self.host.tolist()

    def fault(self) -> tuple[int, int]:
        """Return the sequence number and kind of the first fault, which the GPU's memory contains too."""
        word = self.read()[interface.FAULT]
        assert self.state.item() == word
        return divmod(word, 4)

    def forward(self, sequence_number: int, *trailer: float, averages: bool = False) -> tuple[Tensor, Tensor]:
        """Return y and the statistics. The buffers are new."""
        self.buffers = torch.zeros(C), torch.ones(C), torch.tensor(3)
        dtypes = {"mean_dtype": torch.float32, "var_dtype": torch.float32, "has_counter": True, "averages": averages}
        kernel, momentum = self.kernels.Forward(forward_config(self.x, **dtypes)), None if averages else 1.0
        inputs, total = (self.x, None, None, None), make_total([1.0] * 2 * C, *trailer)
        return kernel.forward_outputs(inputs, total, self.buffers, momentum, self.status_words(sequence_number))[:2]

    def has_updated_buffers(self) -> bool:
        """Return whether the last forward has updated the running statistics of all channels, and the counter once.
        **Raises** AssertionError if it has updated some of them."""
        assert self.buffers[-1] in (3, 4)
        has_changed = torch.cat([(new != old).view(-1) for new, old in zip(self.buffers, (0, 1, 3), strict=True)])
        assert has_changed.all() or not has_changed.any()
        return bool(has_changed[-1])

    def backward(self, sequence_number: int, *trailer: float, needs_x: bool = True) -> None:
        saved = self.x, None, torch.ones(3 * C + 4, dtype=torch.float64), None
        total, status_words = make_total([1.0] * 2 * C, *trailer), self.status_words(sequence_number)
        self.kernels.Backward(backward_config(self.x, needs_x=needs_x)).backward_outputs(
            self.x, saved, total, status_words
        )

    def check(self, sequence_number: int, *trailer: float, is_forward: bool) -> float:
        """Return n in the total after `check_total`."""
        total = make_total([5.0], *trailer)
        self.kernels.check_total(total, is_forward, self.status_words(sequence_number))
        assert total.tolist()[2:] == [3.0, *trailer[1:]]
        return payload.num_values(total).item()


GOOD, DIFFERING = (8, 2, 10, 50), (8, 2, 11, 61)
TRAILERS = [  # n, number of signed ranks, sum of signatures, sum of squares
    (GOOD, NO_FAULT), ((8, 2, 2 * LARGE, 2 * LARGE**2), NO_FAULT),
    ((8, 2, 2 * LARGE - 1, LARGE**2 + (LARGE - 1) ** 2), RANKS_DIFFER), (DIFFERING, RANKS_DIFFER),
    ((8, 1, 5, 25), NO_FAULT), ((8, 0, 0, 0), NO_FAULT),  # The other rank has not signed, or no rank has.
    ((NAN, 1, 5, 25), BAD_ARGUMENT), ((NAN, 2, 11, 61), RANKS_DIFFER), ((1, 2, 11, 61), RANKS_DIFFER),
    ((1, 2, 10, 50), ONE_VALUE), ((2, 2, 10, 50), NO_FAULT), ((0, 2, 10, 50), NO_FAULT),
]  # fmt: skip
FAULTS = [(2**40 + 1, *case) for case in TRAILERS]
# Captured graphs have negative sequence numbers. 0 stands for a call without status words.
FAULTS += [(number, *case) for number in (-6, 0) for case in TRAILERS if case[0] in (GOOD, DIFFERING, (1, 2, 10, 50))]


@pytest.mark.parametrize(("sequence_number", "trailer", "kind"), FAULTS, ids=str)
def test_kernels_that_read_a_total_find_the_same_fault(
    kernels: BackEnd, sequence_number: int, trailer: tuple[float, ...], kind: int
) -> None:
    """One value per channel is a fault in forward only. A captured graph stores faults, and no end of an all_reduce."""
    num_values, num_signed, signature, square = trailer
    ranks_differ = num_signed * square != signature * signature  # EagerCall compares the same on CPUs.
    assert ranks_differ == (kind == RANKS_DIFFER)
    kind = kind if sequence_number else NO_FAULT
    kind_in_backward = NO_FAULT if kind == ONE_VALUE else kind
    parameter_backward = functools.partial(Batch.backward, needs_x=False)
    calls = [(Batch.forward, kind), (Batch.backward, kind_in_backward), (parameter_backward, kind_in_backward)]
    if sequence_number:
        calls.append((functools.partial(Batch.check, is_forward=True), kind))
        calls.append((functools.partial(Batch.check, is_forward=False), kind_in_backward))
    for call, fault in calls:
        batch = Batch(kernels)
        result = call(batch, sequence_number, *trailer)
        assert not isinstance(result, float) or result == (0 if fault else num_values)
        assert batch.fault() == ((sequence_number, fault) if fault else (0, NO_FAULT))
        assert batch.read()[interface.ENDED] == max(0, sequence_number)
        assert batch.read()[interface.LOCAL_NOT_FINITE] == 0
        if call is Batch.forward and (fault or num_values > 1):
            assert batch.has_updated_buffers() == (fault == NO_FAULT)


@pytest.mark.parametrize("averages", [False, True])
def test_the_first_fault_stays_and_stops_updates_of_buffers_but_no_outputs(kernels: BackEnd, averages: bool) -> None:
    batch = Batch(kernels)
    expected = batch.forward(1, *GOOD, averages=averages)
    assert batch.has_updated_buffers()
    batch.backward(2, NAN, 2, 10, 50)
    assert batch.fault() == (2, BAD_ARGUMENT)
    for sequence_number, trailer in ((3, GOOD), (4, DIFFERING), (-2, DIFFERING), (5, GOOD)):
        results = batch.forward(sequence_number, *trailer, averages=averages)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
        assert not batch.has_updated_buffers()
        assert batch.fault() == (2, BAD_ARGUMENT)
    assert batch.check(6, *GOOD, is_forward=True) == 0
    assert batch.read() == [6, 2 * 4 + BAD_ARGUMENT, 0]


@pytest.mark.parametrize("counts", [[], [7], [255], [256], [7, 9], [7, 8], [7, 7, 6], [2**40 + 255] * 3, [1023] * 999])
def test_the_id_of_a_call_is_the_mean_count_of_signed_ranks(kernels: BackEnd, counts: list[int]) -> None:
    """It is rounded down, modulo 256, and 0 if no rank signs."""
    batch, call_id = Batch(kernels), torch.full((1,), NAN, dtype=torch.float64)
    total = payload.from_sums(torch.ones(2 * C, dtype=torch.float64), 20)
    total = functools.reduce(torch.add, [payload.sign(total, 5, count) for count in counts], total)
    status_words = batch.status_words(1)._replace(call_id=call_id.data_ptr())
    expected = math.floor(sum(counts) / max(1, len(counts))) % 256
    kernel = kernels.Forward(forward_config(batch.x))
    kernel.forward_outputs((batch.x, None, None, None), total, status_words=status_words)
    assert call_id.item() == expected
    call_id.fill_(NAN)
    kernels.check_total(total, True, status_words)
    assert call_id.item() == expected


# The square of 1e30 is infinite in float32.
@pytest.mark.parametrize(("value", "sizes"), [(math.inf, (4, 3, 5)), (NAN, ROWS), (1e30, RUNS), (1e30, ROWS)], ids=str)
def test_the_first_forward_with_sums_that_are_not_finite_is_stored(
    kernels: BackEnd, sizes: Sizes, value: float
) -> None:
    """LOCAL_NOT_FINITE is the first since the host has cleared the word, and no fault. Backward stores nothing, because
    a GradScaler lets gradients overflow."""
    batch, x = Batch(kernels), torch.ones(sizes)
    forward_sums = kernels.Forward(forward_config(x)).forward_sums
    sums = forward_sums(x, 5, 1, batch.status_words(3))
    assert batch.read() == [0, 0, 0]
    assert torch.equal(sums, forward_sums(x, 5, 1))
    x[-1, -1, -1] = value
    forward_sums(x, 5)
    forward_sums(x, 5, 1, batch.status_words(-3))
    saved = x, None, torch.ones(3 * sizes[1] + 1, dtype=torch.float64), None
    kernels.Backward(backward_config(x)).backward_sums(x, saved)
    assert batch.read() == [0, 0, 0]
    for sequence_number in (3, 4):
        forward_sums(x, 5, 1, batch.status_words(sequence_number))
        assert batch.read() == [0, 0, 3]
    batch.host.zero_()
    forward_sums(x, 5, 1, batch.status_words(5))
    assert batch.read() == [0, 0, 5]


@pytest.mark.parametrize(("sizes", "relu"), [((5, 2, 49), True), (RUNS, False), (ROWS, True)], ids=str)
def test_kernels_for_a_single_rank_return_the_same(kernels: BackEnd, sizes: Sizes, relu: bool) -> None:
    """A copy of the sums may be the total."""
    dy, x = draw(2, sizes, torch.float32)
    weight, bias, results = torch.rand(sizes[1]), torch.rand(sizes[1]), []
    config = forward_config(x, relu=relu, weight_dtype=weight.dtype, bias_dtype=bias.dtype)
    forward = kernels.Forward(config)
    for calls in (forward, forward.for_single_rank):
        y, statistics, _ = calls.forward_outputs((x, weight, bias, None), calls.forward_sums(x).clone())
        saved, single_rank = (x, weight, statistics, None), calls.config.single_rank
        config = backward_config(
            x, relu_mask=ReluMask.FROM_X if relu else ReluMask.NONE, weight_dtype=weight.dtype,
            grad_weight_dtype=weight.dtype, grad_bias_dtype=bias.dtype, needs_x=True, single_rank=single_rank,
        )  # fmt: skip
        backward = kernels.Backward(config)
        sums, *parameter_gradients = backward.backward_sums(dy, saved)
        results.append([y, statistics, *parameter_gradients, backward.backward_outputs(dy, saved, sums.clone())[0]])
    assert all(map(torch.equal, *results))


def test_a_gpu_that_computes_right_values_passes_the_try(kernels: BackEnd) -> None:
    """test_gpu_launches.py tries kernels that do nothing."""
    select._try_triton(torch.get_default_device())


@pytest.mark.parametrize("version", ["6.4", None])
def test_registers_are_limited_except_on_amd(
    kernels: BackEnd, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For AMD's GPUs, which torch calls cuda too, `maxnreg` is an unknown option, and a KeyError."""
    monkeypatch.setattr(torch.version, "hip", version)
    fields = Layout(1, False, (4, 3, 64)), torch.float32, torch.device("cpu")
    forward, backward = kernels.Forward(ForwardConfig(*fields)), kernels.Backward(BackwardConfig(*fields))
    for launch in (forward.partial_sums, forward.normalize, backward.partial_sums, backward.input_gradient):
        assert ("maxnreg" in launch.options) == (version is None)


@pytest.mark.parametrize("sizes", [(1, 1, 20_000), (600, 33, 1)], ids=str)
def test_a_program_may_process_many_tiles(kernels: BackEnd, sizes: Sizes) -> None:
    """Large tensors have more tiles than programs. A program then adds several float32 sums in float64, and elementwise
    kernels process the tiles in reverse order."""
    dy, x = draw(2, sizes, torch.float32)
    expected = forward_backward(kernels, dy, x, relu=True)
    with patch.multiple(kernels, MAX_PARTS=1, ELEMENTWISE_PROGRAMS=1):
        assert kernels.Forward(forward_config(x)).num_parts == 1
        actual = forward_backward(kernels, dy, x, relu=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-3)  # sums in another order
