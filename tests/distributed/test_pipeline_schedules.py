"""Tests that pipelines of converted stages train as one process in every schedule, each stage over its own ranks."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.parallel import DistributedDataParallel
from voting import Ranks

import syncbn

pytestmark = pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) % 2 == 1, reason="a pipeline of two ranks")
WIDTH, MICRO_BATCHES, SAMPLES = 6, 4, 3  # SAMPLES per rank and micro-batch
# The stages that ranks 0 and 1 of the pipeline hold.
LOOP, V = ((0, 2), (1, 3)), ((0, 3), (1, 2))
SCHEDULES = {
    "ScheduleGPipe": ((0,), (1,)),
    "Schedule1F1B": ((0,), (1,)),
    "ScheduleLoopedBFS": LOOP,
    "ScheduleInterleaved1F1B": LOOP,
    "ScheduleInterleavedZeroBubble": LOOP,
    "ScheduleZBVZeroBubble": V,
    "ScheduleDualPipeV": V,
}


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).double()


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def test_every_schedule_of_torch_is_tested() -> None:
    shipped = {name for name in dir(pipelining) if name.startswith("Schedule")}
    assert shipped == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_trains_as_one_process(ranks: Ranks, name: str) -> None:
    """The ranks that hold a stage normalise each micro-batch together, whatever the schedule."""
    mesh = init_device_mesh(ranks.device.type, (2, ranks.size // 2), mesh_dim_names=("pp", "dp"))
    held, num_stages = SCHEDULES[name][mesh["pp"].get_local_rank()], 2 * len(SCHEDULES[name][0])
    num_parts, part = mesh["dp"].size(), mesh["dp"].get_local_rank()
    whole = nn.Sequential(*map(make_stage, range(num_stages))).to(ranks.device)
    torch.manual_seed(7)
    batch = torch.randn(MICRO_BATCHES, num_parts, SAMPLES, WIDTH, dtype=torch.float64, device=ranks.device)
    for micro_batch in batch:
        (loss_fn(whole(micro_batch.flatten(0, 1)), batch.new_tensor(1.0)) / MICRO_BATCHES).backward()

    modules = [syncbn.convert_syncbn_model(make_stage(index), process_group=mesh.get_group("dp")) for index in held]
    x = batch.new_empty(SAMPLES, WIDTH)
    stages = []
    for module, index in zip(modules, held, strict=True):
        shapes = {"input_args": x.clone().requires_grad_(index > 0), "output_args": x.clone().requires_grad_()}
        group = mesh.get_group("pp")
        stages.append(PipelineStage(module.to(ranks.device), index, num_stages, ranks.device, **shapes, group=group))
    schedule_class = getattr(pipelining, name)
    given = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
    schedule = schedule_class(given, MICRO_BATCHES, loss_fn=loss_fn)
    target = batch.new_ones(MICRO_BATCHES * SAMPLES, WIDTH)
    inputs = [batch[:, part].flatten(0, 1)] * (0 in held)
    schedule.step(*inputs, **{"target": target} if num_stages - 1 in held else {})
    for module, index in zip(modules, held, strict=True):
        torch.testing.assert_close(dict(module.named_buffers()), dict(whole[index].named_buffers()))
        for parameter, expected in zip(module.parameters(), whole[index].parameters(), strict=True):
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            torch.testing.assert_close(parameter.grad / num_parts, expected.grad)


@pytest.mark.parametrize("wrap", [nn.Identity, DistributedDataParallel])
def test_a_layer_that_synchronises_over_other_stages_is_refused(ranks: Ranks, wrap: type[nn.Module]) -> None:
    mesh = init_device_mesh(ranks.device.type, (2, ranks.size // 2), mesh_dim_names=("pp", "dp"))
    index, pipeline = mesh["pp"].get_local_rank(), dist.get_process_group_ranks(mesh.get_group("pp"))
    x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, device=ranks.device)

    def step(process_group: object) -> None:
        module = syncbn.convert_syncbn_model(make_stage(index).to(ranks.device), process_group)
        if wrap is DistributedDataParallel:
            module = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        # Without output_args the stage would run a forward to infer them, and torch 2.11 replaces its errors.
        shapes = {"input_args": (x,), "output_args": (x,)}
        stage = PipelineStage(module, index, 2, ranks.device, **shapes, group=mesh.get_group("pp"))
        stage.forward_maybe_with_nosync(x)

    message = rf"^layer '1': the layer is in stage {index} of a pipeline over ranks {pipeline[0]}"
    for too_large in (None, dist.group.WORLD, mesh.get_group("pp")):
        with pytest.raises(ValueError, match=message + r".* but synchronises over ranks .*, which also hold other "):
            step(too_large)
    step(mesh.get_group("dp"))
    step(1)
    syncbn.convert_syncbn_model(nn.Sequential(make_stage(0), make_stage(1)).to(ranks.device))(x)  # without a pipeline
