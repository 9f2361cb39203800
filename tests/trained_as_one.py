"""Models, a loss and a batch for tests of `syncbn.testing`. The ranks are new processes, which
import these functions by name."""

import os

import torch
from torch import Tensor, nn

import syncbn


def local_model() -> nn.Module:
    """Return a model with dropout that is not converted. The gradient of the convolution's bias is 0 up to rounding
    errors, because batch norm subtracts the bias again: a comparison relative to this gradient would fail."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(),
        nn.Linear(144, 10), nn.BatchNorm1d(10),
    )  # fmt: skip


def model() -> nn.Module:
    return syncbn.convert_syncbn_model(local_model())


def partly_converted_model() -> nn.Module:
    """Return a model whose last layer alone is synchronised."""
    local = local_model()
    syncbn.convert_syncbn_model(local[6])
    return local


def frozen_model() -> nn.Module:
    """Return a partly converted model whose local layer is in evaluation mode."""
    partly_converted = partly_converted_model()
    partly_converted[1].eval()
    return partly_converted


def built_model() -> nn.Module:
    """Return a model that cannot be reverted to nn.BatchNorm: its layers were constructed as synchronised layers."""
    first, second = syncbn.SyncBatchNorm(3), syncbn.convert_syncbn_model(nn.SyncBatchNorm(3))
    return nn.Sequential(first, second, nn.Conv2d(3, 1, 8), nn.Flatten(0))


def model_by_node() -> nn.Module:
    return syncbn.convert_syncbn_model(local_model(), process_group=int(os.environ["LOCAL_WORLD_SIZE"]))


class WithMore(nn.Module):
    """A model of x (N, 3, H, 8) with what nn.BatchNorm2d lacks: a fused relu, a residual, a mask and channel_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = syncbn.convert_syncbn_model(nn.BatchNorm2d(3))
        self.first.fuse_relu = True
        self.middle = syncbn.convert_syncbn_model(nn.BatchNorm2d(3))
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
    """Patch the class of this process's synchronised layers so that they double their outputs, and return a model. The
    nn.BatchNorm layers of the reference do not double theirs, so the two differ on any number of ranks."""
    forward = syncbn.SyncBatchNorm.forward
    syncbn.SyncBatchNorm.forward = lambda *args: 2 * forward(*args)
    return model()


def no_model() -> None:
    """Return None, like a function that lacks its return statement."""


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)
