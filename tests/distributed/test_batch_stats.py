"""Catches sync_batch_stats where it leaves the whole batch's mean, variance and count, or sends more than it must.

Its derivatives are in test_derivatives.py.
"""

import pytest
import torch
from counting import CountCollectives
from torch import Tensor
from voting import Ranks

from syncbn.functional import sync_batch_norm, sync_batch_stats

C = 3
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the faulty rank raises alone")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes_and_layouts(ranks: Ranks, dtype: torch.dtype) -> None:
    """The statistics are those in float64, rounded once; the gradient has the input's dtype and strides."""
    torch.manual_seed(ranks.rank)
    x = (torch.randn(4, C, 2, 3) + 100).to(ranks.device, dtype)
    gapped = x.repeat_interleave(2, dim=3)[..., ::2]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected: list[Tensor] = []
    for same in (x, x.contiguous(memory_format=torch.channels_last), gapped, x.double().to(wide)):
        leaf = same.clone(memory_format=torch.preserve_format).requires_grad_()
        mean, var, count = sync_batch_stats(leaf)
        (mean.sum() + var.sum()).backward()
        assert (mean.dtype, var.dtype, count.dtype) == (wide, wide, torch.int64)
        assert not count.requires_grad
        assert (leaf.grad.dtype, leaf.grad.stride()) == (leaf.dtype, leaf.stride())
        expected = expected or [mean, var, leaf.grad]
        torch.testing.assert_close([mean, var, leaf.grad.to(dtype)], expected)
    assert int(count) == ranks.size * x.numel() // C


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_first_derivative_is_that_with_a_graph(ranks: Ranks, channels_last: bool) -> None:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(4, C, 5, 6, device=ranks.device).contiguous(memory_format=memory_format).requires_grad_()
    mean, var, _ = sync_batch_stats(x)
    (gradient,) = torch.autograd.grad(mean.sum() + var.sum(), x)
    (expected,) = torch.autograd.grad(sum(each.sum() for each in sync_batch_stats(x)[:2]), x, create_graph=True)
    torch.testing.assert_close(gradient, expected)


def test_nobody_has_a_value_or_all_have_one_together(ranks: Ranks) -> None:
    """Or there are no channels, as of a DTensor on a rank that holds none."""
    for num, channels in ((3, 0), (0, C), (int(ranks.rank == 0), C)):
        x = torch.full((num, channels), 2.0, device=ranks.device).requires_grad_()
        mean, var, count = sync_batch_stats(x)
        (mean.sum() + var.sum()).backward()
        assert not var.any()
        assert x.grad.shape == x.shape
        assert bool((x.grad == ranks.size).all())  # each rank's loss has the mean
    assert int(count) == 1
    assert bool((mean == 2).all())


def test_constant_channels(ranks: Ranks) -> None:
    """Rounding makes some variances negative. They become 0, but their second derivatives do not."""
    generator = torch.Generator().manual_seed(0)
    constants, directions = torch.rand(2, 3 * ranks.size, 64, dtype=torch.float64, generator=generator)
    x = constants[:1].expand(3, -1).to(ranks.device).requires_grad_()
    _, var, count = sync_batch_stats(x)
    assert bool((var >= 0).all())
    (first,) = torch.autograd.grad(var.sum(), x, create_graph=True)
    mine = directions[ranks.even(len(directions))].to(ranks.device)
    (second,) = torch.autograd.grad((first * mine).sum(), x)
    expected = ranks.size * 2 / int(count) * (mine - directions.mean(0).to(ranks.device))
    torch.testing.assert_close(second, expected)


def test_groups(ranks: Ranks) -> None:
    """A group of one rank sends nothing; recomputing in backward sends the forward's all_reduce again."""
    x = torch.randn(4, C, device=ranks.device).requires_grad_()
    sync_batch_stats(x, process_group=1)  # makes the groups
    with CountCollectives() as counted:
        mean, var, _ = sync_batch_stats(x, process_group=1)
        mean.sum().backward()
    assert counted.total == 0
    torch.testing.assert_close((mean, var), (x.mean(0), x.var(0, correction=0)))
    with CountCollectives() as counted:
        torch.utils.checkpoint.checkpoint(lambda x: sync_batch_stats(x)[1], x, use_reentrant=False).sum().backward()
    assert counted.total == 3


@on_cpu
def test_ranks_that_call_different_functions(ranks: Ranks) -> None:
    x = torch.randn(4, C)
    with pytest.raises(RuntimeError, match=r"in sync_batch_norm forward(.|\n)*in sync_batch_stats forward"):
        sync_batch_stats(x) if ranks.rank else sync_batch_norm(x, None, None, training=True)


@pytest.mark.compiles
def test_compiled(ranks: Ranks) -> None:
    """In one graph, with its gradient. (Second derivatives of a graph are AOTAutograd's to refuse.)"""
    x = torch.randn(4, C, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    mask, results = x[:, 0] > 0, []
    for function in (sync_batch_stats, torch.compile(sync_batch_stats, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        mean, var, count = function(leaf, mask=mask)
        (gradient,) = torch.autograd.grad((mean + 1).square().sum() + var.square().sum(), leaf)
        results.append((mean, var, count, gradient))
    torch.testing.assert_close(*results)
