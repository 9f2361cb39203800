"""Tests that running statistics of several batches, and sync_batch_stats, equal those of the values of all ranks.

test_derivatives.py has the derivatives of sync_batch_stats.
"""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from training import CountCollectives, preserved_state
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_stats

C = 3
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the other ranks raise at a later call")
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def rank_batch(rank: int, index: int, ranks: Ranks) -> Tensor:
    """Return batch `index` of a rank, always the same. Sizes and means differ between batches and ranks."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    shape = (1 + (rank + index) % 3, C, 4, 5)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + rank) + index).to(ranks.device)


def local_batch(ranks: Ranks, index: int) -> Tensor:
    return rank_batch(ranks.rank, index, ranks)


def all_values(ranks: Ranks, *indices: int) -> Tensor:
    """Return the values (n, C) of the batches with these indices, of all ranks."""
    batches = [rank_batch(rank, index, ranks) for index in indices for rank in range(ranks.size)]
    return torch.cat([batch.movedim(1, -1).flatten(0, -2) for batch in batches])


def make_layer(ranks: Ranks, **options: object) -> syncbn.SyncBatchNorm2d:
    return syncbn.SyncBatchNorm2d(C, dtype=torch.float64, device=ranks.device, **options)


# accumulate_running_stats, for gradient accumulation (https://github.com/pytorch/pytorch/issues/46516).


@pytest.mark.parametrize(("momentum", "checkpointed"), [(0.3, False), (None, True)])
def test_micro_batches_count_as_one(ranks: Ranks, momentum: float | None, checkpointed: bool) -> None:
    """The model may also have frozen layers and layers without running statistics."""
    layer, frozen = make_layer(ranks, momentum=momentum), make_layer(ranks).eval()
    model = nn.Sequential(layer, frozen, make_layer(ranks, track_running_stats=False))
    expected = nn.BatchNorm1d(C, momentum=momentum, dtype=torch.float64, device=ranks.device)
    for indices in (range(3), range(3, 6)):
        with preserved_state(frozen), syncbn.accumulate_running_stats(model):
            for index in indices:
                before = layer.running_mean.clone()
                x = local_batch(ranks, index).requires_grad_()
                y = checkpoint(model, x, use_reentrant=True) if checkpointed else model(x)
                y.pow(2).sum().backward()
                assert torch.equal(layer.running_mean, before)
        expected(all_values(ranks, *indices))
        close(dict(layer.named_buffers()), dict(expected.named_buffers()))


def test_a_forward_that_increments_the_counter_itself_counts_once(ranks: Ranks) -> None:
    """timm's layers add 1 to num_batches_tracked in each forward."""
    layer = syncbn.convert_syncbn_model(BatchNormAct2d(C)).to(ranks.device, torch.float64)
    with syncbn.accumulate_running_stats(layer):
        for index in range(3):
            layer(local_batch(ranks, index))
    assert layer.num_batches_tracked == 1


def test_an_exception_discards_the_statistics_of_the_block_only(ranks: Ranks) -> None:
    layer, x = make_layer(ranks), local_batch(ranks, 0)
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2))
    with preserved_state(layer), pytest.raises(KeyError), syncbn.accumulate_running_stats(model):  # noqa: PT012
        layer(x)
        raise KeyError
    layer(x)
    assert layer.num_batches_tracked == 1
    assert layer.running_mean.all()


