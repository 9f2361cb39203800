"""Observes the arguments of each batch norm that a layer computes: of F.batch_norm, or of syncbn's.

Subclasses may rearrange the input of the module first. Inside torch's synchronised layer nothing can be seen; there the
input of the module counts, as long as the forward is torch's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from syncbn.arguments import Arguments
from syncbn.convertibility import kind_of
from syncbn.layer import SyncBatchNorm
from syncbn.tools.replaced_method import Train, replaced

See = Callable[[Arguments], None]


@contextlib.contextmanager
def observed(layer: _BatchNorm, see: See, miss: Callable[[str], None]) -> Iterator[None]:
    """Within, `see` gets the arguments of each batch norm in training that the layer does; `miss` gets the reason after
    a forward in training in which nothing was seen. Neither may raise an error."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(layer, "forward", functools.partial(_forward, layer, layer.forward, see, miss)))
        if isinstance(layer, SyncBatchNorm):
            train = functools.partial(_see_and_train, see, layer._train_over_ranks)
            stack.enter_context(replaced(layer, "_train_over_ranks", train))
        yield


def _see_and_train(see: See, train: Train, given: Arguments, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
    see(given)
    return train(given, layer)


def _forward(
    layer: _BatchNorm, forward: Callable[..., Any], see: See, miss: Callable[[str], None], *args: Any, **options: Any
) -> Any:
    """The forward of the layer, observed."""
    if not layer.training:
        return forward(*args, **options)
    if type(layer).forward is nn.SyncBatchNorm.forward:
        (x,) = (*args, *options.values())
        see(Arguments(x, None, None, None, None, 0.0, layer.eps))
        return forward(*args, **options)
    with _SeeBatchNorm(see) as mode:
        output = forward(*args, **options)
    if not (mode.seen or (isinstance(layer, SyncBatchNorm) and layer._synchronised_ranks is not None)):
        if isinstance(layer, nn.SyncBatchNorm):
            miss(f"its class {kind_of(layer)} changes the forward of nn.SyncBatchNorm, in which nothing is seen")
        else:
            miss(f"the forward of its class {kind_of(layer)} calls neither super().forward nor F.batch_norm")
    return output


class _SeeBatchNorm(TorchFunctionMode):
    """Is active during a forward of a layer in training."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self.see, self.seen = see, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            self.seen = True
            self.see_if_training(*args, **kwargs)
        return func(*args, **kwargs)

    def see_if_training(
        self, input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> None:  # fmt: skip
        """The arguments of F.batch_norm."""
        if training:
            self.see(Arguments(input, running_mean, running_var, weight, bias, momentum, eps))
