"""Tests that a converted model trains like one process under DDP, FSDP, torch.compile, checkpointing and in pipelines.

With checkpointing the layers of other projects fail: pytorch#96136, pytorch#62471, fairscale#1035.
"""

import contextlib
import copy
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from guides import code_block, run_block, run_code
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import BROADCAST_BUFFERS, CountCollectives, require_trains_as, shard, small_model, step, whole_batches
from voting import Ranks

import syncbn
from syncbn.testing import unequal

compile_model = functools.partial(torch.compile, backend="aot_eager")  # This backend traces, and does not compile.


def checkpointed(model: nn.Sequential, implementation: CheckpointImpl) -> nn.Sequential:
    """Let the second block of the model save its input only, and repeat its forward in backward."""
    model[1] = checkpoint_wrapper(model[1], implementation)
    return model


def shard_by_the_guide(ranks: Ranks) -> nn.Module:
    """Run the guide's block: convert and shard a new model, save it, and load it into a plain model and the shards."""
    names = {"build_model": lambda: small_model().to(ranks.device)}
    names["mesh"] = init_device_mesh(ranks.device.type, (ranks.size,))
    return run_block("torch_features.md", "fully_shard(model, mesh", **names)["model"]


WRAPPERS: dict[str, Callable[[nn.Sequential, Ranks], nn.Module]] = {
    "DDP without broadcasts": lambda model, _: DistributedDataParallel(model, **{BROADCAST_BUFFERS: False}),
    "DDP with a static graph": lambda model, _: DistributedDataParallel(model, static_graph=True),
    "DDP, checkpointed": lambda model, _: DistributedDataParallel(checkpointed(model, CheckpointImpl.REENTRANT)),
    "DDP, compiled": lambda model, _: DistributedDataParallel(compile_model(model, fullgraph=True)),
    "compiled DDP": lambda model, _: compile_model(DistributedDataParallel(model)),  # DDP itself breaks the graph.
    "FSDP1": lambda model, ranks: FullyShardedDataParallel(model, device_id=ranks.device),
    "FSDP2": lambda _, ranks: shard_by_the_guide(ranks),
    "FSDP2 in bfloat16": lambda model, ranks: shard(model, ranks, mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    "FSDP2, checkpointed": lambda model, ranks: shard(checkpointed(model, CheckpointImpl.NO_REENTRANT), ranks),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # FSDP1 is deprecated.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.compiles if "compiled" in name else ()) for name in WRAPPERS]
)
def test_a_wrapped_model_trains_like_one_process(ranks: Ranks, name: str) -> None:
    """The running statistics have the same bits on all ranks."""
    # bfloat16 rounds by 0.4 %, and four steps of training amplify the rounding errors.
    dtype, tolerance = (torch.float32, 0.05) if "bfloat16" in name else (torch.float64, 1e-11)
    model = syncbn.convert_syncbn_model(small_model(dtype)).to(ranks.device)
    input_dtypes: set[torch.dtype] = set()
    if "bfloat16" in name:
        model[0][1].register_forward_pre_hook(lambda layer, inputs: input_dtypes.add(inputs[0].dtype))
    wrapped = WRAPPERS[name](model, ranks)
    model_with_state = wrapped if "FSDP" in name else model  # DDP and torch.compile rename the tensors of a state_dict.
    require_trains_as(small_model(dtype).to(ranks.device), ranks, model_with_state, wrapped, tolerance)
    assert not unequal(dict(wrapped.named_buffers()))
    if "bfloat16" in name:
        assert input_dtypes == {torch.bfloat16}


# DistributedDataParallel.


def test_rank_0_validates_alone_and_no_rank_communicates(ranks: Ranks) -> None:
    x, labels = whole_batches(ranks, 2)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(small_model()).to(ranks.device))
    names = {"ddp": ddp, "loader": [*zip(x, labels, strict=True)], "device": ranks.device}
    with CountCollectives() as collectives:
        names = run_block("training_script.md", "if dist.get_rank() == 0:", **names)
    assert collectives.total == 0
    assert ("right" in names) == (ranks.rank == 0)  # The block defines this variable on the rank that validates.
    assert ddp.module.training


