"""Catches a broken promise of syncbn: nine, in order, as docs/how_it_works.md has them.

Begin here; other files try many more cases.
"""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from training import unchanged
from voting import Ranks

import syncbn

C = 3


def train_as_one_rank(ranks: Ranks, *sizes: int) -> syncbn.SyncBatchNorm:
    """A step with so many samples on the first ranks, and 2 on the others, must equal that of one rank with all."""
    sizes = (*sizes, *[2] * ranks.size)[: ranks.size]
    torch.manual_seed(0)
    alone = nn.BatchNorm1d(C, dtype=torch.float64, device=ranks.device)
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    layer = syncbn.convert_syncbn_model(copy.deepcopy(alone))
    x = torch.randn(sum(sizes), C, 5, dtype=torch.float64).to(ranks.device).requires_grad_()
    own = ranks.slices([*sizes])
    my_x = x[own].detach().requires_grad_()
    y, expected = layer(my_x), alone(x)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    close((y, my_x.grad), (expected[own], x.grad[own]))
    close([ranks.total(one.grad) for one in layer.parameters()], [one.grad for one in alone.parameters()])
    close(layer.state_dict(), alone.state_dict())
    return layer


def test_promise_1_w_ranks_equal_one(ranks: Ranks) -> None:
    train_as_one_rank(ranks)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # CommDebugMode's own hook on the layer
def test_promise_2_one_collective_each_way(ranks: Ranks) -> None:
    x = torch.randn(0 if ranks.rank == 0 else 4, C, device=ranks.device)  # an empty rank, and it needs no gradient
    x.requires_grad_(ranks.rank > 0)
    of_one = syncbn.SyncBatchNorm(C, process_group=1, device=ranks.device)  # its group may be made here
    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    counts = []
    for one, batch in ((layer, x), (layer.eval(), x), (of_one, torch.randn(4, C, device=ranks.device))):
        one.train(one is of_one or not counts)
        with CommDebugMode() as forward:
            y = one(batch)
        with CommDebugMode() as backward:
            y.sum().backward()
        counts.append((forward.get_total_counts(), backward.get_total_counts()))
    assert counts == [(1, 1), (0, 0), (0, 0)]


def test_promise_3_uneven_and_empty_ranks(ranks: Ranks) -> None:
    train_as_one_rank(ranks, 5, 1)
    layer = train_as_one_rank(ranks, 0, 3)
    before = copy.deepcopy(layer.state_dict())
    layer.zero_grad()
    x = torch.empty(0, C, 5, dtype=torch.float64, device=ranks.device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, C, 5)
    before["num_batches_tracked"] += 1
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    assert not layer.weight.grad.any()
    assert not layer.bias.grad.any()


def test_promise_4_running_statistics_are_the_same_bits(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    buffers = [layer.running_mean, layer.running_var, layer.num_batches_tracked]
    addresses = [buffer.data_ptr() for buffer in buffers]
    for step in range(1, 4):
        torch.manual_seed(100 * step + ranks.rank)
        layer(torch.randn(3 + ranks.rank, C, device=ranks.device))
        assert layer.num_batches_tracked == step
    for buffer, now, address in zip(buffers, layer.buffers(), addresses, strict=True):
        assert now is buffer
        assert now.data_ptr() == address
        of_rank_0 = buffer.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(buffer, of_rank_0)


def test_promise_5_evaluation_is_local_and_plain(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(C, device=ranks.device)
    layer(torch.randn(4, C, device=ranks.device))
    layer.eval()
    x = torch.randn(2 + ranks.rank, C, 5, device=ranks.device)
    with CommDebugMode() as collectives:
        y = layer(x)
    assert collectives.get_total_counts() == 0
    expected = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_promise_6_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    """The mean, 1 + 2^-8, has one digit more than bfloat16: statistics in that dtype would lose it."""
    layer = syncbn.SyncBatchNorm(C, momentum=1.0, device=ranks.device, dtype=torch.float32)
    layer.running_var = layer.running_var.bfloat16()
    x = torch.ones(4, C, device=ranks.device).to(dtype)
    x[::2] += 2**-7
    assert layer(x).dtype == dtype
    assert [buffer.dtype for buffer in (layer.running_mean, layer.running_var)] == [torch.float32, torch.bfloat16]
    assert torch.equal(layer.running_mean, torch.full_like(layer.running_mean, 1 + 2**-8))
    num_values = 4 * ranks.size
    variance = 2.0**-16 * num_values / (num_values - 1)
    assert torch.equal(layer.running_var, torch.full_like(layer.running_var, variance))


def test_promise_7_checkpoints_load_both_ways(ranks: Ranks) -> None:
    layer, plain = syncbn.SyncBatchNorm2d(C, device=ranks.device), nn.BatchNorm2d(C, device=ranks.device)
    assert list(layer.state_dict()) == list(plain.state_dict())
    layer(torch.randn(4, C, 2, 2, device=ranks.device))
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(plain.state_dict(), layer.state_dict(), rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the others raise at a later call")
def test_promise_8_a_bad_argument_is_raised_on_every_rank(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(C)
    bad, message = torch.randn(4, C), f"in SyncBatchNorm forward, call 1.\nrank {ranks.size - 1}: ValueError: "
    if ranks.rank == ranks.size - 1:
        bad, message = torch.randn(4, C + 1), "^SyncBatchNorm: "
    message += "expected 3 channels in dim 1 of the input, got 4 .*; correct num_features"
    with unchanged(layer), pytest.raises(ValueError, match=message):
        layer(bad)
    layer(torch.randn(4, C))  # the group goes on


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs they raise at a later call, see test_status.py")
def test_promise_9_ranks_in_different_layers_never_go_on_in_silence(ranks: Ranks) -> None:
    x, layers = torch.randn(4, C), [syncbn.SyncBatchNorm(C) for _ in range(2)]
    for layer in layers:
        layer(x)
    layer = layers[ranks.rank > 0]
    with unchanged(layer), pytest.raises(RuntimeError, match="syncbn: the ranks are in different layers or calls"):
        layer(x)
