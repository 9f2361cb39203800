"""Tests what a conversion changes, what a revert restores, and how warnings and summaries name what is not converted.

distributed/test_conversion.py trains converted models on ranks.
"""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from subclasses import BatchNormAct2d, CallsSuper2d, Frozen, SubclassOfSyncBatchNorm, parametrized
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

import syncbn
from syncbn import unconverted
from syncbn.convert import FORWARD_REPLACED, LOST_OPTIONS, NEVER_CONVERTED
from syncbn.functional import sync_batch_norm

# Conversions.


@pytest.mark.parametrize(
    ("original", "converted"),
    [
        (nn.BatchNorm1d, syncbn.SyncBatchNorm1d),
        (nn.BatchNorm2d, syncbn.SyncBatchNorm2d),
        (nn.BatchNorm3d, syncbn.SyncBatchNorm3d),
        (nn.SyncBatchNorm, syncbn.SyncBatchNorm),
    ],
)
def test_a_conversion_changes_only_the_class_and_a_revert_restores_it(
    original: type[nn.Module], converted: type[nn.Module]
) -> None:
    layer = original(3).eval()
    attributes = dict(vars(layer))
    assert syncbn.convert_syncbn_model(layer) is layer
    assert type(layer) is converted
    # DistributedDataParallel refuses nn.SyncBatchNorm on CPUs, so the converted layer is not an instance of it.
    assert isinstance(layer, original) == (original is not nn.SyncBatchNorm)
    # nn.SyncBatchNorm has an attribute `process_group`. In syncbn's classes `process_group` is a property.
    for name in attributes.keys() - {"process_group"}:
        assert vars(layer)[name] is attributes[name]
    syncbn.revert_syncbn_model(layer)
    assert type(layer) is original
    assert vars(layer) == attributes


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_the_first_forward_of_a_lazy_layer_is_that_of_syncbn() -> None:
    layer = syncbn.convert_syncbn_model(nn.LazyBatchNorm2d(momentum=0.2))
    assert type(syncbn.revert_syncbn_model(layer)) is nn.LazyBatchNorm2d
    syncbn.convert_syncbn_model(layer, process_group=1)  # groups of one rank
    layer(torch.randn(4, 3, 2, 2))
    assert type(layer) is syncbn.SyncBatchNorm2d
    assert (layer.process_group, layer.num_features, layer.momentum) == (1, 3, 0.2)
    assert syncbn.summary(layer)[0].last_step == "not synchronised"
    assert type(syncbn.revert_syncbn_model(layer)) is nn.BatchNorm2d


class WithoutForward(_BatchNorm):
    """Defines no forward, and derives from the base class of nn.BatchNorm1d, 2d and 3d."""

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim == 4


class Registered(CallsSuper2d):
    """Each subclass must be defined with an argument `key`, as in a class that registers its subclasses."""

    def __init_subclass__(cls, *, key: str) -> None:
        pass


@pytest.mark.parametrize(
    "original",
    [BatchNormAct2d(3), CallsSuper2d(3), Frozen(3), WithoutForward(3), Registered(3), parametrized(BatchNormAct2d(3))],
    ids=lambda layer: type(layer).__name__,
)
def test_subclasses_keep_their_behaviour(original: nn.Module) -> None:
    """In one process a converted layer has the outputs, buffers and attributes of the original, also after a revert."""
    layer = copy.deepcopy(original)
    assert syncbn.convert_syncbn_model(layer, process_group=2) is layer
    assert layer.process_group == 2
    x = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(layer(x), original(x))
    torch.testing.assert_close(layer.state_dict(), original.state_dict())
    expected = original.eval()(x)
    torch.testing.assert_close(layer.eval()(x), expected)
    assert syncbn.summary(layer)[0].last_step == "not synchronised"
    syncbn.revert_syncbn_model(layer)
    assert type(layer).__name__ == type(original).__name__
    assert vars(layer).keys() == vars(original).keys()
    torch.testing.assert_close(layer(x), expected)


