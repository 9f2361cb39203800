"""Specifications become the right groups on every rank, and survive copies, pickles and a re-made default group."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.swa_utils import AveragedModel
from voting import Ranks

import syncbn
from syncbn.distributed import groups
from syncbn.distributed.group_spec import GlobalRanks


def make_world_anew(backend: str | None = "") -> None:
    """Another default group, for which no groups are made yet; with another backend than the tests' if one is given."""
    import voting  # whose world is there by now

    assert voting.world is not None
    voting.world.leave()
    usual = voting.world.backend
    voting.world.backend = usual if backend == "" else backend
    voting.world.enter()
    voting.world.backend = usual


def ranks_that_share(layer: syncbn.SyncBatchNorm, ranks: Ranks) -> list[int]:
    """The ranks whose inputs enter the running mean: rank r sends 10^r, so the digits of n * mean name them."""
    layer.train()
    layer.reset_running_stats()
    layer.momentum = 1.0
    x = torch.full((2, layer.num_features), 10.0**ranks.rank, dtype=torch.float64, device=ranks.device)
    layer(x)
    mean = layer.running_mean[0].item()
    for size in range(1, ranks.size + 1):
        digits = f"{mean * size:.3f}"[:-4]
        if set(digits) <= {"0", "1"} and digits.count("1") == size and abs(mean * size - int(digits)) < 1e-3:
            return [rank for rank, digit in enumerate(reversed(digits)) if digit == "1"]
    raise AssertionError(f"mean {mean} is of no group")


def layer_of(process_group: object, ranks: Ranks) -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(2, process_group=process_group, dtype=torch.float64, device=ranks.device)


def test_each_kind_of_specification(ranks: Ranks) -> None:
    everyone = list(range(ranks.size))
    assert ranks_that_share(layer_of(None, ranks), ranks) == everyone
    assert ranks_that_share(layer_of(dist.group.WORLD, ranks), ranks) == everyone
    assert ranks_that_share(layer_of(ranks.size, ranks), ranks) == everyone
    assert ranks_that_share(layer_of(1, ranks), ranks) == [ranks.rank]
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    assert ranks_that_share(layer_of(mesh, ranks), ranks) == everyone
    assert ranks_that_share(layer_of("node", ranks), ranks) == everyone  # torchrun sets LOCAL_WORLD_SIZE
    if ranks.size == 4:
        pair = [0, 1] if ranks.rank < 2 else [2, 3]
        assert ranks_that_share(layer_of(2, ranks), ranks) == pair
        assert ranks_that_share(layer_of(syncbn.create_syncbn_process_group(2), ranks), ranks) == pair
        own = [dist.new_group([0, 3]), dist.new_group([1, 2])][ranks.rank in (1, 2)]
        assert ranks_that_share(layer_of(own, ranks), ranks) == ([0, 3] if ranks.rank in (0, 3) else [1, 2])
        grid = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        assert ranks_that_share(layer_of(grid["shard"], ranks), ranks) == pair
        with pytest.raises(ValueError, match=r"DeviceMesh of 2 dims, expected 1.*replicate"):
            layer_of(grid, ranks)


def test_node_of_two_ranks(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    if ranks.size != 4:
        pytest.skip("two hosts of two ranks")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", str(ranks.rank % 2))
    make_world_anew()
    layer = layer_of("node", ranks)
    assert ranks_that_share(layer, ranks) == ([0, 1] if ranks.rank < 2 else [2, 3])
    assert groups.size("node") == 2
    make_world_anew()


def test_node_needs_its_variable_on_every_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset on one rank only, it is an error on all: the others would wait in new_group."""
    if ranks.rank == 1:
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
    make_world_anew()
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE.*on rank 1 it is None"):
        layer_of("node", ranks)
    dist.barrier()


def test_node_before_its_groups_are_made(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a layer that was built before init_process_group: the size is looked up, and nonsense is named."""
    make_world_anew()
    assert groups.size("node") == ranks.size
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ValueError, match=r"needs the environment variable LOCAL_WORLD_SIZE.*it is 'two'"):
        groups.size("node")


