"""Tests that a converted model trains under DistributedDataParallel like on one process."""

import contextlib
import copy

import pytest
import torch
from guides import run_block
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import BROADCAST_BUFFERS, CountCollectives, require_trains_as, small_model, whole_batches
from voting import Ranks

import syncbn


@pytest.mark.parametrize("option", [{BROADCAST_BUFFERS: False}, {"static_graph": True}], ids=str)
def test_a_model_under_ddp_trains_like_one_process(ranks: Ranks, option: dict[str, bool]) -> None:
    model = syncbn.convert_syncbn_model(small_model()).to(ranks.device)
    require_trains_as(small_model().to(ranks.device), ranks, model, DistributedDataParallel(model, **option))
    assert all(row.last_step == f"synchronised over {ranks.size} ranks" for row in syncbn.summary(model))


def test_rank_0_validates_alone_and_no_rank_communicates(ranks: Ranks) -> None:
    x, labels = whole_batches(ranks, 2)
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(small_model()).to(ranks.device))
    names = {"ddp": ddp, "loader": [*zip(x, labels, strict=True)], "device": ranks.device}
    with CountCollectives() as collectives:
        names = run_block("training_script.md", "if dist.get_rank() == 0:", **names)
    assert collectives.total == 0
    assert ("right" in names) == (ranks.rank == 0)  # The block defines this variable on the rank that validates.
    assert ddp.module.training


def test_ddp_may_run_several_forwards_before_a_backward(ranks: Ranks) -> None:
    """DDP's broadcast in the second forward changes the buffers, which the backward of the first one must not need
    (https://github.com/pytorch/pytorch/issues/24397)."""
    model = nn.Sequential(nn.Linear(3, 3), syncbn.SyncBatchNorm1d(3)).to(ranks.device)
    ddp, x = DistributedDataParallel(model), torch.randn(4, 3, device=ranks.device)
    (ddp(x) + ddp(x)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_all_ranks_skip_a_step_in_which_one_rank_overflows(ranks: Ranks) -> None:
    """GradScaler checks the gradients of its own rank. The layer sends the infinite sums of rank 0 to all ranks, so
    this works even without DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), syncbn.SyncBatchNorm1d(4)).to(ranks.device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(ranks.device.type, 2.0**10)
    before = model[0].weight.detach().clone()
    for overflows in (True, False):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 3, device=ranks.device)).pow(3).sum()
        if overflows and ranks.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model[0].weight, before) == overflows


@pytest.mark.parametrize("broadcasts", [False, True])  # False first: a process that has warned does not warn again.
def test_ddp_that_broadcasts_buffers_between_groups_causes_a_warning(ranks: Ranks, broadcasts: bool) -> None:
    """Without the warning, the broadcast would overwrite the running statistics of the second group in silence."""
    if ranks.size < 4:
        pytest.skip("needs two groups of two ranks")
    layer = syncbn.SyncBatchNorm(3, process_group=2, device=ranks.device)
    ddp = DistributedDataParallel(layer, **{BROADCAST_BUFFERS: broadcasts})
    message = r"over ranks (0-1|2-3) alone, but DistributedDataParallel broadcasts .* forward_sync_buffers=False"
    with pytest.warns(UserWarning, match=message) if broadcasts else contextlib.nullcontext():
        ddp(torch.randn(4, 3, device=ranks.device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="all tensors on a GPU can be shared")
def test_buffers_that_processes_may_share_cause_a_warning(ranks: Ranks) -> None:
    """torch.multiprocessing.spawn moves a model that is passed to it to shared memory, and a conversion keeps that
    memory. A deep copy has its own memory, and does not warn."""
    model, x = nn.Sequential(nn.BatchNorm1d(3)).share_memory(), torch.randn(4, 3)
    syncbn.convert_syncbn_model(copy.deepcopy(model))(x)
    message = r"memory that processes share, .* torch\.multiprocessing\.spawn.* copy\.deepcopy it there"
    with pytest.warns(UserWarning, match=message):
        syncbn.convert_syncbn_model(model)(x)
