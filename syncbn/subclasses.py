"""The classes that a conversion creates for subclasses of nn.BatchNorm, and the mode that replaces torch's batch norm.

For a subclass X of nn.BatchNorm2d, `synchronised_class` creates a class that inherits from X first, so that everything
that X defines stays in effect:

    SyncX -> _SyncSubclass -> X -> ... -> SyncBatchNorm2d -> SyncBatchNorm -> nn.BatchNorm2d -> ...

In X, `super().forward(...)` calls SyncBatchNorm.forward. If X calls F.batch_norm or torch.batch_norm itself, the
forward of X runs inside `ReplaceBatchNormMode`, which passes each call to `_batch_norm`. A call that passes one of the
layer's tensors becomes batch norm over all ranks; any other call stays torch's. The same holds for a forward that a
program has set on torch's own class, as in nn.BatchNorm2d.forward = ....
"""

from abc import ABCMeta
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from syncbn import tracing
from syncbn.arguments import NO_DIM_CHECK, PER_CHANNEL_NAMES, Options, Tensors, check
from syncbn.layer import UNKNOWN_NUM_RANKS, SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d, add_name
from syncbn.ranks.groups import GroupSpec, size
from syncbn.ranks.sites import layer_in_forward
from syncbn.step import train
from syncbn.texts import warn_once
from syncbn.torch_batch_norm import plain_batch_norm
from syncbn.torch_internals import OPERATORS, TORCH_FORWARD, constant_in_graphs, have_same_base, is_compiling, note_call

Result = TypeVar("Result")

SYNC_CLASSES: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}

# Warnings about the forward of a converted subclass that does not synchronise.
NO_BATCH_NORM_CALL = (
    "calls neither super().forward nor F.batch_norm in training. If it uses the statistics of this rank's batch, let "
    "it call one of the two, or syncbn.functional.sync_batch_norm. A layer that communicates by itself needs no change."
)
NO_LAYER_TENSOR = (
    "calls F.batch_norm with none of the layer's weight, bias, running_mean and running_var. If that call uses the "
    "statistics of the batch, pass one of the four or a slice of it, not a copy such as weight.float(), or call "
    "syncbn.functional.sync_batch_norm."
)

_class_cache = dict(SYNC_CLASSES)
# The arguments of torch.batch_norm, in its order, which differs from that of F.batch_norm.
TORCH_ARGUMENTS = "input", "weight", "bias", *PER_CHANNEL_NAMES[:2], "training", "momentum", "eps", "cudnn_enabled"


def synchronised_class(original: type[nn.Module]) -> type[SyncBatchNorm]:
    """Return the synchronised class for layers of class `original`. It is a subclass of SyncBatchNorm and, except for
    nn.SyncBatchNorm, of `original`."""
    if original in _class_cache:
        return _class_cache[original]
    namespace: Any = {"__doc__": original.__doc__, "__module__": original.__module__, "_syncbn_original": original}
    ours = next((SYNC_CLASSES[base] for base in original.__mro__ if base in SYNC_CLASSES), SyncBatchNorm)
    if issubclass(original, LazyModuleMixin) and original.cls_to_become is not None:
        ours = namespace["cls_to_become"] = synchronised_class(original.cls_to_become)
        # torch changes the class of a lazy layer during its first forward, where super() of _SyncSubclass would fail.
        namespace["forward"] = SyncBatchNorm.forward
    bases = _SyncSubclass, original, ours
    _class_cache[original] = make_class(type(original), f"Sync{original.__name__}", bases, namespace)
    return _class_cache[original]


