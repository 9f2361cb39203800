"""Subclasses of torch's batch norm and of Tensor, as users write them."""

from typing import Any, Self

import torch
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


# Tensors. Their values are in their own storage, and every operation keeps the class.


class Image(Tensor):
    """A subclass with torch's default `__torch_function__`, which keeps the class."""

    def new_empty(self, *size: Any, **options: Any) -> Self:
        """Keep the class in copy.deepcopy, which disables `__torch_function__` and calls this method."""
        return super().new_empty(*size, **options).as_subclass(type(self))


class MetaImage(Image):
    """Like MONAI's MetaTensor: a result has the metadata of the first argument that has any."""

    metadata: str | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(output, MetaImage):
            tagged = [value for value in (*args, *(kwargs or {}).values()) if getattr(value, "metadata", None)]
            output.metadata = tagged[0].metadata if tagged else None
        return output


def as_class(tensor: Tensor, subclass: type[Tensor], metadata: str | None = None) -> Tensor:
    """Return a copy of the tensor in this class, with the metadata if it is a MetaImage. The copy of a Parameter is a
    Parameter."""
    copied = tensor.detach().clone().as_subclass(subclass)
    copied = nn.Parameter(copied) if isinstance(tensor, nn.Parameter) else copied
    if isinstance(copied, MetaImage):
        copied.metadata = metadata
    return copied


def plain(tensor: Tensor) -> Tensor:
    """Return the same memory as a torch.Tensor without a graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def class_and_metadata(tensor: Tensor) -> tuple[type[Tensor], str | None]:
    return type(tensor), getattr(tensor, "metadata", None)
