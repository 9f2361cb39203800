"""Tests of torch.compile, torch.fx, torch.jit and torch.export: compiled layers equal eager layers, without a break."""

import copy
from typing import Any

import pytest
import torch
import voting
from subclasses import CallsSuper2d
from torch import Tensor, fx, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter, CompileCounterWithBackend
from training import CountCollectives, step
from voting import Ranks

import syncbn
from syncbn import torch_internals

pytestmark = pytest.mark.compiles
Options = dict[str, Any]


def local_input(ranks: Ranks) -> Tensor:
    """Return the input of this rank, with a mean and a size that differ from those of the other ranks."""
    generator = torch.Generator().manual_seed(ranks.rank)
    return torch.randn(3 + ranks.rank, 1, 8, 8, generator=generator).to(ranks.device) + ranks.rank


@pytest.mark.parametrize(
    ("backend", "first_options", "second_options", "to_options"),
    [
        # Without a cast (float64), grad_weight and grad_bias could share the memory of the sums.
        ("inductor", {}, {}, {"dtype": torch.float64, "memory_format": torch.channels_last}),
        ("aot_eager", {"affine": False, "eps": 1e-3}, {"bias": False, "momentum": None}, {}),
        ("aot_eager", {"process_group": 2}, {"process_group": 1, "track_running_stats": False}, {}),
    ],
    ids=str,
)
def test_a_compiled_model_equals_the_eager_model(
    ranks: Ranks, backend: str, first_options: Options, second_options: Options, to_options: Options
) -> None:
    torch.manual_seed(0)
    first, second = syncbn.SyncBatchNorm2d(4, **first_options), syncbn.SyncBatchNorm2d(6, **second_options)
    # Convolutions have no bias, because its gradient would be rounding errors.
    conv, second_conv = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 6, 3, bias=False)
    eager = nn.Sequential(conv, first, nn.ReLU(inplace=True), second_conv, second).to(ranks.device, **to_options)
    x = local_input(ranks).to(**to_options)
    layer = copy.deepcopy(eager)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        actual, expected = step(layer, x, compiled), step(eager, x)
        torch.testing.assert_close(actual, expected)
        assert actual["output"].stride() == expected["output"].stride()
    torch.testing.assert_close(compiled.eval()(x), eager.eval()(x))


@pytest.mark.parametrize("has_mask", [False, True])
def test_the_second_size_compiles_a_graph_for_all_sizes(ranks: Ranks, has_mask: bool) -> None:
    """No shape in a graph depends on the values of a mask."""
    eager = syncbn.SyncBatchNorm1d(3, fuse_relu=True, device=ranks.device)
    layer, counter = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    generator = torch.Generator().manual_seed(ranks.rank)
    for length, num_graphs in ((7, 1), (8, 2), (9, 2)):
        x = torch.randn(4, 3, length, generator=generator).to(ranks.device, torch.bfloat16)
        mask = torch.rand(4, length, generator=generator).to(ranks.device) < 0.5 if has_mask else None
        torch.testing.assert_close(step(layer, x, compiled, mask=mask), step(eager, x, mask=mask))
        assert counter.frame_count == num_graphs


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # torch causes this warning itself.
@pytest.mark.parametrize(("limit", "operator"), [(16, "all_to_all_single"), (0, "all_reduce")])
def test_a_graph_has_one_collective_each_way(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, limit: int, operator: str
) -> None:
    """Groups of gloo with up to `limit` ranks use all_to_all_single, see ranks/collective.py."""
    monkeypatch.setattr(torch_internals, "MAX_ALL_TO_ALL_RANKS", limit)
    expected = "all_reduce" if ranks.device.type == "cuda" else operator
    graphs, layer, x = AotEagerAndRecordGraphs(), syncbn.SyncBatchNorm(1).to(ranks.device), local_input(ranks)
    step(layer, x, torch.compile(layer, backend=graphs, fullgraph=True))
    for (graph,) in (graphs.fw_graphs, graphs.bw_graphs):
        operators = [str(node.target) for node in graph.graph.nodes]
        collectives = [name for name in operators if "c10d" in name and "wait_tensor" not in name]
        assert collectives == [f"_c10d_functional.{expected}.default"]


# Process groups. More: test_groups.py (destroyed groups).


def test_a_graph_that_was_compiled_without_a_group_is_compiled_again_for_each_default_group(ranks: Ranks) -> None:
    layer, x, counter = syncbn.SyncBatchNorm(1).to(ranks.device), local_input(ranks), CompileCounter()
    compiled, expected = torch.compile(copy.deepcopy(layer), backend=counter, fullgraph=True), layer(x)
    voting.world.destroy_groups()
    compiled(x)
    for num_graphs in (2, 3):
        voting.world.replace_group()
        torch.testing.assert_close(compiled(x), expected)
        assert counter.frame_count == num_graphs


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_error_asks_for_the_groups_that_a_graph_cannot_create(ranks: Ranks, fullgraph: bool) -> None:
    """The layer was built before init_process_group. Once its groups exist, the compiled layer works."""
    voting.world.destroy_groups()
    layer, x = syncbn.SyncBatchNorm(1, process_group=ranks.size).to(ranks.device), local_input(ranks)
    voting.world.create_group()
    compiled = torch.compile(layer, backend="eager", fullgraph=fullgraph)
    remedy = r"needs new groups, .*; construct or convert the layers after .*init_process_group"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"process_group={ranks.size} {remedy}"):
            compiled(x)
    syncbn.create_syncbn_process_group(ranks.size)
    torch.testing.assert_close(compiled(x), copy.deepcopy(layer)(x))


# torch.fx, torch.jit and torch.export.


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.torch.jit:FutureWarning")  # TorchScript warns.
@pytest.mark.parametrize("layer_class", [nn.BatchNorm2d, CallsSuper2d])
def test_one_rank_may_trace_without_the_other_ranks(ranks: Ranks, layer_class: type[nn.Module]) -> None:
    """The last rank traces alone. Later its graph and the models of the other ranks synchronise."""
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Conv2d(1, 3, 3), layer_class(3))).to(ranks.device)
    x = torch.randn(2, 1, 6, 6, device=ranks.device)
    call = model
    if ranks.rank == ranks.size - 1:
        with CountCollectives() as collectives:
            call = fx.symbolic_trace(model)
            with pytest.raises(RuntimeError, match="cannot record batch norm over ranks"):
                torch.jit.trace(model, x)
        assert collectives.total == 0
    call(x)
    assert syncbn.summary(model)[0].last_step == f"synchronised over {ranks.size} ranks"


@pytest.mark.parametrize("strict", [True, False])
def test_torch_export_in_training_is_refused_on_several_ranks_and_exact_on_one(ranks: Ranks, strict: bool) -> None:
    """The program of one rank calls F.batch_norm. An export in evaluation works on any number of ranks."""
    x = local_input(ranks).double()
    model = nn.Sequential(nn.Conv2d(1, 3, 1), syncbn.SyncBatchNorm2d(3)).to(x)
    with pytest.raises(RuntimeError, match=r"torch\.export cannot record .* call model.eval\(\) or syncbn.revert_"):
        torch.export.export(model, (x,), strict=strict)
    torch.export.export(model.eval(), (x,), strict=strict)
    model[1].process_group = 1
    program = torch.export.export(model.train(), (x,), strict=strict)
    assert not any("syncbn" in str(node.target) for node in program.graph.nodes)
    exported, eager = program.module(), copy.deepcopy(model)  # `exported` shares the buffers of `model`.
    torch.testing.assert_close(step(exported, x), step(eager, x))
