"""Tests that a process_group stands for the same ranks in every form, also after a copy or a new default group."""

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import voting
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training import unchanged
from voting import Ranks, Reports

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats
from syncbn.ranks import groups
from syncbn.ranks.groups import GlobalRanks

C = 4  # at least as many as ranks


def layer_of(process_group: object, ranks: Ranks) -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(C, process_group=process_group, dtype=torch.float64, device=ranks.device)


def batch(ranks: Ranks) -> Tensor:
    return torch.randn(3, C, dtype=torch.float64, device=ranks.device)


def sharing_ranks(layer: nn.Module, ranks: Ranks) -> list[int]:
    """Return the ranks whose inputs enter the running mean, all with equal weights: rank r passes ones in channel r."""
    layer.train().reset_running_stats()
    layer.momentum = 1.0
    x = torch.zeros_like(batch(ranks))
    x[:, ranks.rank] = 1
    layer(x)
    members = layer.running_mean.nonzero().flatten()
    assert (layer.running_mean[members] * len(members) - 1).abs().max() < 1e-12
    return members.tolist()


def all_share(layer: nn.Module, ranks: Ranks) -> bool:
    return sharing_ranks(layer, ranks) == list(range(ranks.size))


def test_each_form_of_process_group(ranks: Ranks) -> None:
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for spec in (None, dist.group.WORLD, ranks.size, mesh.get_group()):
        assert all_share(layer_of(spec, ranks), ranks), spec
    assert [syncbn.create_syncbn_process_group(size) for size in (ranks.size, 0)] == [dist.group.WORLD, None]
    assert sharing_ranks(layer_of(1, ranks), ranks) == [ranks.rank]
    if ranks.size == 4:
        pair, cross_pair = [[0, 1], [2, 3]][ranks.rank // 2], [0, 3] if ranks.rank in (0, 3) else [1, 2]
        grid = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        for spec in (2, syncbn.create_syncbn_process_group(2), grid.get_group("shard")):
            assert sharing_ranks(layer_of(spec, ranks), ranks) == pair, spec
        cross_groups = {first: dist.new_group([first, 3 - first]) for first in (0, 1)}
        assert sharing_ranks(layer_of(cross_groups[cross_pair[0]], ranks), ranks) == cross_pair


def test_the_group_of_an_int_is_created_once(ranks: Ranks) -> None:
    group = syncbn.create_syncbn_process_group(1)
    assert syncbn.create_syncbn_process_group(1) is groups.lookup(layer_of(1, ranks).process_group) is group is not None


def test_an_int_given_before_init_process_group_becomes_a_group_in_the_first_training_forward(ranks: Ranks) -> None:
    """Also if the default group was another; 1 needs no group. test_compile.py has compiled layers."""
    alone = [layer_of(1, ranks)]
    everyone = [layer_of(spec, ranks) for spec in (None, ranks.size)]
    of_first_group = layer_of(dist.group.WORLD, ranks)
    voting.world.leave()
    alone.append(layer_of(1, ranks))
    everyone += [layer_of(ranks.size, ranks), layer_of(ranks.size, ranks)]
    assert syncbn.summary(everyone[-1])[0].group_size == 1
    voting.world.enter()
    assert syncbn.summary(everyone[-1])[0].group_size == ranks.size
    assert [sharing_ranks(layer, ranks) for layer in alone] == [[ranks.rank]] * 2
    assert groups.lookup(1) is None
    for layer in everyone:
        assert all_share(layer, ranks)
        assert groups.lookup(layer._process_group) is dist.group.WORLD
    with pytest.raises(RuntimeError, match="was destroyed"):
        of_first_group(batch(ranks))


@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:gloo,cuda:gloo", None])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the backends of a machine without a GPU")
def test_backends_by_device(ranks: Ranks, backend: str | None) -> None:
    """torch.distributed.get_backend returns "cpu:gloo", "cpu:gloo,cuda:gloo" and "undefined" for them."""
    voting.world.make_anew(backend)
    model = nn.Sequential(nn.Linear(3, C), layer_of(ranks.size, ranks).float(), layer_of(ranks.size, ranks).float())
    ddp, x = nn.parallel.DistributedDataParallel(model), torch.randn(4, 3)
    ddp(x).sum().backward()
    with pytest.raises(ValueError, match="expected 3 channels"):
        syncbn.functional.sync_batch_norm(x if ranks.rank else x[:, :2], None, None, torch.ones(3), training=True)
    del ddp  # before the group is destroyed (docs/rules.md): otherwise its reducer may wait forever
    voting.world.make_anew()


