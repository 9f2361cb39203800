"""Subclasses of nn.BatchNorm as users write them."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from syncbn.functional import sync_batch_norm


class BatchNormAct2d(nn.BatchNorm2d):
    """Like timm's BatchNormAct2d: calls F.batch_norm, then an activation."""

    def __init__(self, num_features: int, **options: object) -> None:
        super().__init__(num_features, **options)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        use_batch = self.training or self.running_mean is None
        tracks = not self.training or self.track_running_stats
        running = (self.running_mean, self.running_var) if tracks else (None, None)
        return self.act(F.batch_norm(x, *running, self.weight, self.bias, use_batch, factor, self.eps))


class CallsSuper2d(nn.BatchNorm2d):
    """Calls the inherited forward."""

    def forward(self, x: torch.Tensor, times: float = 2.0) -> torch.Tensor:
        return times * super().forward(x)


class Frozen(nn.BatchNorm2d):
    """Normalises with the running statistics in training too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class CallsFunctional(nn.BatchNorm2d):
    """Calls the function that syncbn's warning about ManualBatchNorm recommends."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        running = self.running_mean, self.running_var
        return sync_batch_norm(x, *running, self.weight, self.bias, self.training, 0.1, self.eps)


class ManualBatchNorm(nn.BatchNorm2d):
    """Calls no batch norm, so no call can be synchronised."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


def parametrized(layer: nn.Module) -> nn.Module:
    """Make the weight of a layer positive by torch.nn.utils.parametrize."""
    return parametrize.register_parametrization(layer, "weight", nn.Softplus())