def test_sizes_that_do_not_divide(ranks: Ranks) -> None:
    for make in (lambda size: layer_of(size, ranks), syncbn.create_syncbn_process_group):
        with pytest.raises(ValueError, match=rf"{ranks.size} ranks do not divide into groups of {ranks.size + 1}"):
            make(ranks.size + 1)
    assert syncbn.create_syncbn_process_group(ranks.size) is dist.group.WORLD
    assert syncbn.create_syncbn_process_group(0) is None


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_a_rank_outside_its_group_builds_and_is_told_when_it_trains(ranks: Ranks, kind: str) -> None:
    """As in torch's test_SyncBatchNorm_process_group, where the group is of rank 0 alone."""
    others = dist.new_group([0]) if kind == "group" else DeviceMesh(ranks.device.type, [0])
    built = layer_of(others, ranks)
    converted = syncbn.convert_syncbn_model(nn.BatchNorm1d(2).to(ranks.device, torch.float64), others)
    copies = [copy.deepcopy(built)] if kind == "mesh" else [copy.deepcopy(built), pickle.loads(pickle.dumps(built))]
    for layer in (built, converted, *copies):
        assert layer.process_group == others
        x = torch.randn(3, 2, dtype=torch.float64, device=ranks.device)
        layer.eval()(x)
        layer.train()
        assert syncbn.summary(layer)[0].group_size == (ranks.rank == 0)
        if ranks.rank == 0:
            layer(x)
        else:
            with pytest.raises(ValueError, match=r"this rank is not in .* set layer.process_group on each rank"):
                layer(x)
            assert layer.num_batches_tracked == 0
    syncbn.assert_synced(built)  # a collective: their buffers differ, and that is well
    given = syncbn.convert_syncbn_model(nn.SyncBatchNorm(2), others)
    expected = dist.GroupMember.NON_GROUP_MEMBER if ranks.rank else groups.existing(built._process_group)
    assert syncbn.revert_syncbn_model(given).process_group is expected


def test_groups_are_made_once(ranks: Ranks) -> None:
    first = layer_of(1, ranks)
    made = groups.existing(first.process_group)
    layer_of(1, ranks)
    assert groups.existing(1) is made


def test_copies_pickles_and_saves(ranks: Ranks) -> None:
    """deepcopy shares the handle; pickle drops it, and an existing group of the same ranks is found again."""
    group = dist.new_group(list(range(ranks.size)))
    model = nn.Sequential(layer_of(group, ranks), layer_of(ranks.size, ranks))
    assert model[0].process_group is group
    assert "process_group=ranks [0" in repr(model[0])
    copied = copy.deepcopy(model)
    averaged = AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    for other in (copied, averaged.module):
        assert other[0].process_group is group
    pickled = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, averaged.module, pickled, loaded):
        assert ranks_that_share(other[0], ranks) == list(range(ranks.size))
        assert ranks_that_share(other[1], ranks) == list(range(ranks.size))
    assert syncbn.summary(pickled)[0].last_step == f"synchronised over {ranks.size} ranks"
    assert syncbn.summary(pickle.loads(pickle.dumps(pickled)))[0].last_step == "none here; 1 compiled or loaded"


def test_a_group_that_does_not_exist_here(ranks: Ranks) -> None:
    layer = layer_of(None, ranks)
    layer.process_group = pickle.loads(pickle.dumps(GlobalRanks((0, 97))))
    assert repr(layer.process_group) == "ranks [0, 97]"
    with pytest.raises(RuntimeError, match=r"\(ranks \[0, 97\]\) was destroyed, or no such group exists here"):
        ranks_that_share(layer, ranks)
    assert syncbn.summary(layer)[0].group_size == 2
    layer.eval()(torch.zeros(1, 2, dtype=torch.float64, device=ranks.device))


