"""Tests that compiled layers equal eager layers without a graph break; and what else may record a graph on ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import voting
from subclasses_of_batchnorm import CallsSuper2d
from torch import Tensor, fx, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter, CompileCounterWithBackend
from torch.fx.proxy import TraceError
from torch.nn.parallel import DistributedDataParallel
from training import CountCollectives, preserved_state, step
from voting import Ranks

import syncbn
from syncbn import torch_internals
from syncbn.functional import sync_batch_norm, sync_batch_stats
from syncbn.kernels import available

pytestmark = pytest.mark.compiles
fullgraphs = pytest.mark.parametrize("fullgraph", [True, False])


def small_model(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None) -> nn.Module:
    """Return a model of two layers with options. Convolutions have no bias: its gradient would be rounding errors."""
    torch.manual_seed(0)
    layers = [syncbn.SyncBatchNorm2d(4, **first or {}), syncbn.SyncBatchNorm2d(6, **second or {})]
    convolutions = [nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 6, 3, bias=False)]
    return nn.Sequential(convolutions[0], layers[0], nn.ReLU(inplace=True), convolutions[1], layers[1])


def own_input(ranks: Ranks) -> Tensor:
    """Return the input of this rank, with a mean and a size that differ from those of the other ranks."""
    generator = torch.Generator().manual_seed(ranks.rank)
    return torch.randn(3 + ranks.rank, 1, 8, 8, generator=generator).to(ranks.device) + ranks.rank


def require_equal(compiled: nn.Module, layer: nn.Module, eager: nn.Module, x: Tensor) -> None:
    """Compare two training steps and an evaluation of `compiled`, which wraps `layer`, with those of `eager`."""
    eager_layer = eager.module if isinstance(eager, DistributedDataParallel) else eager
    for _ in range(2):
        actual, expected = step(compiled, layer, x), step(eager, eager_layer, x)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert actual["output"].stride() == expected["output"].stride()
    torch.testing.assert_close(compiled.eval()(x), eager.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "first", "second", "tensors"),
    [
        ("inductor", {}, {"process_group": 1}, {}),
        # In float64 the sums and the gradients of the parameters could share memory.
        ("inductor", {}, {}, {"dtype": torch.float64, "memory_format": torch.channels_last}),
        ("aot_eager", {"affine": False, "eps": 1e-3}, {"bias": False, "momentum": None}, {}),
        ("aot_eager", {"process_group": 2}, {"track_running_stats": False}, {}),
    ],
    ids=str,
)
def test_equals_eager(
    ranks: Ranks, backend: str, first: dict[str, Any], second: dict[str, Any], tensors: dict[str, Any]
) -> None:
    eager, x = (value.to(ranks.device, **tensors) for value in (small_model(first, second), own_input(ranks)))
    layer = copy.deepcopy(eager)
    require_equal(torch.compile(layer, backend=backend, fullgraph=True), layer, eager, x)


def test_with_ddp(ranks: Ranks) -> None:
    """Dynamo breaks the graph in the forward of DDP itself, so only DDP(compile(model)) has a full graph."""
    eager, x = small_model().to(ranks.device), own_input(ranks)
    layers = [copy.deepcopy(eager) for _ in range(2)]
    inside = DistributedDataParallel(torch.compile(layers[0], backend="aot_eager", fullgraph=True))
    outside = torch.compile(DistributedDataParallel(layers[1]), backend="aot_eager")
    for compiled, layer in zip((inside, outside), layers, strict=True):
        require_equal(compiled, layer, DistributedDataParallel(copy.deepcopy(eager)), x)


def test_dynamic_sizes_compile_twice_without_and_with_a_mask(ranks: Ranks) -> None:
    """Dynamo compiles once for the first size and once for any size. No shape depends on the values of a mask."""
    eager = syncbn.SyncBatchNorm1d(3, fuse_relu=True, device=ranks.device)
    layer, counter = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    generator = torch.Generator().manual_seed(ranks.rank)
    for length, num_graphs in ((7, 1), (8, 2), (9, 2), (5, 3), (6, 4), (8, 4)):
        x = torch.randn(4, 3, length, generator=generator).to(ranks.device, torch.bfloat16)
        mask = torch.rand(4, length, generator=generator).to(ranks.device) < 0.5 if num_graphs > 2 else None
        actual, expected = step(compiled, layer, x, mask=mask), step(eager, eager, x, mask=mask)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
        assert counter.frame_count == num_graphs


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch's own
@pytest.mark.parametrize("is_large", [False, True])
def test_a_graph_has_one_collective_each_way(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, is_large: bool) -> None:
    """Only a small group of gloo uses all_to_all_single, see ranks/collective.py. On CPUs the graphs call operators:
    Inductor's code for torch's operations takes several times as long. (torch 2.11's Dynamo traces a Function's forward
    with gradients enabled.)"""
    monkeypatch.setattr(torch_internals, "MAX_ALL_TO_ALL_RANKS", ranks.size - is_large)
    graphs, layer, x = AotEagerAndRecordGraphs(), syncbn.SyncBatchNorm(1).to(ranks.device), own_input(ranks)
    compiled, is_cpu = torch.compile(copy.deepcopy(layer), backend=graphs, fullgraph=True), ranks.device.type == "cpu"
    torch.testing.assert_close(step(compiled, compiled, x)["gradient of x"], step(layer, layer, x)["gradient of x"])
    for way, (module,) in (("forward", graphs.fw_graphs), ("backward", graphs.bw_graphs)):
        called = [str(node.target) for node in module.graph.nodes]
        collectives = [name for name in called if "c10d" in name and "wait_tensor" not in name]
        name = "all_to_all_single" if is_cpu and not is_large else "all_reduce"
        assert collectives == [f"_c10d_functional.{name}.default"]
        if is_cpu and "cpu: C++" in available() and torch.__version__ >= "2.12":
            assert {f"syncbn.{way}_sums_v4.default", f"syncbn.{way}_outputs_v4.default"} <= {*called}


# Process groups.


@fullgraphs
def test_each_default_group_compiles_once_more(ranks: Ranks, fullgraph: bool) -> None:
    """Without a group the first graph is used again."""

    def function(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return layer(x), sync_batch_norm(x, None, None, training=True), *sync_batch_stats(x)

    layer, x, counter = syncbn.SyncBatchNorm(1).to(ranks.device), own_input(ranks), CompileCounter()
    compiled, expected = torch.compile(function, backend=counter, fullgraph=fullgraph), function(layer, x)
    voting.world.destroy_groups()
    local = compiled(layer, x)
    for num_graphs in (2, 3):
        voting.world.replace_group()
        torch.testing.assert_close(compiled(layer, x), expected)
        assert counter.frame_count == num_graphs
    voting.world.destroy_groups()
    torch.testing.assert_close(compiled(layer, x), local, rtol=0, atol=0)
    voting.world.create_group()
    assert counter.frame_count == 3


@fullgraphs
def test_an_int_before_there_is_a_group_raises_with_the_remedy(ranks: Ranks, fullgraph: bool) -> None:
    """The groups of several ranks cannot be made while a graph is compiled."""
    voting.world.destroy_groups()
    layer, x = syncbn.SyncBatchNorm(1, process_group=ranks.size).to(ranks.device), own_input(ranks)
    voting.world.create_group()
    compiled = torch.compile(layer, backend="eager", fullgraph=fullgraph)
    remedy = r"needs new groups, .*; construct or convert the layers after .*init_process_group"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"process_group={ranks.size} {remedy}"):
            compiled(x)
    syncbn.create_syncbn_process_group(ranks.size)
    torch.testing.assert_close(compiled(x), copy.deepcopy(layer)(x))


@fullgraphs
def test_a_missing_group_raises_as_in_eager_mode(ranks: Ranks, fullgraph: bool) -> None:
    """With another group the layer compiles, even if the first call broke the graph."""
    layer, x = syncbn.SyncBatchNorm(1).to(ranks.device), own_input(ranks)
    layer.process_group = dist.new_group([*range(ranks.size)])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=fullgraph)
    compiled(x)
    voting.world.destroy_groups()  # Without a default group the layer must not train on this rank alone, either.
    for _ in range(2):
        with preserved_state(layer), pytest.raises(RuntimeError, match="was destroyed, or no such group exists here"):
            compiled(x)
    voting.world.create_group()
    layer.process_group = dist.GroupMember.NON_GROUP_MEMBER
    with preserved_state(layer), pytest.raises((RuntimeError, ValueError), match="this rank is not in"):
        compiled(x)
    layer.process_group = None
    torch.testing.assert_close(step(compiled, layer, x)["output"], step(layer, layer, x)["output"])


# torch.fx, torch.jit and torch.export.


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit:FutureWarning")  # TorchScript's own
@pytest.mark.parametrize("layer_class", [nn.BatchNorm2d, CallsSuper2d])
def test_a_rank_traces_without_the_other_ranks(ranks: Ranks, layer_class: type[nn.Module]) -> None:
    """Only the last rank traces, before the first collective of the group. The traced graph synchronises."""
    model = graph = syncbn.convert_syncbn_model(nn.Sequential(nn.Conv2d(1, 3, 3), layer_class(3))).to(ranks.device)
    x = torch.randn(2, 3, 6, 6, device=ranks.device)
    if ranks.rank == ranks.size - 1:
        with CountCollectives() as collectives:
            graph = fx.symbolic_trace(model)
            for function in (model[1], lambda x: sync_batch_norm(x, None, None, training=True)):
                with pytest.raises(TraceError):
                    fx.symbolic_trace(function)
                with pytest.raises(RuntimeError, match="cannot record batch norm over ranks"):
                    torch.jit.trace(function, x)
            with pytest.raises(RuntimeError, match="cannot compile"):
                torch.jit.script(model)
        assert collectives.total == 0
    graph(x[:, :1])
    assert syncbn.summary(model)[0].last_step == f"synchronised over {ranks.size} ranks"


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_of_training_is_refused_on_several_ranks_and_exact_on_one(ranks: Ranks, strict: bool) -> None:
    """One rank exports F.batch_norm, with the gradients of earlier layers. An export in evaluation always works."""
    x = own_input(ranks).double()
    model = nn.Sequential(nn.Conv2d(1, 3, 1), syncbn.SyncBatchNorm2d(3)).to(x)
    with pytest.raises(RuntimeError, match=r"torch\.export cannot record .* call model.eval\(\) or syncbn.revert_"):
        torch.export.export(model, (x,), strict=strict)
    torch.export.export(model.eval(), (x,), strict=strict)
    model[1].process_group = 1
    program = torch.export.export(model.train(), (x,), strict=strict)
    assert not any("syncbn" in str(node.target) for node in program.graph.nodes)
    exported, eager = program.module(), copy.deepcopy(model)  # `exported` shares the buffers of `model`.
    torch.testing.assert_close(step(exported, exported, x), step(eager, eager, x))
