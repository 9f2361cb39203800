"""Tests that ranks may take different paths in one step, and that calls keep no layer, batch or group alive."""

import contextlib
import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import voting
from torch import Tensor, nn
from training import CountCollectives, frees_first_batch, step
from voting import Ranks

import syncbn
from syncbn.kernels import available

C = 3


def layer_and_input(ranks: Ranks, **options: object) -> tuple[syncbn.SyncBatchNorm1d, Tensor]:
    generator = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(2 + ranks.rank, C, 5, generator=generator).to(ranks.device)
    return syncbn.SyncBatchNorm1d(C, device=ranks.device, **options), x


@pytest.mark.skipif("torch operations" in available(), reason="without kernels no rank takes the fast path")
@pytest.mark.parametrize("watch", [functools.partial(torch.profiler.profile, acc_events=True), CountCollectives])
@pytest.mark.parametrize("first_pass", ["forward", "backward"])
def test_a_rank_with_a_profiler_or_mode_trains_with_ranks_on_the_fast_path(
    ranks: Ranks, watch: Callable[[], Any], first_pass: str
) -> None:
    """Dispatched kernels send as many elements in the same order, with the same signatures. Otherwise gloo aborts, or
    the ranks report a difference."""
    layer, x = layer_and_input(ranks)
    watched = copy.deepcopy(layer)
    expected = step(layer, layer, x)
    with contextlib.ExitStack() as contexts:

        def hook(*_: object) -> None:
            contexts.enter_context(watch())

        if ranks.rank == 0:
            (watched.register_forward_pre_hook if first_pass == "forward" else watched.register_forward_hook)(hook)
        actual = step(watched, watched, x)
    torch.testing.assert_close(actual, expected)


def test_a_layer_that_was_called_is_freed(ranks: Ranks) -> None:
    """The group keeps what ranks compare about the layer."""

    def call() -> weakref.ref[nn.Module]:
        layer, x = layer_and_input(ranks)
        layer(x).sum().backward()
        return weakref.ref(layer)

    reference = call()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("mode", [contextlib.nullcontext, CountCollectives])
@pytest.mark.parametrize("process_group", [None, 1])
def test_the_first_batch_is_freed(
    ranks: Ranks, mode: Callable[[], contextlib.AbstractContextManager[object]], process_group: int | None
) -> None:
    """The first call must not read the local variables of its callers: Python 3.11 and 3.12 keep their values."""
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Conv1d(C, C, 1), nn.BatchNorm1d(C)), process_group)
    with mode():
        assert frees_first_batch(model.to(ranks.device), ranks.device)


@pytest.mark.parametrize("process_group", [None, "all", 1])
def test_a_layer_that_was_called_does_not_keep_its_group_and_finds_the_next(
    ranks: Ranks, process_group: str | int | None
) -> None:
    """gloo closes its connections, which wakes the other ranks, when the last reference to a group is released."""
    voting.world.replace_group()  # An error of another test may keep the old group.
    spec = ranks.size if process_group == "all" else process_group
    layer, x = layer_and_input(ranks, process_group=spec, momentum=1.0)
    layer(x).sum().backward()
    expected, group = layer.running_mean.clone(), weakref.ref(dist.group.WORLD)
    voting.world.replace_group()
    gc.collect()
    assert group() is None
    layer.reset_running_stats()
    layer(x)
    assert torch.equal(layer.running_mean, expected)


def test_a_layer_may_have_another_group_in_each_call(ranks: Ranks) -> None:
    """`syncbn.summary` describes the last call."""
    layer, x = layer_and_input(ranks, momentum=1.0)
    layer(x)
    mean_of_all = layer.running_mean.clone()
    for spec in (dist.new_group(), 1, ranks.size, 1, None):
        layer.process_group = spec
        layer(x)
        torch.testing.assert_close(layer.running_mean, x.mean((0, 2)) if spec == 1 else mean_of_all)
        expected = "not synchronised" if spec == 1 else f"synchronised over {ranks.size} ranks"
        assert syncbn.summary(layer)[0].last_step == expected
