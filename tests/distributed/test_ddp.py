"""Catches a converted model that trains otherwise under DistributedDataParallel than on one process."""

import contextlib
import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import mine, require_trains_as, small_model, whole_batches
from voting import Ranks

import syncbn

# torch 2.13 renamed the argument and warns of the old name.
_arguments = inspect.signature(DistributedDataParallel.__init__).parameters
BROADCAST_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _arguments else "broadcast_buffers"


def converted(ranks: Ranks) -> nn.Module:
    return syncbn.convert_syncbn_model(small_model()).to(ranks.device)


def require_equal_gradients(model: nn.Module, alone: nn.Module) -> None:
    expected = [parameter.grad for parameter in alone.parameters()]
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("option", [None, "static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_training_equals_one_process(ranks: Ranks, option: str | None) -> None:
    model = converted(ranks)
    ddp = DistributedDataParallel(model, **{option: True} if option else {BROADCAST_BUFFERS: False})
    require_trains_as(small_model().to(ranks.device), ranks, model, ddp)
    assert all(row.last_step == f"synchronised over {ranks.size} ranks" for row in syncbn.summary(ddp))


@pytest.mark.parametrize("broadcasts", [False, True])  # in this order, as a process warns once
def test_a_broadcast_to_other_groups_is_warned_of(ranks: Ranks, broadcasts: bool) -> None:
    """It gives the running statistics of rank 0 to ranks that have others, and nothing else would notice."""
    if ranks.size < 4:
        pytest.skip("two groups of two ranks")
    ddp = DistributedDataParallel(
        syncbn.SyncBatchNorm(3, process_group=2, device=ranks.device), **{BROADCAST_BUFFERS: broadcasts}
    )
    words = r"over ranks (0-1|2-3) alone, but DistributedDataParallel broadcasts .* forward_sync_buffers=False"
    with pytest.warns(UserWarning, match=words) if broadcasts else contextlib.nullcontext():
        ddp(torch.randn(4, 3, device=ranks.device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="all tensors on a GPU can be shared")
def test_buffers_that_ranks_may_share_are_warned_of(ranks: Ranks) -> None:
    """A copy, as the warning advises, is not; a conversion keeps them. (In this order, as a process warns once.)"""
    model = nn.Sequential(nn.BatchNorm1d(3)).share_memory()
    x = torch.randn(4, 3)
    syncbn.convert_syncbn_model(copy.deepcopy(model))(x)
    syncbn.convert_syncbn_model(model)
    with pytest.warns(
        UserWarning, match=r"memory that processes share, .* torch\.multiprocessing\.spawn.* copy\.deepcopy it there"
    ):
        model(x)


class WithUnusedBranch(nn.Module):
    """Two heads, which take turns; the layers before them are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = small_model(), nn.ModuleList(nn.BatchNorm1d(5).double() for _ in range(2))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.heads[self.step % 2](self.body(x))


def test_a_branch_that_a_step_leaves_out(ranks: Ranks) -> None:
    alone, model = (WithUnusedBranch().to(ranks.device) for _ in range(2))
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(model), find_unused_parameters=True)
    require_trains_as(alone, ranks, model, ddp)


def test_accumulation_under_no_sync(ranks: Ranks) -> None:
    """Five micro-batches, one step; the parameters' gradients are averaged once, the statistics are of each."""
    x, labels = whole_batches(ranks, 5)
    alone, model = small_model().to(ranks.device), converted(ranks)
    ddp = DistributedDataParallel(model)
    for images, targets in zip(x, labels, strict=True):
        F.cross_entropy(alone(images), targets).backward()
    for step, (images, targets) in enumerate(zip(*mine(ranks, x, labels), strict=True)):
        with ddp.no_sync() if step < 4 else contextlib.nullcontext():
            F.cross_entropy(ddp(images), targets).backward()
    require_equal_gradients(model, alone)
    torch.testing.assert_close(dict(model.named_buffers()), dict(alone.named_buffers()), rtol=1e-12, atol=1e-12)


def test_uneven_batches_with_the_loss_scaled_by_count(ranks: Ranks) -> None:
    """The recipe of docs/uneven_data.md: DDP averages over ranks, so a rank with more samples must count for more."""
    sizes = [3, 1, 2, 2][: ranks.size]
    x, labels = (one[0, : sum(sizes)] for one in whole_batches(ranks, 1))
    alone, own = small_model().to(ranks.device), ranks.slices(sizes)
    F.cross_entropy(alone(x), labels).backward()
    ddp = DistributedDataParallel(converted(ranks))
    total = ranks.total(torch.tensor(float(sizes[ranks.rank]), device=ranks.device))
    loss = F.cross_entropy(ddp(x[own]), labels[own], reduction="sum") * ranks.size / total
    loss.backward()
    require_equal_gradients(ddp, alone)


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: Ranks) -> None:
    """GradScaler looks at a rank's own gradients: without DDP the layer alone brings the infinity to all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), syncbn.SyncBatchNorm1d(4)).to(ranks.device)
    before = model[0].weight.detach().clone()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(ranks.device.type, 2.0**10)
    for factor in (float("inf"), 1.0):
        y = model(torch.randn(5, 3, device=ranks.device))
        scaler.scale((y.pow(3) * (factor if ranks.rank == ranks.size - 1 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0**9
        assert torch.equal(model[0].weight, before) == (factor != 1)


@pytest.mark.parametrize(("training", "options"), [(True, {}), (False, {BROADCAST_BUFFERS: False})])
def test_several_forwards_before_a_backward(ranks: Ranks, training: bool, options: dict[str, bool]) -> None:
    """In evaluation F.batch_norm keeps the buffers for its backward, and up to torch 2.12 DDP's broadcast writes them
    (https://github.com/pytorch/pytorch/issues/24397); synchronised layers do not need it."""
    model = nn.Sequential(nn.Linear(3, 3), syncbn.SyncBatchNorm1d(3)).to(ranks.device).train(training)
    ddp, x = DistributedDataParallel(model, **options), torch.randn(4, 3, device=ranks.device)
    (ddp(x) + ddp(x)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
