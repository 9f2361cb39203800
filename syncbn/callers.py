"""Who calls an all_reduce: which layer, by its name in the model, and in which of its calls. In eager mode only."""

from __future__ import annotations

import itertools
import sys
import zlib
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXACT = 2**26  # the square of number of ranks * signature, which is less, is exact in float64


class Place:
    """A layer, or a function, among those that have called on one process group."""

    def __init__(self, name: str, order: int, num_ranks: int) -> None:
        self.name = name
        self.order = order  # the same on all ranks that call in the same order
        self.num_calls = 0
        self.most = EXACT // num_ranks - 1
        self.signatures: dict[tuple[str, bool], Tensor] = {}  # as collectives.py packs them

    def signature(self, step: str) -> int:
        """A positive number that tells places and steps apart.

        Of the name it takes the last part only: one rank may have wrapped the model in another module.
        """
        return 1 + zlib.crc32(f"{self.name.rpartition('.')[2]} {self.order} {step}".encode()) % self.most


class Caller(NamedTuple):
    """A forward of a layer, and its backward."""

    place: Place
    call: int  # 1 is the first
    dtype: torch.dtype | None  # of the input

    def words(self, step: str) -> str:
        """layer4.1.bn3 forward, call 17."""
        return f"{self.place.name} {step}, call {self.call}"


class _Places:
    """Of one process group."""

    def __init__(self) -> None:
        self.orders = itertools.count()
        self.of_layers: WeakKeyDictionary[nn.Module, Place] = WeakKeyDictionary()
        self.of_functions: dict[str, Place] = {}


_places: WeakKeyDictionary[dist.ProcessGroup, _Places] = WeakKeyDictionary()


def new_call(of: nn.Module | str, group: dist.ProcessGroup | None, input: Tensor | None) -> Caller | None:
    """The next call of a layer, or of the function of this name; None where there is nothing to call."""
    if group is None or torch.compiler.is_compiling():
        return None
    places = _places.get(group)
    if places is None:
        places = _places[group] = _Places()
    place = places.of_functions.get(of) if isinstance(of, str) else places.of_layers.get(of)
    if place is None:
        place = Place(of if isinstance(of, str) else _name_in_model(of), next(places.orders), group.size())
        if isinstance(of, str):
            places.of_functions[of] = place
        else:
            places.of_layers[of] = place
    place.num_calls += 1
    return Caller(place, place.num_calls, getattr(input, "dtype", None))


def _name_in_model(layer: nn.Module) -> str:
    """The dotted name in the outermost module whose forward is running, without DistributedDataParallel."""
    names: list[str] = []
    inner, frame = layer, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        outer = frame.f_locals.get("self")
        if isinstance(outer, DistributedDataParallel):
            break
        if isinstance(outer, nn.Module) and outer is not inner:
            name = next((name for name, module in outer.named_modules() if module is inner), None)
            if name is not None:
                names.insert(0, name)
                inner = outer
    return ".".join(names) or type(layer).__name__
