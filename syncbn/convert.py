"""Swaps the batch-norm layers of a model for synchronised ones and back, by swapping the class of each layer.

A layer keeps its identity, parameters, buffers, hooks, attributes and training flag, so all references to it stay
valid, also if a model holds one layer in several places.

nn.BatchNorm1d, 2d and 3d become SyncBatchNorm1d, 2d and 3d. For a subclass X a new class inherits from X first, so that
everything that X defines stays in effect:

    SyncX -> X -> ... -> SyncBatchNorm2d -> SyncBatchNorm -> nn.BatchNorm2d -> ...

In X, `super().forward(...)` calls SyncBatchNorm.forward. If X calls F.batch_norm or torch.batch_norm itself,
`ReplaceBatchNormMode` turns each call that passes one of the layer's tensors into batch norm over all ranks. The same
holds for a forward that a program has set on torch's own class, as in nn.BatchNorm2d.forward = ....
"""

import contextlib
import sys
from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from syncbn import tracing, unconverted
from syncbn.arguments import PER_CHANNEL_NAMES, Options, Tensors, check, check_module
from syncbn.layer import UNKNOWN_NUM_RANKS, SyncBatchNorm, SyncBatchNorm1d, SyncBatchNorm2d, SyncBatchNorm3d, add_name
from syncbn.ranks.groups import GroupSpec, ProcessGroupLike, make_groups, size, to_spec, to_torch
from syncbn.ranks.sites import layer_in_forward
from syncbn.step import train
from syncbn.texts import escape_surrogates, warn, warn_once
from syncbn.torch_batch_norm import plain_batch_norm
from syncbn.torch_internals import OPERATORS, TORCH_FORWARD, constant_in_graphs, have_same_base, is_compiling, note_call

Model = TypeVar("Model", bound=nn.Module)
Result = TypeVar("Result")
# A layer, its new class and its new attributes.
Change: TypeAlias = tuple[nn.Module, type[nn.Module], Mapping[str, object]]

NEVER_CONVERTED = "these layers were not reverted: they were built as syncbn layers; build nn.BatchNorm1d, 2d or 3d"
FORWARD_REPLACED = "these layers were not reverted: layer.forward was replaced; delete layer.forward and revert again"
# Warnings about options that nn.BatchNorm does not have.
LOST_OPTIONS = {
    "fuse_relu": "these layers have lost their relu: put an nn.ReLU after each layer",
    "channel_last": "these layers take the channels in dim 1 again: permute their inputs and outputs",
}


