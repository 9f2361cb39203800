"""Layers of the same path are told apart by the order in which they first called; what must go on, goes on."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from voting import Ranks

import syncbn

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="signatures are for CPUs")
pytestmark = [on_cpu, pytest.mark.two_ranks]


def model() -> nn.Module:
    return syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def x() -> Tensor:
    return torch.randn(4, 3)


def in_one_order(*models: nn.Module) -> None:
    for one in models:
        one(x())


def in_another_order(ranks: Ranks, first: nn.Module, second: nn.Module) -> None:
    """Rank 1 calls the second one first."""
    in_one_order(*((first, second) if ranks.rank == 0 else (second, first)))


def test_a_swap_that_ends_is_found(ranks: Ranks) -> None:
    """In the first step nobody can know; in the next one the ranks do."""
    generator, discriminator = model(), model()
    in_another_order(ranks, generator, discriminator)
    with pytest.raises(RuntimeError, match="the ranks are in different layers or calls"):
        in_one_order(generator, discriminator)


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
def test_one_rank_is_compiled_at_first(ranks: Ranks) -> None:
    """As when its batches have too many sizes for Dynamo: it sends as much, and signs nothing. Its first call in eager
    mode is not the first of the others."""
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
