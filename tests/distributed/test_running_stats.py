"""Catches running statistics over several batches and ranks that are not those of all values together in float64.

Also a fault that leaves them half written, or that one rank alone hears of; and sync_batch_stats where it leaves the
whole batch's mean, variance and count, or sends more than it must. (Its derivatives are in test_derivatives.py.)
"""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from training import CountCollectives, unchanged
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm, sync_batch_stats

CHANNELS = 3
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the faulty rank raises alone")


def part(ranks: Ranks, rank: int, index: int) -> Tensor:
    """A batch of `rank`, of a size of its own, with a mean far from 0; the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    sizes = (1 + (rank + index) % 3, CHANNELS, 4, 5)
    return (torch.randn(sizes, generator=generator, dtype=torch.float64) * (1 + rank) + index).to(ranks.device)


def parts(ranks: Ranks, *indices: int) -> list[Tensor]:
    """Of all ranks."""
    return [part(ranks, rank, index) for index in indices for rank in range(ranks.size)]


def layer_of(ranks: Ranks, **options: object) -> syncbn.SyncBatchNorm2d:
    return syncbn.SyncBatchNorm2d(CHANNELS, dtype=torch.float64, device=ranks.device, **options)


def values_of(batches: list[Tensor]) -> Tensor:
    """(C, n)."""
    return torch.cat([batch.transpose(0, 1).flatten(1) for batch in batches], dim=1)


close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


# Gradient accumulation (https://github.com/pytorch/pytorch/issues/46516).


@pytest.mark.parametrize(("momentum", "checkpointed"), [(0.3, False), (None, True)])
def test_micro_batches_count_as_one(ranks: Ranks, momentum: float | None, checkpointed: bool) -> None:
    """Beside layers that are frozen or have no running statistics."""
    layer, frozen = layer_of(ranks, momentum=momentum), layer_of(ranks).eval()
    model = nn.Sequential(layer, frozen, layer_of(ranks, track_running_stats=False))
    expected = nn.BatchNorm1d(CHANNELS, momentum=momentum, dtype=torch.float64, device=ranks.device)
    for indices in (range(3), range(3, 6)):
        with unchanged(frozen), syncbn.accumulate_running_stats(model):
            for index in indices:
                before = layer.running_mean.clone()
                x = part(ranks, ranks.rank, index).requires_grad_()
                y = checkpoint(model, x, use_reentrant=True) if checkpointed else model(x)
                y.pow(2).sum().backward()
                assert torch.equal(layer.running_mean, before)
        expected(values_of(parts(ranks, *indices)).t())
        close(dict(layer.named_buffers()), dict(expected.named_buffers()))


def test_a_forward_that_counts_counts_once(ranks: Ranks) -> None:
    """timm's layers add 1 to the counter by themselves in each forward; the block has one step."""
    layer = syncbn.convert_syncbn_model(BatchNormAct2d(CHANNELS)).to(ranks.device, torch.float64)
    with syncbn.accumulate_running_stats(layer):
        for index in range(3):
            layer(part(ranks, ranks.rank, index))
    assert layer.num_batches_tracked == 1


def test_an_exception_loses_the_block_and_nothing_else(ranks: Ranks) -> None:
    layer, x = layer_of(ranks), part(ranks, ranks.rank, 0)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    with unchanged(layer), pytest.raises(KeyError), syncbn.accumulate_running_stats(model):  # noqa: PT012
        layer(x)
        raise KeyError
    layer(x)
    assert layer.num_batches_tracked == 1
    assert layer.running_mean.all()


