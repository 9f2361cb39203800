"""Tensor subclasses as users write them, with the memory of a plain tensor. Every operation returns the subclass."""

from typing import Any, Self

import torch
from torch import Tensor, nn


class Image(Tensor):
    """A subclass with torch's default `__torch_function__`, which keeps the class."""

    def new_empty(self, *size: Any, **options: Any) -> Self:  # copy.deepcopy disables __torch_function__
        return super().new_empty(*size, **options).as_subclass(type(self))


class MetaImage(Image):
    """Like MONAI's MetaTensor: a result has the metadata of the first argument that has any."""

    metadata: str | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(output, MetaImage):
            output.metadata = cls.metadata_in((*args, *(kwargs or {}).values()))
        return output

    @classmethod
    def metadata_in(cls, arguments: tuple[Any, ...]) -> str | None:
        return next(filter(None, (getattr(argument, "metadata", None) for argument in arguments)), None)


class TensorImage(MetaImage):
    """Like fastai's TensorImage: a result has the metadata of the first argument only."""

    @classmethod
    def metadata_in(cls, arguments: tuple[Any, ...]) -> str | None:
        return getattr(arguments[0], "metadata", None)


class OwnParameter(nn.Parameter):
    """A subclass of Parameter, whose `__torch_function__` is disabled."""


def as_class(tensor: Tensor, subclass: type[Tensor], metadata: str | None = None) -> Tensor:
    """Return a copy of a class, with metadata if the class has any. The copy of a Parameter is a Parameter."""
    if issubclass(subclass, nn.Parameter):
        return subclass(tensor.detach().clone())
    other = tensor.detach().clone().as_subclass(subclass)
    other = nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other
    if isinstance(other, MetaImage):
        other.metadata = metadata
    return other


def plain(tensor: Tensor) -> Tensor:
    """Return the same memory as a torch.Tensor without a graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def class_and_metadata(tensor: Tensor) -> tuple[type[Tensor], str | None]:
    return type(tensor), getattr(tensor, "metadata", None)