@pytest.mark.compiles
def test_a_graph_compiled_before_the_block_accumulates_and_fullgraph_is_refused(ranks: Ranks) -> None:
    layer, x = make_layer(ranks, momentum=1.0), local_batch(ranks, 0)
    with syncbn.accumulate_running_stats(layer), pytest.raises(Exception, match="compile without fullgraph=True"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    compiled = torch.compile(layer, backend="eager")
    compiled(x)
    with syncbn.accumulate_running_stats(layer):
        for index in range(2):
            compiled(local_batch(ranks, index))
    values = all_values(ranks, 0, 1)
    close((layer.running_mean, layer.running_var), (values.mean(0), values.var(0)))
    assert layer.num_batches_tracked == 2


class Slimmable(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean[:], self.running_var[:], training=True)


@on_cpu
@pytest.mark.parametrize(
    ("layer_class", "replaced", "on_one_rank"),
    [
        (nn.BatchNorm2d, "running_mean", False),
        (nn.BatchNorm2d, "running_var", True),
        (nn.BatchNorm2d, "num_batches_tracked", True),
        (Slimmable, "", False),
    ],
)
def test_a_block_refuses_calls_that_update_other_statistics(
    ranks: Ranks, layer_class: type[nn.Module], replaced: str, on_one_rank: bool
) -> None:
    """The block would update the module's buffers, not those that functional_call or a subclass passes."""
    model, x = syncbn.convert_syncbn_model(nn.Sequential(layer_class(C).double())), local_batch(ranks, 0)
    is_faulty = replaced and (ranks.rank == 0 or not on_one_rank)
    buffers = {f"0.{replaced}": model[0].get_buffer(replaced).clone()} if is_faulty else {}
    refused = "this call updates running statistics that are not those which the layer had when"
    raises = pytest.raises(ValueError, match=rf"'0'(:| forward(.|\n)*ranks? 0.*: ValueError:) {refused}")
    with preserved_state(model), raises, syncbn.accumulate_running_stats(model):
        functional_call(model, buffers, x)
    functional_call(model, buffers, x)  # Outside of the block it updates the caller's buffers.


@pytest.mark.parametrize("trains_inside", [True, False])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_shallow_copy_made_in_a_block_accumulates_with_the_original_and_a_deep_copy_does_not(
    ranks: Ranks, copied: Callable[[nn.Module], nn.Module], trains_inside: bool
) -> None:
    """copy.copy shares buffers, so in the block the batches of both layers count as one. A deep copy trains by itself.
    After the block both update their statistics in each call."""
    layer = make_layer(ranks, momentum=None)
    with syncbn.accumulate_running_stats(layer):
        other = copied(layer)
        layer(local_batch(ranks, 0))
        if trains_inside:
            other(local_batch(ranks, 1))
    if not trains_inside:
        other(local_batch(ranks, 1))
    first, second, both = (all_values(ranks, *indices).mean(0) for indices in ([0], [1], [0, 1]))
    shared = both if trains_inside else (first + second) / 2
    close(other.running_mean, shared if copied is copy.copy else second)
    with syncbn.accumulate_running_stats(other):
        other(local_batch(ranks, 2))


# sync_batch_stats.


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_batch_statistics_do_not_depend_on_layout_or_dtype_of_the_input(ranks: Ranks, dtype: torch.dtype) -> None:
    """They are computed in float64; the gradient has the input's dtype and strides."""
    torch.manual_seed(ranks.rank)
    x = (torch.randn(4, C, 2, 3) + 100).to(ranks.device, dtype)
    wide, strided = torch.promote_types(dtype, torch.float32), x.repeat_interleave(2, dim=3)[..., ::2]
    expected: list[Tensor] = []
    for same in (x, x.contiguous(memory_format=torch.channels_last), strided, x.to(wide)):
        leaf = same.clone(memory_format=torch.preserve_format).requires_grad_()
        mean, var, count = sync_batch_stats(leaf)
        (mean.sum() + var.sum()).backward()
        assert (mean.dtype, var.dtype, count.dtype) == (wide, wide, torch.int64)
        assert (leaf.grad.dtype, leaf.grad.stride()) == (leaf.dtype, leaf.stride())
        expected = expected or [mean, var, leaf.grad]
        torch.testing.assert_close([mean, var, leaf.grad.to(dtype)], expected)
    assert int(count) == ranks.size * x.numel() // C


@pytest.mark.parametrize(("channels", "samples_of_rank_0", "samples"), [(0, 3, 3), (C, 0, 0), (C, 1, 0)])
def test_batch_statistics_of_no_value_or_one(ranks: Ranks, channels: int, samples_of_rank_0: int, samples: int) -> None:
    """A shard of a DTensor may have no channels."""
    x = torch.full((samples if ranks.rank else samples_of_rank_0, channels), 2.0, device=ranks.device).requires_grad_()
    mean, var, count = sync_batch_stats(x)
    (mean.sum() + var.sum()).backward()
    assert mean.eq(2.0 * samples_of_rank_0).all()
    assert not var.any()
    assert x.grad.equal(
        torch.full_like(x, ranks.size)
    )  # d mean / dx is 1, as n = 1, and the losses of all ranks contain the mean.
    assert int(count) == samples_of_rank_0 + samples * (ranks.size - 1)


def test_batch_statistics_of_one_rank_send_nothing(ranks: Ranks) -> None:
    x = torch.randn(4, C, device=ranks.device).requires_grad_()
    with CountCollectives() as collectives:
        mean, var, _ = sync_batch_stats(x, process_group=1)
        mean.sum().backward()
    assert collectives.total == 0
    torch.testing.assert_close((mean, var), (x.mean(0), x.var(0, correction=0)))


@pytest.mark.compiles
def test_compiled_batch_statistics_equal_eager(ranks: Ranks) -> None:
    """A single graph computes the statistics and the gradient. (AOTAutograd refuses second derivatives.)"""
    x = torch.randn(4, C, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    results = []
    for function in (sync_batch_stats, torch.compile(sync_batch_stats, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        mean, var, count = function(leaf, mask=x[:, 0] > 0)
        (gradient,) = torch.autograd.grad((mean + 1).square().sum() + var.square().sum(), leaf)
        results.append((mean, var, count, gradient))
    torch.testing.assert_close(*results)
