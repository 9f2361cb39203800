"""The nine promises of docs/how_it_works.md, each with short tests.

A comment before the first test of each promise names the files with more cases. test_waits.py has the warning of a rank
that has waited 30 s for other ranks.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import HARD_INPUTS, errors_of_one_step, full_batch, hard_case
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from training import assert_state_unchanged
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.testing import unequal

C = 3
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs ranks raise at a later call: test_status.py")


# More: test_fuzz.py (random layers), test_wrappers.py.
@pytest.mark.parametrize("case", HARD_INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_promise_1_w_ranks_equal_one(ranks: Ranks, case: str, dtype: torch.dtype) -> None:
    """W ranks equal one rank that holds the concatenated batch: outputs, grad_input, running statistics; and
    grad_weight and grad_bias after summing over ranks.

    If mean / std is 1e4, sums of squares in float32 lose all digits of the variance. Sums in float64 lose 8 of 16
    digits, and the 8 that remain are more than a float32 result has."""
    samples = slice(ranks.rank, None, ranks.size)
    errors = errors_of_one_step(case, dtype, sync_batch_norm, samples, ranks.device)
    # Float64 sums of squares lose about 1e-16 * E[x^2] / var, and the bound is 20 times as large.
    lost = 2e-15 * full_batch(*hard_case(case, dtype)).cancellation
    bound = 1e-6 if dtype == torch.float32 else max(1e-12, lost)
    assert all(error <= bound for error in errors.values()), errors


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:syncbn. .*NaN or infinity")
def test_promise_1_holds_for_nan_and_infinity(ranks: Ranks, bad: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2 * ranks.size, C, 4, dtype=torch.float64)
    x[-1, 1, 2] = bad  # This is a sample of the last rank.
    alone, local = nn.BatchNorm1d(C, dtype=torch.float64), ranks.even_slice(len(x))
    layer = syncbn.SyncBatchNorm1d(C, dtype=torch.float64, device=ranks.device)
    torch.testing.assert_close(layer(x[local].to(ranks.device)).cpu(), alone(x)[local], equal_nan=True)
    torch.testing.assert_close(layer.cpu().state_dict(), alone.state_dict(), equal_nan=True)


# More: test_derivatives.py (second derivatives), test_step.py, test_wrappers.py (checkpointing), test_compile.py.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # CommDebugMode's own hook on the layer
@pytest.mark.parametrize("mode", [contextlib.nullcontext, CommDebugMode], ids=["fast path", "dispatched kernels"])
def test_promise_2_one_collective_each_way(ranks: Ranks, mode: Callable[[], Any]) -> None:
    """Forward and backward issue exactly 1 collective each, also on rank 0, which has no samples and whose input
    requires no gradient. Evaluation and a group of one rank issue none."""

    def count_collectives(layer: nn.Module, x: torch.Tensor) -> tuple[int, int]:
        count = dist.group.WORLD._get_sequence_number_for_group
        with mode() as collectives:  # Under CommDebugMode no call takes the fast path.
            before = count()
            y = layer(x)
            between = count()
            y.sum().backward()
        counts = between - before, count() - between
        # CommDebugMode counts the collectives of all groups, not of the default group only.
        assert collectives is None or collectives.get_total_counts() == sum(counts)
        return counts

    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    local_layer = syncbn.SyncBatchNorm(C, process_group=1, device=ranks.device)
    x = torch.randn(4, C, device=ranks.device, requires_grad=True)
    x_of_rank = torch.empty(0, C, device=ranks.device) if ranks.rank == 0 else x
    assert count_collectives(layer, x_of_rank) == (1, 1)
    assert count_collectives(layer.eval(), x_of_rank) == (0, 0)
    assert count_collectives(local_layer, x) == (0, 0)


# More: test_fuzz.py, test_recipes.py (ranks that run out of data).
@pytest.mark.parametrize("samples_of_rank_0", [5, 0])
def test_promise_3_uneven_and_empty_ranks_are_exact(ranks: Ranks, samples_of_rank_0: int) -> None:
    """Rank 0 has the first samples. The other ranks take the rest in turn."""
    start = samples_of_rank_0 + ranks.rank - 1
    samples = slice(start, None, ranks.size - 1) if ranks.rank else slice(samples_of_rank_0)
    errors = errors_of_one_step("N(0, 1)", torch.float64, sync_batch_norm, samples, ranks.device)
    assert all(error <= 1e-12 for error in errors.values()), errors


def test_promise_3_a_step_without_a_value_on_any_rank_changes_only_num_batches_tracked(ranks: Ranks) -> None:
    """The step makes no NaN, and gradients of empty inputs are empty, not None."""
    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    layer(torch.randn(4, C, device=ranks.device))
    expected = copy.deepcopy(layer.state_dict())
    expected["num_batches_tracked"] += 1
    x = torch.empty(0, C, 5, device=ranks.device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    torch.testing.assert_close(layer.state_dict(), expected, rtol=0, atol=0)
    assert not layer.weight.grad.any()
    assert not layer.bias.grad.any()


# More: test_running_stats.py (statistics over several batches), test_recipes.py.
def test_promise_4_running_statistics_have_the_same_bits_on_all_ranks(ranks: Ranks) -> None:
    """Running statistics are bit-identical on all ranks of the layer's group, updated in place (never rebound), once
    per step."""
    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    buffers = [(buffer, buffer.data_ptr()) for buffer in layer.buffers()]
    for step in range(1, 4):
        torch.manual_seed(100 * step + ranks.rank)
        layer(torch.randn(3 + ranks.rank, C, device=ranks.device))
        assert layer.num_batches_tracked == step
    assert unequal(layer.state_dict()) == []
    for buffer, (old, address) in zip(layer.buffers(), buffers, strict=True):
        assert buffer is old
        assert buffer.data_ptr() == address


def test_promise_4_can_be_checked_by_unequal_which_compares_bytes(ranks: Ranks) -> None:
    """NaN equals the same NaN, 0 does not equal -0, and strides do not count."""
    x = torch.arange(24.0, device=ranks.device).view(1, 2, 3, 4)
    nan = torch.full_like(x, torch.nan)
    # A name has two tensors: the tensor of the last rank, and the tensor of the other ranks.
    equal = {"strides": (x.to(memory_format=torch.channels_last), x), "empty": (x[:0], x[:0]), "NaN": (nan, nan)}
    different = {"one NaN": (nan, x), "transposed": (x.mT + 1, x.mT), "scalar": (x[0, 0, 0, 1], x[0, 0, 0, 2])}
    different |= {"bool": (x > 3, x > 4), "int": (x.long() + 3, x.long()), "bfloat16": (x.bfloat16() + 4, x.bfloat16())}
    different |= {"complex": (x * 1j, x * 2j), "sign of zero": (-0.0 * x, 0.0 * x)}
    is_last = ranks.rank == ranks.size - 1
    tensors = {name: last if is_last else other for name, (last, other) in (equal | different).items()}
    assert unequal(tensors) == [*different]


# More: test_fuzz.py (with a mask), test_conversion.py (without running statistics), test_layer.py.
def test_promise_5_evaluation_is_local(ranks: Ranks) -> None:
    """Evaluation never communicates, and computes F.batch_norm with the running statistics."""
    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    layer(torch.randn(4, C, device=ranks.device))
    x = torch.randn(2 + ranks.rank, C, 5, device=ranks.device)
    with CommDebugMode() as collectives:
        y = layer.eval()(x)
    assert collectives.get_total_counts() == 0
    expected = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps)
    assert torch.equal(y, expected)


# More: test_fuzz.py.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_promise_6_outputs_have_the_dtype_of_the_input_and_buffers_keep_theirs(
    ranks: Ranks, dtype: torch.dtype
) -> None:
    """The output has the input's dtype. Batch statistics are never below float32: bfloat16 would round the mean here,
    1 + 2^-8, to 1. A buffer keeps its dtype and is rounded once, when written."""
    layer = syncbn.SyncBatchNorm(C, momentum=1.0, device=ranks.device)
    layer.running_var = layer.running_var.bfloat16()
    x = torch.ones(4, C, device=ranks.device).to(dtype)
    x[::2] += 2**-7
    assert layer(x).dtype == dtype
    num_values = 4 * ranks.size
    unbiased_var = 2.0**-16 * num_values / (num_values - 1)
    expected = torch.full((C,), 1 + 2**-8), torch.full((C,), unbiased_var, dtype=torch.bfloat16)
    torch.testing.assert_close((layer.running_mean.cpu(), layer.running_var.cpu()), expected, rtol=0, atol=0)


# More: test_convert.py, test_wrappers.py (checkpoints of FSDP2).
def test_promise_7_checkpoints_load_both_ways(ranks: Ranks) -> None:
    """The keys of a state_dict are those of nn.BatchNorm, so checkpoints load both ways."""
    layer, plain = syncbn.SyncBatchNorm2d(C, device=ranks.device), nn.BatchNorm2d(C, device=ranks.device)
    assert list(layer.state_dict()) == list(plain.state_dict())
    layer(torch.randn(4, C, 2, 2, device=ranks.device))
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain.state_dict(), layer.state_dict(), rtol=0, atol=0)


# More: test_arguments.py (all messages), test_layer.py; test_status.py (GPUs).
@on_cpu
def test_promise_8_a_bad_argument_is_raised_on_every_rank(ranks: Ranks) -> None:
    """A bad argument is a ValueError or TypeError with the values and the remedy, in eager mode on every rank. On GPUs
    the other ranks raise at a later call."""
    layer, last = syncbn.SyncBatchNorm(C), ranks.size - 1
    message = "expected 3 channels in dim 1 of the input, got 4 .*; correct num_features"
    if ranks.rank == last:
        x, message = torch.randn(4, C + 1), f"^SyncBatchNorm: {message}"
    else:
        x, message = torch.randn(4, C), f"in SyncBatchNorm forward, call 1.\nrank {last}: ValueError: {message}"
    with assert_state_unchanged(layer), pytest.raises(ValueError, match=message):
        layer(x)
    layer(torch.randn(4, C))  # The group can still be used.


# More: test_signatures.py; test_status.py (GPUs); test_waits.py (ranks that wait).
@on_cpu
def test_promise_9_ranks_in_different_layers_never_continue_in_silence(ranks: Ranks) -> None:
    """In eager mode ranks in different layers or passes raise an error, unless SYNCBN_CHECKS=0. On GPUs they raise at a
    later call."""
    x, layers = torch.randn(4, C), [syncbn.SyncBatchNorm(C) for _ in range(2)]
    for layer in layers:
        layer(x)
    layer = layers[ranks.rank > 0]
    with assert_state_unchanged(layer), pytest.raises(RuntimeError, match="the ranks are in different layers or calls"):
        layer(x)
