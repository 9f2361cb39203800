"""Catches a rank in the fallback that does not fit beside ranks on the fast path, and what keeps a group alive."""

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import voting
from equal_to_torch import with_gaps
from torch import Tensor, nn
from training import CountCollectives, frees_first_batch, step
from voting import Ranks

import syncbn
from syncbn.kernels import available
from syncbn.kernels.interface import Layout
from syncbn.ranks import report, watchdog

has_kernels = pytest.mark.skipif("torch operations" in available(), reason="without kernels all take the fallback")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs nobody reads a total")
C = 3


def layer_and_input(ranks: Ranks, **options: object) -> tuple[syncbn.SyncBatchNorm1d, Tensor]:
    generator = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(2 + ranks.rank, C, 5, generator=generator).to(ranks.device)
    return syncbn.SyncBatchNorm1d(C, device=ranks.device, **options), x


@has_kernels
@pytest.mark.parametrize("watch", [functools.partial(torch.profiler.profile, acc_events=True), CountCollectives])
@pytest.mark.parametrize("first_pass", ["forward", "backward"])
def test_one_rank_is_watched(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, watch: Callable[[], Any], first_pass: str
) -> None:
    """It takes the fallback, and must send as much as the others, in the same order and signed alike; else gloo
    aborts, or the ranks compare what they do."""
    monkeypatch.setattr(report, "gather_calls", Mock(side_effect=AssertionError))
    layer, x = layer_and_input(ranks)
    other = copy.deepcopy(layer)
    expected = step(layer, layer, x)
    with contextlib.ExitStack() as contexts:

        def hook(*_: object) -> None:
            contexts.enter_context(watch())

        if ranks.rank == 0:
            (other.register_forward_pre_hook if first_pass == "forward" else other.register_forward_hook)(hook)
        actual = step(other, other, x)
    torch.testing.assert_close(actual, expected)


@has_kernels
@on_cpu
def test_a_copy_that_does_not_fit_into_memory(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for this rank, and their report has its error. (Here all ranks fail, and none waits.)"""
    layer, x = layer_and_input(ranks)
    for _ in range(2):  # the second takes cached kernels
        layer(with_gaps(x))
    monkeypatch.setattr(Layout, "dense", Mock(side_effect=RuntimeError("memory is exhausted")))
    with pytest.raises(RuntimeError, match="memory is exhausted"):
        layer(with_gaps(x))
    assert watchdog.this_rank().position().error == "has raised RuntimeError: memory is exhausted"
    dist.barrier()


def test_a_layer_that_was_called_is_freed(ranks: Ranks) -> None:
    """What its group knows of it must not keep it."""

    def call() -> weakref.ref[nn.Module]:
        layer, x = layer_and_input(ranks)
        layer(x).sum().backward()
        return weakref.ref(layer)

    old = call()
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("mode", [contextlib.nullcontext, CountCollectives])
@pytest.mark.parametrize("process_group", [None, 1])
def test_the_first_batch_is_freed(
    ranks: Ranks, mode: Callable[[], contextlib.AbstractContextManager[object]], process_group: int | None
) -> None:
    """No first call may look at the local variables of the functions that it is called in: Python 3.11 and 3.12 keep
    these values."""
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Conv1d(C, C, 1), nn.BatchNorm1d(C)), process_group)
    with mode():
        assert frees_first_batch(model.to(ranks.device), ranks.device)


@pytest.mark.parametrize("process_group", [None, "all", 1])
def test_a_layer_that_was_called_leaves_its_group_for_a_new_one(ranks: Ranks, process_group: str | int | None) -> None:
    """gloo closes its connections, which wakes the other ranks, when the last reference to a group goes; what the spec
    means from then on is not made yet."""
    voting.world.make_anew()  # which no other test has used, whose error may keep it
    spec = ranks.size if process_group == "all" else process_group
    layer, x = layer_and_input(ranks, process_group=spec, momentum=1.0)
    layer(x).sum().backward()
    expected, old = layer.running_mean.clone(), weakref.ref(dist.group.WORLD)
    voting.world.make_anew()
    gc.collect()
    assert old() is None
    layer.reset_running_stats()
    layer(x)
    assert torch.equal(layer.running_mean, expected)


def test_a_layer_may_have_another_group_in_each_call(ranks: Ranks) -> None:
    """What it keeps of one must not be taken for the next. `syncbn.summary` tells of the last."""
    layer, x = layer_and_input(ranks, momentum=1.0)
    layer(x)
    over_all = layer.running_mean.clone()
    for spec in (dist.new_group(), 1, ranks.size, 1, None):
        layer.process_group = spec
        layer(x)
        torch.testing.assert_close(layer.running_mean, x.mean((0, 2)) if spec == 1 else over_all)
        expected = "not synchronised" if spec == 1 else f"synchronised over {ranks.size} ranks"
        assert syncbn.summary(layer)[0].last_step == expected