def test_summary_names_group_payload_and_last_step(ranks: Ranks) -> None:
    """test_compile.py has graphs."""
    model = nn.Sequential(layer_of(None, ranks), layer_of(1, ranks))
    row, alone = syncbn.summary(model)
    num_bytes = 8 * (2 * C + 5)
    assert row == ("0", "SyncBatchNorm", C, ranks.size, num_bytes, num_bytes, "none yet")
    assert alone == ("1", "SyncBatchNorm", C, 1, 0, 0, "none yet")
    model(batch(ranks))
    expected = [f"synchronised over {ranks.size} ranks", "not synchronised"]
    for trained in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [row.last_step for row in syncbn.summary(trained)] == expected
    loaded = layer_of(None, ranks)
    loaded.load_state_dict(model[0].state_dict())
    assert syncbn.summary(loaded)[0].last_step == "not known"  # num_batches_tracked is 1
    assert syncbn.summary(loaded.to("meta"))[0].last_step == "none yet"
    assert str(syncbn.summary(model)).endswith(f"\nkernels: {syncbn.kernels.available()}")


# Ranks outside of the group; copies; conversions.


def test_a_rank_outside_of_the_group_may_build_and_evaluate_a_layer_but_not_train_it(ranks: Ranks) -> None:
    """As in torch's test_SyncBatchNorm_process_group, whose group has rank 0 only."""
    group = dist.new_group([0])
    built = layer_of(group, ranks)
    converted = syncbn.convert_syncbn_model(nn.BatchNorm1d(C).to(ranks.device, torch.float64), group)
    pickled = pickle.loads(pickle.dumps(built))
    for layer in (built, converted, copy.deepcopy(built), pickled):
        assert layer.process_group == group or layer is pickled  # a pickled layer finds the oldest group of its ranks
        layer.eval()(batch(ranks))
        assert syncbn.summary(layer.train())[0].group_size == (ranks.rank == 0)
        if ranks.rank == 0:
            layer(batch(ranks))
        else:
            with unchanged(layer), pytest.raises(ValueError, match=r"not in .* set layer.process_group on each rank"):
                layer(batch(ranks))
    reverted = syncbn.revert_syncbn_model(syncbn.convert_syncbn_model(nn.SyncBatchNorm(2), group))
    assert reverted.process_group is (dist.GroupMember.NON_GROUP_MEMBER if ranks.rank else group)


def test_copies_share_the_group_and_pickles_find_one_of_the_same_ranks(ranks: Ranks) -> None:
    group = dist.new_group(list(range(ranks.size)))
    model = nn.Sequential(layer_of(group, ranks), layer_of(ranks.size, ranks))
    assert "process_group=ranks [0" in repr(model[0])
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert copied[0].process_group is model[0].process_group is group
    for layer in (*copied, *pickled):
        assert all_share(layer, ranks)
    pickled_again = pickle.loads(pickle.dumps(pickled))
    assert all(layer._syncbn_site is None for layer in pickled_again)  # a site holds a group, which cannot be pickled


def test_a_second_conversion_keeps_the_group_unless_one_is_given(ranks: Ranks) -> None:
    """nn.SyncBatchNorm holds the group itself and cannot be pickled; the converted layer can, and reverts to it."""
    group = dist.new_group(list(range(ranks.size)))
    for layer, given in (
        (nn.BatchNorm1d(C), group),
        (nn.SyncBatchNorm(C), group),
        (nn.SyncBatchNorm(C, process_group=group), None),
        (syncbn.SyncBatchNorm1d(C), group),
    ):
        is_torchs = isinstance(layer, nn.SyncBatchNorm)
        model = syncbn.convert_syncbn_model(nn.Sequential(layer).to(ranks.device, torch.float64), given)
        assert syncbn.convert_syncbn_model(model)[0].process_group is group
        assert all_share(pickle.loads(pickle.dumps(model[0])), ranks)
        assert not is_torchs or syncbn.revert_syncbn_model(model)[0].process_group is group
        assert sharing_ranks(syncbn.convert_syncbn_model(model, 1)[0], ranks) == [ranks.rank]
        model[0].process_group = None
        assert all_share(model[0], ranks)


@pytest.mark.parametrize("size", [1, 2])
def test_an_int_reverts_to_its_group(ranks: Ranks, size: int) -> None:
    """An nn.SyncBatchNorm without a group would synchronise over all ranks."""
    voting.world.leave()
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.SyncBatchNorm(C)), size)
    voting.world.enter()
    if ranks.size % size == 0:
        with pytest.raises(RuntimeError, match=rf"process_group={size} .*create_syncbn_process_group\({size}\)"):
            syncbn.revert_syncbn_model(model)
        syncbn.create_syncbn_process_group(size)
        assert syncbn.revert_syncbn_model(model)[0].process_group.size() == size


# Groups that do not exist, or no longer.


def test_a_conversion_or_revert_without_the_group_changes_nothing(ranks: Ranks) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    model[1].process_group = dist.new_group()
    dist.barrier()  # otherwise a rank may leave the group while another still connects to it
    dist.destroy_process_group(model[1].process_group)
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