def convert_syncbn_model(model: Model, process_group: ProcessGroupLike = None, channel_last: bool = False) -> Model:
    """Make each batch-norm layer of `model` a synchronised layer, in place, and return `model`. The name is apex's.

    Only the class of a layer changes. nn.BatchNorm1d, 2d and 3d become SyncBatchNorm1d, 2d and 3d, and nn.SyncBatchNorm
    becomes SyncBatchNorm. The new class of a subclass keeps all that the subclass defines (see the top of convert.py).
    Parametrizations stay. A lazy layer synchronises from its first forward on.

    Each synchronised layer, including those that were built as SyncBatchNorm, stores its dotted name in `model`. Errors
    contain the name, and ranks compare names, so convert the same module on every rank. Converting again updates the
    names and, if `process_group` is not None, the groups of synchronised layers, and changes nothing else.

    One warning lists, by class and with a remedy, what was not converted: subclasses of nn.SyncBatchNorm; scripted and
    exported layers; layers with an attribute whose name syncbn uses, or whose forward was replaced (layer.forward =
    ...); other modules that have running statistics; modules that call F.batch_norm, or that keep batch-norm layers in
    plain lists or dicts.

    Args:
        model: any module, also a single batch-norm layer. Convert before wrapping:
            DistributedDataParallel(convert_syncbn_model(model)).
        process_group: as in `SyncBatchNorm`. If an int is given and torch.distributed is initialised, the call is a
            collective over ALL ranks of the default group. With None, an nn.SyncBatchNorm or SyncBatchNorm keeps its
            group; `layer.process_group = None` resets the group.
        channel_last: the inputs of the converted layers have the channels in the last dim.

    Raises:
        TypeError: `model` is not a module; `process_group` has a wrong type.
        ValueError: `process_group` is invalid; `channel_last` is given for a lazy layer, which infers C from dim 1.
        RuntimeError: a layer is wrapped by FSDP2's fully_shard.

    An error leaves the model unchanged.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> type(convert_syncbn_model(model)[1]).__name__
    'SyncBatchNorm2d'
    """
    check_module(model)
    local_layers, spec = unconverted.unsynchronised(model), to_spec(process_group)
    others = [local for local in local_layers if local.remedy != unconverted.CONVERTIBLE]
    changes: list[Change] = []
    for name, layer in [(local.name, local.layer) for local in local_layers if local.remedy == unconverted.CONVERTIBLE]:
        _require_no_fsdp(name, layer, "convert_syncbn_model")
        if channel_last and isinstance(layer, LazyModuleMixin):
            raise ValueError(f"{name!r} is lazy and counts channels in dim 1; run a forward before channel_last=True")
        # An nn.SyncBatchNorm holds a ProcessGroup, which can be neither copied nor pickled; a GroupSpec can be both.
        new_spec = to_spec(vars(layer).get("process_group")) if spec is None else spec
        original = unconverted.unparametrized_class(layer)
        added = {"_original_class": original, "_process_group": new_spec, "channel_last": channel_last}
        changes.append((layer, synchronised_class(original), added))
    if others:  # A warning may be turned into an error, so it comes before any change.
        warn(f"syncbn did not convert these layers: {unconverted.describe_layers(others)}")
    make_groups(spec)
    synchronised = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    _apply(changes)
    _set_names(model)
    if spec is not None:
        for layer in synchronised:
            vars(layer)["_process_group"] = spec
    return model


