"""A model, pairs of calls that raise an error if two ranks make them at once, and a store that can be slow or fail."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncbn
from syncbn.functional import batch_norm_backward

X = torch.randn(4, 3, requires_grad=True)


class Model(nn.Module):
    """A model of two layers. By default it uses a new group, because a fault on a GPU makes a group unusable."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.bn1, self.bn2 = (nn.BatchNorm1d(3) for _ in range(2))
        syncbn.convert_syncbn_model(self, group or dist.new_group())

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.bn1(x))

    def train_a_step_and_call_bn2_twice(self) -> None:
        """Prepare for a call of MIXTURES: the next call of bn1 is call 2, and the next call of bn2 is call 4."""
        self(X).sum().backward()
        self.loss_2, self.loss_3 = (self.bn2(x).square().sum() for x in (X, 2 * X))  # the losses of calls 2 and 3


# An entry has the call of rank 0, the call of the other ranks, and a regular expression that matches the error of every
# rank. Tests replace OTHERS in the expression by the other ranks, such as "ranks 1-2".
MIXTURES: dict[str, tuple[Callable[[Model], object], Callable[[Model], object], str]] = {
    "two layers": (
        lambda model: model.bn1(X),
        lambda model: model.bn2(X),
        r"rank 0: in bn1 forward, call 2.*\nOTHERS: in bn2 forward, call 4.*\nPossible causes:\n- A rank has left out",
    ),
    "forward and backward of a layer": (
        lambda model: model.bn2(X),
        lambda model: model.loss_2.backward(),
        r"rank 0: in bn2 forward, call 4\nOTHERS: in bn2 backward, call 2\nPossible causes:\n- .* once more, ",
    ),
    "forward and backward of two layers": (
        lambda model: model.bn1(X),
        lambda model: model.loss_2.backward(),
        r"rank 0: in bn1 forward, call 2\nOTHERS: in bn2 backward, call 2\nPossible causes:\n- A rank has left out",
    ),
    "a function and a layer": (
        lambda model: batch_norm_backward(X, X, torch.zeros(3), torch.ones(3), process_group=model.bn1.process_group),
        lambda model: model.bn1(X),
        r"rank 0: in batch_norm_backward.* call 1.*\nOTHERS: in bn1 forward, call 2",
    ),
    "dtypes": (
        lambda model: model.bn1(X.bfloat16()),
        lambda model: model.bn1(X),
        r"rank 0: in bn1 .* with an input of torch.bfloat16\nOTHERS: in bn1 .*float32\nUse autocast on every rank",
    ),
    "backwards with and without a graph": (
        lambda model: torch.autograd.grad(model.loss_2, X, create_graph=True),
        lambda model: model.loss_2.backward(),
        r"rank 0: in bn2 backward with create_graph .*\nOTHERS: in bn2 backward, call 2\nPass create_graph",
    ),
    "backwards of two calls": (
        lambda model: model.loss_2.backward(),
        lambda model: model.loss_3.backward(),
        r"rank 0: in bn2 backward, call 2\nOTHERS: in bn2 backward, call 3\nThe layer is called several times",
    ),
}


class HookedStore:
    """A store that calls `hook` with the name of each method before the method runs."""

    def __init__(self, store: dist.Store, hook: Callable[[str], object]) -> None:
        self.store, self.hook = store, hook

    def __getattr__(self, name: str) -> Any:
        self.hook(name)
        return getattr(self.store, name)
