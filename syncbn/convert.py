"""Swaps the batch-norm layers of a model for synchronised ones and back, by swapping the class of each layer.

The module object stays, with its parameters, buffers, hooks, attributes and training flag, and so do all references to
it: a model may hold one layer at several places.

The synchronised class of one of torch's own BatchNorm classes is ours. For a subclass X a class is made that inherits
from X first and then from ours, so that everything that X defines stays:

    SyncX -> X -> ... -> SyncBatchNorm2d -> SyncBatchNorm -> nn.BatchNorm2d -> ...

X's `super().forward(...)` calls ours. If X calls F.batch_norm itself, the mode ReplaceBatchNormMode around its forward
replaces each call that passes a tensor of the layer by the batch norm of all ranks.
"""

import contextlib
import sys
from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping
from typing import Any, SupportsIndex, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from syncbn import inputs
from syncbn.arguments import PER_CHANNEL_NAMES, Options, Tensors, check
from syncbn.fallback import plain_batch_norm
from syncbn.layer import UNKNOWN_NUM_RANKS, SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d, add_name
from syncbn.ranks.groups import GroupSpec, ProcessGroupLike, size, to_spec, to_torch
from syncbn.ranks.reduction import make_groups
from syncbn.ranks.sites import layer_in_forward
from syncbn.step import train
from syncbn.texts import escape_surrogates, warn, warn_once
from syncbn.torch_internals import OPERATORS, constant_in_graphs, have_same_base, is_compiling
from syncbn.unconverted import (
    ADDED_ATTRIBUTES,
    CONVERTIBLE,
    check_module,
    describe_layers,
    shorten_names,
    unparametrized_class,
    unsynchronised,
)

Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")
# A layer, its new class and its new attributes.
Change: TypeAlias = tuple[nn.Module, type[nn.Module], Mapping[str, object]]

NEVER_CONVERTED = "these layers were built as syncbn layers and stay: build them as nn.BatchNorm1d, 2d or 3d"
OVERRIDDEN = "a forward that was set on these layers hides their class's, and they stay: delete it and revert again"
# What a layer loses in a revert, by its option.
LOST_OPTIONS = {
    "fuse_relu": "these layers have lost their relu: put an nn.ReLU behind each",
    "channel_last": "these layers take the channels in dim 1 again",
}


def convert_syncbn_model(model: Model, process_group: ProcessGroupLike = None, channel_last: bool = False) -> Model:
    """Make each batch-norm layer of `model` a synchronised layer, in place, and return `model`.

    The name is apex's. Only the class of a layer changes: nn.BatchNorm1d/2d/3d and nn.SyncBatchNorm become ours, a
    subclass becomes a class that keeps its behaviour and gains synchronisation (see the top of convert.py), a
    parametrization stays, a lazy layer is synchronised from its first forward.
    Each synchronised layer of `model`, also one that was built so, gets its dotted name in `model`: errors call it by
    this name, and ranks compare the names, so convert the same module on every rank. Converting again renews the names
    and sets the group, if one is given, of layers that are synchronised already, and changes nothing else.
    What cannot be converted is left alone and named in one warning, by class, with what to do: subclasses of
    nn.SyncBatchNorm, scripted and exported layers, layers that have an attribute of a name that ours need or a forward
    set on them (layer.forward = ...), other modules with running statistics of their own, modules whose class calls
    F.batch_norm, and those that keep layers in plain lists or dicts.

    Args:
        model: any module, also a single batch-norm layer. Convert before wrapping it:
            DistributedDataParallel(convert_syncbn_model(model)).
        process_group: as in `SyncBatchNorm`. With an int, and torch.distributed initialised, a collective of ALL ranks
            of the default group. None keeps the group that a layer already has, of nn.SyncBatchNorm or ours;
            `layer.process_group = None` resets it.
        channel_last: the layers' inputs have the channels in the last dim.

    Raises:
        ValueError, TypeError: a bad `process_group`; not a module; `channel_last` with a lazy layer, which counts
            channels in dim 1.
        RuntimeError: a layer is wrapped by FSDP2.

    After an error the model is as it was.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> type(convert_syncbn_model(model)[1]).__name__
    'SyncBatchNorm2d'
    """
    check_module(model)
    local_layers, spec = unsynchronised(model), to_spec(process_group)
    others = [local for local in local_layers if local.remedy != CONVERTIBLE]
    changes: list[Change] = []
    for name, layer in [(local.name, local.layer) for local in local_layers if local.remedy == CONVERTIBLE]:
        _require_no_fsdp(name, layer, "convert_syncbn_model")
        if channel_last and isinstance(layer, LazyModuleMixin):
            raise ValueError(f"{name!r} is lazy and counts channels in dim 1; run a forward before channel_last=True")
        # An nn.SyncBatchNorm holds its group itself, which could be neither copied nor pickled.
        new_spec = to_spec(vars(layer).get("process_group")) if spec is None else spec
        original = unparametrized_class(layer)
        added = {"_original_class": original, "_process_group": new_spec, "channel_last": channel_last}
        changes.append((layer, synchronised_class(original), added))
    if others:  # before any change, as a warning may be made an error
        warn(f"syncbn did not convert these layers: {describe_layers(others)}")
    make_groups(spec)
    synchronised = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    _apply(changes)
    _set_names(model)
    if spec is not None:
        for layer in synchronised:
            vars(layer)["_process_group"] = spec
    return model