class RefusesNewClass(nn.BatchNorm2d):
    """Raises AttributeError if a conversion changes its class."""

    @property
    def __class__(self) -> type:
        return RefusesNewClass


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (nn.LazyBatchNorm2d(), ValueError, "'2' is lazy and counts channels in dim 1"),
        (RefusesNewClass(3), AttributeError, "has no setter"),
        (SubclassOfSyncBatchNorm(3), UserWarning, "did not convert"),  # pytest turns the warning into an error.
    ],
)
def test_an_error_leaves_the_model_unchanged(layer: nn.Module, error: type[Exception], message: str) -> None:
    """The third layer cannot be converted, so the first two layers do not change either."""
    model = nn.Sequential(nn.BatchNorm2d(3), syncbn.SyncBatchNorm(3), layer)
    before = [(type(module), dict(vars(module))) for module in model]
    with pytest.raises(error, match=message):
        syncbn.convert_syncbn_model(model, process_group=1, channel_last=True)
    assert [(type(module), vars(module)) for module in model] == before


# Reverts.


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("target", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_torchs_synchronised_layers_are_reverted_to_the_target_class(
    target: type[nn.Module], is_converted: bool
) -> None:
    """The model is as it was before torch's convert_sync_batchnorm (pytorch#41081, yolov5#1018)."""
    original = nn.Sequential(target(3, momentum=None), target(3, affine=False))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(original))
    if is_converted:
        syncbn.convert_syncbn_model(model, process_group=1)
    tensors = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    assert syncbn.revert_syncbn_model(model, target) is model
    assert repr(model) == repr(original)
    assert [(type(layer), vars(layer).keys()) for layer in model] == [(target, vars(each).keys()) for each in original]
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == tensors


def test_a_target_class_applies_to_nn_sync_batch_norm_only() -> None:
    model = nn.Sequential(syncbn.convert_syncbn_model(nn.BatchNorm1d(3)), SubclassOfSyncBatchNorm(3))
    syncbn.revert_syncbn_model(model, nn.BatchNorm2d)
    assert [type(layer) for layer in model] == [nn.BatchNorm1d, SubclassOfSyncBatchNorm]


def test_one_warning_names_layers_that_are_not_reverted_or_that_lose_an_option() -> None:
    model = nn.ModuleDict({name: nn.BatchNorm1d(3) for name in ("plain", "relu", "channels", "replaced")})
    model["built"] = syncbn.SyncBatchNorm(3)
    syncbn.convert_syncbn_model(model)
    model["relu"].fuse_relu = model["channels"].channel_last = True
    model["replaced"].forward = lambda x: x
    with pytest.warns(UserWarning, match="^syncbn: ") as warnings:
        syncbn.revert_syncbn_model(model)
    assert [str(warning.message) for warning in warnings] == [
        f"syncbn: {LOST_OPTIONS['fuse_relu']} (relu); {LOST_OPTIONS['channel_last']} (channels); "
        f"{FORWARD_REPLACED} (replaced); {NEVER_CONVERTED} (built)"
    ]
    for name in ("plain", "relu", "channels"):
        assert vars(model[name]).keys() == vars(nn.BatchNorm1d(3)).keys()
    assert type(model["replaced"]) is syncbn.SyncBatchNorm1d
    del model["replaced"].forward  # the remedy of the warning
    assert type(syncbn.revert_syncbn_model(model["replaced"])) is nn.BatchNorm1d


# Layers that are not converted.


def with_attributes(module: nn.Module, **attributes: object) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class HeteroBatchNorm(nn.Module):
    """Like torch_geometric's HeteroBatchNorm, which has running statistics for each type of node."""


class CallsBatchNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is", "ignore:.*LeafSpec:FutureWarning")  # torch warns.
def test_a_warning_and_the_summary_name_the_layers_that_are_not_converted() -> None:
    """The warning is at the line that called syncbn. The layers do not change."""
    exported = torch.export.export(nn.Sequential(nn.BatchNorm2d(3)), (torch.ones(2, 3, 2, 2),)).module()
    statistics = nn.Buffer(torch.zeros(2, 3))
    cases = {
        "torch": (with_attributes(nn.SyncBatchNorm(3), forward=lambda x: x), unconverted.OVERRIDDEN),
        "derived": (SubclassOfSyncBatchNorm(3), unconverted.COMMUNICATES),
        "replaced": (with_attributes(nn.BatchNorm2d(3), forward=lambda x: x), unconverted.OVERRIDDEN),
        "conflicting": (
            with_attributes(BatchNormAct2d(3), channel_last="an attribute of the user"),
            "has attributes whose names syncbn uses; rename channel_last",
        ),
        "custom": (with_attributes(HeteroBatchNorm(), running_mean=statistics), unconverted.CUSTOM),
        "calls": (with_attributes(CallsBatchNorm(), running_mean=statistics), unconverted.CALLS_FUNCTION),
        "list": (with_attributes(nn.Module(), layers=[nn.BatchNorm2d(3)]), unconverted.UNREGISTERED),
        "scripted": (torch.jit.script(nn.BatchNorm2d(3)), unconverted.EXPORTED),
        "exported": (exported, unconverted.CALLS_FUNCTION),  # Its code calls torch.ops.aten.batch_norm.
    }
    model = nn.ModuleDict({name: layer for name, (layer, _) in cases.items()})
    cases["exported.0"] = exported.get_submodule("0"), unconverted.EXPORTED  # It holds the statistics.
    before = [(type(layer), dict(vars(layer))) for layer in model.children()]
    with pytest.warns(UserWarning, match="syncbn did not convert") as warnings:
        syncbn.convert_syncbn_model(model)
    assert [warning.filename for warning in warnings] == [__file__]
    assert [(type(layer), vars(layer)) for layer in model.children()] == before
    described = [f"1 {type(layer).__name__} ({name}): {remedy}" for name, (layer, remedy) in cases.items()]
    assert str(warnings[0].message) == f"syncbn did not convert these layers: {'; '.join(described)}"
    by_torch, local = described[:2], described[2:]  # The first two layers are instances of nn.SyncBatchNorm.
    assert str(syncbn.summary(model)) == (
        f"not synchronised: {'; '.join(local)}\n"
        f"synchronised by torch's nn.SyncBatchNorm, on GPUs only: {'; '.join(by_torch)}"
    )


def test_frozen_synchronised_and_instance_norms_are_not_named() -> None:
    """pytest turns a warning into an error. convert_sync_batchnorm is torch's name of the conversion."""
    layers = [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), BatchNormAct2d(3), CallsSuper2d(3), Frozen(3)]
    layers += [parametrized(BatchNormAct2d(3)), nn.InstanceNorm2d(3, track_running_stats=True)]
    # detectron2's FrozenBatchNorm2d has its weight in a buffer.
    frozen = with_attributes(CallsBatchNorm(), weight=nn.Buffer(torch.ones(3)), running_mean=nn.Buffer(torch.zeros(3)))
    model = nn.Sequential(*layers, syncbn.SyncBatchNorm2d(3), frozen)
    for convert in (syncbn.SyncBatchNorm.convert_sync_batchnorm, syncbn.convert_syncbn_model):
        assert syncbn.summary(convert(model)).others == ()
    # A module traced by torch.fx is not named either: its layers can be converted.
    syncbn.convert_syncbn_model(torch.fx.symbolic_trace(nn.Sequential(nn.BatchNorm2d(3))))


