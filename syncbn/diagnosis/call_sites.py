"""Names who calls an all-reduce, in eager mode: which layer, by its path in the model, and in which of its calls."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncbn.diagnosis import pipelines
from syncbn.diagnosis.model_paths import in_words, path_in_model
from syncbn.torch_private import is_compiling


class CallSite:
    """A layer, or a function, that calls on one process group."""

    def __init__(self, path: str, name: str, num_ranks: int) -> None:
        self.path = path  # the dotted name in the model, or that of the function; empty for a layer without a model
        self.name = in_words(path) or name
        self.num_ranks = num_ranks
        self.num_calls = 0
        self.signs = True  # until a rank turns out to have another path for the same layer
        self.signatures: dict[tuple[str, bool], Tensor] = {}  # by pass, and whether there is a count; see signatures.py


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


def new_call(of: nn.Module | str, group: dist.ProcessGroup, input: Tensor | None) -> LayerCall | None:
    """The next call of a layer, or of the function of this name, on `group`; None in a compiled graph.

    **Raises** ValueError where the first call of a layer shows that it is in a stage of a pipeline over these ranks.
    """
    if is_compiling():
        return None
    if group not in _sites:
        _sites[group] = WeakKeyDictionary(), {}
    of_layers, of_functions = _sites[group]
    if isinstance(of, str):
        site = of_functions.get(of) or of_functions.setdefault(of, CallSite(of, of, group.size()))
    else:
        if of not in of_layers:
            pipelines.require_one_stage(group)
            of_layers[of] = CallSite(path_in_model(of), type(of).__name__, group.size())
        site = of_layers[of]
    site.num_calls += 1
    return LayerCall(site, site.num_calls, getattr(input, "dtype", None))
