"""Tests that pipelines of converted stages train like one process in every schedule, each stage over its own ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from voting import Ranks

import syncbn

WIDTH, NUM_MICRO_BATCHES = 6, 4
NUM_SAMPLES = 3  # samples of a rank in a micro-batch
# All schedules of torch 2.13, and the stages that rank 0 and rank 1 of a pipeline hold.
SCHEDULES = {
    "ScheduleGPipe": ((0,), (1,)),
    "Schedule1F1B": ((0,), (1,)),
    "ScheduleLoopedBFS": ((0, 2), (1, 3)),
    "ScheduleInterleaved1F1B": ((0, 2), (1, 3)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)),
    "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
    "ScheduleDualPipeV": ((0, 3), (1, 2)),
}


def test_the_table_has_every_schedule_of_torch() -> None:
    assert {name for name in dir(pipelining) if name.startswith("Schedule")} == {*SCHEDULES}


@pytest.fixture
def mesh(ranks: Ranks) -> DeviceMesh:
    if ranks.size % 2 == 1:
        pytest.skip("a pipeline has two ranks")
    return init_device_mesh(ranks.device.type, (2, ranks.size // 2), mesh_dim_names=("pp", "dp"))


def make_stage(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()).double()


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_trains_like_one_process(ranks: Ranks, mesh: DeviceMesh, name: str) -> None:
    """The ranks of a stage normalise each micro-batch together, whatever the schedule."""
    pp, dp, num_replicas = mesh.get_group("pp"), mesh.get_group("dp"), mesh["dp"].size()
    indices = SCHEDULES[name][mesh["pp"].get_local_rank()]
    num_stages = 2 * len(indices)
    whole = nn.Sequential(*map(make_stage, range(num_stages))).to(ranks.device)
    torch.manual_seed(7)  # the same batch on all ranks
    batch = torch.randn(NUM_MICRO_BATCHES, num_replicas, NUM_SAMPLES, WIDTH, dtype=torch.float64, device=ranks.device)
    for micro_batch in batch:
        (loss_fn(whole(micro_batch.flatten(0, 1)), batch.new_tensor(1.0)) / NUM_MICRO_BATCHES).backward()

    modules = {index: syncbn.convert_syncbn_model(make_stage(index), dp).to(ranks.device) for index in indices}
    stages = []
    for index, module in modules.items():
        x = batch.new_empty(NUM_SAMPLES, WIDTH, requires_grad=index > 0)
        y = batch.new_empty(NUM_SAMPLES, WIDTH, requires_grad=True)
        stages.append(
            pipelining.PipelineStage(module, index, num_stages, ranks.device, input_args=x, output_args=y, group=pp)
        )
    held_stages = stages if len(stages) > 1 else stages[0]
    schedule = getattr(pipelining, name)(held_stages, NUM_MICRO_BATCHES, loss_fn=loss_fn)
    inputs = [batch[:, mesh["dp"].get_local_rank()].flatten(0, 1)] if 0 in indices else []
    targets = {"target": batch.new_ones(NUM_MICRO_BATCHES * NUM_SAMPLES, WIDTH)} if num_stages - 1 in indices else {}
    schedule.step(*inputs, **targets)
    for index, module in modules.items():
        torch.testing.assert_close(dict(module.named_buffers()), dict(whole[index].named_buffers()))
        for parameter, expected in zip(module.parameters(), whole[index].parameters(), strict=True):
            dist.all_reduce(parameter.grad, group=dp)
            torch.testing.assert_close(parameter.grad / num_replicas, expected.grad)


@pytest.mark.parametrize("wrapper", [nn.Identity, DistributedDataParallel])
def test_a_layer_that_synchronises_with_ranks_of_other_stages_is_refused(
    ranks: Ranks, mesh: DeviceMesh, wrapper: type[nn.Module]
) -> None:
    index, pp, dp = mesh["pp"].get_local_rank(), mesh.get_group("pp"), mesh.get_group("dp")
    x = torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64, device=ranks.device)

    def forward(process_group: object) -> None:
        module = syncbn.convert_syncbn_model(make_stage(index).to(ranks.device), process_group)
        if wrapper is DistributedDataParallel:
            module = DistributedDataParallel(module, process_group=dp)
        # Without output_args the stage would run a forward to infer them, and torch 2.11 replaces its errors.
        stage = pipelining.PipelineStage(module, index, 2, ranks.device, input_args=(x,), output_args=(x,), group=pp)
        stage.forward_maybe_with_nosync(x)

    where = rf"^layer '1': the layer is in stage {index} of a pipeline over ranks {dist.get_process_group_ranks(pp)[0]}"
    for group_of_several_stages in (None, dist.group.WORLD, pp):
        with pytest.raises(ValueError, match=where + r".* but synchronises over ranks .*, which also hold other "):
            forward(group_of_several_stages)
    forward(dp)
    forward(1)
    # A model outside of a pipeline may synchronise over all ranks.
    syncbn.convert_syncbn_model(nn.Sequential(make_stage(0), make_stage(1)).to(ranks.device))(x)
