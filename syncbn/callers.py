"""Who calls an all_reduce: which layer, by its name in the model, and in which of its calls. In eager mode only."""

from __future__ import annotations

import sys
import zlib
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

EXACT = 2**26  # the square of number of ranks * signature, which is less, is exact in float64


class Place:
    """A layer, or a function, that calls on one process group."""

    def __init__(self, name: str, number: int, num_ranks: int) -> None:
        self.name = name
        self.number = number  # among the batch norms of the model; 0 for a function
        self.num_calls = 0
        self.most = EXACT // num_ranks - 1
        self.signatures: dict[tuple[str, bool], Tensor] = {}  # as collectives.py packs them

    def signature(self, step: str) -> int:
        """A positive number that tells places and steps apart.

        It is the same on a rank that has wrapped the model in another module, and on one where a part is compiled: it
        takes the last part of the name, and does not depend on what was called before.
        """
        return 1 + zlib.crc32(f"{self.name.rpartition('.')[2]} {self.number} {step}".encode()) % self.most


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
            place = functions[of] = Place(of, 0, group.size())
    else:
        if group not in _of_layers:
            _of_layers[group] = WeakKeyDictionary()
        place = _of_layers[group].get(of)
        if place is None:
            place = _of_layers[group][of] = Place(*_in_model(of), group.size())
    place.num_calls += 1
    return Caller(place, place.num_calls, getattr(input, "dtype", None))


def _in_model(layer: nn.Module) -> tuple[str, int]:
    """The dotted name of a layer, and its number among the batch norms, in the outermost module whose forward runs.

    DistributedDataParallel and the wrapper of torch.compile do not count.
    """
    names: list[str] = []
    model, frame = layer, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        outer = frame.f_locals.get("self")
        if isinstance(outer, DistributedDataParallel):
            break
        if isinstance(outer, nn.Module) and outer is not model:
            name = next((name for name, module in outer.named_modules() if module is model), None)
            if name is not None:
                names.insert(0, name)
                model = outer
    parts = [part for name in names for part in name.split(".") if part != "_orig_mod"]
    batch_norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    number = next(number for number, module in enumerate(batch_norms, start=1) if module is layer)
    return ".".join(parts) or type(layer).__name__, number