@pytest.mark.parametrize("all_groups", [True, False])
def test_a_layer_whose_group_was_destroyed_does_not_train_alone(ranks: Ranks, all_groups: bool) -> None:
    mesh = DeviceMesh(ranks.device.type, [[rank] for rank in range(ranks.size)], mesh_dim_names=("all", "own"))["own"]
    layer, x = layer_of(mesh.get_group(), ranks), batch(ranks)
    layer(x)
    voting.world.leave() if all_groups else dist.destroy_process_group(mesh.get_group())
    message = "was destroyed, or no such group exists here; create the group"
    with unchanged(layer), pytest.raises(RuntimeError, match=message):
        layer(x)
    layer.eval()(x)
    assert "process_group=" in repr(layer)
    if all_groups:
        voting.world.enter()
    layer.process_group = None
    assert all_share(layer, ranks)


def test_another_group_of_the_same_ranks_does_not_replace_a_destroyed_group(ranks: Ranks) -> None:
    """Other ranks may not have destroyed the group, and would wait in it. A layer unpickled later may use any group."""
    group, later = (dist.new_group(list(range(ranks.size))) for _ in range(2))
    layer = layer_of(group, ranks)
    pickled_before = pickle.loads(pickle.dumps(layer))
    assert pickled_before.process_group is dist.group.WORLD
    assert all_share(layer, ranks)
    dist.barrier()  # otherwise a rank may leave the group while another still connects to it
    dist.destroy_process_group(group)
    copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    for destroyed in (layer, copied, layer):  # also after the first error
        with unchanged(destroyed), pytest.raises(RuntimeError, match="was destroyed"):
            destroyed(batch(ranks))
    layer.process_group = later
    for existing in (layer, pickled_before, pickled):
        assert all_share(existing, ranks)


def destroyed_layer(ranks: Ranks) -> syncbn.SyncBatchNorm:
    """Return a layer whose group rank 1 has destroyed."""
    group = dist.new_group(list(range(ranks.size)))
    layer = layer_of(group, ranks)
    dist.barrier()
    if ranks.rank == 1:
        dist.destroy_process_group(group)
    return layer


Call = Callable[[Tensor], object]
# The call of rank 1, built on all ranks, and its error.
CALLS_WITHOUT_GROUP: dict[str, tuple[Callable[[Ranks], Call], str]] = {
    "function": (
        lambda ranks: lambda x: sync_batch_norm(x, None, None, training=True, process_group=0),
        "ValueError: process_group=0",
    ),
    "statistics": (lambda ranks: lambda x: sync_batch_stats(x, "world"), "TypeError: process_group must be None"),
    "backward": (
        lambda ranks: lambda x: batch_norm_backward(x, x, x[0], x[0], process_group=True),
        "TypeError: process_group must be None",
    ),
    "constructor": (lambda ranks: lambda x: layer_of(-1, ranks), "ValueError: process_group=-1"),
    "size": (lambda ranks: lambda x: syncbn.create_syncbn_process_group(-2), "ValueError: group_size must be an int"),
    "destroyed group": (destroyed_layer, r"RuntimeError: the layer's process_group \(ranks .*\) was destroyed"),
    "group without this rank": (
        lambda ranks: layer_of(dist.new_group([0]), ranks),
        "ValueError: this rank is not in the layer's process_group",
    ),
}


@pytest.mark.parametrize("name", CALLS_WITHOUT_GROUP)
def test_ranks_that_wait_read_why_another_rank_finds_no_group(ranks: Ranks, reports: Reports, name: str) -> None:
    """Rank 1 raises before it knows in which group the other ranks wait; in this test rank 1 joins them later."""
    build, text = CALLS_WITHOUT_GROUP[name]
    call, layer = build(ranks), layer_of(None, ranks)
    if ranks.rank == 1:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            call(batch(ranks))
        reports.wait_for(rf"rank 1: (.*; )?has raised {text}.*\n(rank.*\n)*\Z")  # and no cause of a late rank follows
    assert all_share(layer, ranks)


def test_the_destroyed_group_of_an_int_is_named(ranks: Ranks) -> None:
    if ranks.size == 4:
        layer = layer_of(2, ranks)
        dist.destroy_process_group(syncbn.create_syncbn_process_group(2))
        with pytest.raises(RuntimeError, match="process_group=2 was destroyed"):
            layer(batch(ranks))


def test_groups_that_cannot_be_made_are_asked_for_once(ranks: Ranks) -> None:
    """A second collective of the rank in a forward would meet the next collective of the other ranks."""
    train = partial(syncbn.functional.sync_batch_norm, batch(ranks), None, None, training=True)
    with pytest.raises(ValueError, match="the ranks ask for different process groups"):
        syncbn.create_syncbn_process_group(7) if ranks.rank else train(process_group=5)
    own = torch.tensor([1.0], device=ranks.device)
    dist.all_reduce(own)
    assert own == ranks.size