def test_a_conversion_or_revert_that_fails_changes_nothing(ranks: Ranks) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    model[1].process_group = dist.new_group()
    dist.barrier()  # else a rank may leave the group while another still connects to it
    dist.destroy_process_group(model[1].process_group)
    with pytest.raises(ValueError, match="process_group was destroyed; pass one that exists"):
        syncbn.convert_syncbn_model(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm1d, nn.SyncBatchNorm]
    model[1].process_group = None
    syncbn.convert_syncbn_model(model)
    model[1].process_group = GlobalRanks((0, 97))
    with pytest.raises(RuntimeError, match="no such group exists here"):
        syncbn.revert_syncbn_model(model)
    assert [type(layer) for layer in model] == [syncbn.SyncBatchNorm1d, syncbn.SyncBatchNorm]


def test_a_converted_torch_layer_keeps_its_group(ranks: Ranks) -> None:
    """nn.SyncBatchNorm holds a handle, which cannot be pickled; converted it can, reverted it has the handle again."""
    group = dist.new_group(list(range(ranks.size)))
    layer = nn.SyncBatchNorm(2, process_group=group, dtype=torch.float64, device=ranks.device)
    syncbn.convert_syncbn_model(layer)
    assert layer.process_group is group
    assert ranks_that_share(pickle.loads(pickle.dumps(layer)), ranks) == list(range(ranks.size))
    assert syncbn.revert_syncbn_model(layer).process_group is group
    syncbn.convert_syncbn_model(layer, process_group=1)  # said here, it overrides the layer's own
    assert ranks_that_share(layer, ranks) == [ranks.rank]


def test_converting_again_keeps_the_group_unless_one_is_given(ranks: Ranks) -> None:
    group = dist.new_group(list(range(ranks.size)))
    for kind in (nn.BatchNorm1d, nn.SyncBatchNorm, syncbn.SyncBatchNorm1d):
        model = syncbn.convert_syncbn_model(nn.Sequential(kind(2)).to(ranks.device, torch.float64), group)
        assert syncbn.convert_syncbn_model(model)[0].process_group is group
        assert ranks_that_share(syncbn.convert_syncbn_model(model, 1)[0], ranks) == [ranks.rank]
        model[0].process_group = None
        assert model[0].process_group is None
        assert ranks_that_share(model[0], ranks) == list(range(ranks.size))


@pytest.mark.parametrize("all_groups", [True, False])
@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_a_layer_whose_own_group_was_destroyed_does_not_train_alone(ranks: Ranks, kind: str, all_groups: bool) -> None:
    import voting

    mesh = DeviceMesh(ranks.device.type, [[rank] for rank in range(ranks.size)], mesh_dim_names=("all", "own"))["own"]
    layer, x = layer_of(mesh if kind == "mesh" else mesh.get_group(), ranks), torch.randn(3, 2, dtype=torch.float64)
    layer(x.to(ranks.device))
    if all_groups:
        voting.world.leave()
    else:
        dist.destroy_process_group(mesh.get_group())
    try:
        with pytest.raises(RuntimeError, match="was destroyed, or no such group exists here; make it again"):
            layer(x.to(ranks.device))
        assert layer.num_batches_tracked == 1
        layer.eval()(x.to(ranks.device))
        assert "process_group=" in repr(layer)
        layer.process_group = None
        assert all_groups or ranks_that_share(layer, ranks) == list(range(ranks.size))
    finally:
        if all_groups:
            voting.world.enter()


def test_a_new_default_group_makes_new_groups(ranks: Ranks) -> None:

    layer = layer_of(1, ranks)
    everyone = [layer_of(None, ranks), layer_of(ranks.size, ranks), layer_of(dist.group.WORLD, ranks)]
    make_world_anew()
    assert groups.existing(layer.process_group) is None
    for one in everyone:
        assert ranks_that_share(one, ranks) == list(range(ranks.size))
        assert groups.existing(one._process_group) is dist.group.WORLD
    assert ranks_that_share(layer, ranks) == [ranks.rank]


