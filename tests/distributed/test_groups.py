"""Tests that a process_group selects the same ranks in each form, in copies, in pickles and in a new default group."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import voting
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training import assert_state_unchanged
from voting import Ranks, Reports

import syncbn
from syncbn.functional import sync_batch_stats

C = 4  # at least as many channels as ranks


def make_layer(process_group: object, ranks: Ranks) -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(C, process_group=process_group, dtype=torch.float64, device=ranks.device)


def random_batch(ranks: Ranks) -> Tensor:
    return torch.randn(3, C, dtype=torch.float64, device=ranks.device)


def synchronised_ranks(layer: nn.Module, ranks: Ranks) -> list[int]:
    """Return the ranks over which the layer normalises. Each rank passes ones in the channel of its own number, and
    zeros in all other channels. Over k ranks the means of k channels are then 1 / k, and all other means are 0."""
    layer.train().reset_running_stats()
    layer.momentum = 1.0
    x = torch.zeros_like(random_batch(ranks))
    x[:, ranks.rank] = 1
    layer(x)
    means = layer.running_mean.tolist()
    members = [rank for rank in range(C) if means[rank] > 0]
    assert [means[rank] for rank in members] == pytest.approx([1 / len(members)] * len(members))
    return members


def synchronises_all(layer: nn.Module, ranks: Ranks) -> bool:
    return synchronised_ranks(layer, ranks) == [*range(ranks.size)]


# Forms of a process_group.


def test_a_process_group_can_select_all_ranks_or_this_rank_alone(ranks: Ranks) -> None:
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for process_group in (None, dist.group.WORLD, ranks.size, mesh.get_group()):
        assert synchronises_all(make_layer(process_group, ranks), ranks), process_group
    assert syncbn.create_syncbn_process_group(ranks.size) is dist.group.WORLD
    assert syncbn.create_syncbn_process_group(0) is None
    for process_group in (1, syncbn.create_syncbn_process_group(1)):
        assert synchronised_ranks(make_layer(process_group, ranks), ranks) == [ranks.rank]


def test_a_process_group_can_select_some_ranks(ranks: Ranks) -> None:
    if ranks.size != 4:
        pytest.skip("needs 4 ranks")
    consecutive_ranks = [0, 1] if ranks.rank < 2 else [2, 3]
    mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    for process_group in (2, syncbn.create_syncbn_process_group(2), mesh.get_group("shard")):
        assert synchronised_ranks(make_layer(process_group, ranks), ranks) == consecutive_ranks, process_group
    outer_group, inner_group = dist.new_group([0, 3]), dist.new_group([1, 2])
    if ranks.rank in (0, 3):
        assert synchronised_ranks(make_layer(outer_group, ranks), ranks) == [0, 3]
    else:
        assert synchronised_ranks(make_layer(inner_group, ranks), ranks) == [1, 2]


def test_layers_may_be_built_before_init_process_group(ranks: Ranks) -> None:
    """Layers may also be built under an earlier default group. test_compile.py has compiled layers."""
    layers = [make_layer(process_group, ranks) for process_group in (None, ranks.size)]
    voting.world.destroy_groups()
    layers.append(make_layer(ranks.size, ranks))
    local_layer = make_layer(1, ranks)
    assert [syncbn.summary(layer)[0].group_size for layer in layers] == [1, 1, 1]
    voting.world.create_group()
    assert [syncbn.summary(layer)[0].group_size for layer in layers] == [ranks.size] * 3
    for layer in layers:
        assert synchronises_all(layer, ranks)
    assert synchronised_ranks(local_layer, ranks) == [ranks.rank]


def test_summary_names_group_payload_and_last_step(ranks: Ranks) -> None:
    model = nn.Sequential(make_layer(None, ranks), make_layer(1, ranks))
    payload_bytes = 8 * (2 * C + 5)
    assert [*syncbn.summary(model)] == [
        ("0", "SyncBatchNorm", C, ranks.size, payload_bytes, payload_bytes, "none yet"),
        ("1", "SyncBatchNorm", C, 1, 0, 0, "none yet"),
    ]
    model(random_batch(ranks))
    for trained in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        last_steps = [row.last_step for row in syncbn.summary(trained)]
        assert last_steps == [f"synchronised over {ranks.size} ranks", "not synchronised"]
    loaded = make_layer(None, ranks)
    loaded.load_state_dict(model[0].state_dict())
    assert syncbn.summary(loaded)[0].last_step == "not known"  # The state_dict has no ranks.
    assert str(syncbn.summary(model)).endswith(f"\nkernels: {syncbn.kernels.available()}")


# Ranks outside of the group, copies and conversions.


def test_a_rank_outside_of_the_group_may_build_copy_and_evaluate_a_layer_but_not_train_it(ranks: Ranks) -> None:
    group = dist.new_group([0])
    built = make_layer(group, ranks)
    converted = syncbn.convert_syncbn_model(nn.BatchNorm1d(C).to(ranks.device, torch.float64), group)
    copied, pickled = copy.deepcopy(built), pickle.loads(pickle.dumps(built))
    for layer in (built, converted, copied):
        assert layer.process_group == group
    for layer in (built, converted, copied, pickled):
        layer.eval()(random_batch(ranks))
        layer.train()
        if ranks.rank == 0:
            assert synchronised_ranks(layer, ranks) == [0]
        else:
            assert syncbn.summary(layer)[0].group_size == 0
            message = "not in .* set layer.process_group on each rank"
            with assert_state_unchanged(layer), pytest.raises(ValueError, match=message):
                layer(random_batch(ranks))


def test_copies_share_the_group_and_pickles_find_a_group_of_the_same_ranks(ranks: Ranks) -> None:
    group = dist.new_group()
    model = nn.Sequential(make_layer(group, ranks), make_layer(ranks.size, ranks))
    assert "process_group=ranks [0" in repr(model[0])
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert copied[0].process_group is model[0].process_group is group
    for layer in (*copied, *pickled):
        assert synchronises_all(layer, ranks)
    pickle.dumps(pickled)  # A group cannot be pickled, but a layer that has trained can.


def test_a_second_conversion_keeps_the_group_unless_another_is_given(ranks: Ranks) -> None:
    group = dist.new_group()
    layer = nn.BatchNorm1d(C).to(ranks.device, torch.float64)
    model = syncbn.convert_syncbn_model(nn.Sequential(layer), group)
    assert syncbn.convert_syncbn_model(model)[0].process_group is group
    assert synchronised_ranks(syncbn.convert_syncbn_model(model, 1)[0], ranks) == [ranks.rank]
    model[0].process_group = None
    assert synchronises_all(model[0], ranks)


@pytest.mark.parametrize("is_member", [True, False])
def test_a_conversion_of_nn_syncbatchnorm_and_its_revert_keep_the_group(ranks: Ranks, is_member: bool) -> None:
    group = dist.new_group() if is_member else dist.new_group([0])  # Other ranks get NON_GROUP_MEMBER.
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.SyncBatchNorm(C, process_group=group)))
    assert model[0].process_group == group
    assert syncbn.revert_syncbn_model(model)[0].process_group is group


def test_a_layer_with_an_int_reverts_to_its_group_and_not_to_all_ranks(ranks: Ranks) -> None:
    """While the group does not exist, the revert is refused and changes no layer."""
    voting.world.destroy_groups()
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(C), nn.SyncBatchNorm(C)), process_group=1)
    voting.world.create_group()
    with pytest.raises(RuntimeError, match=r"process_group=1 .*create_syncbn_process_group\(1\)"):
        syncbn.revert_syncbn_model(model)
    assert [type(layer) for layer in model] == [syncbn.SyncBatchNorm1d, syncbn.SyncBatchNorm]
    group = syncbn.create_syncbn_process_group(1)
    assert syncbn.revert_syncbn_model(model)[1].process_group is group


# Groups that do not exist.


def destroy(group: dist.ProcessGroup) -> None:
    dist.barrier()  # Otherwise a rank may leave the group while another rank still connects to it.
    dist.destroy_process_group(group)


def test_a_conversion_with_a_destroyed_group_is_refused_and_changes_no_layer(ranks: Ranks) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2, process_group=dist.new_group()))
    destroy(model[1].process_group)
    message = r"is a ProcessGroup that was destroyed, or that was not created by .*; pass an existing group"
    with pytest.raises(ValueError, match=message):
        syncbn.convert_syncbn_model(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm1d, nn.SyncBatchNorm]


@pytest.mark.parametrize("destroys_all_groups", [False, True])
def test_no_other_group_replaces_a_destroyed_group(ranks: Ranks, destroys_all_groups: bool) -> None:
    """Other ranks may still use the destroyed group, and would wait in it. Only a layer that is unpickled afterwards
    may use another group of the same ranks."""
    layer = make_layer(dist.new_group(), ranks)
    layer(random_batch(ranks))
    if destroys_all_groups:
        voting.world.replace_group()
    else:
        destroy(layer.process_group)
    for destroyed in (layer, copy.deepcopy(layer), layer):  # The layer raises again after the first error.
        message = "was destroyed, or no such group exists here; create the group"
        with assert_state_unchanged(destroyed), pytest.raises(RuntimeError, match=message):
            destroyed(random_batch(ranks))
        destroyed.eval()(random_batch(ranks))
        destroyed.train()
    unpickled = pickle.loads(pickle.dumps(layer))
    layer.process_group = None
    for usable in (layer, unpickled):
        assert synchronises_all(usable, ranks)


@pytest.mark.parametrize(
    ("destroys_group", "text"), [(False, "ValueError: process_group=0"), (True, r"RuntimeError: .* was destroyed")]
)
def test_ranks_that_wait_report_why_another_rank_has_no_group(
    ranks: Ranks, reports: Reports, destroys_group: bool, text: str
) -> None:
    """Rank 1 raises without joining the all_reduce in which the other ranks wait, and calls their layer only after they
    have reported the error."""
    layer, group = make_layer(None, ranks), dist.new_group()
    layer_of_group = make_layer(group, ranks)
    dist.barrier()
    if ranks.rank == 1 and destroys_group:
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError):
            layer_of_group(random_batch(ranks))
    elif ranks.rank == 1:
        with pytest.raises(ValueError):
            sync_batch_stats(random_batch(ranks), process_group=0)
    if ranks.rank == 1:
        reports.wait_for(rf"rank 1: (.*; )?has raised {text}.*\n(rank.*\n)*\Z")  # No list of causes follows.
    assert synchronises_all(layer, ranks)


def test_ranks_that_ask_for_different_groups_issue_one_collective(ranks: Ranks) -> None:
    """If some ranks issued a second collective, it would pair with the next collective of the other ranks."""
    with pytest.raises(ValueError, match="the ranks ask for different process groups"):
        syncbn.create_syncbn_process_group(7) if ranks.rank else sync_batch_stats(random_batch(ranks), process_group=5)
    assert ranks.all_reduce_sum(torch.ones(1, device=ranks.device)) == ranks.size
