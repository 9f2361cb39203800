"""Models and losses for `syncbn.testing`, whose ranks import them."""

import os

import torch
from torch import Tensor, nn

import syncbn


def local_model() -> nn.Module:
    """Return a model with dropout, and a bias before batch norm whose gradient is only rounding errors."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(),
        nn.Linear(144, 10), nn.BatchNorm1d(10),
    )  # fmt: skip


def model() -> nn.Module:
    return syncbn.convert_syncbn_model(local_model())


def partly_converted_model() -> nn.Module:
    whole = local_model()
    syncbn.convert_syncbn_model(whole[6])
    return whole


def built_model() -> nn.Module:
    """Return a model whose layers cannot be reverted, because they were not converted."""
    return nn.Sequential(syncbn.SyncBatchNorm(3), nn.SyncBatchNorm(3), nn.Conv2d(3, 1, 8), nn.Flatten(0)).apply(
        lambda layer: syncbn.convert_syncbn_model(layer) if isinstance(layer, nn.SyncBatchNorm) else None
    )


def model_by_node() -> nn.Module:
    return syncbn.convert_syncbn_model(local_model(), process_group=int(os.environ["LOCAL_WORLD_SIZE"]))


def frozen_model() -> nn.Module:
    """Return a model whose first batch norm is in evaluation mode."""
    whole = partly_converted_model()
    whole[1].eval()
    return whole


class WithMore(nn.Module):
    """A model that nn.BatchNorm2d cannot express: relu, residual, mask and channel_last. It takes x (N, 3, H, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = (syncbn.convert_syncbn_model(nn.BatchNorm2d(3)) for _ in range(2))
        self.first.fuse_relu = True
        self.last = syncbn.convert_syncbn_model(nn.BatchNorm2d(8), channel_last=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x, 0.5 * x), mask=x[:, 0] > 0))


class OwnLoss(nn.Module):
    """A model that changes its input in place and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mul_(0.5)).square().mean()


def doubling_model() -> nn.Module:
    """Return a model whose layers double their outputs on any number of ranks. Only nn.BatchNorm shows the error."""
    forward = syncbn.SyncBatchNorm.forward
    syncbn.SyncBatchNorm.forward = lambda *args: 2 * forward(*args)
    return model()


def no_model() -> None:
    """Return None, like a function that lacks its return statement."""


def mean_square(output: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that ignores the labels."""
    return output.square().mean()


def loss_of_the_model(loss: Tensor, labels: Tensor) -> Tensor:
    """Return the output of a model that computes its loss."""
    return loss


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)
