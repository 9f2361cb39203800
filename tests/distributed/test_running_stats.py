"""Tests of statistics over all ranks: accumulate_running_stats over several batches, and sync_batch_stats of one batch.

test_derivatives.py has the derivatives of sync_batch_stats.
"""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from subclasses import BatchNormAct2d
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from training import assert_state_unchanged
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_stats

C = 3
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def rank_batch(ranks: Ranks, index: int, rank: int | None = None) -> Tensor:
    """Return batch `index` of `rank`, by default of this rank. Sizes, means and scales differ between the batches."""
    rank = ranks.rank if rank is None else rank
    generator = torch.Generator().manual_seed(100 * rank + index)
    num_samples = 1 + (rank + index) % 3
    noise = torch.randn(num_samples, C, 4, 5, generator=generator, dtype=torch.float64)
    return (noise * (1 + rank) + index).to(ranks.device)


def all_values(ranks: Ranks, *indices: int) -> Tensor:
    """Return the values (n, C) of the batches with these indices, of all ranks."""
    batches = [rank_batch(ranks, index, rank) for index in indices for rank in range(ranks.size)]
    return torch.cat([batch.movedim(1, -1).flatten(0, -2) for batch in batches])


# accumulate_running_stats, for gradient accumulation (https://github.com/pytorch/pytorch/issues/46516).


def make_layer(ranks: Ranks, **options: object) -> syncbn.SyncBatchNorm2d:
    return syncbn.SyncBatchNorm2d(C, dtype=torch.float64, device=ranks.device, **options)


@pytest.mark.parametrize(("momentum", "is_checkpointed"), [(0.3, False), (None, True)])
def test_micro_batches_count_as_one(ranks: Ranks, momentum: float | None, is_checkpointed: bool) -> None:
    """The model may also have frozen layers, layers without running statistics, and layers of timm, which add 1 to
    num_batches_tracked in each forward."""
    layer, frozen = make_layer(ranks, momentum=momentum), make_layer(ranks).eval()
    layer_of_timm = syncbn.convert_syncbn_model(BatchNormAct2d(C)).to(ranks.device, torch.float64)
    model = nn.Sequential(layer, frozen, make_layer(ranks, track_running_stats=False), layer_of_timm)
    alone = nn.BatchNorm1d(C, momentum=momentum, dtype=torch.float64, device=ranks.device)
    for indices in (range(3), range(3, 6)):
        mean_before = layer.running_mean.clone()
        with assert_state_unchanged(frozen), syncbn.accumulate_running_stats(model):
            for index in indices:
                x = rank_batch(ranks, index).requires_grad_()
                y = checkpoint(model, x, use_reentrant=True) if is_checkpointed else model(x)
                y.pow(2).sum().backward()
                assert torch.equal(layer.running_mean, mean_before)
        alone(all_values(ranks, *indices))
        close(dict(layer.named_buffers()), dict(alone.named_buffers()))
        assert layer_of_timm.num_batches_tracked == layer.num_batches_tracked


def test_after_an_exception_in_a_block_the_statistics_are_those_from_before_the_block(ranks: Ranks) -> None:
    layer, x = make_layer(ranks), rank_batch(ranks, 0)
    with assert_state_unchanged(layer), pytest.raises(KeyError), syncbn.accumulate_running_stats(layer):  # noqa: PT012
        layer(x)
        raise KeyError
    layer(x)  # Outside of the block a call updates the statistics again.
    assert layer.num_batches_tracked == 1
    assert layer.running_mean.ne(0).all()  # Before this call every channel had a running mean of 0.


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_a_copy_that_is_made_in_a_block_updates_its_statistics_after_the_block(
    ranks: Ranks, make_copy: Callable[[nn.Module], nn.Module]
) -> None:
    """In the block the layer has an attribute that collects the batches, and a shallow copy has the same attribute.
    After the block the attribute must not stop the copy from updating its statistics. A shallow copy shares the buffers
    of the layer, and a deep copy has its own."""
    layer = make_layer(ranks, momentum=1.0)
    with syncbn.accumulate_running_stats(layer):
        other = make_copy(layer)
        layer(rank_batch(ranks, 0))
    other(rank_batch(ranks, 1))
    close(other.running_mean, all_values(ranks, 1).mean(0))


