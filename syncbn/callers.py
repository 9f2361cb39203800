"""Who calls an all_reduce: which layer, by its name in the model, and in which of its calls. In eager mode only."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

EXACT = 2**26  # the square of number of ranks * signature, which is less, is exact in float64


class Place:
    """A layer, or a function, that calls on one process group."""

    def __init__(self, path: str, name: str, num_ranks: int) -> None:
        self.path = path  # the dotted name in the model; empty for a function, and for a layer without a model
        self.name = path or name
        self.num_calls = 0
        self.most = EXACT // num_ranks - 1
        self.signs = True  # until a rank turns out to have another path for the same layer
        self.signatures: dict[tuple[str, bool], Tensor] = {}  # as collectives.py packs them

    def signature(self, step: str) -> int:
        """A positive number that tells places and steps apart."""
        return 1 + zlib.crc32(f"{self.path} {step}".encode()) % self.most

    def sign_no_more(self) -> None:
        """From now on the signatures would differ although the layer is the same."""
        self.signs = False
        self.signatures.clear()


def may_be_one(paths: Iterable[str]) -> bool:
    """Whether these can be of one layer: some ranks have wrapped the model in another module, or have no model."""
    longest = max(paths, key=len)
    return all(not path or f".{longest}".endswith(f".{path}") for path in paths)


class Caller(NamedTuple):
    """A forward of a layer, and its backward."""

    place: Place
    call: int  # 1 is the first
    dtype: torch.dtype | None  # of the input

    def words(self, step: str) -> str:
        """layer4.1.bn3 forward, call 17."""
        return f"{self.place.name} {step}, call {self.call}"


_of_layers: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[nn.Module, Place]] = WeakKeyDictionary()
_of_functions: WeakKeyDictionary[dist.ProcessGroup, dict[str, Place]] = WeakKeyDictionary()


def new_call(of: nn.Module | str, group: dist.ProcessGroup | None, input: Tensor | None) -> Caller | None:
    """The next call of a layer, or of the function of this name; None where there is nothing to call."""
    if group is None or torch.compiler.is_compiling():
        return None
    if isinstance(of, str):
        functions = _of_functions.setdefault(group, {})
        place = functions.get(of)
        if place is None:
            place = functions[of] = Place("", of, group.size())
    else:
        if group not in _of_layers:
            _of_layers[group] = WeakKeyDictionary()
        place = _of_layers[group].get(of)
        if place is None:
            place = _of_layers[group][of] = Place(_path_in_model(of), type(of).__name__, group.size())
    place.num_calls += 1
    return Caller(place, place.num_calls, getattr(input, "dtype", None))


def _path_in_model(layer: nn.Module) -> str:
    """The dotted name of a layer in the outermost module that is `self` in a frame of this call, or nothing.

    DistributedDataParallel and the wrapper of torch.compile do not count.
    """
    names: list[str] = []
    inner, frame = layer, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        outer = frame.f_locals.get("self")
        if isinstance(outer, DistributedDataParallel):
            break
        if isinstance(outer, nn.Module) and outer is not inner:
            below = itertools.chain(outer.named_children(), outer.named_modules())  # most often it is a child
            name = next((name for name, module in below if module is inner), None)
            if name is not None:
                names.insert(0, name)
                inner = outer
    return ".".join(part for name in names for part in name.split(".") if part != "_orig_mod")
