"""Tests that a process_group means the same ranks in every form, also after a copy, a pickle or a new default group."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import voting
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import preserved_state
from voting import Ranks, Reports

import syncbn
from syncbn.functional import sync_batch_stats
from syncbn.ranks import groups
from syncbn.ranks.groups import GlobalRanks

C = 4  # at least as many as ranks


def make_layer(process_group: object, ranks: Ranks) -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(C, process_group=process_group, dtype=torch.float64, device=ranks.device)


def random_batch(ranks: Ranks) -> Tensor:
    return torch.randn(3, C, dtype=torch.float64, device=ranks.device)


def synchronised_ranks(layer: nn.Module, ranks: Ranks) -> list[int]:
    """Return the ranks whose inputs enter the running mean, all with equal weights: rank r passes ones in channel r."""
    layer.train().reset_running_stats()
    layer.momentum = 1.0
    x = torch.zeros_like(random_batch(ranks))
    x[:, ranks.rank] = 1
    layer(x)
    members = layer.running_mean.nonzero().flatten()
    assert (layer.running_mean[members] * len(members) - 1).abs().max() < 1e-12
    return members.tolist()


def synchronises_all(layer: nn.Module, ranks: Ranks) -> bool:
    return synchronised_ranks(layer, ranks) == list(range(ranks.size))


# Forms of a process_group.


def test_each_form_of_process_group(ranks: Ranks) -> None:
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for process_group in (None, dist.group.WORLD, ranks.size, mesh.get_group()):
        assert synchronises_all(make_layer(process_group, ranks), ranks), process_group
    assert [syncbn.create_syncbn_process_group(size) for size in (ranks.size, 0)] == [dist.group.WORLD, None]
    assert synchronised_ranks(make_layer(1, ranks), ranks) == [ranks.rank]
    group = syncbn.create_syncbn_process_group(1)
    assert syncbn.create_syncbn_process_group(1) is group is not None
    if ranks.size == 4:
        pair, crossed_pair = [[0, 1], [2, 3]][ranks.rank // 2], [0, 3] if ranks.rank in (0, 3) else [1, 2]
        grid = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        for process_group in (2, syncbn.create_syncbn_process_group(2), grid.get_group("shard")):
            assert synchronised_ranks(make_layer(process_group, ranks), ranks) == pair, process_group
        crossed = {first: dist.new_group([first, 3 - first]) for first in (0, 1)}
        assert synchronised_ranks(make_layer(crossed[crossed_pair[0]], ranks), ranks) == crossed_pair


def test_an_int_given_before_init_process_group_becomes_a_group_in_the_first_training_forward(ranks: Ranks) -> None:
    """Also if the default group was another one. test_compile.py has compiled layers."""
    alone, outdated = [make_layer(1, ranks)], make_layer(dist.group.WORLD, ranks)
    layers = [make_layer(process_group, ranks) for process_group in (None, ranks.size)]
    voting.world.destroy_groups()
    alone.append(make_layer(1, ranks))
    layers += [make_layer(ranks.size, ranks), make_layer(ranks.size, ranks)]
    assert syncbn.summary(layers[-1])[0].group_size == 1
    voting.world.create_group()
    assert syncbn.summary(layers[-1])[0].group_size == ranks.size
    assert [synchronised_ranks(layer, ranks) for layer in alone] == [[ranks.rank]] * 2
    assert groups.lookup(1) is None  # One rank needs no group.
    for layer in layers:
        assert synchronises_all(layer, ranks)
        assert groups.lookup(layer._process_group) is dist.group.WORLD
    with pytest.raises(RuntimeError, match="was destroyed"):
        outdated(random_batch(ranks))


def test_summary_names_group_payload_and_last_step(ranks: Ranks) -> None:
    """test_compile.py has graphs."""
    model, payload_bytes = nn.Sequential(make_layer(None, ranks), make_layer(1, ranks)), 8 * (2 * C + 5)
    assert [*syncbn.summary(model)] == [
        ("0", "SyncBatchNorm", C, ranks.size, payload_bytes, payload_bytes, "none yet"),
        ("1", "SyncBatchNorm", C, 1, 0, 0, "none yet"),
    ]
    model(random_batch(ranks))
    expected = [f"synchronised over {ranks.size} ranks", "not synchronised"]
    for trained in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [row.last_step for row in syncbn.summary(trained)] == expected
    loaded = make_layer(None, ranks)
    loaded.load_state_dict(model[0].state_dict())
    assert syncbn.summary(loaded)[0].last_step == "not known"  # num_batches_tracked is 1
    assert syncbn.summary(loaded.to("meta"))[0].last_step == "none yet"
    assert str(syncbn.summary(model)).endswith(f"\nkernels: {syncbn.kernels.available()}")


# Ranks outside of the group, copies and conversions.


def test_a_rank_outside_of_the_group_may_build_and_evaluate_a_layer_but_not_train_it(ranks: Ranks) -> None:
    """torch's test_SyncBatchNorm_process_group also has a group of rank 0 only."""
    group = dist.new_group([0])
    built = make_layer(group, ranks)
    converted = syncbn.convert_syncbn_model(nn.BatchNorm1d(C).to(ranks.device, torch.float64), group)
    pickled = pickle.loads(pickle.dumps(built))
    for layer in (built, converted, copy.deepcopy(built), pickled):
        assert layer.process_group == group or layer is pickled  # A pickle finds the oldest group of the ranks.
        layer.eval()(random_batch(ranks))
        assert syncbn.summary(layer.train())[0].group_size == (ranks.rank == 0)
        if ranks.rank == 0:
            layer(random_batch(ranks))
        else:
            message = r"not in .* set layer.process_group on each rank"
            with preserved_state(layer), pytest.raises(ValueError, match=message):
                layer(random_batch(ranks))
    reverted = syncbn.revert_syncbn_model(syncbn.convert_syncbn_model(nn.SyncBatchNorm(2), group))
    assert reverted.process_group is (dist.GroupMember.NON_GROUP_MEMBER if ranks.rank else group)


