"""Running statistics over several batches and ranks, against those of all values together in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from voting import Ranks

import syncbn
from syncbn.distributed import reduction

CHANNELS = 3


def part(ranks: Ranks, rank: int, index: int) -> Tensor:
    """A batch of `rank`, of a size of its own, with a mean far from 0; the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(100 * rank + index)
    sizes = (1 + (rank + index) % 3, CHANNELS, 4, 5)
    return (torch.randn(sizes, generator=generator, dtype=torch.float64) * (1 + rank) + index).to(ranks.device)


def values_of(batches: list[Tensor]) -> Tensor:
    """(C, n)."""
    return torch.cat([batch.transpose(0, 1).flatten(1) for batch in batches], dim=1)


def close(actual: Tensor | None, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# Gradient accumulation (https://github.com/pytorch/pytorch/issues/46516).


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_micro_batches_count_as_one(ranks: Ranks, momentum: float | None, checkpointed: bool) -> None:
    layer = syncbn.SyncBatchNorm2d(CHANNELS, momentum=momentum, dtype=torch.float64, device=ranks.device)
    expected = nn.BatchNorm2d(CHANNELS, momentum=momentum, dtype=torch.float64, device=ranks.device)
    for step in range(2):
        indices = range(3 * step, 3 * step + 3)
        with syncbn.accumulate_running_stats(layer):
            for index in indices:
                before = layer.running_mean.clone()
                x = part(ranks, ranks.rank, index).requires_grad_()
                y = checkpoint(layer, x, use_reentrant=True) if checkpointed else layer(x)
                y.pow(2).sum().backward()
                assert torch.equal(layer.running_mean, before)
        expected(
            values_of([part(ranks, rank, index) for index in indices for rank in range(ranks.size)]).t()[
                ..., None, None
            ]
        )
        for name, buffer in layer.named_buffers():
            close(buffer, expected.get_buffer(name))


def test_an_exception_loses_the_block_and_nothing_else(ranks: Ranks) -> None:
    model = nn.Sequential(syncbn.SyncBatchNorm2d(CHANNELS), nn.Flatten(), nn.LazyLinear(2)).to(
        ranks.device, torch.float64
    )
    before = copy.deepcopy(dict(model[0].named_buffers()))

    def fail_in_block() -> None:
        with syncbn.accumulate_running_stats(model):
            model[0](part(ranks, ranks.rank, 0))
            raise KeyError("no such image")

    with pytest.raises(KeyError):
        fail_in_block()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model[0].named_buffers())
    model[0](part(ranks, ranks.rank, 0))
    assert model[0].num_batches_tracked == 1
    assert not torch.equal(model[0].running_mean, before["running_mean"])


def test_frozen_layers_are_left_alone(ranks: Ranks) -> None:
    frozen = syncbn.SyncBatchNorm2d(CHANNELS).to(ranks.device, torch.float64).eval()
    untracked = syncbn.SyncBatchNorm2d(CHANNELS, track_running_stats=False).to(ranks.device, torch.float64)
    model = nn.Sequential(frozen, untracked)
    with syncbn.accumulate_running_stats(model):
        model(part(ranks, ranks.rank, 0))
    assert frozen.num_batches_tracked == 0
    assert not frozen.running_mean.any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