@pytest.mark.compiles
def test_a_compiled_layer_accumulates_unless_it_is_compiled_with_fullgraph(ranks: Ranks) -> None:
    """Inside the block every graph breaks at the layer, even if the graph was compiled before the block."""
    layer, x = make_layer(ranks, momentum=1.0), rank_batch(ranks, 0)
    with syncbn.accumulate_running_stats(layer), pytest.raises(Exception, match="compile without fullgraph=True"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    with syncbn.accumulate_running_stats(layer):
        for index in range(2):
            compiled(rank_batch(ranks, index))
    values = all_values(ranks, 0, 1)
    close((layer.running_mean, layer.running_var), (values.mean(0), values.var(0)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the other ranks raise at a later call")
@pytest.mark.parametrize("name", ["running_mean", "running_var", "num_batches_tracked"])
def test_a_block_refuses_buffers_that_functional_call_passes(ranks: Ranks, name: str) -> None:
    """The block updates the buffers that the layer has, so it would ignore those that the call passes. Only rank 0
    passes a buffer here, and every rank raises."""
    model, x = nn.Sequential(make_layer(ranks)), rank_batch(ranks, 0)
    view = model[0].get_buffer(name)[...]  # A view has the memory of the buffer, but is another tensor.
    buffers = {f"0.{name}": view} if ranks.rank == 0 else {}
    message = "this call updates running statistics that are not those which the layer had when"
    with (
        assert_state_unchanged(model),
        pytest.raises(ValueError, match=message),
        syncbn.accumulate_running_stats(model),
    ):
        functional_call(model, buffers, x)
    functional_call(model, buffers, x)  # Outside of the block the call is accepted.


# sync_batch_stats.


@pytest.mark.parametrize(
    ("is_masked", "is_compiled"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.compiles)]
)
@pytest.mark.parametrize("channel_dim", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_batch_statistics_and_gradients_are_those_of_the_values_of_all_ranks(
    ranks: Ranks, dtype: torch.dtype, channel_dim: int, is_masked: bool, is_compiled: bool
) -> None:
    """The ranks have different numbers of samples. Mean and var are float32 for a float16 input, and the gradient has
    the dtype and the strides of the input."""
    function = torch.compile(sync_batch_stats, backend="aot_eager", fullgraph=True) if is_compiled else sync_batch_stats
    threshold = 0.0 if is_masked else -torch.inf  # The values in the first channel decide what the mask counts.
    values, x = all_values(ranks, 0).to(dtype).double(), rank_batch(ranks, 0).to(dtype)
    values, mask = values[values[:, 0] > threshold], x[:, 0] > threshold
    leaf = x.movedim(1, channel_dim).requires_grad_()
    mean, var, count = function(leaf, channel_dim=channel_dim, mask=mask if is_masked else None)
    (mean.sum() + var.sum()).backward()
    assert int(count) == len(values)
    assert mean.dtype == var.dtype == torch.promote_types(dtype, torch.float32)
    expected_mean = values.mean(0)
    expected = expected_mean.to(mean), values.var(0, correction=0).to(var)
    torch.testing.assert_close((mean, var), expected, rtol=1e-6, atol=1e-6)  # Float32 rounds by 6e-8.
    # All ranks have the same loss, and this is the gradient of the sum of their losses.
    gradient = ranks.size * mask[:, None] * (1 + 2 * (x.detach() - expected_mean[:, None, None])) / len(values)
    torch.testing.assert_close(leaf.grad, gradient.to(dtype).movedim(1, channel_dim))
    assert leaf.grad.stride() == leaf.stride()


@pytest.mark.parametrize("num_values", [0, 1])
def test_batch_statistics_of_one_value_or_none_are_defined(ranks: Ranks, num_values: int) -> None:
    """Rank 0 has `num_values` values, and the other ranks have none. The function raises no error, and the mean of no
    value is 0."""
    x = torch.full((0 if ranks.rank else num_values, C), 2.0, device=ranks.device, requires_grad=True)
    mean, var, count = sync_batch_stats(x)
    (mean.sum() + var.sum()).backward()
    assert x.grad.isfinite().all()
    assert mean.eq(2.0 * num_values).all()
    assert not var.any()
    assert int(count) == num_values
