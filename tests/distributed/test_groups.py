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


# Forms of a process_group.


def test_a_process_group_can_select_all_ranks_or_some_ranks_or_this_rank_alone(ranks: Ranks) -> None:
    mesh, create = init_device_mesh(ranks.device.type, (ranks.size,)), syncbn.create_syncbn_process_group
    assert create(ranks.size) is dist.group.WORLD
    assert create(0) is None
    # The ranks that share statistics, and the process groups that select them.
    selections = [
        ([*range(ranks.size)], [None, dist.group.WORLD, ranks.size, mesh.get_group()]),
        ([ranks.rank], [1, create(1)]),
    ]
    if ranks.size == 4:
        mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        selections.append(([0, 1] if ranks.rank < 2 else [2, 3], [2, create(2), mesh.get_group("shard")]))
        outer_group, inner_group = dist.new_group([0, 3]), dist.new_group([1, 2])
        selections.append(([0, 3], [outer_group]) if ranks.rank in (0, 3) else ([1, 2], [inner_group]))
    for expected, process_groups in selections:
        for process_group in process_groups:
            assert synchronised_ranks(make_layer(process_group, ranks), ranks) == expected, process_group


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
        assert synchronised_ranks(layer, ranks) == [*range(ranks.size)]
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
    assert syncbn.summary(loaded)[0].last_step == "not known"  # A state_dict does not record the ranks.
    wrapper = torch.compile(model, backend="eager")
    assert [row.last_step for row in syncbn.summary(wrapper)] == ["compiled", "compiled"]
    model.compile(backend="eager")  # This changes the model itself.
    assert [row.last_step for row in syncbn.summary(model)] == ["compiled", "compiled"]
    assert str(syncbn.summary(model)).endswith(f"\nkernels: {syncbn.kernels.available()}")


# Copies and conversions.


@pytest.mark.parametrize("form", ["a group of all ranks", "a group of rank 0", "an int"])
def test_a_layer_keeps_its_group_in_conversions_copies_and_pickles(ranks: Ranks, form: str) -> None:
    """A rank outside of the group may build, copy and evaluate a layer, but not train it. A pickled layer finds a group
    of the same ranks."""
    members = [0] if form == "a group of rank 0" else [*range(ranks.size)]
    group = ranks.size if form == "an int" else dist.new_group(members)
    built = make_layer(group, ranks)
    converted = syncbn.convert_syncbn_model(nn.BatchNorm1d(C).to(ranks.device, torch.float64), group)
    copied, pickled = copy.deepcopy(built), pickle.loads(pickle.dumps(built))
    assert built.process_group == converted.process_group == copied.process_group == group
    if form == "a group of all ranks":
        assert f"process_group=ranks {members}" in repr(built)
    for layer in (built, converted, copied, pickled):
        layer.eval()(random_batch(ranks))
        layer.train()
        if ranks.rank in members:
            assert synchronised_ranks(layer, ranks) == members
            pickle.dumps(layer)  # A group cannot be pickled, but a layer that has trained can.
        else:
            assert syncbn.summary(layer)[0].group_size == 0
            message = "not in .* set layer.process_group on each rank"
            with assert_state_unchanged(layer), pytest.raises(ValueError, match=message):
                layer(random_batch(ranks))


def test_a_second_conversion_keeps_the_group_unless_another_is_given(ranks: Ranks) -> None:
    group, model = dist.new_group(), nn.Sequential(nn.BatchNorm1d(C)).to(ranks.device, torch.float64)
    syncbn.convert_syncbn_model(model, group)
    assert syncbn.convert_syncbn_model(model)[0].process_group is group
    assert synchronised_ranks(syncbn.convert_syncbn_model(model, 1)[0], ranks) == [ranks.rank]
    model[0].process_group = None
    assert synchronised_ranks(model[0], ranks) == [*range(ranks.size)]


