"""Names who calls an all-reduce, in eager mode: which layer, by its path in the model, and in which of its calls."""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MOST_SQUARES = 2**26  # number of ranks * signature is less, so that its square is exact in float64


class CallSite:
    """A layer, or a function, that calls on one process group."""

    def __init__(self, path: str, name: str, num_ranks: int) -> None:
        self.path = path  # the dotted name in the model; empty for a function, and for a layer without a model
        self.name = path or name
        self.num_calls = 0
        self.largest_signature = MOST_SQUARES // num_ranks - 1
        self.signs = True  # until a rank turns out to have another path for the same layer
        self.signatures: dict[tuple[str, bool], Tensor] = {}  # as collectives.py packs them

    def signature(self, pass_name: str) -> int:
        """A positive number that tells call sites and passes apart."""
        return 1 + zlib.crc32(f"{self.path} {pass_name}".encode()) % self.largest_signature

    def stop_signing(self) -> None:
        """From now on the signatures would differ although the layer is the same."""
        self.signs = False
        self.signatures.clear()


class LayerCall(NamedTuple):
    """A forward of a layer or function, and its backward."""

    site: CallSite
    number: int  # 1 is the first
    dtype: torch.dtype | None  # of the input

    def words(self, pass_name: str) -> str:
        """layer4.1.bn3 forward, call 17."""
        return f"{self.site.name} {pass_name}, call {self.number}"


Sites: TypeAlias = tuple[WeakKeyDictionary[nn.Module, CallSite], dict[str, CallSite]]  # of layers, of functions

_sites: WeakKeyDictionary[dist.ProcessGroup, Sites] = WeakKeyDictionary()


def new_call(of: nn.Module | str, group: dist.ProcessGroup, input: Tensor | None) -> LayerCall:
    """The next call of a layer, or of the function of this name, on `group`."""
    if group not in _sites:
        _sites[group] = WeakKeyDictionary(), {}
    of_layers, of_functions = _sites[group]
    if isinstance(of, str):
        site = of_functions.get(of) or of_functions.setdefault(of, CallSite("", of, group.size()))
    else:
        if of not in of_layers:
            of_layers[of] = CallSite(_path_in_model(of), type(of).__name__, group.size())
        site = of_layers[of]
    site.num_calls += 1
    return LayerCall(site, site.num_calls, getattr(input, "dtype", None))


def may_be_one_layer(paths: Iterable[str]) -> bool:
    """Whether these can be of one layer: some ranks have wrapped the model in another module, or have no model."""
    longest = max(paths, key=len)
    return all(not path or f".{longest}".endswith(f".{path}") for path in paths)


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
