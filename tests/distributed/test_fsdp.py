"""Tests that a converted model trains under FSDP like on one process, with whole statistics and checkpoints."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from training import rank_slices, require_equal_state, require_trains_as, shard, small_model, train, whole_batches
from voting import Ranks

import syncbn
from syncbn.testing import unequal

STEPS = 4


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:torch.distributed is disabled")  # dcp.load
def test_fsdp2_trains_like_one_process_which_loads_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    alone = small_model().to(ranks.device)
    sharded = shard(syncbn.convert_syncbn_model(small_model()).to(ranks.device), ranks)
    assert isinstance(sharded[0][1], syncbn.SyncBatchNorm2d)
    require_trains_as(alone, ranks, sharded, sharded)
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths)  # All ranks write to the folder of rank 0.
    dcp.save({"model": get_model_state_dict(sharded)}, checkpoint_id=paths[0])
    single = small_model().to(ranks.device)
    state = {"model": get_model_state_dict(single)}
    dcp.load(state, checkpoint_id=paths[0], no_dist=True)
    set_model_state_dict(single, state["model"])
    require_equal_state(single, alone)


def test_bf16_mixed_precision_keeps_float32_statistics(ranks: Ranks) -> None:
    """With bfloat16 inputs, statistics stay close to those of float32 training and bit-identical on all ranks."""
    x, labels = whole_batches(ranks, STEPS, torch.float32)
    alone = small_model(torch.float32).to(ranks.device)
    train(alone, x, labels)
    model = syncbn.convert_syncbn_model(small_model(torch.float32)).to(ranks.device)
    dtypes: set[torch.dtype] = set()
    model[0][1].register_forward_pre_hook(lambda layer, inputs: dtypes.add(inputs[0].dtype))
    sharded = shard(model, ranks, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(sharded, *rank_slices(ranks, x, labels))
    assert dtypes == {torch.bfloat16}
    for name, expected in alone.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), expected, rtol=0.05, atol=0.05, msg=name)
    assert not unequal(dict(model.named_buffers()))


@pytest.mark.parametrize("name", ["convert_syncbn_model", "revert_syncbn_model"])
def test_a_conversion_after_fully_shard_is_refused(ranks: Ranks, name: str) -> None:
    """fully_shard changes the class of a batch norm that it shards by itself."""
    layer = nn.BatchNorm2d(4).to(ranks.device)
    layer = layer if name == "convert_syncbn_model" else syncbn.convert_syncbn_model(layer)
    fully_shard(layer, mesh=init_device_mesh(ranks.device.type, (ranks.size,)))
    with pytest.raises(RuntimeError, match=f"call {name} before fully_shard"):
        getattr(syncbn, name)(nn.Sequential(layer))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # FSDP1 is deprecated
def test_fsdp1_trains_like_one_process(ranks: Ranks) -> None:
    x, labels = whole_batches(ranks, STEPS)
    alone, model = small_model().to(ranks.device), syncbn.convert_syncbn_model(small_model()).to(ranks.device)
    train(alone, x, labels)
    sharded = FullyShardedDataParallel(model, device_id=ranks.device)
    train(sharded, *rank_slices(ranks, x, labels))
    with FullyShardedDataParallel.summon_full_params(sharded):
        require_equal_state(model, alone)
