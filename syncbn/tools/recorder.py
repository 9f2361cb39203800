"""Records the sums of the inputs that one layer normalises in training: of F.batch_norm's, or of syncbn's.

Subclasses may rearrange the input of the module first. Inside torch's synchronised layer nothing can be seen; there the
input of the module counts, as long as the forward is torch's own.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from syncbn import masks, torch_private, torch_state
from syncbn.arguments import Arguments
from syncbn.convert import kind_of
from syncbn.distributed.groups import GroupSpec, to_spec
from syncbn.layer import SyncBatchNorm
from syncbn.layout import Layout
from syncbn.roads import dtensors, nested, watched
from syncbn.tools.replaced import replaced


class Recorder(TorchFunctionMode):
    """Keeps the sums of one layer's calls on this rank. It raises nothing, as the training goes on and the other ranks
    do. It is active as a mode, which sees F.batch_norm, in a forward of the layer in training."""

    def __init__(self, name: str, layer: _BatchNorm, spec: GroupSpec, num_slices: int) -> None:
        """`spec` is the group to compare; None takes the layer's own."""
        super().__init__()
        self.name, self.layer, self.num_slices = name, layer, num_slices
        if spec is None and isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
            spec = to_spec(layer.process_group)
        self.spec, self.eps = spec, layer.eps
        self.num_calls = 0  # in training mode
        self.sums: list[Tensor] = []  # for each call (2C + 1, num_slices), packed as in moments.py
        self.why_left_out = ""
        self.has_seen = False  # a batch norm in the current forward

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within, each batch norm in training that the layer computes is recorded."""
        layer, original = self.layer, self.layer.forward

        def forward(called: nn.Module, /, *args: Any, **options: Any) -> Any:
            if called is not layer:  # but a copy, made within
                return type(called).forward(called, *args, **options)
            if not layer.training:
                return original(*args, **options)
            if type(layer).forward is nn.SyncBatchNorm.forward:
                (x,) = (*args, *options.values())
                self.record(Arguments(x, eps=layer.eps))
                return original(*args, **options)
            self.has_seen = False
            with self:
                output = original(*args, **options)
            if not self.has_seen:
                self.leave_out(
                    f"the forward of its class {kind_of(layer)} calls neither super().forward nor F.batch_norm, or is "
                    "derived from nn.SyncBatchNorm's, in which nothing is seen"
                )
            return output

        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(layer, "forward", MethodType(forward, layer)))
            if isinstance(layer, SyncBatchNorm):
                train = layer._train_over_ranks

                def record_and_train(given: Arguments, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
                    self.record(given)
                    return train(given, layer)

                stack.enter_context(replaced(layer, "_train_over_ranks", record_and_train))
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            self.has_seen = True
            call = inspect.signature(func).bind(*args, **kwargs or {})
            call.apply_defaults()
            if call.arguments["training"]:
                self.record(Arguments(call.arguments["input"], eps=call.arguments["eps"]))
        return func(*args, **kwargs or {})

    @torch.no_grad()
    def record(self, arguments: Arguments) -> None:
        """A batch norm of the layer in training."""
        self.has_seen = True
        if torch_state.current_backward() != -1:
            return
        self.num_calls += 1
        try:
            self.sums.append(self._local_sums(arguments))
        except Exception as error:  # of whatever class a strange input raises
            self.leave_out(str(error))

    def leave_out(self, why: str) -> None:
        """The layer is not measured."""
        self.why_left_out = self.why_left_out or " ".join(why.split()) or "its input cannot be read"

    def _local_sums(self, arguments: Arguments) -> Tensor:
        """The sums of each slice of this call's input."""
        if torch_private.inside_vmap():
            raise RuntimeError("an ensemble under torch.func.vmap has no batch of its own; measure one of its models")
        if dtensors.is_dtensor(arguments.input):
            raise TypeError("its input is a DTensor, whose mesh says which ranks share a batch; measure plain tensors")
        self.eps, channel_dim = arguments.eps, arguments.channel_dim
        arguments = dataclasses.replace(arguments, num_channels=self.layer.num_features, check_input_dim=None)
        if nested.is_jagged(arguments.input):
            arguments, _ = nested.unwrap(arguments)
        arguments.check()
        x, mask = arguments.input.detach(), arguments.mask
        if mask is not None:
            x, mask = masks.apply(mask, x, channel_dim)
        slices = []
        for index, part in enumerate(x.tensor_split(self.num_slices)):
            layout = Layout.of(part, channel_dim)
            num_values = None if mask is None else mask.tensor_split(self.num_slices)[index].sum()
            slices.append(watched.forward_sums(layout.dense(part), num_values, layout))
        return torch.stack(slices, dim=1)
