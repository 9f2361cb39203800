"""Catches layers of equal paths that are taken for one another, and programs that are refused though ranks agree."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from voting import Ranks

import syncbn

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="signatures are for CPUs"), pytest.mark.two_ranks]


def model() -> nn.Module:
    return syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def x() -> Tensor:
    return torch.randn(4, 3)


def test_a_swap_that_ends_is_found(ranks: Ranks) -> None:
    """In the first step nobody can know; in the next one the ranks do."""
    models = [model(), model()]
    for one in models[::-1] if ranks.rank else models:
        one(x())
    with pytest.raises(RuntimeError, match="the ranks are in different layers or calls"):
        [one(x()) for one in models]


def test_what_goes_on(ranks: Ranks) -> None:
    """A model more on one rank, a copy that evaluates, a shared layer, a model that is replaced on one rank."""
    if ranks.rank:
        model().eval()(x())
    first, second = model(), model()
    average = copy.deepcopy(first).eval()
    shared = nn.Sequential(first[1], nn.Linear(3, 3), first[1])
    for step in range(3):
        for one in (first, second, shared):
            one(x()).sum().backward()
        if ranks.rank == 0:
            average(x())
        if step == 1 and ranks.rank == 0:  # as one that is loaded from a file
            second = copy.deepcopy(second)


@pytest.mark.compiles
def test_one_rank_is_compiled_at_first(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its batches have too many sizes for Dynamo: it sends as many numbers, with zeros for the signature. Its
    first eager call of a layer comes after the others' first."""
    group = dist.new_group()  # where compiled calls are not counted
    first, second = (syncbn.SyncBatchNorm(3, process_group=group) for _ in range(2))
    compiled = torch.compile(first, backend="aot_eager", fullgraph=True) if ranks.rank else first
    batch = x().requires_grad_()
    outputs = []
    for one in (compiled, second, first, second, compiled):
        outputs.append(one(batch))
        outputs[-1].sum().backward()
    for output in outputs:
        torch.testing.assert_close(output, outputs[0])
