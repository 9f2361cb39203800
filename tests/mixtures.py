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
    """A model of two layers. The default is a new group, because a fault on a GPU makes a group unusable."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.bn1, self.bn2 = (nn.BatchNorm1d(3) for _ in range(2))
        syncbn.convert_syncbn_model(self, group or dist.new_group())

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.bn1(x))

    def train_a_step_and_call_bn2_twice(self) -> None:
        """Prepare for the methods below: the next call of bn1 is call 2, and the next call of bn2 is call 4."""
        self(X).sum().backward()
        self.loss_of_call_2, self.loss_of_call_3 = (self.bn2(x).square().sum() for x in (X, 2 * X))

    def call_bn1(self) -> None:
        self.bn1(X)

    def call_bn1_in_bfloat16(self) -> None:
        self.bn1(X.bfloat16())

    def call_bn2(self) -> None:
        self.bn2(X)

    def differentiate_call_2(self) -> None:
        self.loss_of_call_2.backward()

    def differentiate_call_2_with_graph(self) -> None:
        torch.autograd.grad(self.loss_of_call_2, X, create_graph=True)

    def differentiate_call_3(self) -> None:
        self.loss_of_call_3.backward()

    def call_a_function(self) -> None:
        batch_norm_backward(X, X, torch.zeros(3), torch.ones(3), process_group=self.bn1.process_group)


# An entry has the method that rank 0 calls, the method that the other ranks call, and a regular expression that matches
# the error of every rank. Tests replace OTHERS in the expression by the other ranks, such as "ranks 1-2".
MIXTURES: dict[str, tuple[Callable[[Model], None], Callable[[Model], None], str]] = {
    "two layers": (
        Model.call_bn1, Model.call_bn2,
        r"rank 0: in bn1 forward, call 2.*\nOTHERS: in bn2 forward, call 4.*\nPossible causes:\n- A rank has left out",
    ),
    "forward and backward of a layer": (
        Model.call_bn2, Model.differentiate_call_2,
        r"rank 0: in bn2 forward, call 4\nOTHERS: in bn2 backward, call 2\nPossible causes:\n- .* once more, ",
    ),
    "forward and backward of two layers": (
        Model.call_bn1, Model.differentiate_call_2,
        r"rank 0: in bn1 forward, call 2\nOTHERS: in bn2 backward, call 2\nPossible causes:\n- A rank has left out",
    ),
    "a function and a layer": (
        Model.call_a_function, Model.call_bn1,
        r"rank 0: in batch_norm_backward.* call 1.*\nOTHERS: in bn1 forward, call 2",
    ),
    "dtypes": (
        Model.call_bn1_in_bfloat16, Model.call_bn1,
        r"rank 0: in bn1 .* with an input of torch.bfloat16\nOTHERS: in bn1 .*float32\nUse autocast on every rank",
    ),
    "backwards with and without a graph": (
        Model.differentiate_call_2_with_graph, Model.differentiate_call_2,
        r"rank 0: in bn2 backward with create_graph .*\nOTHERS: in bn2 backward, call 2\nPass create_graph",
    ),
    "backwards of two calls": (
        Model.differentiate_call_2, Model.differentiate_call_3,
        r"rank 0: in bn2 backward, call 2\nOTHERS: in bn2 backward, call 3\nThe layer is called several times",
    ),
}  # fmt: skip


class HookedStore:
    """A store that calls `hook` with the name of each method before the method runs."""

    def __init__(self, store: dist.Store, hook: Callable[[str], object]) -> None:
        self.store, self.hook = store, hook

    def __getattr__(self, name: str) -> Any:
        self.hook(name)
        return getattr(self.store, name)
