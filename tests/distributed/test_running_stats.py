"""Tests that running statistics and sync_batch_stats are those of all values of all ranks together, in float64.

test_derivatives.py has the derivatives of sync_batch_stats.
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


close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def part(rank: int, index: int, ranks: Ranks) -> Tensor:
    """Return batch `index` of a rank: always the same, with a size of its own and a mean far from 0."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    shape = (1 + (rank + index) % 3, CHANNELS, 4, 5)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + rank) + index).to(ranks.device)


def own_part(ranks: Ranks, index: int) -> Tensor:
    return part(ranks.rank, index, ranks)


def values_of_all(ranks: Ranks, *indices: int) -> Tensor:
    """Return the values (n, C) of these batches of all ranks."""
    batches = [part(rank, index, ranks) for index in indices for rank in range(ranks.size)]
    return torch.cat([batch.movedim(1, -1).flatten(0, -2) for batch in batches])


def layer_of(ranks: Ranks, **options: object) -> syncbn.SyncBatchNorm2d:
    return syncbn.SyncBatchNorm2d(CHANNELS, dtype=torch.float64, device=ranks.device, **options)


# accumulate_running_stats, for gradient accumulation (https://github.com/pytorch/pytorch/issues/46516).


@pytest.mark.parametrize(("momentum", "checkpointed"), [(0.3, False), (None, True)])
def test_micro_batches_count_as_one(ranks: Ranks, momentum: float | None, checkpointed: bool) -> None:
    """The model may also have frozen layers and layers without running statistics."""
    layer, frozen = layer_of(ranks, momentum=momentum), layer_of(ranks).eval()
    model = nn.Sequential(layer, frozen, layer_of(ranks, track_running_stats=False))
    expected = nn.BatchNorm1d(CHANNELS, momentum=momentum, dtype=torch.float64, device=ranks.device)
    for indices in (range(3), range(3, 6)):
        with unchanged(frozen), syncbn.accumulate_running_stats(model):
            for index in indices:
                before = layer.running_mean.clone()
                x = own_part(ranks, index).requires_grad_()
                y = checkpoint(model, x, use_reentrant=True) if checkpointed else model(x)
                y.pow(2).sum().backward()
                assert torch.equal(layer.running_mean, before)
        expected(values_of_all(ranks, *indices))
        close(dict(layer.named_buffers()), dict(expected.named_buffers()))


def test_a_forward_that_increments_the_counter_itself_counts_once(ranks: Ranks) -> None:
    """timm's layers add 1 to num_batches_tracked in each forward."""
    layer = syncbn.convert_syncbn_model(BatchNormAct2d(CHANNELS)).to(ranks.device, torch.float64)
    with syncbn.accumulate_running_stats(layer):
        for index in range(3):
            layer(own_part(ranks, index))
    assert layer.num_batches_tracked == 1


def test_an_exception_discards_the_statistics_of_the_block_only(ranks: Ranks) -> None:
    layer, x = layer_of(ranks), own_part(ranks, 0)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    with unchanged(layer), pytest.raises(KeyError), syncbn.accumulate_running_stats(model):  # noqa: PT012
        layer(x)
        raise KeyError
    layer(x)
    assert layer.num_batches_tracked == 1
    assert layer.running_mean.all()


