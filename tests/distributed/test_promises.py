"""The nine promises of syncbn, each with a short test. docs/how_it_works.md lists them.

A comment after each promise names the files with more cases.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from training import preserved_state
from voting import Ranks

import syncbn

C = 3
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs ranks raise at a later call: test_status.py")


def train_like_one_rank(ranks: Ranks, *sizes: int) -> syncbn.SyncBatchNorm:
    """Compare a step with one rank that holds the concatenated batch, and return the layer. The first ranks have
    `sizes` samples. All other ranks have 2."""
    sizes = (*sizes, *[2] * ranks.size)[: ranks.size]
    torch.manual_seed(0)
    alone = nn.BatchNorm1d(C, dtype=torch.float64, device=ranks.device)
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    layer = syncbn.convert_syncbn_model(copy.deepcopy(alone))
    x = torch.randn(sum(sizes), C, 5, dtype=torch.float64).to(ranks.device).requires_grad_()
    local = ranks.local_slice([*sizes])
    local_x = x[local].detach().requires_grad_()
    y, expected = layer(local_x), alone(x)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close((y, local_x.grad), (expected[local], x.grad[local]))
    for parameter, whole in zip(layer.parameters(), alone.parameters(), strict=True):
        close(ranks.all_reduce_sum(parameter.grad), whole.grad)
    close(layer.state_dict(), alone.state_dict())
    return layer


# More: test_equality.py (inputs that lose digits), test_fuzz.py (random layers), test_ddp.py, test_fsdp.py.
def test_promise_1_w_ranks_equal_one(ranks: Ranks) -> None:
    """W ranks equal one rank holding the concatenated batch: outputs, grad_input, running statistics; and grad_weight
    and grad_bias after summing over ranks."""
    train_like_one_rank(ranks)


# More: test_derivatives.py (second derivatives), test_collective.py, test_checkpointing.py, test_compile.py.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # CommDebugMode's own hook on the layer
def test_promise_2_one_collective_each_way(ranks: Ranks) -> None:
    """Exactly 1 collective in forward and 1 in backward, also on ranks without samples or a gradient; 0 in eval and in
    a group of one rank."""

    def count_collectives(layer: nn.Module, x: torch.Tensor) -> tuple[int, int]:
        with CommDebugMode() as forward:
            y = layer(x)
        with CommDebugMode() as backward:
            y.sum().backward()
        return forward.get_total_counts(), backward.get_total_counts()

    layer, local_layer = (syncbn.SyncBatchNorm(C, process_group=k, device=ranks.device) for k in (None, 1))
    x = torch.randn(0 if ranks.rank == 0 else 4, C, device=ranks.device).requires_grad_(ranks.rank > 0)
    assert count_collectives(layer, x) == (1, 1)
    assert count_collectives(layer.eval(), x) == (0, 0)
    assert count_collectives(local_layer, torch.randn(4, C, device=ranks.device)) == (0, 0)


def test_promise_2_one_collective_each_way_on_the_fast_path(ranks: Ranks) -> None:
    """CommDebugMode is a dispatch mode, under which other kernels run. A process group counts its own collectives."""
    assert dist.group.WORLD is not None
    count = dist.group.WORLD._get_sequence_number_for_group
    layer, x = syncbn.SyncBatchNorm(C, device=ranks.device), torch.randn(4, C, device=ranks.device, requires_grad=True)
    counts = [count()]
    y = layer(x)
    counts.append(count())
    y.sum().backward()
    counts.append(count())
    layer.eval()(x)
    counts.append(count())
    assert [count - counts[0] for count in counts] == [0, 1, 2, 2]


# More: test_fuzz.py, test_recipes.py (ranks that run out of data).
def test_promise_3_uneven_and_empty_ranks(ranks: Ranks) -> None:
    """Uneven ranks and empty ranks are exact. A step without a value on any rank changes only num_batches_tracked and
    makes no NaN; gradients of empty inputs are empty, not None."""
    train_like_one_rank(ranks, 5, 1)
    layer = train_like_one_rank(ranks, 0, 3)
    expected = copy.deepcopy(layer.state_dict())
    expected["num_batches_tracked"] += 1
    layer.zero_grad()
    x = torch.empty(0, C, 5, dtype=torch.float64, device=ranks.device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape
    torch.testing.assert_close(layer.state_dict(), expected, rtol=0, atol=0)
    assert not layer.weight.grad.any()
    assert not layer.bias.grad.any()


# More: test_running_stats.py (statistics over several batches), test_recipes.py.
def test_promise_4_running_statistics_are_the_same_bits(ranks: Ranks) -> None:
    """Running statistics are bit-identical on all ranks of the layer's group, updated in place (never rebound), once
    per step."""
    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    buffers = [*layer.buffers()]
    addresses = [buffer.data_ptr() for buffer in buffers]
    for step in range(1, 4):
        torch.manual_seed(100 * step + ranks.rank)
        layer(torch.randn(3 + ranks.rank, C, device=ranks.device))
        assert layer.num_batches_tracked == step
    for buffer, old, address in zip(layer.buffers(), buffers, addresses, strict=True):
        assert buffer is old
        assert buffer.data_ptr() == address
        expected = buffer.clone()
        dist.broadcast(expected, 0)
        assert torch.equal(buffer, expected)


# More: test_equality.py (with a mask), test_conversion.py (without running statistics), test_layer.py.
def test_promise_5_evaluation_is_local(ranks: Ranks) -> None:
    """eval() never communicates and is F.batch_norm."""
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
def test_promise_6_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    """Output dtype equals input dtype; batch statistics are never below float32; a buffer keeps its dtype and is
    rounded once, when written. (The mean, 1 + 2^-8, has one digit more than bfloat16.)"""
    layer = syncbn.SyncBatchNorm(C, momentum=1.0, device=ranks.device)
    layer.running_var = layer.running_var.bfloat16()
    x = torch.ones(4, C, device=ranks.device).to(dtype)
    x[::2] += 2**-7
    assert layer(x).dtype == dtype
    unbiased_var = 2.0**-16 * 4 * ranks.size / (4 * ranks.size - 1)
    expected = torch.full((C,), 1 + 2**-8), torch.full((C,), unbiased_var, dtype=torch.bfloat16)
    torch.testing.assert_close((layer.running_mean.cpu(), layer.running_var.cpu()), expected, rtol=0, atol=0)


# More: test_convert.py, test_recipes.py (FSDP checkpoints).
def test_promise_7_checkpoints_load_both_ways(ranks: Ranks) -> None:
    """state_dict keys are those of nn.BatchNorm: checkpoints load both ways."""
    layer, plain = syncbn.SyncBatchNorm2d(C, device=ranks.device), nn.BatchNorm2d(C, device=ranks.device)
    assert list(layer.state_dict()) == list(plain.state_dict())
    layer(torch.randn(4, C, 2, 2, device=ranks.device))
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain.state_dict(), layer.state_dict(), rtol=0, atol=0)


# More: test_errors.py (all messages), test_arguments.py; test_status.py (GPUs).
@on_cpu
def test_promise_8_a_bad_argument_is_raised_on_every_rank(ranks: Ranks) -> None:
    """A bad argument is a ValueError or TypeError with the values and the remedy, in eager mode on every rank; on a GPU
    the other ranks raise at a later call."""
    layer = syncbn.SyncBatchNorm(C)
    is_faulty = ranks.rank == ranks.size - 1
    where = f"in SyncBatchNorm forward, call 1.\nrank {ranks.size - 1}: ValueError: "
    message = "expected 3 channels in dim 1 of the input, got 4 .*; correct num_features"
    message = ("^SyncBatchNorm: " if is_faulty else where) + message
    with preserved_state(layer), pytest.raises(ValueError, match=message):
        layer(torch.randn(4, C + is_faulty))
    layer(torch.randn(4, C))  # The group can still be used.


# More: test_signatures.py, test_order_of_layers.py; test_status.py (GPUs).
@on_cpu
def test_promise_9_ranks_in_different_layers_never_continue_in_silence(ranks: Ranks) -> None:
    """In eager mode ranks that are in different layers or passes never continue in silence, on any device, unless
    SYNCBN_CHECKS=0."""
    x, layers = torch.randn(4, C), [syncbn.SyncBatchNorm(C) for _ in range(2)]
    for layer in layers:
        layer(x)
    layer = layers[ranks.rank > 0]
    with preserved_state(layer), pytest.raises(RuntimeError, match="the ranks are in different layers or calls"):
        layer(x)