def test_where_nothing_can_be_accumulated(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm2d(CHANNELS, device=ranks.device)
    with (
        pytest.raises(ValueError, match=r"no synchronised layer .*convert"),
        syncbn.accumulate_running_stats(nn.ReLU()),
    ):
        pass
    with (
        syncbn.accumulate_running_stats(layer),
        pytest.raises(RuntimeError, match="cannot run inside one another"),
        syncbn.accumulate_running_stats(layer),
    ):
        pass
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with syncbn.accumulate_running_stats(layer), pytest.raises(Exception, match="compile without fullgraph=True"):
        compiled(part(ranks, ranks.rank, 0).float())


@pytest.mark.two_ranks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
def test_a_graph_compiled_before_breaks(ranks: Ranks) -> None:
    torch._dynamo.reset()
    layer = syncbn.SyncBatchNorm2d(CHANNELS, momentum=1.0, dtype=torch.float64, device=ranks.device)
    compiled = torch.compile(layer, backend="eager")
    compiled(part(ranks, ranks.rank, 0))
    with syncbn.accumulate_running_stats(layer):
        for index in range(2):
            compiled(part(ranks, ranks.rank, index))
    close(
        layer.running_var,
        values_of([part(ranks, rank, index) for index in range(2) for rank in range(ranks.size)]).var(1),
    )
    assert layer.num_batches_tracked == 2


# Recomputed over a data set (https://github.com/facebookresearch/fvcore/issues/152).


class Net(nn.Module):
    """Two batch norms, so that the second's input depends on how the first normalises."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bn1 = nn.BatchNorm2d(CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, 4, 3)
        self.bn2 = nn.BatchNorm2d(4, momentum=None)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.bn2(self.conv(self.bn1(x)).relu()))


def expected_statistics(model: Net, steps: list[list[Tensor]]) -> dict[str, list[Tensor]]:
    """By the definition: mean and unbiased variance of all that goes into each layer when a step is one batch."""
    inputs: dict[str, list[Tensor]] = {"bn1": [], "bn2": []}
    model = copy.deepcopy(model).eval()
    for name, kept in inputs.items():
        model.get_submodule(name).train()
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].detach()))
    for batches in steps:
        model(torch.cat(batches))
    return {name: [values_of(kept).mean(1), values_of(kept).var(1)] for name, kept in inputs.items()}


@pytest.mark.parametrize("kind", ["local", "synchronised", "synchronised alone", "DDP", "mixed"])
@pytest.mark.parametrize("num_batches", [None, 2])
def test_recomputed_over_uneven_loaders(ranks: Ranks, kind: str, num_batches: int | None) -> None:
    """Rank r has 3 batches, less r, and the last rank none."""
    lengths = [0 if rank == ranks.size - 1 else max(1, 3 - rank) for rank in range(ranks.size)]
    model = Net().to(ranks.device, torch.float64)
    most = min(max(lengths), num_batches or 9)
    steps = [[part(ranks, rank, t) for rank in range(ranks.size) if t < lengths[rank]] for t in range(most)]
    expected = expected_statistics(model, steps)
    if kind != "local":
        syncbn.convert_syncbn_model(model.bn1 if kind == "mixed" else model, 1 if "alone" in kind else None)
    model.bn1.running_mean.fill_(torch.nan)
    model.bn2.eval()
    before = [(type(module), module.training, vars(module).get("_process_group")) for module in model.modules()]
    given = DistributedDataParallel(model) if kind == "DDP" else model

    loader = ((part(ranks, ranks.rank, t), "a label") for t in range(lengths[ranks.rank]))
    syncbn.recompute_running_stats(given, loader, num_batches)

    for name, (mean, var) in expected.items():
        layer = model.get_submodule(name)
        close(layer.running_mean, mean)
        close(layer.running_var, var)
        assert layer.num_batches_tracked == most
    syncbn.assert_synced(model)
    after = [(type(module), module.training, vars(module).get("_process_group")) for module in model.modules()]
    assert after == before
    assert reduction.joined_group() is None


def failing_loader(ranks: Ranks) -> Iterator[Tensor]:
    yield part(ranks, ranks.rank, 0)
    if ranks.rank == 0:
        raise KeyError("no such image")
    yield part(ranks, ranks.rank, 1)


class BrokenLoader:
    """Workers that do not start."""

    def __iter__(self) -> Iterator[Tensor]:
        raise OSError("no workers")


def test_a_loader_that_does_not_start_on_one_rank(ranks: Ranks) -> None:
    error, message = (OSError, "no workers") if ranks.rank == 0 else (RuntimeError, "rank 0: OSError: no workers")
    with pytest.raises(error, match=message):
        syncbn.recompute_running_stats(nn.BatchNorm2d(3), BrokenLoader() if ranks.rank == 0 else [part(ranks, 1, 0)])


@pytest.mark.parametrize("num_batches", [lambda model, batch: model(batch), -1])
def test_num_batches_of_another_kind(ranks: Ranks, num_batches: object) -> None:
    """As of a `forward` that was not given by its name."""
    layer = nn.BatchNorm1d(3, device=ranks.device)
    with pytest.raises(ValueError, match="num_batches must be a number of batches or None, got "):
        syncbn.recompute_running_stats(layer, [torch.randn(4, 3, device=ranks.device)], num_batches)


def test_the_rest_of_the_model_is_in_evaluation(ranks: Ranks) -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm2d(CHANNELS)).to(ranks.device, torch.float64)
    syncbn.recompute_running_stats(model, [part(ranks, ranks.rank, 0)])
    close(model[1].running_var, values_of([part(ranks, rank, 0) for rank in range(ranks.size)]).var(1))
    assert model[0].training


@pytest.mark.parametrize("has_batch", [0, 1])
def test_compiled_data_parallel_where_a_rank_has_no_batch(
    ranks: Ranks, has_batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    """DistributedDataParallel's own forward would wait. The rank does not wait before its first all_reduce, either."""
    inner = Net().to(ranks.device, torch.float64)
    model = torch.compile(DistributedDataParallel(inner), backend="eager")
    syncbn.recompute_running_stats(model, [part(ranks, 0, 0)] if ranks.rank == has_batch else [])
    assert not caplog.records
    close(inner.bn1.running_mean, values_of([part(ranks, 0, 0)]).mean(1))
    with pytest.raises(ValueError, match=r"inside the model is a DistributedDataParallel \(0\)"):
        syncbn.recompute_running_stats(nn.Sequential(DistributedDataParallel(inner)), [])


def test_a_group_of_torchs_layer_stays(ranks: Ranks) -> None:
    groups = [dist.new_group([rank]) for rank in range(ranks.size)]
    layer = nn.SyncBatchNorm(CHANNELS, process_group=groups[ranks.rank]).to(ranks.device, torch.float64)
    syncbn.recompute_running_stats(layer, [part(ranks, ranks.rank, 0)])
    assert type(layer) is nn.SyncBatchNorm
    assert layer.process_group is groups[ranks.rank]


class OwnAttribute(nn.BatchNorm2d):
    process_group = "taken"


def test_layers_that_cannot_take_part_are_named(ranks: Ranks) -> None:
    model = nn.Sequential(nn.BatchNorm2d(CHANNELS), OwnAttribute(CHANNELS))
    with pytest.raises(ValueError, match=r"leaves as they are cannot take part: 1$"):
        syncbn.recompute_running_stats(model, [part(ranks, 0, 0)])
    assert type(model[0]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match=r"the layer '1' is lazy and has no statistics yet"):
        syncbn.recompute_running_stats(nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d()), [])