def test_summary(ranks: Ranks) -> None:
    model = nn.Sequential(
        layer_of(None, ranks), layer_of(1, ranks), torch.compile(layer_of(None, ranks), backend="eager")
    )
    row, alone, compiled = syncbn.summary(model)
    numbers = (5, 4) if torch.cuda.is_available() else (8, 8)  # on CPU with signatures
    assert row == ("0", "SyncBatchNorm", 2, ranks.size, *(8 * number for number in numbers), "none yet")
    assert alone == ("1", "SyncBatchNorm", 2, 1, 0, 0, "none yet")
    assert compiled.last_step == "compiled"
    model[:2](torch.randn(3, 2, dtype=torch.float64, device=ranks.device))
    row, alone, _ = syncbn.summary(model)
    assert row.last_step == f"synchronised over {ranks.size} ranks"
    assert alone.last_step == "not synchronised"
    printed = str(syncbn.summary(model))
    assert f"synchronised over {ranks.size} ranks" in printed
    assert printed.endswith(f"\nkernels: {syncbn.kernels.available()}")


def test_an_old_default_group_is_released(ranks: Ranks) -> None:
    """A table from it to the groups that were made would keep it alive where one of these is itself."""
    layer_of(ranks.size, ranks)(torch.randn(3, 2, dtype=torch.float64, device=ranks.device))
    old = weakref.ref(dist.group.WORLD)
    make_world_anew()
    gc.collect()
    assert old() is None


def test_specification_before_init_process_group(ranks: Ranks) -> None:
    """An int given without a process group becomes a group in the first training forward."""
    import voting

    world = voting.world
    assert world is not None
    world.leave()
    layer = layer_of(1, ranks)
    world_layer = layer_of(ranks.size, ranks)
    world.enter()
    assert groups.existing(1) is None
    assert ranks_that_share(layer, ranks) == [ranks.rank]
    assert ranks_that_share(world_layer, ranks) == list(range(ranks.size))


def test_groups_cannot_be_made_inside_a_compiled_graph(ranks: Ranks) -> None:
    import voting

    world = voting.world
    assert world is not None
    world.leave()
    layer = layer_of(1, ranks)
    world.enter()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"convert the layers after torch.distributed.init_process_group\(\)"):
        compiled(torch.randn(3, 2, dtype=torch.float64, device=ranks.device))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo uses what torch itself deprecates
def test_summary_of_compiled_steps_that_it_does_not_see(ranks: Ranks) -> None:
    layer = layer_of(None, ranks)
    step = torch.compile(lambda x: layer(x), backend="eager")
    assert syncbn.summary(layer)[0].last_step == "none yet"
    for number in (1, 2):
        step(torch.randn(3, 2, dtype=torch.float64, device=ranks.device))
        assert syncbn.summary(layer)[0].last_step == f"none here; {number} compiled or loaded"
    assert syncbn.summary(copy.deepcopy(layer).to("meta"))[0].last_step == "none yet"
    layer(torch.randn(3, 2, dtype=torch.float64, device=ranks.device))
    assert syncbn.summary(layer)[0].last_step == f"synchronised over {ranks.size} ranks"
    torch._dynamo.reset()  # which keeps the process group


@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:gloo,cuda:gloo", None])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the backends of a machine without a GPU")
def test_backends_by_device(ranks: Ranks, backend: str | None) -> None:
    """torch.distributed.get_backend says of these "cpu:gloo", "cpu:gloo,cuda:gloo" and "undefined"."""
    make_world_anew(backend)
    model = nn.Sequential(nn.Linear(3, 2), layer_of(ranks.size, ranks).float(), layer_of("node", ranks).float())
    x = torch.randn(4, 3)
    ddp = nn.parallel.DistributedDataParallel(model)
    with syncbn.join(ddp):
        for _ in range(2 if ranks.rank else 1):
            ddp(x).sum().backward()
    with syncbn.debug():
        model(x)
    with pytest.raises(ValueError, match=r"rank 0: .*expected 3 channels"):
        syncbn.functional.sync_batch_norm(x if ranks.rank else x[:, :2], None, None, torch.ones(3), training=True)
    syncbn.recompute_running_stats(model, [x])
    syncbn.merge_running_stats(model)
    syncbn.assert_synced(model)
    make_world_anew()
