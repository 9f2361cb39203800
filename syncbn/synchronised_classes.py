"""Makes the synchronised class of each BatchNorm class: ours for torch's own, for a subclass one that inherits from it.

The made class inherits from the original first and then from ours, so that everything the original defines stays:

    SyncX -> X -> ... -> SyncBatchNorm2d -> SyncBatchNorm -> nn.BatchNorm2d -> ...

X's `super().forward(...)` calls ours. If X calls F.batch_norm itself, the mode BatchNormReplaced around its forward
replaces each call that passes a tensor of the layer by the batch norm of all ranks.
"""

from abc import ABCMeta
from collections.abc import Callable, Collection
from typing import Any, SupportsIndex, TypeVar

from torch import Tensor, nn
from torch.fx import Proxy
from torch.overrides import TorchFunctionMode

from syncbn.arguments import PER_CHANNEL, Options, Tensors
from syncbn.call_stack import warn_once
from syncbn.checks import check
from syncbn.evaluation import plain_batch_norm
from syncbn.inputs import traced
from syncbn.layer import SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d, add_name
from syncbn.ranks.groups import GroupSpec, size
from syncbn.ranks.sites import layer_in_forward
from syncbn.torch_internals.autograd import have_same_base
from syncbn.torch_internals.state import OPERATORS, constant_in_graphs, is_compiling

OURS: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}

# Attributes that a conversion gives to a layer and a revert takes away: among them all that our class annotates.
# process_group, a property of ours, is an attribute of an nn.SyncBatchNorm.
ADDED = "process_group", "_original_class", "_train_over_ranks", *SyncBatchNorm.__annotations__

NOT_KNOWN = 0  # in place of the number of ranks: a step in eager mode has not noted it

# What a warning says about the forward of a converted subclass that does not synchronise.
CALLS_NONE = (
    "calls neither super().forward nor F.batch_norm. If it normalises by its batch, let it call one of them, or "
    "syncbn.functional.sync_batch_norm."
)
PASSES_NONE = (
    "calls F.batch_norm with none of the layer's weight, bias, running_mean and running_var. If that normalises by the "
    "batch, let it pass one of them or a slice of one, not a copy such as weight.float(), or let it call "
    "syncbn.functional.sync_batch_norm."
)

Result = TypeVar("Result")

_classes = dict(OURS)  # and the classes made so far


def class_of(layer: nn.Module) -> type[nn.Module]:
    """The layer's class, below the one that torch.nn.utils.parametrize makes for each layer."""
    return type(layer).__bases__[0] if nn.utils.parametrize.is_parametrized(layer) else type(layer)


def synchronised_class(original: type[nn.Module]) -> type[SyncBatchNorm]:
    """The class that an instance of `original` gets: a subclass of ours and, except for nn.SyncBatchNorm, of it."""
    if original in _classes:
        return _classes[original]
    namespace = {"__doc__": original.__doc__, "__module__": original.__module__, "_syncbn_original": original}
    ours = next((OURS[base] for base in original.__mro__ if base in OURS), SyncBatchNorm)
    if issubclass(original, nn.modules.lazy.LazyModuleMixin) and original.cls_to_become is not None:
        ours = namespace["cls_to_become"] = synchronised_class(original.cls_to_become)  # after the first forward
    mixin = _Made if original.forward is nn.BatchNorm1d.forward else _KeepsForward
    _classes[original] = make_class(type(original), f"Sync{original.__name__}", (mixin, original, ours), namespace)
    return _classes[original]