def test_the_summary_of_a_converted_model_names_layers_that_another_converter_has_added() -> None:
    """It does not name HeteroBatchNorm, whose forward may call syncbn. In evaluation it names no layer."""
    custom = with_attributes(HeteroBatchNorm(), running_mean=nn.Buffer(torch.zeros(2, 3)))
    model = nn.Sequential(nn.BatchNorm2d(3), custom)
    with pytest.warns(UserWarning, match="1 HeteroBatchNorm"):
        syncbn.convert_syncbn_model(model)
    assert syncbn.summary(model).others == ()
    # timm's SplitBatchNorm2d has an attribute `aux_bn`.
    model.append(with_attributes(CallsSuper2d(3), aux_bn=nn.ModuleList([nn.BatchNorm2d(3)])))
    remedy = unconverted.CONVERTIBLE
    expected = f"not synchronised: 1 CallsSuper2d (layer '2'): {remedy}; 1 BatchNorm2d (2.aux_bn.0): {remedy}"
    assert syncbn.summary(model).others == (expected,)
    assert syncbn.summary(model.eval()).others == ()


def test_the_summary_of_a_model_without_synchronised_layers_has_no_table() -> None:
    local, without_layers = str(syncbn.summary(nn.BatchNorm2d(3))), str(syncbn.summary(nn.Linear(2, 2)))
    assert local == f"not synchronised: 1 BatchNorm2d (the model): {unconverted.CONVERTIBLE}"
    assert without_layers == "no synchronised layers: the model has no batch-norm layer that trains"


def test_modules_that_keep_layers_in_plain_lists_and_dicts_are_named() -> None:
    """Subclasses of dict are skipped, because Lightning keeps a copy of a module's arguments in a subclass of dict."""
    layer, limit = nn.BatchNorm2d(3), unconverted.MAX_INSPECTED
    named = [[layer], (3, layer), {"a": nn.Sequential(layer)}, [*range(limit - 1), layer]]
    not_inspected = [[*range(limit), layer], OrderedDict(a=layer), [3, None], "a string"]
    not_local = [[nn.InstanceNorm2d(3)], [nn.BatchNorm2d(3).eval()], [nn.SyncBatchNorm(3)], [syncbn.SyncBatchNorm(3)]]
    model = nn.ModuleList([with_attributes(nn.Module(), value=value) for value in named + not_inspected + not_local])
    expected = f"4 Module (layer '0', layer '1', layer '2', ...): {unconverted.UNREGISTERED}"
    with pytest.warns(UserWarning, match=f"^syncbn did not convert these layers: {re.escape(expected)}$"):
        syncbn.convert_syncbn_model(model)
    model.append(layer)  # The model now registers the layer, so the conversion finds it.
    assert syncbn.summary(syncbn.convert_syncbn_model(model)).others == ()


# Byte code is searched for names such as F.batch_norm, so a call with training=False counts.
CALLS: list[Callable[..., Any]] = [
    lambda self, x: F.batch_norm(x, self.stored_mean, self.stored_var, training=self.training),
    lambda self, x: F.batch_norm(x, self.stored_mean, self.stored_var, training=False),
    lambda _, x: batch_norm(x, None, None, training=True),
    lambda _, x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, True),
    lambda _, x: (lambda: F.batch_norm(x, None, None, training=True))(),
    lambda _, x: functional.batch_norm(x, None, None, training=True),
]
OTHER_CALLS: list[Callable[..., Any]] = [
    lambda self, x: self.batch_norm(x, training=True),
    lambda self, x: F.relu(self.batch_norm(x)),
    lambda _, x: sync_batch_norm(x, None, None, training=True),
    lambda _, x: F.instance_norm(x),
]


@pytest.mark.parametrize("method", CALLS + OTHER_CALLS)
def test_a_class_is_found_if_and_only_if_a_method_may_call_batch_norm_of_torch(method: Callable[..., Any]) -> None:
    """The method may be inherited, static or decorated."""
    methods = method, staticmethod(method), classmethod(method), torch.no_grad()(method)
    classes = [type("Norm", (nn.Module,), {"method": method}) for method in methods]
    for kind in (*classes, type("Child", (classes[0],), {})):
        assert unconverted.calls_batch_norm(kind) == (method in CALLS)