@pytest.mark.compiles
def test_a_graph_compiled_before_accumulates_unless_it_has_fullgraph(ranks: Ranks) -> None:
    layer, x = layer_of(ranks, momentum=1.0), own_part(ranks, 0)
    with syncbn.accumulate_running_stats(layer), pytest.raises(Exception, match="compile without fullgraph=True"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    with syncbn.accumulate_running_stats(layer):
        for index in range(2):
            compiled(own_part(ranks, index))
    values = values_of_all(ranks, 0, 1)
    close((layer.running_mean, layer.running_var), (values.mean(0), values.var(0)))
    assert layer.num_batches_tracked == 2


class OtherStatistics(nn.BatchNorm2d):
    """Passes F.batch_norm other running statistics than those that it inherits."""

    passes = "own"

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("own_mean", torch.zeros(num_features))
        self.register_buffer("own_var", torch.ones(num_features))
        self.inner = nn.BatchNorm2d(num_features)

    def forward(self, x: Tensor) -> Tensor:
        running = {
            "own": (self.own_mean, self.own_var),
            "an inner layer's": (self.inner.running_mean, self.inner.running_var),
            "one own": (self.running_mean, self.own_var),
            "slices": (self.running_mean[:], self.running_var[:]),
            "inherited": (self.running_mean, self.running_var),
        }
        return F.batch_norm(x, *running[self.passes], self.weight, self.bias, self.training, self.momentum, self.eps)


OTHER_STATISTICS = "this call updates running statistics that are not those which the layer had when"


@pytest.mark.parametrize("on_one_rank", [False, True])
@pytest.mark.parametrize("passes", ["own", "an inner layer's", "one own", "slices"])
def test_other_running_statistics_are_refused(ranks: Ranks, passes: str, on_one_rank: bool) -> None:
    """Every rank raises with the layer's name before any statistics move."""
    model = nn.Sequential(OrderedDict(norm=OtherStatistics(CHANNELS))).to(ranks.device, torch.float64)
    syncbn.convert_syncbn_model(model).norm.passes = "inherited" if on_one_rank and ranks.rank else passes
    message = rf"norm(:| forward(.|\n)*ranks? 0.*: ValueError:) {OTHER_STATISTICS}"
    if ranks.device.type == "cuda" and on_one_rank:
        pytest.skip("on GPUs the other ranks raise at a later call")
    raises = pytest.raises((ValueError, RuntimeError), match=message)
    with unchanged(model), raises, syncbn.accumulate_running_stats(model):
        model(own_part(ranks, 0))


@on_cpu
@pytest.mark.parametrize("on_one_rank", [False, True])
@pytest.mark.parametrize("passed", ["all", "running_mean", "running_var", "num_batches_tracked"])
def test_buffers_of_functional_call_are_refused(ranks: Ranks, passed: str, on_one_rank: bool) -> None:
    """The block would update the module's buffers, not the caller's. Without a block functional_call updates the
    caller's buffers."""
    model = nn.Sequential(layer_of(ranks))
    others = {name: buffer.clone() for name, buffer in model.named_buffers() if passed in ("all", name.split(".")[1])}
    passes = ranks.rank == 0 or not on_one_rank
    message = OTHER_STATISTICS if passes else rf"rank 0: ValueError: {OTHER_STATISTICS}"
    raises = pytest.raises((ValueError, RuntimeError), match=message)
    with unchanged(model), raises, syncbn.accumulate_running_stats(model):
        functional_call(model, others if passes else {}, own_part(ranks, 0))
    functional_call(model, others, own_part(ranks, 0))
    assert "0.running_mean" not in others or others["0.running_mean"].any()


def test_functional_call_may_replace_parameters(ranks: Ranks) -> None:
    """functional_call may also pass the module's own buffers."""
    model = nn.Sequential(layer_of(ranks))
    replaced = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    with syncbn.accumulate_running_stats(model):
        for index in range(2):
            functional_call(model, replaced | dict(model.named_buffers()), own_part(ranks, index))
    close(model[0].running_mean, 0.1 * values_of_all(ranks, 0, 1).mean(0))


@pytest.mark.parametrize("trains", ["in the block", "after the block"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_made_in_a_block(ranks: Ranks, copied: Callable[[nn.Module], nn.Module], trains: str) -> None:
    """copy.copy shares buffers, so the batches of both layers count as one in the block. A deep copy trains by itself.
    After the block both layers update their statistics in each call."""
    layer = layer_of(ranks, momentum=None)
    with syncbn.accumulate_running_stats(layer):
        other = copied(layer)
        layer(own_part(ranks, 0))
        if trains == "in the block":
            other(own_part(ranks, 1))
    if trains == "after the block":
        other(own_part(ranks, 1))
    last = values_of_all(ranks, 1).mean(0)
    if other.running_mean is not layer.running_mean:
        expected = last
    elif trains == "in the block":
        expected = values_of_all(ranks, 0, 1).mean(0)
    else:
        expected = (values_of_all(ranks, 0).mean(0) + last) / 2
    close(other.running_mean, expected)
    with syncbn.accumulate_running_stats(other):
        other(own_part(ranks, 2))


# sync_batch_stats


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_batch_statistics_are_rounded_once_in_any_layout(ranks: Ranks, dtype: torch.dtype) -> None:
    """They are computed in float64; the gradient has the input's dtype and strides."""
    torch.manual_seed(ranks.rank)
    x = (torch.randn(4, CHANNELS, 2, 3) + 100).to(ranks.device, dtype)
    strided = x.repeat_interleave(2, dim=3)[..., ::2]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected: list[Tensor] = []
    for same in (x, x.contiguous(memory_format=torch.channels_last), strided, x.double().to(wide)):
        leaf = same.clone(memory_format=torch.preserve_format).requires_grad_()
        mean, var, count = sync_batch_stats(leaf)
        (mean.sum() + var.sum()).backward()
        assert (mean.dtype, var.dtype, count.dtype) == (wide, wide, torch.int64)
        assert not count.requires_grad
        assert (leaf.grad.dtype, leaf.grad.stride()) == (leaf.dtype, leaf.stride())
        expected = expected or [mean, var, leaf.grad]
        torch.testing.assert_close([mean, var, leaf.grad.to(dtype)], expected)
    assert int(count) == ranks.size * x.numel() // CHANNELS


@pytest.mark.parametrize("values", ["no channels", "none on any rank", "one on rank 0"])
def test_batch_statistics_of_no_values_or_one(ranks: Ranks, values: str) -> None:
    """A shard of a DTensor may have no channels."""
    num = {"no channels": 3, "none on any rank": 0, "one on rank 0": int(ranks.rank == 0)}[values]
    x = torch.full((num, CHANNELS * (values != "no channels")), 2.0, device=ranks.device).requires_grad_()
    mean, var, count = sync_batch_stats(x)
    (mean.sum() + var.sum()).backward()
    assert not var.any()
    assert x.grad.equal(torch.full_like(x, ranks.size))  # the loss of each rank has the mean
    if values == "one on rank 0":
        assert int(count) == 1
        assert mean.eq(2).all()


def test_constant_channels_have_variance_0_but_exact_second_derivatives(ranks: Ranks) -> None:
    """Rounding makes some of these variances negative before they are clamped to 0."""
    generator = torch.Generator().manual_seed(0)
    constants, directions = torch.rand(2, 3 * ranks.size, 64, dtype=torch.float64, generator=generator).to(ranks.device)
    x = constants[:1].expand(3, -1).clone().requires_grad_()
    _, var, count = sync_batch_stats(x)
    assert var.ge(0).all()
    (first,) = torch.autograd.grad(var.sum(), x, create_graph=True)
    own = directions[ranks.even(len(directions))]
    (second,) = torch.autograd.grad((first * own).sum(), x)
    torch.testing.assert_close(second, ranks.size * 2 / int(count) * (own - directions.mean(0)))


def test_one_rank_sends_nothing_and_a_recompute_sends_the_forward_again(ranks: Ranks) -> None:
    x = torch.randn(4, CHANNELS, device=ranks.device).requires_grad_()
    sync_batch_stats(x, process_group=1)  # creates the groups
    with CountCollectives() as counted:
        mean, var, _ = sync_batch_stats(x, process_group=1)
        mean.sum().backward()
    assert counted.total == 0
    torch.testing.assert_close((mean, var), (x.mean(0), x.var(0, correction=0)))
    with CountCollectives() as counted:
        checkpoint(lambda x: sync_batch_stats(x)[1], x, use_reentrant=False).sum().backward()
    assert counted.total == 3


@on_cpu
def test_ranks_that_call_different_functions_are_named(ranks: Ranks) -> None:
    x = torch.randn(4, CHANNELS)
    with pytest.raises(RuntimeError, match=r"in sync_batch_norm forward(.|\n)*in sync_batch_stats forward"):
        sync_batch_stats(x) if ranks.rank else sync_batch_norm(x, None, None, training=True)


@pytest.mark.compiles
def test_compiled_batch_statistics_equal_eager(ranks: Ranks) -> None:
    """One graph has them and their gradient. (AOTAutograd refuses second derivatives of any graph.)"""
    x = torch.randn(4, CHANNELS, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    results = []
    for function in (sync_batch_stats, torch.compile(sync_batch_stats, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        mean, var, count = function(leaf, mask=x[:, 0] > 0)
        (gradient,) = torch.autograd.grad((mean + 1).square().sum() + var.square().sum(), leaf)
        results.append((mean, var, count, gradient))
    torch.testing.assert_close(*results)
