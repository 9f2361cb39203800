"""Faults that tests inject: ranks that mix what they send, and a store that is late or fails."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncbn

X = torch.randn(4, 3, requires_grad=True)


class Model(nn.Module):
    """Two layers, by default over a new group, because a fault on a GPU ends the use of a group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.bn1, self.bn2 = (nn.BatchNorm1d(3) for _ in range(2))
        syncbn.convert_syncbn_model(self, group or dist.new_group())

    def forward(self, x: Tensor, *names: str) -> Tensor:
        for name in names or ("bn1", "bn2"):
            x = self.get_submodule(name)(x)
        return x


Call = Callable[[Model, Tensor, Tensor], object]

# The calls of rank 0 and of the other ranks, and the report of every rank. The model has trained one step and has then
# called bn2 twice: the arguments are the model and the two outputs. CPUs raise at once, GPUs at a later call.
MIXTURES: dict[str, tuple[Call, Call, str]] = {
    "layers": (
        lambda model, y, other: model.bn1(X), lambda model, y, other: model.bn2(X),
        r"rank 0: in bn1 forward, call 2.*\nOTHERS: in bn2 forward, call 4.*\nPossible causes:\n- A rank has left out",
    ),
    "passes": (
        lambda model, y, other: model.bn2(X), lambda model, y, other: y.sum().backward(),
        r"rank 0: in bn2 forward, call 4\nOTHERS: in bn2 backward, call 2\nPossible causes:\n- .* once more, ",
    ),
    "passes of one step": (
        lambda model, y, other: model.bn1(X), lambda model, y, other: y.sum().backward(),
        r"rank 0: in bn1 forward, call 2\nOTHERS: in bn2 backward, call 2\nPossible causes:\n- A rank has left out",
    ),
    "dtypes": (
        lambda model, y, other: model.bn1(X.bfloat16()), lambda model, y, other: model.bn1(X),
        r"rank 0: in bn1 .* with an input of torch.bfloat16\nOTHERS: in bn1 .*float32\nUse autocast on every rank",
    ),
    "graphs": (
        lambda model, y, other: torch.autograd.grad(y.square().sum(), X, create_graph=True),
        lambda model, y, other: y.sum().backward(),
        r"rank 0: in bn2 backward with create_graph .*\nOTHERS: in bn2 backward, call 2\nPass create_graph",
    ),
    "calls": (
        lambda model, y, other: y.square().sum().backward(),
        lambda model, y, other: other.square().sum().backward(),
        r"rank 0: in bn2 backward, call 2\nOTHERS: in bn2 backward, call 3\nThe layer is called several times",
    ),
    "settings": (
        lambda model, y, other: (setattr(model.bn1, "eps", 1e-3), model.bn1(X)), lambda model, y, other: model.bn1(X),
        r"rank 0: in bn1 .* with eps=0.001\nOTHERS: in bn1 .*eps=1e-05\nGive the layer the same settings",
    ),
}  # fmt: skip


class HookedStore:
    """A store that calls `hook` with the name of each method before the method runs."""

    def __init__(self, store: dist.Store, hook: Callable[[str], object]) -> None:
        self.store, self.hook = store, hook

    def __getattr__(self, name: str) -> Any:
        self.hook(name)
        return getattr(self.store, name)
