"""fully_shard: a converted model trains like one process, its statistics are whole on every rank, and its checkpoints
load at another world size."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from voting import Ranks

import syncbn

STEPS, SHARE = 4, 2


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(6 * 16, 5),
    ).to(dtype)


def shard(model: nn.Module, ranks: Ranks, **options: object) -> nn.Module:
    """Every block, then the rest."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for block in model[:2]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def data(ranks: Ranks, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    batch = SHARE * ranks.size
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, batch, 1, 8, 8, generator=generator, dtype=dtype)
    return x.to(ranks.device), torch.randint(5, (STEPS, batch), generator=generator).to(ranks.device)


def train(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, targets in zip(x, labels, strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    """The values of a DTensor on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train_both(ranks: Ranks) -> tuple[nn.Module, nn.Module]:
    x, labels = data(ranks)
    alone = small_model().to(ranks.device)
    train(alone, x, labels)
    sharded = shard(syncbn.convert_syncbn_model(small_model()).to(ranks.device), ranks)
    mine = ranks.even(x.shape[1])
    train(sharded, x[:, mine], labels[:, mine])
    return alone, sharded


def test_trains_as_one_process(ranks: Ranks) -> None:
    alone, sharded = train_both(ranks)
    assert isinstance(sharded[0][1], syncbn.SyncBatchNorm2d)
    for name, expected in alone.state_dict().items():
        actual = whole(sharded.state_dict()[name])
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=name)


def test_bf16_mixed_precision(ranks: Ranks) -> None:
    """Parameters and values in bfloat16; statistics in float32, near those of float32 and bit-equal on all ranks."""
    x, labels = data(ranks, torch.float32)
    alone = small_model(torch.float32).to(ranks.device)
    train(alone, x, labels)
    model = syncbn.convert_syncbn_model(small_model(torch.float32)).to(ranks.device)
    seen: list[torch.dtype] = []
    model[0][1].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].dtype))
    sharded = shard(model, ranks, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    mine = ranks.even(x.shape[1])
    train(sharded, x[:, mine], labels[:, mine])
    assert set(seen) == {torch.bfloat16}
    for name, expected in alone.named_buffers():
        buffer = model.get_buffer(name)
        assert buffer.dtype == expected.dtype
        torch.testing.assert_close(buffer, expected, rtol=0.05, atol=0.05, msg=name)
        of_rank_0 = buffer.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(buffer, of_rank_0)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # by torch's own checkpoint reader
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # no_dist=True, as wanted
def test_checkpoint_at_another_world_size(ranks: Ranks, tmp_path: Path) -> None:
    """Saved by W ranks; loaded by one process, and by W / 2 pairs."""
    alone, sharded = train_both(ranks)
    shared_path = [str(tmp_path)]
    dist.broadcast_object_list(shared_path)
    dcp.save({"model": get_model_state_dict(sharded)}, checkpoint_id=shared_path[0])

    single = small_model().to(ranks.device)
    state = {"model": get_model_state_dict(single)}
    dcp.load(state, checkpoint_id=shared_path[0], no_dist=True)
    set_model_state_dict(single, state["model"])
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(single.state_dict()[name], expected, rtol=1e-11, atol=1e-11, msg=name)

    if ranks.size == 4:
        mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        pair = syncbn.convert_syncbn_model(small_model(), process_group=mesh["shard"]).to(ranks.device)
        fully_shard(pair, mesh=mesh["shard"])
        state = {"model": get_model_state_dict(pair)}
        dcp.load(state, checkpoint_id=shared_path[0])
        set_model_state_dict(pair, state["model"])
        for name, expected in single.state_dict().items():
            assert torch.equal(whole(pair.state_dict()[name]), expected), name
        assert pair[0][1].process_group == mesh["shard"]


def test_converting_afterwards_is_refused(ranks: Ranks) -> None:
    """A batch norm that is sharded by itself has a class of FSDP2's."""
    layer = nn.BatchNorm2d(4).to(ranks.device)
    fully_shard(layer, mesh=init_device_mesh(ranks.device.type, (ranks.size,)))
    with pytest.raises(RuntimeError, match="call convert_syncbn_model before fully_shard"):
        syncbn.convert_syncbn_model(nn.Sequential(layer))
    layer = syncbn.convert_syncbn_model(nn.BatchNorm2d(4).to(ranks.device))
    fully_shard(layer, mesh=init_device_mesh(ranks.device.type, (ranks.size,)))
    with pytest.raises(RuntimeError, match="call revert_syncbn_model before fully_shard"):
        syncbn.revert_syncbn_model(nn.Sequential(layer))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # FSDP1 is deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fsdp1(ranks: Ranks) -> None:
    """A smoke test, while torch still has it."""
    x, labels = data(ranks)
    alone = small_model().to(ranks.device)
    model = syncbn.convert_syncbn_model(copy.deepcopy(alone))
    train(alone, x, labels)
    sharded = FullyShardedDataParallel(model, device_id=ranks.device)
    mine = ranks.even(x.shape[1])
    train(sharded, x[:, mine], labels[:, mine])
    with FullyShardedDataParallel.summon_full_params(sharded):
        for name, expected in alone.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-11, atol=1e-11, msg=name)