def make_class(metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    """Create a class without calling `metaclass`, which may register each class or need arguments. For subclasses of
    ABCMeta, ABCMeta.__new__ is called, because it gives each class the cache that `isinstance` needs."""
    return (ABCMeta if issubclass(metaclass, ABCMeta) else type).__new__(metaclass, name, bases, namespace)


class _SyncSubclass(SyncBatchNorm):
    """The base of the classes created at run time. In the forward of the original class, torch's batch norm is
    synchronised. Instances are copyable and picklable, although pickle cannot import these classes."""

    _syncbn_original: type[nn.Module]

    def __init_subclass__(cls) -> None:
        """Hide the __init_subclass__ of the original, which may register each class or need arguments."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return _new_instance, (self._syncbn_original,), self.__getstate__()  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._syncbn_original.forward is TORCH_FORWARD:  # Otherwise the original defines a forward.
            return super().forward(*args, **kwargs)
        # torch.fx may pass one Proxy as all arguments of the traced module.
        first = args if isinstance(args, Proxy) else next(iter((*args, *kwargs.values())), None)
        if isinstance(first, Proxy):
            return tracing.create_leaf(self, first.tracer, args, kwargs)
        return run_forward(self, super().forward, *args, **kwargs)


def run_forward(layer: SyncBatchNorm, forward: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call `forward`, a forward of the layer that is neither torch's nor syncbn's. In it torch's batch norm is
    synchronised. In training, warn if it calls no batch norm."""
    layer._current_options()  # If an option has changed, this resets the site and with it the signature.
    replaced = ReplaceBatchNormMode(layer)
    if is_compiling() or not layer.training:
        note_call(not layer.training)  # Evaluation needs no call of batch norm.
        with replaced:
            output = forward(*args, **kwargs)
        is_known = note_call(True)
    else:
        vars(layer)["_synchronised_ranks"] = UNKNOWN_NUM_RANKS
        token = layer_in_forward.set(layer)
        try:
            with replaced:
                output = forward(*args, **kwargs)
        finally:
            layer_in_forward.reset(token)
        is_known = layer._synchronised_ranks != UNKNOWN_NUM_RANKS or replaced.saw_operators
    # Without a synchronised submodule, nothing in this layer can have synchronised.
    if not is_known and sum(isinstance(module, SyncBatchNorm) for module in layer.modules()) == 1:
        _warn_on_several_ranks(type(layer), NO_BATCH_NORM_CALL, layer._process_group)
    return output


class ReplaceBatchNormMode(TorchFunctionMode):
    """Replaces F.batch_norm and torch.batch_norm by `_batch_norm` of `layer` inside the context."""

    # True after compiled code has run. Compiled code calls operators and does not set `_synchronised_ranks`.
    saw_operators = False

    def __init__(self, layer: SyncBatchNorm) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Callable[..., Result], types: Collection[type],
        args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None,
    ) -> Result | Tensor:  # fmt: skip
        if func is nn.functional.batch_norm:
            return _batch_norm(self.layer, *args, **(kwargs or {}))
        if func is torch.batch_norm:
            return _batch_norm(self.layer, **dict(zip(TORCH_ARGUMENTS, args, strict=False)), **(kwargs or {}))
        if isinstance(func, OPERATORS) and not is_compiling():  # A graph must not set attributes.
            self.saw_operators = True
        return func(*args, **(kwargs or {}))


def _batch_norm(
    layer: SyncBatchNorm, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """Replace torch's batch norm in a forward of `layer`. If the call belongs to the layer, apply `channel_last` and
    `fuse_relu`, and synchronise in training."""
    tensors = Tensors(input, None, weight, bias, running_mean, running_var)
    own, options = layer._current_options(), Options(momentum, eps, process_group=layer._process_group)
    belongs = training or own.channel_last is not False or own.relu is not False
    if belongs := belongs and _belongs_to_layer(layer, tensors):
        options = replace(own, momentum=momentum, eps=eps, num_channels=None, check_input_dim=NO_DIM_CHECK)
    try:
        if training and layer.training:
            if belongs:
                return (layer._train_override or train)(tensors, options, layer)[0]
            _warn_on_several_ranks(type(layer), NO_LAYER_TENSOR, layer._process_group)
        if is_compiling():
            note_call(True)
        elif layer.training:
            vars(layer)["_synchronised_ranks"] = layer._synchronised_ranks or 1
        try:
            x = input.movedim(-1, 1) if options.channel_dim == -1 else input
            y = plain_batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps, cudnn_enabled)
            y = y.relu() if options.relu is True else y
            return y.movedim(1, -1) if options.channel_dim == -1 else y  # A view only if the caller asked for one.
        except (IndexError, RuntimeError):  # torch's error may lack values and a remedy. `check` raises a better error.
            check(tensors, options, layer)
            raise
    except (RuntimeError, TypeError, ValueError) as error:
        add_name(error, layer)
        raise


def _belongs_to_layer(layer: SyncBatchNorm, tensors: Tensors) -> bool:
    """Return whether a call of F.batch_norm passes the layer's weight, bias, running_mean or running_var, or a view of
    one; True if the layer has none of the four.

    Do not compare shapes. Instance norm calls F.batch_norm with an input of shape (1, N * C, ...), which has the C
    channels of the layer on a rank with N = 1, and not on the other ranks.
    """
    # The property of a parametrized tensor computes a new tensor at each access.
    names = [name for name in PER_CHANNEL_NAMES if not hasattr(type(layer), name)]
    own = [tensor for name in names if isinstance(tensor := getattr(layer, name, None), Tensor)]
    passed = [tensor for tensor in tensors.per_channel().values() if isinstance(tensor, Tensor)]
    return not own or any(have_same_base(tensor, other) for tensor in passed for other in own)


@constant_in_graphs
def _warn_on_several_ranks(kind: type[SyncBatchNorm], problem: str, spec: GroupSpec) -> None:
    """If the group has several ranks, warn once that layers of class `kind` do not synchronise."""
    if size(spec) > 1:
        original: type[nn.Module] = getattr(kind, "_syncbn_original", kind)
        warn_once(f"syncbn is not synchronising: {original.__qualname__}.forward {problem}")


def _new_instance(original: type[nn.Module]) -> SyncBatchNorm:
    return object.__new__(synchronised_class(original))
