"""Catches a graph that holds a group of the rank which compiles it for all (compile_on_one_rank, torch 2.15)."""

import copy
import os
import zlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from voting import Ranks

import syncbn
from syncbn.comm.text_exchange import all_gather_json

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.compiler.config, "compile_on_one_rank"), reason="torch 2.15 is the first"),
    pytest.mark.skipif(int(os.environ["WORLD_SIZE"]) % 2, reason="for groups of 2 ranks"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor"),  # of Dynamo
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd"),  # torch's own
]

# On 4 ranks "int", "group" and "mesh" give two groups of 2 ranks, which have different names.
PROCESS_GROUPS: dict[str, Callable[[str], object]] = {
    "default": lambda device: None,
    "int": lambda device: 2,
    "group": lambda device: dist.new_subgroups(2)[0],
    "mesh": lambda device: init_device_mesh(device, (dist.get_world_size() // 2, 2), mesh_dim_names=("a", "b"))["b"],
    "node": lambda device: "node",
}


def require_portable(graphs: AotEagerAndRecordGraphs) -> None:
    """Each is the same on all ranks, and its group comes from outside."""
    assert len(graphs.fw_graphs) == len(graphs.bw_graphs) == 1
    for graph in (graphs.fw_graphs[0].graph, graphs.bw_graphs[0].graph):
        targets = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.all_to_all_single.default)
        [collective] = (node for node in graph.nodes if node.target in targets)
        assert isinstance(collective.args[-1], torch.fx.Node), str(graph)  # else a name
        assert not graph.find_nodes(op="get_attr"), str(graph)  # else a group that was there when it was traced
        checksums = all_gather_json(zlib.crc32(str(graph).encode()), dist.group.WORLD)
        assert len(set(checksums)) == 1, str(graph)


def compiled_step(layer: syncbn.SyncBatchNorm, x: Tensor, backend: object) -> tuple[Tensor, Tensor]:
    """The output and the gradient of x."""
    torch._dynamo.reset()
    x = x.detach().clone().requires_grad_()
    with torch.compiler.config.patch(compile_on_one_rank=True):
        output = torch.compile(layer, backend=backend, fullgraph=True)(x)
        output.sin().sum().backward()
    return output, x.grad


@pytest.mark.parametrize("kind", PROCESS_GROUPS)
def test_groups_are_inputs_of_a_graph(ranks: Ranks, kind: str) -> None:
    layer = syncbn.SyncBatchNorm(3, process_group=PROCESS_GROUPS[kind](ranks.device.type), device=ranks.device)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device).requires_grad_()
    output = copy.deepcopy(layer)(x)
    output.sin().sum().backward()
    graphs = AotEagerAndRecordGraphs()
    torch.testing.assert_close(compiled_step(layer, x, graphs), (output, x.grad))
    require_portable(graphs)
    if kind == "int":  # for one, as it takes long
        torch.testing.assert_close(compiled_step(layer, x, "inductor"), (output, x.grad))


def test_the_group_of_a_dtensor(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(3, device=ranks.device)
    mesh = init_device_mesh(ranks.device.type, (ranks.size // 2, 2))
    x = distribute_tensor(torch.randn(4, 3, device=ranks.device), mesh, [Replicate(), Shard(0)])
    expected, graphs = copy.deepcopy(layer)(x), AotEagerAndRecordGraphs()
    output, _ = compiled_step(layer, x, graphs)
    torch.testing.assert_close(output.to_local(), expected.to_local())
    require_portable(graphs)