@pytest.mark.compiles
def test_a_graph_compiled_before_breaks(ranks: Ranks) -> None:
    layer, x = layer_of(ranks, momentum=1.0), part(ranks, ranks.rank, 0)
    with syncbn.accumulate_running_stats(layer), pytest.raises(Exception, match="compile without fullgraph=True"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    with syncbn.accumulate_running_stats(layer):
        for index in range(2):
            compiled(part(ranks, ranks.rank, index))
    close(layer.running_mean, values_of(parts(ranks, 0, 1)).mean(1))
    close(layer.running_var, values_of(parts(ranks, 0, 1)).var(1))
    assert layer.num_batches_tracked == 2


class KeepsOthers(nn.BatchNorm2d):
    """With running statistics beside those that it inherits, or with those of an inner layer."""

    kept = "own"

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("own_mean", torch.zeros(num_features))
        self.register_buffer("own_var", torch.ones(num_features))
        self.inner = nn.BatchNorm2d(num_features)

    def forward(self, x: Tensor) -> Tensor:
        running = {
            "own": (self.own_mean, self.own_var),
            "inner": (self.inner.running_mean, self.inner.running_var),
            "one own": (self.running_mean, self.own_var),
            "a slice": (self.running_mean[:], self.running_var[:]),
            "none": (self.running_mean, self.running_var),
        }
        return F.batch_norm(x, *running[self.kept], self.weight, self.bias, self.training, self.momentum, self.eps)


OTHER_STATISTICS = "this call updates running statistics that are not those which the layer had when"


@pytest.mark.parametrize("on_one_rank", [False, True])
@pytest.mark.parametrize("kept", ["own", "inner", "one own", "a slice"])
def test_other_running_statistics_are_refused(ranks: Ranks, kept: str, on_one_rank: bool) -> None:
    """By the name of the layer, on every rank, before anything moves."""
    model = nn.Sequential(OrderedDict(norm=KeepsOthers(CHANNELS))).to(ranks.device, torch.float64)
    syncbn.convert_syncbn_model(model).norm.kept = "none" if on_one_rank and ranks.rank else kept
    words = rf"norm(:| forward(.|\n)*ranks? 0.*: ValueError:) {OTHER_STATISTICS}"
    if ranks.device.type == "cuda" and on_one_rank:
        pytest.skip("on GPUs the other ranks raise at a later call")
    with (
        unchanged(model),
        pytest.raises((ValueError, RuntimeError), match=words),
        syncbn.accumulate_running_stats(model),
    ):
        model(part(ranks, ranks.rank, 0))


@on_cpu
@pytest.mark.parametrize("on_one_rank", [False, True])
@pytest.mark.parametrize("passed", ["all", "running_mean", "running_var", "num_batches_tracked"])
def test_buffers_of_functional_call_are_refused(ranks: Ranks, passed: str, on_one_rank: bool) -> None:
    """The block would update the buffers of the module, and leave those of the caller. Without a block functional_call
    updates those of the caller."""
    model = nn.Sequential(layer_of(ranks))
    others = {name: buffer.clone() for name, buffer in model.named_buffers() if passed in ("all", name.split(".")[1])}
    passes = ranks.rank == 0 or not on_one_rank
    words = OTHER_STATISTICS if passes else rf"rank 0: ValueError: {OTHER_STATISTICS}"
    with (
        unchanged(model),
        pytest.raises((ValueError, RuntimeError), match=words),
        syncbn.accumulate_running_stats(model),
    ):
        functional_call(model, others if passes else {}, part(ranks, ranks.rank, 0))
    functional_call(model, others, part(ranks, ranks.rank, 0))
    assert "0.running_mean" not in others or others["0.running_mean"].any()


def test_functional_call_may_replace_parameters(ranks: Ranks) -> None:
    """And may pass the buffers of the module themselves."""
    model = nn.Sequential(layer_of(ranks))
    replaced = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    with syncbn.accumulate_running_stats(model):
        for index in range(2):
            functional_call(model, replaced | dict(model.named_buffers()), part(ranks, ranks.rank, index))
    close(model[0].running_mean, 0.1 * values_of(parts(ranks, 0, 1)).mean(1))


@pytest.mark.parametrize("trains", ["in the block", "after the block"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_made_in_a_block(ranks: Ranks, copied: Callable[[nn.Module], nn.Module], trains: str) -> None:
    """copy.copy shares buffers, so the batches of both layers count as one in the block. A deep copy trains by itself.
    After the block both update their statistics in each call."""
    layer = layer_of(ranks, momentum=None)
    with syncbn.accumulate_running_stats(layer):
        other = copied(layer)
        layer(part(ranks, ranks.rank, 0))
        if trains == "in the block":
            other(part(ranks, ranks.rank, 1))
    if trains == "after the block":
        other(part(ranks, ranks.rank, 1))
    shares, last = other.running_mean is layer.running_mean, values_of(parts(ranks, 1)).mean(1)
    if not shares:
        expected = last
    elif trains == "in the block":
        expected = values_of(parts(ranks, 0, 1)).mean(1)
    else:
        expected = (values_of(parts(ranks, 0)).mean(1) + last) / 2
    close(other.running_mean, expected)
    with syncbn.accumulate_running_stats(other):
        other(part(ranks, ranks.rank, 2))


# The statistics of one batch.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes_and_layouts(ranks: Ranks, dtype: torch.dtype) -> None:
    """The statistics are those in float64, rounded once; the gradient has the input's dtype and strides."""
    torch.manual_seed(ranks.rank)
    x = (torch.randn(4, CHANNELS, 2, 3) + 100).to(ranks.device, dtype)
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
    assert int(count) == ranks.size * x.numel() // CHANNELS


def test_nobody_has_a_value_or_all_have_one_together(ranks: Ranks) -> None:
    """Or there are no channels, as of a DTensor on a rank that holds none."""
    for num, channels in ((3, 0), (0, CHANNELS), (int(ranks.rank == 0), CHANNELS)):
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
    x = torch.randn(4, CHANNELS, device=ranks.device).requires_grad_()
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
    x = torch.randn(4, CHANNELS)
    with pytest.raises(RuntimeError, match=r"in sync_batch_norm forward(.|\n)*in sync_batch_stats forward"):
        sync_batch_stats(x) if ranks.rank else sync_batch_norm(x, None, None, training=True)


@pytest.mark.compiles
def test_compiled(ranks: Ranks) -> None:
    """In one graph, with its gradient. (Second derivatives of a graph are AOTAutograd's to refuse.)"""
    x = torch.randn(4, CHANNELS, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    mask, results = x[:, 0] > 0, []
    for function in (sync_batch_stats, torch.compile(sync_batch_stats, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        mean, var, count = function(leaf, mask=mask)
        (gradient,) = torch.autograd.grad((mean + 1).square().sum() + var.square().sum(), leaf)
        results.append((mean, var, count, gradient))
    torch.testing.assert_close(*results)