def test_ddp_may_run_several_forwards_before_a_backward(ranks: Ranks) -> None:
    """DDP's broadcast in the second forward changes the buffers, which the backward of the first one must not need
    (https://github.com/pytorch/pytorch/issues/24397)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), syncbn.SyncBatchNorm1d(3)).to(ranks.device)
    expected, x = copy.deepcopy(model), torch.randn(4, 3, device=ranks.device)
    (2 * expected(x)).pow(3).sum().backward()
    ddp = DistributedDataParallel(model)
    (ddp(x) + ddp(x)).pow(3).sum().backward()
    for parameter, expected_parameter in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected_parameter.grad)


def test_all_ranks_skip_a_step_in_which_one_rank_overflows(ranks: Ranks) -> None:
    """GradScaler checks the gradients of its own rank. The layer sends the infinite sums of rank 0 to all ranks, so
    this works even without DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), syncbn.SyncBatchNorm1d(4)).to(ranks.device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(ranks.device.type, 2.0**10)
    before = model[0].weight.detach().clone()
    for overflows in (True, False):
        optimizer.zero_grad()
        factor = float("inf") if overflows and ranks.rank == 0 else 1.0
        loss = model(torch.randn(5, 3, device=ranks.device)).pow(3).sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model[0].weight, before) == overflows


@pytest.mark.parametrize("broadcasts", [False, True])  # False first: a process issues the warning once.
def test_ddp_that_broadcasts_buffers_between_hosts_causes_a_warning(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, broadcasts: bool
) -> None:
    """Without the warning, the broadcast would overwrite the running statistics of the second host in silence."""
    if ranks.size < 4:
        pytest.skip("needs two hosts of two ranks")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    code = code_block("groups.md", "ddp = DistributedDataParallel(")
    code = code.replace("forward_sync_buffers=False", f"{BROADCAST_BUFFERS}={broadcasts}")
    ddp = run_code(code, model=nn.Sequential(nn.BatchNorm1d(3)).to(ranks.device))["ddp"]
    message = r"over ranks (0-1|2-3) alone, but DistributedDataParallel broadcasts .* forward_sync_buffers=False"
    with pytest.warns(UserWarning, match=message) if broadcasts else contextlib.nullcontext():
        ddp(torch.randn(4, 3, device=ranks.device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="all tensors on a GPU can be shared")
def test_buffers_that_processes_may_share_cause_a_warning(ranks: Ranks) -> None:
    """torch.multiprocessing.spawn moves a model that is passed to it to shared memory, and a conversion keeps that
    memory. A deep copy has its own memory, and does not warn."""
    model, x = nn.Sequential(nn.BatchNorm1d(3)).share_memory(), torch.randn(4, 3)
    syncbn.convert_syncbn_model(copy.deepcopy(model))(x)
    message = r"memory that processes share, .* torch\.multiprocessing\.spawn.* copy\.deepcopy it there"
    with pytest.warns(UserWarning, match=message):
        syncbn.convert_syncbn_model(model)(x)


# FSDP2 and activation checkpointing.


@pytest.mark.parametrize("name", ["convert_syncbn_model", "revert_syncbn_model"])
def test_a_conversion_after_fully_shard_is_refused(ranks: Ranks, name: str) -> None:
    """fully_shard changes the class of a batch norm to which it is applied."""
    layer = nn.BatchNorm2d(4).to(ranks.device)
    if name == "revert_syncbn_model":
        syncbn.convert_syncbn_model(layer)
    fully_shard(layer, mesh=init_device_mesh(ranks.device.type, (ranks.size,)))
    with pytest.raises(RuntimeError, match=f"call {name} before fully_shard"):
        getattr(syncbn, name)(nn.Sequential(layer))


reentrant = functools.partial(checkpoint, use_reentrant=True)
non_reentrant = functools.partial(checkpoint, use_reentrant=False)


def selective(block: nn.Module, x: Tensor) -> Tensor:
    return run_block("torch_features.md", "def keep_all_reduces", block=block, x=x)["y"]


@pytest.mark.parametrize(
    ("way", "num_collectives"),  # Each of two layers runs two forwards and a backward.
    [(reentrant, 2 * 3), (non_reentrant, 2 * 3), (selective, 2 * 2)],
    ids=["reentrant", "non-reentrant", "selective"],
)
def test_checkpointing_changes_no_bit(
    ranks: Ranks, way: Callable[[nn.Module, Tensor], Tensor], num_collectives: int
) -> None:
    """The repeated forward issues its collectives again, unless selective checkpointing saves their results."""
    block = syncbn.convert_syncbn_model(small_model()[:2]).to(ranks.device)
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(ranks.rank), dtype=torch.float64)
    x = x.to(ranks.device)
    repeated_block = copy.deepcopy(block)
    repeated = functools.partial(way, repeated_block)
    for _ in range(2):
        actual, expected = step(repeated_block, x, repeated), step(block, x)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    with CountCollectives() as collectives:
        step(repeated_block, x, repeated)
    assert collectives.total == num_collectives


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs ranks raise at a later call: test_status.py")
@pytest.mark.parametrize(
    ("second_layer", "message"),
    [(0, "the ranks differentiate different calls of a layer"), (1, r"different layers or calls.*\n.*forward, call 6")],
)
def test_backwards_of_different_checkpointed_calls_raise(ranks: Ranks, second_layer: int, message: str) -> None:
    """Backward repeats a forward as the next call of its layer. With one layer the repeated forwards agree, and only
    the backwards differ. With two layers the repeated forwards differ: call 6 of one layer or of the other."""
    layers, x = [syncbn.SyncBatchNorm(3) for _ in range(2)], torch.randn(4, 3, requires_grad=True)

    def losses_of_two_calls() -> list[Tensor]:
        return [non_reentrant(layers[i], x).square().sum() for i in (0, second_layer)]

    for order in ([0, 1], [1, 0]):  # The backwards may run in any order that is the same on all ranks.
        losses = losses_of_two_calls()
        for index in order:
            losses[index].backward()
    losses = losses_of_two_calls()
    with pytest.raises(RuntimeError, match=message):
        losses[ranks.rank > 0].backward()


