"""Subclasses of Tensor as users write them: with ordinary memory; they survive every operation, and whole models run on
them."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn


class Image(Tensor):
    """Without a `__torch_function__` of its own: torch's keeps the class."""

    def new_empty(self, *size: Any, **options: Any) -> Self:  # for copy.deepcopy, where torch's hooks are disabled
        return super().new_empty(*size, **options).as_subclass(type(self))


class MetaImage(Image):
    """As MONAI's MetaTensor: it takes the metadata of the first argument that has any."""

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
    """As fastai's: it takes the metadata of the first argument alone."""

    @classmethod
    def metadata_in(cls, arguments: tuple[Any, ...]) -> str | None:
        return getattr(arguments[0], "metadata", None)


class OwnParameter(nn.Parameter):
    """A subclass of Parameter, whose `__torch_function__` is disabled."""


class Observed(Image):
    """It notes which functions it is called with; `batch_norm` says what it does in those of that name."""

    seen: ClassVar[list[Any]] = []
    batch_norm: Callable[[Callable[[], Any]], Any] = staticmethod(lambda run: run())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        run = functools.partial(super().__torch_function__, function, types, args, kwargs or {})
        return cls.batch_norm(run) if registered_name(function) == "batch_norm" else run()


def registered_name(function: Any) -> str:
    """Of a function that a hook was called with; a property is its getter or setter."""
    return getattr(function, "__name__", str(function))


def as_class(tensor: Tensor, subclass: type[Tensor], metadata: str | None = None) -> Tensor:
    """The same values, in memory of their own, of a class and with metadata, if it has any. A parameter stays one."""
    if issubclass(subclass, nn.Parameter):
        return subclass(tensor.detach().clone())
    other = tensor.detach().clone().as_subclass(subclass)
    other = nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other
    if isinstance(other, MetaImage):
        other.metadata = metadata
    return other


def plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def class_and_metadata(tensor: Tensor) -> tuple[type[Tensor], str | None]:
    return type(tensor), getattr(tensor, "metadata", None)
