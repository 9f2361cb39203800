"""Tests of a training step on several ranks: the collective, ranks that take different paths, and freed objects.

test_promises.py has the results of a step.
"""

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import voting
from torch import Tensor
from training import CountCollectives
from voting import Ranks

import syncbn
from syncbn.kernels import available
from syncbn.ranks import calls, collective
from syncbn.ranks.watchdog import this_rank

C = 3


def layer_and_input(ranks: Ranks, **options: object) -> tuple[syncbn.SyncBatchNorm1d, Tensor]:
    generator = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(2 + ranks.rank, C, 5, generator=generator).to(ranks.device)
    return syncbn.SyncBatchNorm1d(C, device=ranks.device, **options), x


# The collective: all_to_all_single in small groups of gloo, all_reduce in other groups.


@pytest.mark.parametrize("use_operator", [False, True], ids=["group method", "functional operator"])
@pytest.mark.parametrize("uses_all_to_all", [False, True])
def test_the_total_has_the_same_bits_on_all_ranks(ranks: Ranks, uses_all_to_all: bool, use_operator: bool) -> None:
    """Otherwise the running statistics of the ranks would drift apart. With all_to_all_single every rank adds the
    payloads in the order of the ranks."""
    generator = torch.Generator().manual_seed(0)
    # 1001 elements cannot be split evenly over 2, 3 or 4 ranks.
    payloads = torch.randn(ranks.size, 1001, dtype=torch.float64, generator=generator).to(ranks.device)
    all_to_all_size = ranks.size if uses_all_to_all else 0  # With 0 the payload goes through all_reduce.
    total = collective.all_reduce(payloads[ranks.rank].clone(), dist.group.WORLD, all_to_all_size, use_operator)
    tolerance = 0.0 if uses_all_to_all and total.is_cpu else 1e-14
    torch.testing.assert_close(total, functools.reduce(torch.add, payloads), rtol=tolerance, atol=tolerance)
    total_of_rank_0 = total.clone()
    dist.broadcast(total_of_rank_0, 0)
    assert torch.equal(total, total_of_rank_0)


@torch.no_grad()
def test_an_interrupt_leaves_no_record_of_a_collective_that_has_ended(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the watchdog would report a wait that has ended. Python raises KeyboardInterrupt when it enters a
    Python function or returns from a C function, so the test interrupts a forward at each of these events in turn.
    It runs without autograd, whose generators would swallow an interrupt."""
    num_events, interrupted_event, was_interrupted = 0, 0, True

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_events
        num_events += event in ("call", "c_return")
        if num_events == interrupted_event:
            raise KeyboardInterrupt

    layer, x = layer_and_input(ranks)
    layer(x)
    # The ranks may be interrupted at different events, so they must not wait for each other.
    monkeypatch.setattr(calls, "all_reduce", lambda payload, *_: payload)
    while was_interrupted:
        gc.disable()  # A collection would add events.
        num_events, interrupted_event = 0, interrupted_event + 1
        try:
            sys.setprofile(interrupt)
            layer(x)
            was_interrupted = False
        except KeyboardInterrupt:
            assert not this_rank().waiting, interrupted_event
        finally:
            sys.setprofile(None)
            gc.enable()
    assert interrupted_event > 30  # A forward has more events than this, so the profile function has been called.


# Ranks that take different paths.


def test_a_rank_whose_output_gets_no_gradient_still_communicates(ranks: Ranks) -> None:
    """Autograd calls the backward of rank 0 without a gradient. The other ranks wait for the zeros of rank 0."""
    torch.manual_seed(0)
    x = torch.randn(2 * ranks.size, C, dtype=torch.float64).to(ranks.device).requires_grad_()
    local = ranks.even_slice(len(x))
    leaf = x.detach()[local].requires_grad_()
    y = syncbn.SyncBatchNorm(C, dtype=torch.float64, device=ranks.device)(leaf)
    if ranks.rank == 0:
        y = torch._C._functions.UndefinedGrad()(y)
    y.sin().sum().backward()
    samples_of_other_ranks = F.batch_norm(x, None, None, training=True)[2:]
    samples_of_other_ranks.sin().sum().backward()
    torch.testing.assert_close(leaf.grad, x.grad[local], rtol=1e-12, atol=1e-12)


@pytest.mark.skipif("torch operations" in available(), reason="without kernels no rank takes the fast path")
@pytest.mark.parametrize("watch", [functools.partial(torch.profiler.profile, acc_events=True), CountCollectives])
@pytest.mark.parametrize("watched_passes", [("forward", "backward"), ("backward",)])
def test_a_rank_with_a_profiler_or_mode_trains_with_ranks_on_the_fast_path(
    ranks: Ranks, watch: Callable[[], Any], watched_passes: tuple[str, ...]
) -> None:
    """Dispatched kernels must send as many elements, in the same order and with the same signatures, as direct kernels.
    Otherwise gloo aborts, or the ranks report that they differ."""
    layer, x = layer_and_input(ranks)
    results = []
    watched = watched_passes if ranks.rank == 0 else ()
    for passes in (watched, ()):
        layer.reset_parameters()
        leaf = x.clone().requires_grad_()
        with watch() if "forward" in passes else contextlib.nullcontext():
            y = layer(leaf)
        with watch() if "backward" in passes else contextlib.nullcontext():
            gradients = torch.autograd.grad(y.sin().sum(), (leaf, *layer.parameters()))
        results.append([y, *gradients, *(buffer.clone() for buffer in layer.buffers())])
    torch.testing.assert_close(*results)


# Objects that must be freed.


def test_a_layer_and_its_batch_are_freed_after_a_step(ranks: Ranks) -> None:
    """The group keeps the name and the settings of the layer, which the ranks compare, but not the layer."""

    def run_step() -> list[weakref.ref[object]]:
        layer, x = layer_and_input(ranks)
        layer(x.requires_grad_()).sum().backward()
        return [weakref.ref(layer), weakref.ref(x)]

    references = run_step()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("process_group", [None, "number of ranks", 1])
def test_a_layer_keeps_no_destroyed_group_and_trains_over_the_next_group(
    ranks: Ranks, process_group: str | int | None
) -> None:
    """gloo closes the connections of a group, which wakes waiting ranks, when the last reference is released."""
    voting.world.replace_group()  # The error of another test may hold a reference to the old group.
    process_group = ranks.size if process_group == "number of ranks" else process_group
    layer, x = layer_and_input(ranks, process_group=process_group, momentum=1.0)
    layer(x).sum().backward()
    expected, group = layer.running_mean.clone(), weakref.ref(dist.group.WORLD)
    voting.world.replace_group()
    gc.collect()
    assert group() is None
    layer.reset_running_stats()
    layer(x)
    assert torch.equal(layer.running_mean, expected)
