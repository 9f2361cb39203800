"""Catches a stage of a pipeline that synchronises over ranks of other stages, which must be refused by name.

That its own ranks train as one process is in test_pipeline_schedules.py.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from voting import Ranks

import syncbn

pytestmark = pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) % 2 == 1, reason="a pipeline of two stages")
SHARE = 3  # samples


def two_stages(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return nn.Sequential(first, second).to(device, torch.float64)


def mesh_of(ranks: Ranks) -> DeviceMesh:
    return init_device_mesh(ranks.device.type, (2, ranks.size // 2), mesh_dim_names=("pp", "dp"))


@pytest.mark.parametrize("wrap", [nn.Identity, DistributedDataParallel])
def test_a_stage_over_the_whole_pipeline_is_refused(ranks: Ranks, wrap: type[nn.Module]) -> None:
    mesh = mesh_of(ranks)
    index, pipeline = mesh["pp"].get_local_rank(), dist.get_process_group_ranks(mesh.get_group("pp"))
    x = torch.randn(SHARE, 8, dtype=torch.float64, device=ranks.device)

    def step(process_group: object) -> None:
        module = syncbn.convert_syncbn_model(two_stages(ranks.device)[index], process_group)
        if wrap is DistributedDataParallel:
            module = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        # else a forward finds them, whose errors torch 2.11 replaces
        shapes = {"input_args": (x,), "output_args": (x,)}
        stage = PipelineStage(module, index, 2, ranks.device, **shapes, group=mesh.get_group("pp"))
        stage.forward_maybe_with_nosync(x)

    words = rf"^layer '1': the layer is in stage {index} of a pipeline over ranks {pipeline[0]}"
    for too_large in (None, dist.group.WORLD, mesh["pp"]):
        with pytest.raises(ValueError, match=words + r".* which hold other stages, and synchronises over ranks "):
            step(too_large)
    step(mesh["dp"])
    step(1)
    syncbn.convert_syncbn_model(two_stages(ranks.device))(x)  # without a pipeline