def test_nn_syncbatchnorm_keeps_its_group_in_a_conversion_and_a_revert(ranks: Ranks) -> None:
    """With process_group=1 a revert is refused and changes no layer until create_syncbn_process_group(1) is called."""
    for group in (dist.new_group(), dist.new_group([0])):  # Other ranks get NON_GROUP_MEMBER for the second group.
        model = syncbn.convert_syncbn_model(nn.Sequential(nn.SyncBatchNorm(C, process_group=group)))
        assert model[0].process_group == group
        assert syncbn.revert_syncbn_model(model)[0].process_group is group
    voting.world.replace_group()
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(C), nn.SyncBatchNorm(C)), process_group=1)
    with pytest.raises(RuntimeError, match=r"process_group=1 .*create_syncbn_process_group\(1\)"):
        syncbn.revert_syncbn_model(model)
    assert [type(layer) for layer in model] == [syncbn.SyncBatchNorm1d, syncbn.SyncBatchNorm]
    group = syncbn.create_syncbn_process_group(1)
    assert syncbn.revert_syncbn_model(model)[1].process_group is group


# Groups that do not exist.


@pytest.mark.parametrize(
    ("destroyed", "fullgraph"),
    [
        ("the group", None),
        ("all groups, and a default group is created", None),
        ("all groups", None),
        *(pytest.param("all groups", fullgraph, marks=pytest.mark.compiles) for fullgraph in (True, False)),
    ],
)
def test_no_other_group_replaces_a_destroyed_group(ranks: Ranks, destroyed: str, fullgraph: bool | None) -> None:
    """Other ranks may still use the destroyed group, and would wait in it. Only a layer that is unpickled afterwards
    may use another group of the same ranks. `fullgraph`: None does not compile the layer."""
    group = dist.new_group()
    layer = make_layer(group, ranks)
    call = layer if fullgraph is None else torch.compile(layer, backend="aot_eager", fullgraph=fullgraph)
    call(random_batch(ranks))
    if destroyed == "the group":
        dist.barrier()  # Otherwise a rank may leave the group while another rank still connects to it.
        dist.destroy_process_group(group)
    else:
        voting.world.destroy_groups()
    if destroyed == "all groups, and a default group is created":
        voting.world.create_group()
    for unusable in (call, copy.deepcopy(layer), call):  # The layer raises again after the first error.
        message = "was destroyed, or no such group exists here; create the group"
        with assert_state_unchanged(unusable), pytest.raises(RuntimeError, match=message):
            unusable(random_batch(ranks))
        unusable.eval()(random_batch(ranks))
        unusable.train()
    with pytest.raises(ValueError, match=r"is a ProcessGroup that was destroyed, or that was not .*; pass an existing"):
        make_layer(group, ranks)
    if destroyed == "all groups":
        voting.world.create_group()
    unpickled = pickle.loads(pickle.dumps(layer))
    layer.process_group = None
    for usable in (call, unpickled):
        assert synchronised_ranks(usable, ranks) == [*range(ranks.size)]


@pytest.mark.parametrize("error", ["ValueError: process_group=0", "RuntimeError: .* was destroyed"])
def test_ranks_that_wait_report_why_another_rank_has_no_group(ranks: Ranks, reports: Reports, error: str) -> None:
    """Rank 1 raises without joining the all_reduce of `layer`, in which the others wait, and joins it after they have
    reported the error."""
    layer, layer_of_group = (make_layer(group, ranks) for group in (None, dist.new_group()))
    dist.barrier()
    if ranks.rank == 1:
        if "destroyed" in error:
            dist.destroy_process_group(layer_of_group.process_group)
        with pytest.raises((ValueError, RuntimeError)):
            layer_of_group(random_batch(ranks)) if "destroyed" in error else make_layer(0, ranks)
        reports.wait_for(rf"rank 1: (.*; )?has raised {error}.*\n(rank.*\n)*\Z")  # No list of causes follows.
    assert synchronised_ranks(layer, ranks) == [*range(ranks.size)]


def test_ranks_that_ask_for_different_groups_issue_one_collective(ranks: Ranks) -> None:
    """If some ranks issued a second collective, it would pair with the next collective of the other ranks."""
    with pytest.raises(ValueError, match="the ranks ask for different process groups"):
        syncbn.create_syncbn_process_group(7) if ranks.rank else sync_batch_stats(random_batch(ranks), process_group=5)
    assert ranks.all_reduce_sum(torch.ones(1, device=ranks.device)) == ranks.size
