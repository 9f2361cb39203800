"""Catches a subclass of ProcessGroup that is treated unlike any other, or that is used though torch did not make it."""

import copy
import pickle
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from voting import Ranks

import syncbn

C = 3


class InPython(dist.ProcessGroup):
    """A backend that is written in Python, by way of the default group; torch's new_group makes it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)

    def allreduce(self, tensors: list[Tensor], options: object = None) -> dist.Work:
        return dist.group.WORLD.allreduce(tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: object) -> dist.Work:
        return dist.group.WORLD.allgather(outputs, inputs, *options)


def layer_over(group: dist.ProcessGroup, ranks: Ranks) -> syncbn.SyncBatchNorm1d:
    return syncbn.SyncBatchNorm1d(C, process_group=group, dtype=torch.float64, device=ranks.device)


def batch(ranks: Ranks) -> Tensor:
    torch.manual_seed(ranks.rank)
    return torch.randn(2, C, dtype=torch.float64, device=ranks.device)


@pytest.fixture
def registered_for_this_rank(ranks: Ranks) -> Iterator[InPython]:
    """As torchft's register() does it: torch's registry then says that the group is one rank. It has no name."""
    name, group = f"users-{id(ranks)}", InPython(dist.HashStore(), 0, 1, timedelta())
    dist.Backend.register_backend(name, lambda *_: group, devices=[ranks.device.type])
    assert dist.new_group([ranks.rank], backend=name) is group
    yield group
    dist.distributed_c10d._world.pg_map.pop(group)  # destroy_process_group asks for its name


def test_groups_that_torch_did_not_make_are_refused(ranks: Ranks, registered_for_this_rank: InPython) -> None:
    for group in (InPython(dist.HashStore(), 0, 1, timedelta()), registered_for_this_rank):
        with pytest.raises(ValueError, match=r"a InPython, which torch.distributed did not make; pass a group of"):
            layer_over(group, ranks)
    layer_over(dist.new_group(), ranks)(batch(ranks))


@pytest.mark.usefixtures("registered_for_this_rank")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor")  # of Dynamo
def test_other_groups_compile_beside_a_group_without_a_name(ranks: Ranks) -> None:
    """Dynamo cannot read torch's registry then. A graph outlives groups that are made later, and its own made anew."""
    everyone = range(ranks.size)
    layer, x = layer_over(dist.new_group(everyone), ranks), batch(ranks)
    expected, graphs = copy.deepcopy(layer)(x), CompileCounter()
    compiled = torch.compile(layer, backend=graphs, fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    dist.new_group(everyone)
    compiled(x)
    assert graphs.frame_count == 1
    torch._dynamo.reset()
    dist.destroy_process_group(layer.process_group)
    torch.testing.assert_close(compiled(x), expected)  # over the other group of these ranks


def test_a_backend_in_python_makes_a_group_like_any_other(ranks: Ranks) -> None:
    """torch's registry has its ranks and its name, which the group itself may not know."""
    name = f"in-python-{id(ranks)}"
    dist.Backend.register_backend(name, InPython, devices=[ranks.device.type])
    group = dist.new_group(backend=name)
    layer, x = layer_over(group, ranks), batch(ranks)
    layer(x)
    torch.testing.assert_close(layer.running_mean, 0.1 * ranks.total(x.mean(0)) / ranks.size)
    (row,) = syncbn.summary(layer)
    assert row.group_size == ranks.size
    if ranks.device.type == "cpu":  # a GPU's total is not read
        words = "expected 3 channels" if ranks.rank == 1 else "rank 1: .*expected 3 channels"
        with pytest.raises(ValueError, match=words):
            layer(x[:, :2] if ranks.rank == 1 else x)
    loaded = pickle.loads(pickle.dumps(layer))
    assert loaded._process_group.ranks == tuple(range(ranks.size))
    dist.distributed_c10d._world.pg_map.pop(group)  # destroy_process_group asks for its name
