"""Tensor subclasses as users write them: their values are in their own storage, and every operation keeps the class."""

from typing import Any, Self

import torch
from torch import Tensor, nn


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