def test_recomputing_inside_join_is_refused(ranks: Ranks) -> None:
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(Net()).to(ranks.device))
    with (
        syncbn.join(ddp),
        pytest.raises(RuntimeError, match=r"recompute_running_stats cannot be used inside syncbn\.join"),
    ):
        syncbn.recompute_running_stats(ddp, [])


def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing(ranks: Ranks) -> None:
    model = Net().to(ranks.device, torch.float64)
    before = copy.deepcopy(model.state_dict())

    def unchanged() -> bool:
        return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    error = KeyError if ranks.rank == 0 else RuntimeError
    message = (
        "no such image" if ranks.rank == 0 else "inside recompute_running_stats another rank failed: rank 0: KeyError"
    )
    with pytest.raises(error, match=message):
        syncbn.recompute_running_stats(model, failing_loader(ranks))
    assert unchanged()
    with pytest.raises(ValueError, match="no rank has a batch"):
        syncbn.recompute_running_stats(model, [])
    with pytest.raises(TypeError, match="begins with one, got dict; pass forward="):
        syncbn.recompute_running_stats(model, [{"x": part(ranks, 0, 0)}])
    with pytest.raises(ValueError, match="no BatchNorm layer with running statistics"):
        syncbn.recompute_running_stats(nn.BatchNorm1d(3, track_running_stats=False), [])
    assert unchanged()
    assert type(model.bn1) is nn.BatchNorm2d
    x = part(ranks, 0, 0)
    syncbn.recompute_running_stats(model, [{"x": x}], forward=lambda module, batch: module(batch["x"]))
    close(model.bn1.running_mean, values_of([x]).mean(1))


# Merged from ranks that had their own.


@pytest.mark.parametrize("count", ["values", "of each layer"])
def test_merged_local_batches_are_the_whole_batch(ranks: Ranks, count: str) -> None:
    """Each rank has one batch of its own size; the last rank none, and NaN."""
    local = nn.BatchNorm2d(CHANNELS, momentum=1.0).to(ranks.device, torch.float64)
    batches = [part(ranks, rank, rank) for rank in range(ranks.size - 1)]
    num_values = 0
    if ranks.rank < ranks.size - 1:
        local(batches[ranks.rank])
        num_values = batches[ranks.rank].numel() // CHANNELS
    else:
        local.running_var.fill_(torch.nan)
    syncbn.merge_running_stats(nn.Sequential(local), num_values if count == "values" else {"0": num_values})
    close(local.running_mean, values_of(batches).mean(1))
    close(local.running_var, values_of(batches).var(1))
    syncbn.assert_synced(local)


def test_merged_by_the_number_of_batches(ranks: Ranks) -> None:
    """The variance of the mixture; merging again changes nothing but rounding."""
    layer = nn.BatchNorm1d(CHANNELS).to(ranks.device, torch.float64)
    means = (
        torch.arange(ranks.size * CHANNELS, dtype=torch.float64, device=ranks.device).view(ranks.size, CHANNELS) ** 2
    )
    variances = means + 1
    batches = torch.arange(ranks.size, dtype=torch.float64, device=ranks.device)  # rank 0 has none
    layer.running_mean.copy_(means[ranks.rank])
    layer.running_var.copy_(variances[ranks.rank])
    layer.num_batches_tracked.fill_(ranks.rank)
    syncbn.merge_running_stats(layer)
    weights = (batches / batches.sum())[:, None]
    mean = (weights * means).sum(0)
    for _ in range(2):
        close(layer.running_mean, mean)
        close(layer.running_var, (weights * (variances + (means - mean) ** 2)).sum(0))
        assert layer.num_batches_tracked == ranks.size - 1
        syncbn.assert_synced(layer)
        syncbn.merge_running_stats(layer)


