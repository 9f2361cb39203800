"""Models and a batch for tests of `syncbn.testing`, whose ranks are new processes and import them by name."""

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


class EveryLayer(nn.Module):
    """A model that changes its input (N, 3, H, 8) in place and returns its loss. Its layers were built as synchronised
    layers, are synchronised in each host, are frozen, or do what nn.BatchNorm2d cannot."""

    def __init__(self) -> None:
        super().__init__()
        convert = syncbn.convert_syncbn_model
        self.first = nn.Sequential(
            syncbn.SyncBatchNorm(3), nn.Conv2d(3, 3, 1), convert(nn.SyncBatchNorm(3)), nn.Tanh(),
            convert(nn.BatchNorm2d(3), process_group=int(os.environ["LOCAL_WORLD_SIZE"])), nn.Tanh(),
            nn.BatchNorm2d(3).eval(),
        )  # fmt: skip
        self.relu, self.masked = convert(nn.BatchNorm2d(3)), convert(nn.BatchNorm2d(3))
        self.relu.fuse_relu = True
        self.channel_last = convert(nn.BatchNorm2d(8), channel_last=True)  # Its channels are the last dim, of size 8.

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.mul_(0.5))
        return self.channel_last(self.masked(self.relu(x, 0.5 * x), mask=x[:, 0] > 0)).exp().mean()


def doubling_model() -> nn.Module:
    """Patch the class of this process's synchronised layers so that they double their outputs, and return a model. The
    nn.BatchNorm layers of the reference do not double theirs, so the two differ on any number of ranks."""
    forward = syncbn.SyncBatchNorm.forward
    syncbn.SyncBatchNorm.forward = lambda *args: 2 * forward(*args)
    return model()


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)
