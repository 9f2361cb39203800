"""Makes the synchronised class of each BatchNorm class: ours for torch's own, for a subclass one that is made from it.

A made class stands before the original and before ours, so that everything the original defines stays:

    SyncX -> X -> ... -> SyncBatchNorm2d -> SyncBatchNorm -> nn.BatchNorm2d -> ...

X's `super().forward(...)` calls ours. Where X calls F.batch_norm itself, a TorchFunctionMode around its forward
replaces that by the batch norm of all ranks.
"""

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy
from torch.overrides import TorchFunctionMode

from syncbn import argument_errors
from syncbn.arguments import Arguments
from syncbn.functional import SYNC_BATCH_NORM
from syncbn.layer import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d
from syncbn.program import warn_once
from syncbn.roads import traced
from syncbn.step import plain_batch_norm
from syncbn.torch_internals.state import is_compiling

OURS: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}

# A conversion adds these attributes to a layer; a revert takes them away.
ADDED = (
    "_original_class", "_process_group", "channel_last", "fuse_relu", "_synchronised_ranks", "_call_site",
    "_train_over_ranks",
)  # fmt: skip

_classes = dict(OURS)  # and those made so far


def class_of(layer: nn.Module) -> type[Any]:
    """The layer's class, without the one that torch.nn.utils.parametrize makes for each layer on top of it."""
    return type(layer).__bases__[0] if nn.utils.parametrize.is_parametrized(layer) else type(layer)


def synchronised_class(original: type[nn.Module]) -> type[SyncBatchNorm]:
    """The class that an instance of `original` gets: a subclass of it, but for nn.SyncBatchNorm, and of ours."""
    if original in _classes:
        return _classes[original]
    namespace: dict[str, Any] = {"__doc__": original.__doc__, "__module__": original.__module__}
    namespace["_syncbn_original"] = original
    if issubclass(original, nn.modules.lazy.LazyModuleMixin) and original.cls_to_become is not None:
        # the class of the layer after its first forward
        ours = namespace["cls_to_become"] = synchronised_class(original.cls_to_become)
    else:
        ours = next((OURS[base] for base in original.__mro__ if base in OURS), SyncBatchNorm)
    mixin = _Made if original.forward is nn.BatchNorm1d.forward else _KeepsForward
    _classes[original] = type(f"Sync{original.__name__}", (mixin, original, ours), namespace)
    return _classes[original]


class _Made(SyncBatchNorm):
    """Lets instances of a made class be copied and pickled: pickle cannot import a class made at run time."""

    _syncbn_original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _empty_instance, (self._syncbn_original,), self.__getstate__()


class _KeepsForward(_Made):
    """For an original with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # One Proxy may stand for all arguments of the traced module.
        first: Any = args if isinstance(args, Proxy) else next(iter((*args, *kwargs.values())), None)
        if isinstance(first, Proxy):
            return traced.leaf(self, first.tracer, args, kwargs)
        trains = self.training and not is_compiling()
        if trains:
            SYNC_BATCH_NORM._synchronised_ranks = None
        with _SynchroniseBatchNorm(self):
            output = super().forward(*args, **kwargs)
        if trains and SYNC_BATCH_NORM._synchronised_ranks is not None:  # it has called sync_batch_norm
            self._synchronised_ranks = SYNC_BATCH_NORM._synchronised_ranks
        if trains and self._synchronised_ranks is None:
            warn_once(
                f"syncbn is not synchronising: {self._syncbn_original.__qualname__}.forward calls neither "
                "super().forward nor F.batch_norm. Let it call one of them, or syncbn.functional.sync_batch_norm."
            )
        return output


class _SynchroniseBatchNorm(TorchFunctionMode):
    """Within the context F.batch_norm(training=True) of a layer in training is over all ranks of its group."""

    def __init__(self, layer: SyncBatchNorm) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.batch_norm:
            func = self.batch_norm
        return func(*args, **(kwargs or {}))

    def batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        layer, group = self.layer, self.layer._process_group
        given = Arguments(input, running_mean, running_var, weight, bias, momentum, eps, process_group=group)
        try:
            if training and layer.training:
                return layer._train_over_ranks(given, layer)[0]
            if layer.training and not is_compiling():
                layer._synchronised_ranks = 1  # the original normalises by frozen statistics
            try:
                return plain_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
            except RuntimeError:  # torch's, which may say neither values nor remedy
                given.check()
                raise
        except (RuntimeError, TypeError, ValueError) as error:
            argument_errors.raise_with_name(error, layer)


def _empty_instance(original: type[nn.Module]) -> SyncBatchNorm:
    return object.__new__(synchronised_class(original))
