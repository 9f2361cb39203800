"""Shows what a batch-norm layer normalises: what reaches F.batch_norm, or ours, from the forward of its class.

Subclasses may rearrange the input of the module first. Inside torch's synchronised layer nothing can be seen; there it
is the module's input, as long as the forward is torch's own.
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
from syncbn.tools.replaced_training import Train, trained_by

See = Callable[[Arguments], None]


@contextlib.contextmanager
def observed(layer: _BatchNorm, see: See, miss: Callable[[str], None]) -> Iterator[None]:
    """Within, `see` gets the arguments of each batch norm in training that the layer does; `miss`, after a forward in
    training of which nothing is seen, why that is so. Neither may raise an error."""
    mode = _SeeBatchNorm(layer, see, miss)
    with contextlib.ExitStack() as stack:
        stack.enter_context(layer.register_forward_pre_hook(mode.begin, with_kwargs=True))
        stack.enter_context(layer.register_forward_hook(mode.end, always_call=True))
        stack.callback(mode.leave)
        if isinstance(layer, SyncBatchNorm):
            stack.enter_context(trained_by(layer, functools.partial(_see_and_train, see, layer._train_over_ranks)))
        yield


def _see_and_train(see: See, train: Train, given: Arguments, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
    see(given)
    return train(given, layer)


class _SeeBatchNorm(TorchFunctionMode):
    """Is active during each forward of a layer."""

    def __init__(self, layer: _BatchNorm, see: See, miss: Callable[[str], None]) -> None:
        super().__init__()
        self.layer, self.see, self.miss = layer, see, miss
        self.active = self.seen = False

    def begin(self, layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A hook before the forward."""
        self.seen = isinstance(layer, SyncBatchNorm)
        if type(layer).forward is nn.SyncBatchNorm.forward:
            self.seen = True
            if layer.training:
                self.see_batch_norm(*inputs, **options)
        elif not self.active:
            self.active = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, layer: nn.Module, inputs: object, output: object) -> None:
        """A hook after the forward, which may have failed, and then has no output."""
        self.leave()
        seen = layer._synchronised_ranks is not None if isinstance(layer, SyncBatchNorm) else self.seen
        if seen or output is None or not layer.training:
            return
        if isinstance(layer, nn.SyncBatchNorm):
            self.miss(f"its class {kind_of(layer)} changes the forward of nn.SyncBatchNorm, in which nothing is seen")
        else:
            self.miss(f"the forward of its class {kind_of(layer)} calls neither super().forward nor F.batch_norm")

    def leave(self) -> None:
        """Be no longer active, also after an interrupt between the hooks."""
        if self.active:
            self.active = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

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
        if training and self.layer.training:
            self.see(Arguments(input, running_mean, running_var, weight, bias, momentum, eps))

    def see_batch_norm(self, input: Tensor) -> None:
        """The argument of nn.SyncBatchNorm."""
        self.see(Arguments(input, None, None, None, None, 0.0, self.layer.eps))
