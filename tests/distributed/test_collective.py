"""Tests that the payload is summed over all ranks, by all_to_all in small gloo groups and by all_reduce in others."""

import datetime
import functools
import gc
import sys
from types import FrameType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from training import require_trains_as, small_model
from voting import Ranks

import syncbn
from syncbn import torch_internals
from syncbn.ranks import calls, collective, report
from syncbn.ranks.watchdog import this_rank


def gather(ranks: Ranks, tensor: torch.Tensor) -> list[torch.Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(ranks.size)]
    dist.all_gather(tensors, tensor)
    return tensors


@pytest.mark.parametrize("use_operator", [False, True])
@pytest.mark.parametrize("exchanges", [False, True])
def test_all_ranks_have_the_same_bits(ranks: Ranks, exchanges: bool, use_operator: bool) -> None:
    """With all_to_all they are the bits of a sum in the order of the ranks."""
    generator = torch.Generator().manual_seed(ranks.rank)
    payload = torch.randn(1001, dtype=torch.float64, generator=generator).to(ranks.device)
    expected = functools.reduce(torch.add, gather(ranks, payload))
    total = collective.all_reduce(payload.clone(), dist.group.WORLD, exchanges * ranks.size, use_operator)
    tolerance = 0.0 if exchanges and payload.is_cpu else 1e-14
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(other, total) for other in gather(ranks, total))


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # from torch itself
def test_graphs_of_a_large_group_all_reduce(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "MAX_ALL_TO_ALL_RANKS", ranks.size - 1)
    model = syncbn.convert_syncbn_model(small_model()).to(ranks.device)
    graphs = AotEagerAndRecordGraphs()
    compiled = torch.compile(model, backend=graphs)
    require_trains_as(small_model().to(ranks.device), ranks, model, DistributedDataParallel(compiled))
    assert graphs.bw_graphs
    for graph in graphs.fw_graphs + graphs.bw_graphs:
        collectives = {str(node.target) for node in graph.graph.nodes if "_c10d" in str(node.target)}
        assert collectives == {"_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"}


@pytest.mark.parametrize("extra", [0, 1])
def test_payloads_above_64_kb_all_reduce(ranks: Ranks, extra: int) -> None:
    used = torch.ops.c10d.allreduce_ if extra or ranks.device.type != "cpu" else torch.ops.c10d.alltoall_base_
    payload = torch.ones(8192 + extra, dtype=torch.float64, device=ranks.device)
    with CommDebugMode() as collectives:
        total = collective.all_reduce(payload, dist.group.WORLD, ranks.size)
    assert total.eq(ranks.size).all()
    assert collectives.get_comm_counts() == {used: 1}


@pytest.mark.parametrize(("size", "config", "expected"), [
    (2, "cpu:gloo,cuda:nccl", True), (16, "cpu:gloo,cuda:gloo", True), (17, "cpu:gloo,cuda:gloo", False),
    (2, "cuda:nccl", False), (2, "cpu:mpi,cuda:mpi", False), (2, "cuda:gloo", False),
    (2, "cpu:gloo_of_mine,cuda:gloo", False),
])  # fmt: skip
def test_gloo_groups_of_up_to_16_ranks_use_all_to_all(
    monkeypatch: pytest.MonkeyPatch, size: int, config: str, expected: bool
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert torch_internals.all_to_all_size(SimpleNamespace(size=lambda: size)) == size * expected


@pytest.mark.two_ranks
def test_ranks_with_payloads_on_both_sides_of_64_kb_report_their_channels(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They issue different collectives, so they wait until the time-out."""
    monkeypatch.setattr(report, "SETTLE_SECONDS", 0.3)
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    layer = syncbn.SyncBatchNorm1d(4090 + 10 * ranks.rank, device=ranks.device, process_group=group)
    with pytest.raises(RuntimeError, match=r"with 4090 channels over ranks 0-1(; .*)?\nrank 1: .* with 4100 channels"):
        layer(torch.randn(2, layer.num_features, device=ranks.device))


@pytest.mark.two_ranks
def test_an_interrupt_leaves_no_collective_that_is_over(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises KeyboardInterrupt at the entry of a Python function or after a call of C: interrupt at each.

    The ranks do not communicate, as they would wait for one another."""
    layer, x = syncbn.SyncBatchNorm1d(3, device=ranks.device), torch.randn(4, 3, device=ranks.device)
    layer(x)
    monkeypatch.setattr(calls, "all_reduce", lambda payload, *_: payload)
    remaining = 0

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal remaining
        remaining -= event in ("call", "c_return")
        if remaining == 0:
            raise KeyboardInterrupt

    def was_interrupted(after: int) -> bool:
        nonlocal remaining
        remaining = after
        try:
            sys.setprofile(interrupt)
            layer(x)
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    gc.disable()
    try:
        after = 1
        while was_interrupted(after):
            assert not this_rank().waiting, after
            after += 1
    finally:
        gc.enable()
    assert after > 30
