"""Tests that a converted model trains under FSDP like on one process.

test_recipes.py has the checkpoints of FSDP2.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from training import require_trains_as, shard, small_model
from voting import Ranks

import syncbn
from syncbn.testing import unequal


def wrap_by_fsdp1(model: nn.Module, ranks: Ranks) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=ranks.device)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # FSDP1 is deprecated.
@pytest.mark.parametrize("wrap", [wrap_by_fsdp1, shard], ids=["FSDP1", "FSDP2"])
def test_a_sharded_model_trains_like_one_process(ranks: Ranks, wrap: Callable[..., nn.Module]) -> None:
    sharded = wrap(syncbn.convert_syncbn_model(small_model()).to(ranks.device), ranks)
    require_trains_as(small_model().to(ranks.device), ranks, sharded, sharded)


def test_bf16_mixed_precision_keeps_float32_statistics(ranks: Ranks) -> None:
    """With bfloat16 inputs, parameters and statistics stay close to those of float32 training, and the statistics are
    bit-identical on all ranks."""
    model = syncbn.convert_syncbn_model(small_model(torch.float32)).to(ranks.device)
    input_dtypes: set[torch.dtype] = set()
    model[0][1].register_forward_pre_hook(lambda layer, inputs: input_dtypes.add(inputs[0].dtype))
    sharded = shard(model, ranks, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    # bfloat16 rounds by 0.4 %, and four steps of training amplify the rounding errors.
    require_trains_as(small_model(torch.float32).to(ranks.device), ranks, sharded, sharded, tolerance=0.05)
    assert input_dtypes == {torch.bfloat16}
    assert not unequal(dict(model.named_buffers()))


@pytest.mark.parametrize("name", ["convert_syncbn_model", "revert_syncbn_model"])
def test_a_conversion_after_fully_shard_is_refused(ranks: Ranks, name: str) -> None:
    """fully_shard changes the class of a batch norm to which it is applied."""
    layer = nn.BatchNorm2d(4).to(ranks.device)
    if name == "revert_syncbn_model":
        syncbn.convert_syncbn_model(layer)
    fully_shard(layer, mesh=init_device_mesh(ranks.device.type, (ranks.size,)))
    with pytest.raises(RuntimeError, match=f"call {name} before fully_shard"):
        getattr(syncbn, name)(nn.Sequential(layer))