def test_what_cannot_be_merged(ranks: Ranks) -> None:
    layer = nn.BatchNorm1d(CHANNELS, device=ranks.device)
    layer.running_mean.fill_(ranks.rank)
    for count, message in (
        (-1.0, "rank 0: .* got -1.0 for the layer ''"),
        ({"a": 1}, r"rank 0: .*nothing .* it has \['a'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            syncbn.merge_running_stats(layer, count if ranks.rank == 0 else 1)
    with pytest.raises(
        ValueError, match=r"differ, first in:\nrank 0: nothing more\nranks? 1.*: BatchNorm layer 2: 3 channels$"
    ):
        syncbn.merge_running_stats(layer if ranks.rank == 0 else nn.Sequential(layer, nn.BatchNorm1d(CHANNELS)))
    with pytest.raises(ValueError, match=r"rank 0: BatchNorm layers, with count\nranks? 1.*: BatchNorm layers$"):
        syncbn.merge_running_stats(layer, 4 if ranks.rank == 0 else None)
    many = [nn.BatchNorm1d(64) for _ in range(300)]  # whose description is longer than what is sent at once
    with pytest.raises(ValueError, match=r"rank 0: BatchNorm layer 301: 9 channels\nranks? 1.* 301: 8 channels$"):
        syncbn.merge_running_stats(nn.Sequential(*many, nn.BatchNorm1d(8 + (ranks.rank == 0))))
    assert (layer.running_mean == ranks.rank).all()
    dist.barrier()


# Equal on all ranks.


def test_equal_models_are_synced(ranks: Ranks) -> None:
    model = Net().to(ranks.device)
    model.register_buffer("nothing", torch.empty(0))
    model.register_buffer("flag", torch.tensor([True, False]))
    model.conv.weight.data[0] = torch.nan
    model.to(memory_format=torch.channels_last)
    syncbn.assert_synced(model)


def test_differences_are_named(ranks: Ranks) -> None:
    model = Net().to(ranks.device)
    last, others = ranks.size - 1, "rank 0" if ranks.size == 2 else f"ranks 0-{ranks.size - 2}"
    model.to(memory_format=torch.channels_last)
    if ranks.rank == last:
        model.conv.weight.data[0, 0, 0, 0] += 0.5
        model.bn1.running_var[1] += 0.25
        model.bn2.num_batches_tracked += 3
    expected = (
        rf"3 of 12 tensors differ between ranks:\n"
        rf"conv.weight: {others} unlike rank {last}, by up to 0.5\n"
        rf"bn1.running_var: {others} unlike rank {last}, by up to 0.25\n"
        rf"bn2.num_batches_tracked: {others} unlike rank {last}, by up to 3$"
    )
    with pytest.raises(AssertionError, match=expected):
        syncbn.assert_synced(model)


def test_other_tensors_on_one_rank_are_named(ranks: Ranks) -> None:
    model = Net()
    if ranks.rank == 0:
        model.bn2 = nn.BatchNorm2d(5)
    expected = r"not the same tensors.*\nrank 0: bn2.weight: \(5,\) torch.float32\nranks? 1.*: bn2.weight: \(4,\) "
    with pytest.raises(AssertionError, match=expected):
        syncbn.assert_synced(model)
    with pytest.raises(AssertionError, match=r"rank 0: nothing more\nranks? 1.*: running_mean"):
        syncbn.assert_synced(nn.BatchNorm1d(3, track_running_stats=ranks.rank != 0))


def test_groups_are_compared_within(ranks: Ranks) -> None:
    if ranks.size != 4:
        pytest.skip("needs two groups of two")
    layer = syncbn.SyncBatchNorm1d(CHANNELS, process_group=2, device=ranks.device)
    layer(torch.full((2, CHANNELS), float(ranks.rank // 2), device=ranks.device))
    syncbn.assert_synced(layer)
    if ranks.rank == 2:
        layer.running_mean[0] = 7
    with pytest.raises(AssertionError, match=r"running_mean: rank 2 unlike rank 3, by up to 6.9$"):
        syncbn.assert_synced(layer)
    layer.process_group = None
    with pytest.raises(AssertionError, match=r"running_mean: ranks 0-1 unlike rank 2 unlike rank 3, by up to 7$"):
        syncbn.assert_synced(layer)