def test_copies_share_the_group_and_pickles_find_one_of_the_same_ranks(ranks: Ranks) -> None:
    group = dist.new_group()
    model = nn.Sequential(make_layer(group, ranks), make_layer(ranks.size, ranks))
    assert "process_group=ranks [0" in repr(model[0])
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert copied[0].process_group is model[0].process_group is group
    for layer in (*copied, *pickled):
        assert synchronises_all(layer, ranks)
    pickle.dumps(pickled)  # although it has trained with a group, which cannot be pickled


def test_a_second_conversion_keeps_the_group_unless_one_is_given(ranks: Ranks) -> None:
    """nn.SyncBatchNorm holds the group itself and cannot be pickled; the converted layer can, and reverts to it."""
    group = dist.new_group()
    for layer, process_group in ((nn.BatchNorm1d(C), group), (nn.SyncBatchNorm(C, process_group=group), None)):
        model = syncbn.convert_syncbn_model(nn.Sequential(layer).to(ranks.device, torch.float64), process_group)
        assert syncbn.convert_syncbn_model(model)[0].process_group is group
        assert synchronises_all(pickle.loads(pickle.dumps(model[0])), ranks)
        if process_group is None:
            assert syncbn.revert_syncbn_model(model)[0].process_group is group
        assert synchronised_ranks(syncbn.convert_syncbn_model(model, 1)[0], ranks) == [ranks.rank]
        model[0].process_group = None
        assert synchronises_all(model[0], ranks)


@pytest.mark.parametrize("size", [1, 2])
def test_an_int_reverts_to_its_group(ranks: Ranks, size: int) -> None:
    """An nn.SyncBatchNorm without a group would synchronise over all ranks."""
    voting.world.destroy_groups()
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.SyncBatchNorm(C)), size)
    voting.world.create_group()
    if ranks.size % size == 0:
        with pytest.raises(RuntimeError, match=rf"process_group={size} .*create_syncbn_process_group\({size}\)"):
            syncbn.revert_syncbn_model(model)
        syncbn.create_syncbn_process_group(size)
        assert syncbn.revert_syncbn_model(model)[0].process_group.size() == size


# Groups that do not exist, or no longer.


def destroy(group: dist.ProcessGroup) -> None:
    dist.barrier()  # otherwise a rank may leave the group while another still connects to it
    dist.destroy_process_group(group)


