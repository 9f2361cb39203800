"""A converted model under DistributedDataParallel trains like one process with the whole batch."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch_names import BROADCAST_BUFFERS
from voting import Ranks

import syncbn

STEPS, SHARE = 5, 2


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 16, 5), nn.BatchNorm1d(5),
    ).double()  # fmt: skip


def train(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for images, targets in zip(x, labels, strict=True):
        loss = F.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    batch = SHARE * ranks.size
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, batch, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x.to(ranks.device), torch.randint(5, (STEPS, batch), generator=generator).to(ranks.device)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_training_equals_one_process(ranks: Ranks, broadcast_buffers: bool, memory_format: torch.memory_format) -> None:
    """After 5 steps every parameter and buffer agrees to 1e-11 (roundings of 1e-16 grow in training)."""
    x, labels = data(ranks)
    alone = small_model().to(ranks.device)
    train(alone, x, labels)
    model = syncbn.convert_syncbn_model(small_model()).to(ranks.device, memory_format=memory_format)
    ddp = DistributedDataParallel(model, **{BROADCAST_BUFFERS: broadcast_buffers})
    mine = ranks.even(x.shape[1])
    train(ddp, x[:, mine], labels[:, mine])
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-11, atol=1e-11, msg=name)
    assert all(row.last_step == f"synchronised over {ranks.size} ranks" for row in syncbn.summary(ddp))


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str
)
def test_options_of_ddp(ranks: Ranks, options: dict[str, bool]) -> None:
    x, labels = data(ranks)
    alone = small_model().to(ranks.device)
    train(alone, x, labels)
    model = syncbn.convert_syncbn_model(small_model()).to(ranks.device)
    mine = ranks.even(x.shape[1])
    train(DistributedDataParallel(model, **options), x[:, mine], labels[:, mine])
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-11, atol=1e-11, msg=name)


class WithUnusedBranch(nn.Module):
    """Two heads, of which a step uses the one it is told; the layers before them are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = small_model(), nn.ModuleList(nn.BatchNorm1d(5).double() for _ in range(2))
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.heads[self.step % 2](self.body(x))


def test_a_branch_that_a_step_leaves_out(ranks: Ranks) -> None:
    x, labels = data(ranks)
    alone, model = WithUnusedBranch().to(ranks.device), syncbn.convert_syncbn_model(WithUnusedBranch())
    train(alone, x, labels)
    mine = ranks.even(x.shape[1])
    ddp = DistributedDataParallel(model.to(ranks.device), find_unused_parameters=True)
    train(ddp, x[:, mine], labels[:, mine])
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-11, atol=1e-11, msg=name)


def test_accumulation_under_no_sync(ranks: Ranks) -> None:
    """Five micro-batches, one step; the parameters' gradients are averaged once, the statistics are of each."""
    x, labels = data(ranks)
    alone, model = small_model().to(ranks.device), syncbn.convert_syncbn_model(small_model()).to(ranks.device)
    for images, targets in zip(x, labels, strict=True):
        F.cross_entropy(alone(images), targets).backward()
    ddp = DistributedDataParallel(model)
    mine = ranks.even(x.shape[1])
    for step, (images, targets) in enumerate(zip(x[:, mine], labels[:, mine], strict=True)):
        with ddp.no_sync() if step < STEPS - 1 else contextlib.nullcontext():
            F.cross_entropy(ddp(images), targets).backward()
    for name, expected in alone.named_parameters():
        actual = model.get_parameter(name).grad
        torch.testing.assert_close(actual, expected.grad, rtol=1e-11, atol=1e-11, msg=name)
    for name, expected in alone.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="DDP's mixed precision records events, which CPUs lack")
def test_mixed_precision_of_ddp(ranks: Ranks) -> None:
    """Parameters in bfloat16 while they compute, running statistics in float32: they lie near those of float32."""
    x, labels = data(ranks)
    x = x.float()
    alone = small_model().float().to(ranks.device)
    losses = train(alone, x, labels)
    model = syncbn.convert_syncbn_model(small_model()).float().to(ranks.device)
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    mine = ranks.even(x.shape[1])
    ddp = DistributedDataParallel(model, mixed_precision=precision)
    own_losses = train(ddp, x[:, mine], labels[:, mine])
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32, torch.int64}
    mean_losses = ranks.total(torch.tensor(own_losses, device=ranks.device)) / ranks.size
    torch.testing.assert_close(mean_losses.tolist(), losses, rtol=0, atol=0.05)
    for name, expected in alone.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), expected, rtol=0.05, atol=0.05, msg=name)


def test_local_batch_norm_does_not(ranks: Ranks) -> None:
    """The test above can fail: without synchronisation the models differ in the first digit."""
    x, labels = data(ranks)
    alone, local = small_model().to(ranks.device), small_model().to(ranks.device)
    mine = ranks.even(x.shape[1])
    losses = train(alone, x, labels), train(DistributedDataParallel(local), x[:, mine], labels[:, mine])
    assert abs(losses[0][-1] - losses[1][-1]) > 1e-2


def test_layers_in_groups_of_two(ranks: Ranks) -> None:
    """Each pair of ranks is its own batch; broadcast_buffers must be off, it would mix the groups' statistics."""
    if ranks.size != 4:
        pytest.skip("needs two groups of two")
    x, _ = data(ranks)
    model = syncbn.convert_syncbn_model(small_model(), process_group=2).to(ranks.device)
    ddp = DistributedDataParallel(model, **{BROADCAST_BUFFERS: False})
    alone = small_model().to(ranks.device)
    pair = slice(0, 2 * SHARE) if ranks.rank < 2 else slice(2 * SHARE, None)
    alone(x[0, pair])
    ddp(x[0, ranks.even(x.shape[1])])
    for name, expected in alone.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), expected, rtol=1e-12, atol=1e-12, msg=name)


def test_uneven_batches_with_the_loss_scaled_by_count(ranks: Ranks) -> None:
    """The recipe of docs/uneven_data.md: DDP averages over ranks, so a rank with more samples must count for more."""
    sizes = [3, 1, 2, 2][: ranks.size]
    x, labels = data(ranks)
    x, labels = x[0, : sum(sizes)], labels[0, : sum(sizes)]
    if len(x) < sum(sizes):
        pytest.fail("not enough samples")
    alone = small_model().to(ranks.device)
    F.cross_entropy(alone(x), labels).backward()
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(small_model()).to(ranks.device))
    mine = ranks.slices(sizes)
    count = torch.tensor(float(sizes[ranks.rank]), device=ranks.device)
    total = ranks.total(count)
    loss = F.cross_entropy(ddp(x[mine]), labels[mine], reduction="sum") * ranks.size / total
    loss.backward()
    for (name, expected), actual in zip(alone.named_parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-11, atol=1e-11, msg=name)


def test_a_deep_copy_of_a_trained_layer_trains_on(ranks: Ranks) -> None:
    x, labels = data(ranks)
    mine = ranks.even(x.shape[1])
    model = syncbn.convert_syncbn_model(small_model()).to(ranks.device)
    train(DistributedDataParallel(model), x[:2, mine], labels[:2, mine])
    copied = copy.deepcopy(model)
    for one in (model, copied):
        train(DistributedDataParallel(one), x[2:, mine], labels[2:, mine])
    for name, expected in model.state_dict().items():
        # DDP's first step reduces other buckets than its later ones: from three ranks on, sums differ by a rounding.
        torch.testing.assert_close(copied.state_dict()[name], expected, rtol=1e-11, atol=1e-11, msg=name)


def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: Ranks) -> None:
    """GradScaler asks each rank's gradients alone, here without DDP between them."""
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
