"""Catches a process_group that means other ranks than it says, also after a copy or a new default group."""

import copy
import pickle
from collections.abc import Callable

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


def ranks_that_share(layer: syncbn.SyncBatchNorm, ranks: Ranks) -> list[int]:
    """The ranks whose inputs enter the running mean, each as much: rank r sends ones in channel r."""
    layer.train().reset_running_stats()
    layer.momentum = 1.0
    x = torch.zeros_like(batch(ranks))
    x[:, ranks.rank] = 1
    layer(x)
    members = layer.running_mean.nonzero().flatten()
    assert (layer.running_mean[members] * len(members) - 1).abs().max() < 1e-12
    return members.tolist()


def all_share(layer: syncbn.SyncBatchNorm, ranks: Ranks) -> bool:
    return ranks_that_share(layer, ranks) == list(range(ranks.size))


def test_each_kind_of_specification(ranks: Ranks) -> None:
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for spec in (None, dist.group.WORLD, ranks.size, mesh.get_group()):
        assert all_share(layer_of(spec, ranks), ranks), spec
    assert [syncbn.create_syncbn_process_group(size) for size in (ranks.size, 0)] == [dist.group.WORLD, None]
    own = groups.lookup(layer_of(1, ranks).process_group)
    assert ranks_that_share(layer_of(1, ranks), ranks) == [ranks.rank]
    assert groups.lookup(1) is own  # made once
    if ranks.size == 4:
        pair = [0, 1] if ranks.rank < 2 else [2, 3]
        other_pair = [0, 3] if ranks.rank in (0, 3) else [1, 2]
        grid = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        for spec in (2, syncbn.create_syncbn_process_group(2), grid.get_group("shard")):
            assert ranks_that_share(layer_of(spec, ranks), ranks) == pair, spec
        made = {0: dist.new_group([0, 3]), 1: dist.new_group([1, 2])}[other_pair[0]]
        assert ranks_that_share(layer_of(made, ranks), ranks) == other_pair


def test_a_rank_outside_its_group_builds_and_is_told_when_it_trains(ranks: Ranks) -> None:
    """As in torch's test_SyncBatchNorm_process_group, where the group is of rank 0 alone."""
    others = dist.new_group([0])
    built = layer_of(others, ranks)
    converted = syncbn.convert_syncbn_model(nn.BatchNorm1d(C).to(ranks.device, torch.float64), others)
    pickled = pickle.loads(pickle.dumps(built))
    for layer in (built, converted, copy.deepcopy(built), pickled):
        assert layer.process_group == others or layer is pickled  # which finds the oldest group of its ranks
        layer.eval()(batch(ranks))
        layer.train()
        assert syncbn.summary(layer)[0].group_size == (ranks.rank == 0)
        if ranks.rank == 0:
            layer(batch(ranks))
        else:
            with unchanged(layer), pytest.raises(ValueError, match=r"not in .* set layer.process_group on each rank"):
                layer(batch(ranks))
    given = syncbn.convert_syncbn_model(nn.SyncBatchNorm(2), others)
    expected = dist.GroupMember.NON_GROUP_MEMBER if ranks.rank else groups.lookup(built._process_group)
    assert syncbn.revert_syncbn_model(given).process_group is expected


def test_copies_and_pickles(ranks: Ranks) -> None:
    """deepcopy shares the handle; pickle drops it, and an existing group of the same ranks is found again."""
    group = dist.new_group(list(range(ranks.size)))
    model = nn.Sequential(layer_of(group, ranks), layer_of(ranks.size, ranks))
    assert "process_group=ranks [0" in repr(model[0])
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert copied[0].process_group is model[0].process_group is group
    for layer in (*copied, *pickled):
        assert all_share(layer, ranks)
    assert all(layer._syncbn_site is None for layer in pickle.loads(pickle.dumps(pickled)))  # A group has no pickle.


