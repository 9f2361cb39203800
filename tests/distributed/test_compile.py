"""Catches a compiled layer that breaks the graph, has other numbers than eager, communicates more or compiles often."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import voting
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch.nn.parallel import DistributedDataParallel
from training import step, unchanged
from voting import Ranks

import syncbn
from syncbn.kernels import available
from syncbn.ranks.groups import GlobalRanks

pytestmark = pytest.mark.compiles
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_OPERATORS = DEVICE == "cpu" and "cpu: C++" in available() and torch.__version__ >= "2.12"  # in graphs


def small_model(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),  # whose gradient would be rounding errors
        syncbn.SyncBatchNorm2d(4, **options),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, bias=False),
        syncbn.SyncBatchNorm2d(6, **options),
    )


def own_input(ranks: Ranks, num: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(ranks.rank)
    return torch.randn(num, 1, 8, 8, generator=generator).to(ranks.device)


def require_equal(compiled: nn.Module, layer: nn.Module, eager: nn.Module, x: Tensor) -> None:
    """Two training steps and an evaluation of `compiled`, made of `layer`, and of `eager`; to float32 rounding."""
    eager_layer = eager.module if isinstance(eager, DistributedDataParallel) else eager
    for _ in range(2):
        actual, expected = step(compiled, layer, x), step(eager, eager_layer, x)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert actual["output"].stride() == expected["output"].stride()
    torch.testing.assert_close(compiled.eval()(x), eager.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("inductor", {}),
        ("inductor", {"memory_format": torch.channels_last}),
        ("inductor", {"process_group": 1}),
        ("inductor", {"dtype": torch.float64}),  # where sums and gradients of parameters could share memory
        ("aot_eager", {"affine": False, "eps": 1e-3}),
        ("aot_eager", {"bias": False, "momentum": None}),
        ("aot_eager", {"track_running_stats": False}),
        # What a layer keeps of a group is looked up inside the graph.
        ("aot_eager", {"process_group": 2}),
        ("aot_eager", {"process_group": dist.new_group}),
    ],
    ids=str,
)
def test_equals_eager(ranks: Ranks, backend: str, options: dict[str, Any]) -> None:
    made = {name: value() if callable(value) else value for name, value in options.items()}
    memory_format = made.pop("memory_format", torch.contiguous_format)
    eager, x = (one.to(ranks.device, memory_format=memory_format) for one in (small_model(**made), own_input(ranks)))
    layer = copy.deepcopy(eager)
    require_equal(torch.compile(layer, backend=backend, fullgraph=True), layer, eager, x)


def test_with_ddp(ranks: Ranks) -> None:
    """DDP(compile(model, fullgraph=True)); compile(DDP(model)) breaks in DDP's own forward, so without fullgraph."""
    eager, x = small_model().to(ranks.device), own_input(ranks)
    layers = [copy.deepcopy(eager) for _ in range(2)]
    inside = DistributedDataParallel(torch.compile(layers[0], backend="aot_eager", fullgraph=True))
    outside = torch.compile(DistributedDataParallel(layers[1]), backend="aot_eager")
    for compiled, layer in zip((inside, outside), layers, strict=True):
        require_equal(compiled, layer, DistributedDataParallel(copy.deepcopy(eager)), x)


@pytest.mark.parametrize(
    ("kind", "is_full"), [("layer", True), ("layer", False), ("sync_batch_norm", True), ("sync_batch_stats", True)]
)
def test_compiled_before_there_is_a_group(ranks: Ranks, kind: str, is_full: bool) -> None:
    """Each default group compiles once more. Without a group the first graph serves again."""
    functions: dict[str, Callable[[Tensor], Any]] = {
        "layer": syncbn.SyncBatchNorm(1).to(ranks.device),
        "sync_batch_norm": lambda x: syncbn.functional.sync_batch_norm(x, None, None, training=True),
        "sync_batch_stats": syncbn.functional.sync_batch_stats,
    }
    x, counter = own_input(ranks) + ranks.rank, CompileCounter()
    expected = copy.deepcopy(functions[kind])(x)
    compiled = torch.compile(functions[kind], backend=counter, fullgraph=is_full)
    voting.world.leave()
    local = compiled(x)
    voting.world.enter()
    for num_graphs in (2, 3):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), expected)
        assert counter.frame_count == num_graphs
        voting.world.make_anew()
    voting.world.leave()
    torch.testing.assert_close(compiled(x), local, rtol=0, atol=0)
    voting.world.enter()
    assert counter.frame_count == 3


