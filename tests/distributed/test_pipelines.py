"""Stages of a pipeline: each over the ranks that hold it, as one process; over others they are refused."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from voting import Ranks

import syncbn

pytestmark = pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) % 2 == 1, reason="a pipeline of two stages")
MICRO_BATCHES, SHARE = 2, 3  # per rank: samples of a micro-batch


def two_stages(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
    second = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return nn.Sequential(first, second).to(device, torch.float64)


def mesh_of(ranks: Ranks) -> DeviceMesh:
    return init_device_mesh(ranks.device.type, (2, ranks.size // 2), mesh_dim_names=("pp", "dp"))


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def test_each_stage_over_its_own_ranks_trains_as_one_process(ranks: Ranks) -> None:
    """Each micro-batch is normalised by itself, over the ranks that hold the stage, as docs/pipelines.md has it.

    With the shapes that it gives nothing else moves the running statistics; without, memory that is not written may.
    """
    mesh = mesh_of(ranks)
    index, num_parts, part = mesh["pp"].get_local_rank(), mesh["dp"].size(), mesh["dp"].get_local_rank()
    whole = two_stages(ranks.device)
    batch = torch.randn(MICRO_BATCHES, num_parts, SHARE, 8, dtype=torch.float64, device=ranks.device)
    for micro_batch in batch:
        (loss_fn(whole(micro_batch.flatten(0, 1)), batch.new_tensor(1.0)) / MICRO_BATCHES).backward()

    module = syncbn.convert_syncbn_model(two_stages(ranks.device)[index], process_group=mesh["dp"])
    x, between = batch.new_empty(SHARE, 8), batch.new_empty(SHARE, 8, requires_grad=True)
    shapes = (
        {"input_args": x, "output_args": between},
        {"input_args": between, "output_args": batch.new_empty(SHARE, 1, requires_grad=True)},
    )
    stage = PipelineStage(module, index, 2, ranks.device, **shapes[index], group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss_fn)
    if index == 0:
        schedule.step(batch[:, part].flatten(0, 1))
    else:
        schedule.step(target=batch.new_ones(MICRO_BATCHES * SHARE, 1))
    torch.testing.assert_close(dict(module.named_buffers()), dict(whole[index].named_buffers()))
    for parameter, expected in zip(module.parameters(), whole[index].parameters(), strict=True):
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        torch.testing.assert_close(parameter.grad / num_parts, expected.grad)


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