def test_a_group_that_does_not_exist_here(ranks: Ranks) -> None:
    """A conversion or revert that fails changes nothing."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    model[1].process_group = dist.new_group()
    dist.barrier()  # else a rank may leave the group while another still connects to it
    dist.destroy_process_group(model[1].process_group)
    with pytest.raises(
        ValueError, match=r"is a ProcessGroup that was destroyed, or that was not created by .*; pass an existing group"
    ):
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


def test_converting_again_keeps_the_group_unless_one_is_given(ranks: Ranks) -> None:
    """nn.SyncBatchNorm holds a handle, which cannot be pickled; converted it can, reverted it has the handle again."""
    group = dist.new_group(list(range(ranks.size)))
    for plain, given in (
        (nn.BatchNorm1d(C), group),
        (nn.SyncBatchNorm(C), group),
        (nn.SyncBatchNorm(C, process_group=group), None),
        (syncbn.SyncBatchNorm1d(C), group),
    ):
        is_torchs = isinstance(plain, nn.SyncBatchNorm)
        model = syncbn.convert_syncbn_model(nn.Sequential(plain).to(ranks.device, torch.float64), given)
        assert syncbn.convert_syncbn_model(model)[0].process_group is group
        assert all_share(pickle.loads(pickle.dumps(model[0])), ranks)
        assert not is_torchs or syncbn.revert_syncbn_model(model)[0].process_group is group
        assert ranks_that_share(syncbn.convert_syncbn_model(model, 1)[0], ranks) == [ranks.rank]
        model[0].process_group = None
        assert all_share(model[0], ranks)


@pytest.mark.parametrize("all_groups", [True, False])
def test_a_layer_whose_own_group_was_destroyed_does_not_train_alone(ranks: Ranks, all_groups: bool) -> None:
    mesh = DeviceMesh(ranks.device.type, [[rank] for rank in range(ranks.size)], mesh_dim_names=("all", "own"))["own"]
    layer, x = layer_of(mesh.get_group(), ranks), batch(ranks)
    layer(x)
    voting.world.leave() if all_groups else dist.destroy_process_group(mesh.get_group())
    with (
        unchanged(layer),
        pytest.raises(RuntimeError, match="was destroyed, or no such group exists here; create the group"),
    ):
        layer(x)
    layer.eval()(x)
    assert "process_group=" in repr(layer)
    if all_groups:
        voting.world.enter()
    layer.process_group = None
    assert all_share(layer, ranks)


def test_another_group_of_the_same_ranks_does_not_replace_a_destroyed_group(ranks: Ranks) -> None:
    """Other ranks may not have destroyed it, and would wait in it. A layer that is unpickled afterwards may use any."""
    group, later = (dist.new_group(list(range(ranks.size))) for _ in range(2))
    layer = layer_of(group, ranks)
    found = pickle.loads(pickle.dumps(layer))
    assert found.process_group is dist.group.WORLD
    assert all_share(layer, ranks)
    dist.barrier()  # else a rank may leave the group while another still connects to it
    dist.destroy_process_group(group)
    copied, pickled = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    for destroyed in (layer, copied, layer):  # also after the first error
        with unchanged(destroyed), pytest.raises(RuntimeError, match="was destroyed"):
            destroyed(batch(ranks))
    layer.process_group = later
    for existing in (layer, found, pickled):
        assert all_share(existing, ranks)


def destroyed_layer(ranks: Ranks) -> syncbn.SyncBatchNorm:
    group = dist.new_group(list(range(ranks.size)))
    layer = layer_of(group, ranks)
    dist.barrier()
    if ranks.rank == 1:
        dist.destroy_process_group(group)
    return layer


Call = Callable[[Tensor], object]
# What rank 1 calls, built on all ranks, and its error.
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
    """Rank 1 raises before it knows in which group the others wait. Here it then joins them."""
    build, text = CALLS_WITHOUT_GROUP[name]
    call, layer = build(ranks), layer_of(None, ranks)
    if ranks.rank == 1:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            call(batch(ranks))
        reports.wait_for(rf"rank 1: (.*; )?has raised {text}.*\n(rank.*\n)*\Z")  # and no cause of a late rank
    assert all_share(layer, ranks)


def test_a_group_of_an_int_that_was_destroyed(ranks: Ranks) -> None:
    if ranks.size == 4:
        layer = layer_of(2, ranks)
        dist.destroy_process_group(syncbn.create_syncbn_process_group(2))
        with pytest.raises(RuntimeError, match="process_group=2 was destroyed"):
            layer(batch(ranks))


def test_summary(ranks: Ranks) -> None:
    """Of graphs in test_compile.py."""
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


def test_specification_before_init_process_group(ranks: Ranks) -> None:
    """An int given without a default group, or under another, becomes a group in the first training forward; 1 needs
    none. Compiled layers: test_compile.py."""
    alone = [layer_of(1, ranks)]
    everyone = [layer_of(spec, ranks) for spec in (None, ranks.size)]
    of_first_group = layer_of(dist.group.WORLD, ranks)
    voting.world.leave()
    alone.append(layer_of(1, ranks))
    everyone += [layer_of(ranks.size, ranks), layer_of(ranks.size, ranks)]
    assert syncbn.summary(everyone[-1])[0].group_size == 1
    voting.world.enter()
    assert groups.lookup(1) is None
    assert syncbn.summary(everyone[-1])[0].group_size == ranks.size
    for layer in alone:
        assert ranks_that_share(layer, ranks) == [ranks.rank]
    assert groups.lookup(1) is None
    for layer in everyone:
        assert all_share(layer, ranks)
        assert groups.lookup(layer._process_group) is dist.group.WORLD
    with pytest.raises(RuntimeError, match="was destroyed"):
        of_first_group(batch(ranks))


@pytest.mark.parametrize("size", [1, 2])
def test_an_int_is_reverted_to_its_group(ranks: Ranks, size: int) -> None:
    """An nn.SyncBatchNorm without a group would synchronise over all ranks."""
    voting.world.leave()
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.SyncBatchNorm(C)), size)
    voting.world.enter()
    if ranks.size % size == 0:
        with pytest.raises(RuntimeError, match=rf"process_group={size} .*create_syncbn_process_group\({size}\)"):
            syncbn.revert_syncbn_model(model)
        syncbn.create_syncbn_process_group(size)
        assert syncbn.revert_syncbn_model(model)[0].process_group.size() == size


@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:gloo,cuda:gloo", None])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the backends of a machine without a GPU")
def test_backends_by_device(ranks: Ranks, backend: str | None) -> None:
    """torch.distributed.get_backend says of these "cpu:gloo", "cpu:gloo,cuda:gloo" and "undefined"."""
    voting.world.make_anew(backend)
    model = nn.Sequential(nn.Linear(3, C), layer_of(ranks.size, ranks).float(), layer_of(ranks.size, ranks).float())
    x = torch.randn(4, 3)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp(x).sum().backward()
    with pytest.raises(ValueError, match="expected 3 channels"):
        syncbn.functional.sync_batch_norm(x if ranks.rank else x[:, :2], None, None, torch.ones(3), training=True)
    del ddp  # before the group is destroyed, see docs/rules.md: else the end of its reducer may wait for ever
    voting.world.make_anew()