@pytest.mark.parametrize("is_full", [True, False])
def test_an_int_before_there_is_a_group(ranks: Ranks, is_full: bool) -> None:
    """The groups of several ranks cannot be made while a graph is compiled; one rank needs no group."""
    voting.world.leave()
    alone, layer = (syncbn.SyncBatchNorm(1, process_group=size).to(ranks.device) for size in (1, ranks.size))
    voting.world.enter()
    counter, x = CompileCounter(), own_input(ranks) + ranks.rank
    compiled = torch.compile(nn.Sequential(alone, layer), backend=counter, fullgraph=is_full)
    remedy = (
        rf"process_group={ranks.size} needs new groups, .*; construct or convert the layers after .*init_process_group"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=remedy):
            compiled(x)
    expected = nn.functional.batch_norm(x, None, None, training=True)
    torch.testing.assert_close(torch.compile(alone, backend="eager", fullgraph=is_full)(x), expected)
    syncbn.create_syncbn_process_group(ranks.size)
    torch.testing.assert_close(compiled(x), copy.deepcopy(layer)(expected))


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("why", ["destroyed", "unpickled", "outside", "not made"])
def test_a_group_that_does_not_exist(ranks: Ranks, why: str, is_full: bool) -> None:
    """A compiled call raises the error of an eager call. With another group the layer compiles, as if it had not
    failed, also where the first call broke the graph."""
    layer, x = syncbn.SyncBatchNorm(1).to(ranks.device), own_input(ranks) + ranks.rank
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=is_full)
    compiled(x)
    specs = {
        "destroyed": dist.new_group([*range(ranks.size)]) if why == "destroyed" else None,
        "unpickled": GlobalRanks((0, 97)),
        "outside": dist.GroupMember.NON_GROUP_MEMBER,
        "not made": ranks.size,
    }
    layer.process_group = specs[why]
    words = {
        "destroyed": "was destroyed, or no such group exists here; create the group",
        "unpickled": "was destroyed, or no such group exists here; create the group",
        "outside": "this rank is not in .*; set layer.process_group on each rank",
        "not made": "needs new groups, which cannot be made inside a compiled graph",
    }
    if why == "destroyed":
        compiled(x)
        voting.world.leave()  # Without a default group the layer must not train on its own, either.
    for _ in range(2):
        with unchanged(layer), pytest.raises((RuntimeError, ValueError), match=words[why]):
            compiled(x)
    if why == "destroyed":
        voting.world.enter()
    layer.process_group = None
    for _ in range(2):
        torch.testing.assert_close(step(compiled, layer, x)["output"], step(layer, layer, x)["output"])


def test_masks_in_bfloat16(ranks: Ranks) -> None:
    """No shape depends on the values of the mask, so nothing breaks the graph."""
    eager, x = syncbn.SyncBatchNorm2d(1, fuse_relu=True).to(ranks.device), own_input(ranks).bfloat16()
    layer = copy.deepcopy(eager)
    compiled = torch.compile(layer, fullgraph=True)
    for seed in range(2):
        mask = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(ranks.device) < 0.5
        actual, expected = step(compiled, layer, x, mask=mask), step(eager, eager, x, mask=mask)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_masks_of_dynamic_sizes(ranks: Ranks) -> None:
    """The size of x is a symbol, that of the mask, seen for the first time, a number."""
    layer = syncbn.SyncBatchNorm1d(3, device=ranks.device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for length in (7, 9):
        compiled(torch.randn(4, 3, length, device=ranks.device))
    x, mask = torch.randn(4, 3, 5, device=ranks.device), torch.rand(4, 5, device=ranks.device) > 0.3
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))


def test_dynamic_batch_sizes_compile_twice(ranks: Ranks) -> None:
    """Once for the first size and once for any size."""
    counter = CompileCounter()
    compiled = torch.compile(small_model().to(ranks.device), backend=counter, fullgraph=True)
    for num in (3, 4, 5, 7, 9):
        compiled(own_input(ranks, num))
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch's own
def test_one_all_reduce_each_way(ranks: Ranks) -> None:
    """And on CPUs the operators: what Inductor makes of torch's operations takes several times as long there. (torch
    2.11's Dynamo traces a Function's forward with gradients enabled.)"""
    graphs = AotEagerAndRecordGraphs()
    compiled = torch.compile(syncbn.SyncBatchNorm(1).to(ranks.device), backend=graphs, fullgraph=True)
    compiled(own_input(ranks).requires_grad_()).sum().backward()
    for way, (module,) in (("forward", graphs.fw_graphs), ("backward", graphs.bw_graphs)):
        called = [str(node.target) for node in module.graph.nodes]
        collectives = [name for name in called if "c10d" in name and "wait_tensor" not in name]
        name = "all_to_all_single" if ranks.device.type == "cpu" else "all_reduce"  # see ranks/collective.py
        assert collectives == [f"_c10d_functional.{name}.default"]
        if HAS_OPERATORS:
            assert {f"syncbn.{way}_sums_v4.default", f"syncbn.{way}_outputs_v4.default"} <= {*called}


def test_a_bad_input_behind_a_graph_break(ranks: Ranks) -> None:
    """Parts of the call are compiled, and no rank reads the marks of others: each raises its own error."""
    layer = syncbn.SyncBatchNorm2d(3).to(ranks.device)

    def forward(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return layer(x * 2)

    compiled = torch.compile(forward, backend="eager")
    compiled(torch.randn(2, 3, 4, 4, device=ranks.device))
    with pytest.raises(ValueError, match="expected 3 channels in dim 1 of the input, got 4"):
        compiled(torch.randn(2, 4, 4, 4, device=ranks.device))