def test_a_conversion_or_revert_without_the_group_changes_nothing(ranks: Ranks) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    model[1].process_group = dist.new_group()
    destroy(model[1].process_group)
    message = r"is a ProcessGroup that was destroyed, or that was not created by .*; pass an existing group"
    with pytest.raises(ValueError, match=message):
        syncbn.convert_syncbn_model(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm1d, nn.SyncBatchNorm]
    model[1].process_group = None
    syncbn.convert_syncbn_model(model)
    model[1].process_group = GlobalRanks((0, 97))
    with pytest.raises(RuntimeError, match="no such group exists here"):
        syncbn.revert_syncbn_model(model)
    assert [type(layer) for layer in model] == [syncbn.SyncBatchNorm1d, syncbn.SyncBatchNorm]
    assert repr(model[1].process_group) == "ranks [0, 97]"
    assert syncbn.summary(model)[1].group_size == 2


@pytest.mark.parametrize("destroys_all", [False, True])
def test_no_other_group_replaces_a_destroyed_group(ranks: Ranks, destroys_all: bool) -> None:
    """Other ranks may not have destroyed the group, and would wait in it. A layer unpickled later may use any group."""
    group, later = (dist.new_group() for _ in range(2))
    layer = make_layer(group, ranks)
    pickled_before = pickle.loads(pickle.dumps(layer))
    assert pickled_before.process_group is dist.group.WORLD
    assert synchronises_all(layer, ranks)
    voting.world.replace_group() if destroys_all else destroy(group)
    copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    message = "was destroyed, or no such group exists here; create the group"
    for destroyed in (layer, copied, layer):  # The layer raises again after the first error.
        with preserved_state(destroyed), pytest.raises(RuntimeError, match=message):
            destroyed(random_batch(ranks))
        destroyed.eval()(random_batch(ranks))
        assert "process_group=ranks [0" in repr(destroyed.train())
    layer.process_group = None if destroys_all else later
    for existing in (layer, pickled_before, pickled)[: 1 if destroys_all else 3]:
        assert synchronises_all(existing, ranks)


def test_the_destroyed_group_of_an_int_is_named(ranks: Ranks) -> None:
    if ranks.size == 4:
        layer = make_layer(2, ranks)
        dist.destroy_process_group(syncbn.create_syncbn_process_group(2))
        with pytest.raises(RuntimeError, match="process_group=2 was destroyed"):
            layer(random_batch(ranks))


def layer_of_group_destroyed_by_rank_1(ranks: Ranks) -> syncbn.SyncBatchNorm:
    group = dist.new_group()
    layer = make_layer(group, ranks)
    dist.barrier()
    if ranks.rank == 1:
        dist.destroy_process_group(group)
    return layer


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda ranks: lambda x: sync_batch_stats(x, 0), "ValueError: process_group=0"),
        (lambda ranks: lambda x: sync_batch_stats(x, "world"), "TypeError: process_group must be None"),
        (lambda ranks: lambda x: syncbn.create_syncbn_process_group(-2), "ValueError: group_size must be an int"),
        (lambda ranks: make_layer(dist.new_group([0]), ranks), "ValueError: this rank is not in the layer's"),
        (layer_of_group_destroyed_by_rank_1, r"RuntimeError: the layer's process_group \(ranks .*\) was destroyed"),
    ],
)
def test_ranks_that_wait_report_why_another_rank_has_no_group(
    ranks: Ranks, reports: Reports, build: Callable[[Ranks], Callable[[Tensor], object]], text: str
) -> None:
    """Rank 1 raises before it knows in which group the other ranks wait. Later it joins their call."""
    call, layer = build(ranks), make_layer(None, ranks)
    if ranks.rank == 1:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            call(random_batch(ranks))
        reports.wait_for(rf"rank 1: (.*; )?has raised {text}.*\n(rank.*\n)*\Z")  # No cause of a late rank follows.
    assert synchronises_all(layer, ranks)


def test_ranks_that_ask_for_different_groups_issue_one_collective(ranks: Ranks) -> None:
    """A second collective of the rank in a forward would meet the next collective of the other ranks."""
    x = random_batch(ranks)
    with pytest.raises(ValueError, match="the ranks ask for different process groups"):
        syncbn.create_syncbn_process_group(7) if ranks.rank else sync_batch_stats(x, process_group=5)
    ones = torch.ones(1, device=ranks.device)
    dist.all_reduce(ones)
    assert ones == ranks.size