def make_class(metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    """Make a class without calling the metaclass, which may register each class or need arguments.

    ABCMeta is the exception: it gives each class a cache for `isinstance`.
    """
    return (ABCMeta if issubclass(metaclass, ABCMeta) else type).__new__(metaclass, name, bases, namespace)


class _Made(SyncBatchNorm):
    """Makes instances of a made class copyable and picklable: pickle cannot import a class made at run time."""

    _syncbn_original: type[nn.Module]

    def __init_subclass__(cls) -> None:
        """Hide the original's hook, which may register each class or need arguments."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return _empty_instance, (self._syncbn_original,), self.__getstate__()


class _KeepsForward(_Made):
    """Runs the original's forward, in which F.batch_norm normalises over all ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # One Proxy may stand for all arguments of the traced module.
        first = args if isinstance(args, Proxy) else next(iter((*args, *kwargs.values())), None)
        if isinstance(first, Proxy):
            return traced.leaf(self, first.tracer, args, kwargs)
        self._current_options()  # forgets the layer's signature if a setting has changed
        replaced = BatchNormReplaced(self)
        if not self.training or is_compiling():
            with replaced:
                return super().forward(*args, **kwargs)
        note, outer = vars(self), layer_in_forward.set(self)
        note["_synchronised_ranks"] = NOT_KNOWN
        try:
            with replaced:
                output = super().forward(*args, **kwargs)
        finally:
            layer_in_forward.reset(outer)
        if self._synchronised_ranks != NOT_KNOWN or replaced.saw_operators:
            return output
        _, *parts = self.modules()
        if not any(isinstance(part, SyncBatchNorm) for part in parts):  # which may have synchronised in its place
            note["_synchronised_ranks"] = 1
            _warn_on_several_ranks(self._syncbn_original.__qualname__, CALLS_NONE, self._process_group)
        return output


class BatchNormReplaced(TorchFunctionMode):
    """Within the context F.batch_norm normalises as in the forward of `layer`."""

    saw_operators = False  # a compiled part of the forward calls them, and leaves no note on the layer

    def __init__(self, layer: _Made) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Callable[..., Result], types: Collection[type],
        args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None,
    ) -> Result | Tensor:  # fmt: skip
        if func is nn.functional.batch_norm:
            return _batch_norm(self.layer, *args, **(kwargs or {}))
        if isinstance(func, OPERATORS) and not is_compiling():  # a graph may not set attributes
            self.saw_operators = True
        return func(*args, **(kwargs or {}))


def _batch_norm(
    layer: _Made, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """F.batch_norm in the forward of `layer`: in training over all ranks of its group, if the call belongs to it."""
    tensors = Tensors(input, None, weight, bias, running_mean, running_var)
    options = Options(momentum, eps, process_group=layer._process_group)
    try:
        if training and layer.training:
            if _belongs_to_layer(layer, tensors):
                return layer._train_over_ranks(tensors, options, layer)[0]
            _warn_on_several_ranks(layer._syncbn_original.__qualname__, PASSES_NONE, layer._process_group)
        if layer.training and not is_compiling():
            vars(layer)["_synchronised_ranks"] = layer._synchronised_ranks or 1
        try:
            return plain_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        except RuntimeError:  # torch's, which may say neither values nor remedy
            check(tensors, options, layer)
            raise
    except (RuntimeError, TypeError, ValueError) as error:
        add_name(error, layer)
        raise


def _belongs_to_layer(layer: SyncBatchNorm, tensors: Tensors) -> bool:
    """Return whether a call of F.batch_norm passes the layer's weight, bias, running_mean or running_var, or a view of
    one; True if the layer has none of the four.

    Shapes must not decide, because they differ between ranks: instance norm of one sample has the layer's channels.
    """
    held = [name for name in PER_CHANNEL if not hasattr(type(layer), name)]  # a parametrization makes a property
    own = [tensor for name in held if isinstance(tensor := getattr(layer, name, None), Tensor)]
    passed = [tensor for tensor in tensors.per_channel().values() if isinstance(tensor, Tensor)]
    return not own or any(have_same_base(tensor, other) for tensor in passed for other in own)


@constant_in_graphs
def _warn_on_several_ranks(kind: str, problem: str, spec: GroupSpec) -> None:
    """Warn once if several ranks would synchronise the layer."""
    if size(spec) > 1:
        warn_once(f"syncbn is not synchronising: {kind}.forward {problem}")


def _empty_instance(original: type[nn.Module]) -> SyncBatchNorm:
    return object.__new__(synchronised_class(original))