def revert_syncbn_model(model: Model, target: type[_BatchNorm] | None = None) -> Model:
    """Restore the original class of each layer that `convert_syncbn_model` converted, in place, and return `model`.

    Parameters and statistics stay. One warning lists the layers that were not reverted, because they were built as
    syncbn layers and have no original class, or because their forward was replaced (layer.forward = ...); and the
    layers that now compute something else, because they had `fuse_relu=True` or `channel_last=True`.

    Args:
        model: any module, also a single layer.
        target: nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d, the class for each nn.SyncBatchNorm, whether or not
            `convert_syncbn_model` has converted the layer. An nn.SyncBatchNorm does not record its original class, and
            the three classes accept different numbers of dims. If a model needs several classes, revert its parts one
            by one. With None, a converted nn.SyncBatchNorm becomes an nn.SyncBatchNorm again. Subclasses of
            nn.SyncBatchNorm stay.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `target` is another class.
        RuntimeError: a layer is wrapped by FSDP2's fully_shard; a layer becomes an nn.SyncBatchNorm, and its process
            group does not exist.

    An error leaves the model unchanged.

    >>> model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    >>> type(revert_syncbn_model(model, nn.BatchNorm2d)[1]).__name__
    'BatchNorm2d'
    """
    check_module(model)
    if target not in (None, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        raise ValueError(f"target must be nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or None, got {target!r}")
    changes: list[Change] = []
    warnings: dict[str, list[str]] = {}  # For each text, the names of its layers.
    for name, layer in model.named_modules():
        new_class = vars(layer).get("_original_class", unconverted.unparametrized_class(layer))
        if new_class is nn.SyncBatchNorm and target is not None:
            new_class = target
        if new_class is unconverted.unparametrized_class(layer):
            if isinstance(layer, SyncBatchNorm):
                warnings.setdefault(NEVER_CONVERTED, []).append(name)
            continue
        if "forward" in vars(layer):
            warnings.setdefault(FORWARD_REPLACED, []).append(name)
            continue
        _require_no_fsdp(name, layer, "revert_syncbn_model")
        if issubclass(new_class, LazyModuleMixin) and not isinstance(layer, LazyModuleMixin):
            new_class = new_class.cls_to_become
        # An nn.SyncBatchNorm holds a ProcessGroup. `to_torch` may raise, so it is called before any change.
        needs_group = new_class is nn.SyncBatchNorm
        changes.append((layer, new_class, {"process_group": to_torch(layer._process_group)} if needs_group else {}))
        for option, lost in LOST_OPTIONS.items():
            if vars(layer).get(option):
                warnings.setdefault(lost, []).append(name)
    if warnings:
        warn(f"syncbn: {'; '.join(f'{what} ({unconverted.shorten_names(names)})' for what, names in warnings.items())}")
    _apply(changes)
    return model


def _set_names(model: nn.Module) -> None:
    """Store in each synchronised layer its dotted name in `model`, without the parts that DistributedDataParallel and
    torch.compile add. If `model` itself is a layer, it keeps its name."""
    root = model
    while isinstance(root, nn.parallel.DistributedDataParallel) or "_orig_mod" in root._modules:
        root = next(root.children())
    for name, layer in root.named_modules():
        path = ".".join(part for part in name.split(".") if part not in ("", "_orig_mod"))
        if path and isinstance(layer, SyncBatchNorm):
            vars(layer).update(_syncbn_name=(type(root).__name__, escape_surrogates(path)), _syncbn_site=None)


def _apply(changes: list[Change]) -> None:
    """Set the new class and attributes of each layer, or of none if an error occurs. The class that parametrize creates
    for a layer is created again, as a subclass of the new class."""
    with contextlib.ExitStack() as undo:
        for layer, new_class, attributes in changes:
            undo.callback(_set, layer, type(layer), dict(vars(layer)))
            kept = {name: value for name, value in vars(layer).items() if name not in unconverted.ADDED_ATTRIBUTES}
            if unconverted.unparametrized_class(layer) is not type(layer):
                class_name = f"Parametrized{new_class.__name__}"
                new_class = make_class(type(new_class), class_name, (new_class,), dict(vars(type(layer))))
            _set(layer, new_class, {**kept, **attributes})
        undo.pop_all()


def _set(layer: nn.Module, new_class: type[nn.Module], attributes: dict[str, object]) -> None:
    object.__setattr__(layer, "__class__", new_class)
    vars(layer).clear()
    vars(layer).update(attributes)


def _require_no_fsdp(name: str, module: nn.Module, caller: str) -> None:
    """**Raises** RuntimeError if fully_shard has wrapped the module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # The import is slow. Without it no module is wrapped.
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        raise RuntimeError(f"{name!r} is already wrapped by fully_shard; call {caller} before fully_shard")


SYNC_CLASSES: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}

# Warnings about the forward of a converted subclass that does not synchronise.
NO_BATCH_NORM_CALL = (
    "calls neither super().forward nor F.batch_norm in training. If it uses the statistics of this rank's batch, let "
    "it call one of the two, or syncbn.functional.sync_batch_norm. A layer that communicates by itself needs nothing."
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
    if issubclass(original, nn.modules.lazy.LazyModuleMixin) and original.cls_to_become is not None:
        ours = namespace["cls_to_become"] = synchronised_class(original.cls_to_become)
        namespace["forward"] = SyncBatchNorm.forward  # During the first forward the class of the layer changes.
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
    belongs = (training or layer.channel_last or layer.fuse_relu) and _belongs_to_layer(layer, tensors)
    channel_dim, relu = (-1 if layer.channel_last else 1, layer.fuse_relu) if belongs else (1, False)
    options = Options(momentum, eps, channel_dim, relu, process_group=layer._process_group)
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
            x = input.movedim(channel_dim, 1)
            y = plain_batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps, cudnn_enabled)
            return (y.relu() if relu else y).movedim(1, channel_dim)
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