def revert_syncbn_model(model: Model, target: type[_BatchNorm] | None = None) -> Model:
    """Give every layer that `convert_syncbn_model` converted its original class back, in place, and return `model`.

    Statistics and parameters are those that training left. Layers that were built as syncbn layers have no original
    class and stay. One warning names the layers that compute something else then, as they had `fuse_relu=True` or
    `channel_last=True`, those that stay because a forward was set on them, and, with a `target`, others that stay.

    Args:
        model: any module, also a single layer.
        target: what each nn.SyncBatchNorm becomes, one that `convert_syncbn_model` has converted or that torch's
            converter has made: nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d. It does not tell which it was, and
            they differ in the inputs that they take; where a model has several, revert its parts one by one. None
            leaves it an nn.SyncBatchNorm. Its subclasses stay.

    Raises:
        ValueError, TypeError: another `target`; not a module.
        RuntimeError: a layer is wrapped by FSDP2, or the process group of one that becomes an nn.SyncBatchNorm does not
            exist.

    After an error the model is as it was.

    >>> model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> type(revert_syncbn_model(model, nn.BatchNorm2d)[1]).__name__
    'BatchNorm2d'
    """
    check_module(model)
    if target not in (None, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        raise ValueError(f"target must be nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or None, got {target!r}")
    changes: list[Change] = []
    warnings: dict[str, list[str]] = {}  # what to warn of, and the layers
    for name, layer in model.named_modules():
        new_class = vars(layer).get("_original_class", unparametrized_class(layer))
        if new_class is nn.SyncBatchNorm and target is not None:
            new_class = target
        if new_class is unparametrized_class(layer):
            if target is not None and isinstance(layer, SyncBatchNorm):
                warnings.setdefault(NEVER_CONVERTED, []).append(name)
            continue
        if "forward" in vars(layer):
            warnings.setdefault(OVERRIDDEN, []).append(name)
            continue
        _require_no_fsdp(name, layer, "revert_syncbn_model")
        if issubclass(new_class, LazyModuleMixin) and not isinstance(layer, LazyModuleMixin):
            new_class = new_class.cls_to_become
        # An nn.SyncBatchNorm holds its group itself. Looking it up may raise, so it comes before any change.
        is_torchs = new_class is nn.SyncBatchNorm
        changes.append((layer, new_class, {"process_group": to_torch(layer._process_group)} if is_torchs else {}))
        for option, lost in LOST_OPTIONS.items():
            if vars(layer).get(option):
                warnings.setdefault(lost, []).append(name)
    if warnings:
        warn(f"syncbn: {'; '.join(f'{what} ({shorten_names(names)})' for what, names in warnings.items())}")
    _apply(changes)
    return model


def _set_names(model: nn.Module) -> None:
    """Note on each synchronised layer its dotted name in `model`, by which ranks compare their layers and errors call
    it. What DistributedDataParallel and torch.compile add to names is left out; a single layer keeps its name."""
    root = model
    while isinstance(root, nn.parallel.DistributedDataParallel) or "_orig_mod" in root._modules:
        root = next(root.children())
    for name, layer in root.named_modules():
        path = ".".join(part for part in name.split(".") if part not in ("", "_orig_mod"))
        if path and isinstance(layer, SyncBatchNorm):
            vars(layer)["_syncbn_name"] = type(root).__name__, escape_surrogates(path)


def _apply(changes: list[Change]) -> None:
    """Set the new class and attributes of each layer. A class that parametrize has put on top is made again on top of
    the new class. After an error all layers are as they were.

    The layer's __setattr__ is not called, as it may refuse.
    """
    with contextlib.ExitStack() as undo:
        for layer, new_class, attributes in changes:
            undo.callback(_set, layer, type(layer), dict(vars(layer)))
            kept = {name: value for name, value in vars(layer).items() if name not in ADDED_ATTRIBUTES}
            if unparametrized_class(layer) is not type(layer):
                class_name = f"Parametrized{new_class.__name__}"
                new_class = make_class(type(new_class), class_name, (new_class,), dict(vars(type(layer))))
            _set(layer, new_class, {**kept, **attributes})
        undo.pop_all()


def _set(layer: nn.Module, new_class: type[nn.Module], attributes: dict[str, object]) -> None:
    object.__setattr__(layer, "__class__", new_class)
    vars(layer).clear()
    vars(layer).update(attributes)


def _require_no_fsdp(name: str, module: nn.Module, caller: str) -> None:
    """**Raises** RuntimeError if fully_shard has given the module a class of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and nobody can have wrapped a module without it
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        raise RuntimeError(f"{name!r} is already wrapped by fully_shard; call {caller} before fully_shard")


SYNC_CLASSES: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}

# What a warning says about the forward of a converted subclass that does not synchronise.
NO_BATCH_NORM_CALL = (
    "calls neither super().forward nor F.batch_norm. If it normalises by its batch, let it call one of them, or "
    "syncbn.functional.sync_batch_norm."
)
NO_LAYER_TENSOR = (
    "calls F.batch_norm with none of the layer's weight, bias, running_mean and running_var. If that normalises by the "
    "batch, let it pass one of them or a slice of one, not a copy such as weight.float(), or let it call "
    "syncbn.functional.sync_batch_norm."
)

_class_cache = dict(SYNC_CLASSES)  # and the classes made so far


def synchronised_class(original: type[nn.Module]) -> type[SyncBatchNorm]:
    """The class that an instance of `original` gets: a subclass of ours and, except for nn.SyncBatchNorm, of it."""
    if original in _class_cache:
        return _class_cache[original]
    namespace = {"__doc__": original.__doc__, "__module__": original.__module__, "_syncbn_original": original}
    ours = next((SYNC_CLASSES[base] for base in original.__mro__ if base in SYNC_CLASSES), SyncBatchNorm)
    if issubclass(original, nn.modules.lazy.LazyModuleMixin) and original.cls_to_become is not None:
        ours = namespace["cls_to_become"] = synchronised_class(original.cls_to_become)  # after the first forward
    mixin = _SyncSubclass if original.forward is nn.BatchNorm1d.forward else _SyncSubclassWithForward
    _class_cache[original] = make_class(type(original), f"Sync{original.__name__}", (mixin, original, ours), namespace)
    return _class_cache[original]


def make_class(metaclass: type, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
    """Make a class without calling the metaclass, which may register each class or need arguments.

    ABCMeta is the exception: it gives each class a cache for `isinstance`.
    """
    return (ABCMeta if issubclass(metaclass, ABCMeta) else type).__new__(metaclass, name, bases, namespace)


class _SyncSubclass(SyncBatchNorm):
    """Makes instances of a made class copyable and picklable: pickle cannot import a class made at run time."""

    _syncbn_original: type[nn.Module]

    def __init_subclass__(cls) -> None:
        """Hide the original's hook, which may register each class or need arguments."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return _new_instance, (self._syncbn_original,), self.__getstate__()


class _SyncSubclassWithForward(_SyncSubclass):
    """Runs the original's forward, in which F.batch_norm normalises over all ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # One Proxy may stand for all arguments of the traced module.
        first = args if isinstance(args, Proxy) else next(iter((*args, *kwargs.values())), None)
        if isinstance(first, Proxy):
            return inputs.create_leaf(self, first.tracer, args, kwargs)
        self._current_options()  # forgets the layer's signature if a setting has changed
        replaced = ReplaceBatchNormMode(self)
        if not self.training or is_compiling():
            with replaced:
                return super().forward(*args, **kwargs)
        attributes, outer = vars(self), layer_in_forward.set(self)
        attributes["_synchronised_ranks"] = UNKNOWN_NUM_RANKS
        try:
            with replaced:
                output = super().forward(*args, **kwargs)
        finally:
            layer_in_forward.reset(outer)
        if self._synchronised_ranks != UNKNOWN_NUM_RANKS or replaced.saw_operators:
            return output
        _, *parts = self.modules()
        if not any(isinstance(part, SyncBatchNorm) for part in parts):  # which may have synchronised in its place
            attributes["_synchronised_ranks"] = 1
            _warn_on_several_ranks(self._syncbn_original.__qualname__, NO_BATCH_NORM_CALL, self._process_group)
        return output


class ReplaceBatchNormMode(TorchFunctionMode):
    """Within the context F.batch_norm normalises as in the forward of `layer`."""

    saw_operators = False  # a compiled part of the forward calls them, and leaves no note on the layer

    def __init__(self, layer: _SyncSubclass) -> None:
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
    layer: _SyncSubclass, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """F.batch_norm in the forward of `layer`: in training over all ranks of its group, if the call belongs to it."""
    tensors = Tensors(input, None, weight, bias, running_mean, running_var)
    options = Options(momentum, eps, process_group=layer._process_group)
    try:
        if training and layer.training:
            if _belongs_to_layer(layer, tensors):
                train_layer = train if layer._train_override is None else layer._train_override
                return train_layer(tensors, options, layer)[0]
            _warn_on_several_ranks(layer._syncbn_original.__qualname__, NO_LAYER_TENSOR, layer._process_group)
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
    held = [name for name in PER_CHANNEL_NAMES if not hasattr(type(layer), name)]  # a parametrization makes a property
    own = [tensor for name in held if isinstance(tensor := getattr(layer, name, None), Tensor)]
    passed = [tensor for tensor in tensors.per_channel().values() if isinstance(tensor, Tensor)]
    return not own or any(have_same_base(tensor, other) for tensor in passed for other in own)


@constant_in_graphs
def _warn_on_several_ranks(kind: str, problem: str, spec: GroupSpec) -> None:
    """Warn once if several ranks would synchronise the layer."""
    if size(spec) > 1:
        warn_once(f"syncbn is not synchronising: {kind}.forward {problem}")


def _new_instance(original: type[nn.Module]) -> SyncBatchNorm:
    return object.__new__(synchronised_class(original))
