"""Records, on this rank, the sums of the inputs that one layer normalises in training."""

import contextlib
import dataclasses
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from syncbn.arguments import Options, Tensors, num_channels_of
from syncbn.checks import check
from syncbn.comm.groups import GroupSpec, to_spec
from syncbn.convert import kind_of
from syncbn.inputs import dtensors
from syncbn.inputs.unwrapping import expanded_mask, unwrap
from syncbn.kernels.interface import SIGNATURE_NUMBERS, Kind
from syncbn.kernels.select import general_kernels
from syncbn.layer import SyncBatchNorm
from syncbn.layout import Layout
from syncbn.statistics import to_float64
from syncbn.synchronised_classes import BatchNormReplaced
from syncbn.tools.replace import replace
from syncbn.torch_internals.state import current_backward, inside_vmap


class Recorder:
    """Keeps the sums of each input that one layer gives to F.batch_norm or to syncbn in training.

    Subclasses may rearrange the input of the module first, so a mode, active in the layer's forward, sees F.batch_norm.
    Inside torch's synchronised layer nothing can be seen: there the input of the module counts, as long as the forward
    is torch's own. A recorder raises nothing, as the training goes on and the other ranks do.
    """

    def __init__(self, name: str, layer: _BatchNorm, spec: GroupSpec, num_slices: int) -> None:
        """`spec` is the group to compare; None takes the layer's own."""
        self.name, self.layer, self.num_slices = name, layer, num_slices
        if spec is None and isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)):
            spec = to_spec(layer.process_group)
        self.spec, self.eps = spec, layer.eps
        self.num_calls = 0  # in training mode
        self.sums: list[Tensor] = []  # for each call (2C + 1, num_slices), packed as in statistics.py
        self.why_left_out = ""
        self.has_seen = False  # a batch norm in the current forward

    def attach(self, undo: contextlib.ExitStack) -> None:
        """Records each batch norm that the layer computes in training, until `undo` ends."""
        layer, original = self.layer, self.layer.forward

        def forward(called: nn.Module, /, *args: Any, **options: Any) -> Any:
            if called is not layer:  # a copy of it, made within the block
                return type(called).forward(called, *args, **options)
            if not layer.training:
                return original(*args, **options)
            if type(layer).forward is nn.SyncBatchNorm.forward:
                (x,) = (*args, *options.values())
                self._record(Tensors(x), Options(eps=layer.eps))
                return original(*args, **options)
            self.has_seen = False
            with BatchNormReplaced(self._batch_norm):
                output = original(*args, **options)
            if not self.has_seen:
                self._leave_out(
                    f"the forward of its class {kind_of(layer)} calls neither super().forward nor F.batch_norm, or is "
                    "derived from nn.SyncBatchNorm's, in which nothing is seen"
                )
            return output

        replace(layer, "forward", MethodType(forward, layer), undo)
        if isinstance(layer, SyncBatchNorm):
            train = layer._train_over_ranks

            def record_and_train(tensors: Tensors, options: Options, layer: SyncBatchNorm) -> tuple[Tensor, Tensor]:
                self._record(tensors, options)
                return train(tensors, options, layer)

            replace(layer, "_train_over_ranks", record_and_train, undo)

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        """F.batch_norm in the forward of the layer."""
        self.has_seen = True
        if training:
            self._record(Tensors(input), Options(eps=eps))
        return nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    @torch.no_grad()
    def _record(self, tensors: Tensors, options: Options) -> None:
        """Keeps the sums of a batch norm of the layer in training."""
        self.has_seen = True
        if current_backward() != -1:
            return
        self.num_calls += 1
        try:
            self.sums.append(self._local_sums(tensors, options))
        except Exception as error:  # of whatever class a strange input raises
            self._leave_out(str(error))

    def _leave_out(self, why: str) -> None:
        """Notes why the layer cannot be measured, the first time."""
        self.why_left_out = self.why_left_out or " ".join(why.split()) or "its input cannot be read"

    def _local_sums(self, tensors: Tensors, options: Options) -> Tensor:
        """The sums of each slice of this call's input."""
        if inside_vmap():
            raise RuntimeError("an ensemble under torch.func.vmap has no batch of its own; measure one of its models")
        if dtensors.is_dtensor(tensors.input):
            raise TypeError("its input is a DTensor, whose mesh says which ranks share a batch; measure plain tensors")
        self.eps, channel_dim = options.eps, options.channel_dim
        options = dataclasses.replace(options, num_channels=num_channels_of(self.layer), check_input_dim=None)
        tensors, options, _ = unwrap(tensors, options)
        check(tensors, options, self.layer)
        x, mask = tensors.input.detach(), tensors.mask
        if mask is not None:
            mask = expanded_mask(mask, x, channel_dim)
            x = torch.where(mask, x, 0)
        sums = torch.stack([_sums(part, channel_dim) for part in x.tensor_split(self.num_slices)], dim=1)
        if mask is not None:
            sums[-1] = to_float64(torch.stack([part.sum() for part in mask.tensor_split(self.num_slices)]))
        return sums


def _sums(x: Tensor, channel_dim: int) -> Tensor:
    layout = Layout.of(x, channel_dim)
    dense = layout.dense(x)
    return general_kernels(Kind(layout, dense.dtype, dense.device), dense).forward_sums(dense)[0][:-SIGNATURE_NUMBERS]
