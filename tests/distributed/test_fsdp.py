"""Tests that a converted model trains under FSDP like on one process.

test_recipes.py has the checkpoints of FSDP2.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from training import rank_slices, require_equal_state, require_trains_as, shard, small_model, train, whole_batches
from voting import Ranks

import syncbn
from syncbn.testing import unequal

STEPS = 4


def test_fsdp2_trains_like_one_process(ranks: Ranks) -> None:
    sharded = shard(syncbn.convert_syncbn_model(small_model()).to(ranks.device), ranks)
    assert isinstance(sharded[0][1], syncbn.SyncBatchNorm2d)
    require_trains_as(small_model().to(ranks.device), ranks, sharded, sharded)


def test_bf16_mixed_precision_keeps_float32_statistics(ranks: Ranks) -> None:
    """With bfloat16 inputs, statistics stay close to those of float32 training and bit-identical on all ranks."""
    x, labels = whole_batches(ranks, STEPS, torch.float32)
    alone = small_model(torch.float32).to(ranks.device)
    train(alone, x, labels)
    model = syncbn.convert_syncbn_model(small_model(torch.float32)).to(ranks.device)
    input_dtypes: set[torch.dtype] = set()
    model[0][1].register_forward_pre_hook(lambda layer, inputs: input_dtypes.add(inputs[0].dtype))
    sharded = shard(model, ranks, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    train(sharded, *rank_slices(ranks, x, labels))
    assert input_dtypes == {torch.bfloat16}
    buffers = dict(model.named_buffers())
    torch.testing.assert_close(buffers, dict(alone.named_buffers()), rtol=0.05, atol=0.05)
    assert not unequal(buffers)


@pytest.mark.parametrize("name", ["convert_syncbn_model", "revert_syncbn_model"])
def test_a_conversion_after_fully_shard_is_refused(ranks: Ranks, name: str) -> None:
    """fully_shard changes the class of a batch norm to which it is applied."""
    layer = nn.BatchNorm2d(4).to(ranks.device)
    if name == "revert_syncbn_model":
        syncbn.convert_syncbn_model(layer)
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
