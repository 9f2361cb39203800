"""Subclasses of torch's batch norm as users write them."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize


class BatchNormAct2d(nn.BatchNorm2d):
    """Like timm's BatchNormAct2d: counts the batch, calls F.batch_norm, then an activation."""

    def __init__(self, num_features: int, **options: object) -> None:
        super().__init__(num_features, **options)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        running = self.running_mean, self.running_var
        return self.act(F.batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.eps))


class CallsSuper2d(nn.BatchNorm2d):
    """Calls the inherited forward."""

    def forward(self, x: Tensor, times: float = 2.0) -> Tensor:
        return times * super().forward(x)


class Frozen(nn.BatchNorm2d):
    """Normalises with the running statistics in training, too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class SubclassOfSyncBatchNorm(nn.SyncBatchNorm):
    """Derives from torch's synchronised layer. A conversion does not change layers of this class."""


def parametrized(layer: nn.Module) -> nn.Module:
    """Make the weight of a layer positive by torch.nn.utils.parametrize."""
    return parametrize.register_parametrization(layer, "weight", nn.Softplus())
