"""Finds the bound methods that modules hold: a wrapped forward on a layer outlives a change of the layer's class."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn


class Place(NamedTuple):
    """What is held somewhere, by what name, and the function that puts something else there."""

    name: str  # of an attribute
    content: Any
    put: Callable[[Any], None]


def bound_methods(modules: Iterable[nn.Module], skipped: str | None = None) -> Iterator[Place]:
    """The bound methods of modules that the attributes and hooks of `modules` lead to.

    The search follows functions (variables of a closure, defaults), functools.partial, callable objects and objects
    whose method is held; it does not follow attributes of the name `skipped`.
    """
    seen: set[int] = set()
    for module in modules:
        for mapping in (vars(module), *[value for value in vars(module).values() if isinstance(value, dict)]):
            for place in _items(mapping):
                yield from _followed(place, seen, skipped)


def _followed(place: Place, seen: set[int], skipped: str | None) -> Iterator[Place]:
    held = place.content
    if place.name == skipped:
        return
    if isinstance(held, MethodType) and isinstance(held.__self__, nn.Module):
        yield place
    if callable(held) and id(held) not in seen:
        seen.add(id(held))
        for inner in _places(held):
            yield from _followed(inner, seen, skipped)


def _places(holder: Any) -> Iterator[Place]:
    """What this object holds that a call of it may use."""
    if isinstance(holder, MethodType):
        yield from _places(holder.__func__)
        holder = holder.__self__
    if isinstance(holder, (nn.Module, type)):  # modules are looked at for themselves
        return
    if isinstance(holder, FunctionType):
        for cell in holder.__closure__ or ():
            if cell != CellType():  # an empty one
                yield Place("", cell.cell_contents, functools.partial(setattr, cell, "cell_contents"))
        for index, default in enumerate(holder.__defaults__ or ()):
            yield Place("", default, functools.partial(_put_default, holder, index))
        yield from _items(holder.__kwdefaults__ or {})
    if isinstance(holder, functools.partial):
        for index, part in enumerate((holder.func, *holder.args)):
            yield Place("", part, functools.partial(_put_part, holder, index))
        yield from _items(holder.keywords)
    attributes: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # of whatever class a property of that name raises
        attributes = vars(holder)
    yield from _items(attributes)


def _items(mapping: dict[str, Any]) -> Iterator[Place]:
    for key, value in mapping.items():
        yield Place(key, value, functools.partial(mapping.__setitem__, key))


def _put_default(function: FunctionType, index: int, value: Any) -> None:
    defaults = list(function.__defaults__ or ())
    defaults[index] = value
    function.__defaults__ = tuple(defaults)


def _put_part(partial: functools.partial[Any], index: int, value: Any) -> None:
    parts = [partial.func, *partial.args]
    parts[index] = value
    partial.__setstate__((parts[0], tuple(parts[1:]), partial.keywords, vars(partial)))  # type: ignore[attr-defined]
