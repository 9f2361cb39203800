"""Tests that the payload is summed over all ranks, by all_to_all in small gloo groups and by all_reduce in others."""

import datetime
import functools
import gc
import itertools
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from voting import Ranks

import syncbn
from syncbn.ranks import calls, collective, report
from syncbn.ranks.watchdog import this_rank


def gather(ranks: Ranks, tensor: torch.Tensor) -> list[torch.Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(ranks.size)]
    dist.all_gather(tensors, tensor)
    return tensors


@pytest.mark.parametrize("use_operator", [False, True])
@pytest.mark.parametrize("uses_all_to_all", [False, True])
def test_all_ranks_have_the_same_bits(ranks: Ranks, uses_all_to_all: bool, use_operator: bool) -> None:
    """With all_to_all the ranks add the payloads in the order of the ranks."""
    generator = torch.Generator().manual_seed(ranks.rank)
    payload = torch.randn(1001, dtype=torch.float64, generator=generator).to(ranks.device)
    expected = functools.reduce(torch.add, gather(ranks, payload))
    total = collective.all_reduce(payload.clone(), dist.group.WORLD, uses_all_to_all * ranks.size, use_operator)
    tolerance = 0.0 if uses_all_to_all and payload.is_cpu else 1e-14
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(other, total) for other in gather(ranks, total))


@pytest.mark.parametrize("num_extra", [0, 1])
def test_payloads_above_64_kb_use_all_reduce(ranks: Ranks, num_extra: int) -> None:
    is_large = num_extra or ranks.device.type != "cpu"
    payload = torch.ones(8192 + num_extra, dtype=torch.float64, device=ranks.device)
    with CommDebugMode() as collectives:
        total = collective.all_reduce(payload, dist.group.WORLD, ranks.size)
    assert total.eq(ranks.size).all()
    operator = torch.ops.c10d.allreduce_ if is_large else torch.ops.c10d.alltoall_base_
    assert collectives.get_comm_counts() == {operator: 1}


@pytest.mark.two_ranks
def test_ranks_with_payloads_on_both_sides_of_64_kb_report_their_channels(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks issue different collectives, so both wait until the timeout."""
    monkeypatch.setattr(report, "SETTLE_SECONDS", 0.3)
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    layer = syncbn.SyncBatchNorm1d(4090 + 10 * ranks.rank, device=ranks.device, process_group=group)
    with pytest.raises(RuntimeError, match=r"with 4090 channels over ranks 0-1(; .*)?\nrank 1: .* with 4100 channels"):
        layer(torch.randn(2, layer.num_features, device=ranks.device))


@pytest.mark.two_ranks
def test_an_interrupt_leaves_no_collective_that_has_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyboardInterrupt at the entry of a Python function or after a call of C: interrupt at each.

    The ranks do not communicate: they would wait for each other."""
    layer, x = syncbn.SyncBatchNorm1d(3, device=ranks.device), torch.randn(4, 3, device=ranks.device)
    layer(x)
    monkeypatch.setattr(calls, "all_reduce", lambda payload, *_: payload)

    event_number, was_interrupted = 0, True
    gc.disable()
    try:
        while was_interrupted:
            event_number, was_interrupted = event_number + 1, False
            countdown = itertools.count(event_number, -1)

            def interrupt(frame: FrameType, event: str, argument: object, countdown: Iterator[int] = countdown) -> None:
                if event in ("call", "c_return") and next(countdown) == 1:
                    raise KeyboardInterrupt

            try:
                sys.setprofile(interrupt)
                layer(x)
            except KeyboardInterrupt:
                was_interrupted = True
            finally:
                sys.setprofile(None)
            assert not this_rank().waiting, event_number
    finally:
        gc.enable()
    assert event_number > 30