def test_ranks_may_use_different_kinds_of_checkpointing(ranks: Ranks) -> None:
    """With use_reentrant=True autograd differentiates the recomputed forward instead of the first forward, so the ranks
    differentiate different calls of the layer."""
    layer = syncbn.SyncBatchNorm(3, device=ranks.device)
    for _ in range(3):
        x = torch.randn(4, 3, device=ranks.device, requires_grad=True)
        (expected,) = torch.autograd.grad(layer(x).pow(3).sum(), x)
        checkpoint(layer, x, use_reentrant=ranks.rank > 0).pow(3).sum().backward()
        torch.testing.assert_close(x.grad, expected)


# Pipelines. Each stage synchronises over its own ranks.

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
        stages.append(PipelineStage(module, index, num_stages, ranks.device, input_args=x, output_args=y, group=pp))
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


@pytest.mark.parametrize("uses_ddp", [False, True])
def test_a_layer_that_synchronises_with_ranks_of_other_stages_is_refused(
    ranks: Ranks, mesh: DeviceMesh, uses_ddp: bool
) -> None:
    index, pp, dp = mesh["pp"].get_local_rank(), mesh.get_group("pp"), mesh.get_group("dp")
    x = torch.randn(NUM_SAMPLES, WIDTH, dtype=torch.float64, device=ranks.device)

    def forward(process_group: object) -> None:
        module = syncbn.convert_syncbn_model(make_stage(index).to(ranks.device), process_group)
        if uses_ddp:
            module = DistributedDataParallel(module, process_group=dp)
        # Without output_args the stage would run a forward to infer them, whose errors torch 2.11 replaces.
        stage = PipelineStage(module, index, 2, ranks.device, input_args=(x,), output_args=(x,), group=pp)
        stage.forward_maybe_with_nosync(x)

    where = rf"^layer '1': the layer is in stage {index} of a pipeline over ranks {dist.get_process_group_ranks(pp)[0]}"
    for group_of_several_stages in (None, dist.group.WORLD, pp):
        with pytest.raises(ValueError, match=where + r".* but synchronises over ranks .* hold other stages"):
            forward(group_of_several_stages)
    forward(dp)
    forward(1)
    # A model outside of a pipeline may synchronise over all ranks.
    syncbn.convert_syncbn_model(nn.Sequential(make_stage(0), make_stage(1)).to(ranks.device))(x)
