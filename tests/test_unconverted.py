"""Tests that a conversion and a summary name the modules whose batch norm is not synchronised, each with a remedy."""

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d, Frozen, SubclassOfSyncBatchNorm, parametrized
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import batch_norm

import syncbn
from syncbn import unconverted
from syncbn.functional import sync_batch_norm


class StatisticsPerType(nn.Module):
    """Has running statistics for each type of node, like torch_geometric's HeteroBatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.running_mean = nn.Buffer(torch.zeros(2, 3))
        self.weight = nn.Parameter(torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is", "ignore:.*LeafSpec:FutureWarning")  # torch warns.
def test_one_warning_names_the_layers_that_are_not_converted() -> None:
    """The warning is at the line that called syncbn. The layers do not change."""
    program = torch.export.export(nn.Sequential(nn.BatchNorm2d(3)), (torch.ones(2, 3, 2, 2),))
    layers = {
        "derived": SubclassOfSyncBatchNorm(3),
        "conflicting": BatchNormAct2d(3),
        "scripted": torch.jit.script(nn.BatchNorm2d(3)),
        "exported": program.module(),
        "custom": StatisticsPerType(),
        "replaced": nn.BatchNorm2d(3),
        "torch": nn.SyncBatchNorm(3),
    }
    model = nn.ModuleDict(layers)
    model["conflicting"].channel_last = "an attribute of the user"
    for layer in (model["replaced"], model["torch"]):
        layer.forward = layer.forward  # sets an attribute of the layer, like any replacement
    before = [(type(layer), dict(vars(layer))) for layer in layers.values()]
    with pytest.warns(UserWarning, match="syncbn did not convert") as warnings:
        syncbn.convert_syncbn_model(model)
    assert [warning.filename for warning in warnings] == [__file__]
    remedies = {
        "derived": unconverted.COMMUNICATES,
        "conflicting": "has attributes whose names syncbn uses; rename channel_last",
        "scripted": unconverted.EXPORTED,
        "exported": unconverted.CALLS_FUNCTION,  # The code of an exported model calls torch.ops.aten.batch_norm.
        "exported.0": unconverted.EXPORTED,
        "custom": unconverted.CUSTOM,
        "replaced": unconverted.OVERRIDDEN,
        "torch": unconverted.OVERRIDDEN,
    }
    described = [f"1 {type(model.get_submodule(name)).__name__} ({name}): {remedies[name]}" for name in remedies]
    assert str(warnings[0].message) == f"syncbn did not convert these layers: {'; '.join(described)}"
    assert [(type(layer), vars(layer)) for layer in layers.values()] == before


class FrozenBatchNorm2d(nn.Module):
    """Has its weight and statistics in buffers, like detectron2's FrozenBatchNorm2d."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.running_mean = nn.Buffer(torch.ones(3)), nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, torch.ones(3), self.weight)


def test_synchronised_instance_and_frozen_norms_are_not_named() -> None:
    """pytest turns a warning into an error. convert_sync_batchnorm is torch's name of the conversion."""
    layers = [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), BatchNormAct2d(3), CallsSuper2d(3), Frozen(3)]
    layers += [parametrized(BatchNormAct2d(3)), nn.InstanceNorm2d(3, track_running_stats=True)]
    model = nn.Sequential(*layers, syncbn.SyncBatchNorm2d(3), FrozenBatchNorm2d())
    for convert in (syncbn.SyncBatchNorm.convert_sync_batchnorm, syncbn.convert_syncbn_model):
        assert syncbn.summary(convert(model)).others == ()
    syncbn.convert_syncbn_model(torch.fx.symbolic_trace(nn.Sequential(nn.BatchNorm2d(3))))


def test_the_summary_names_layers_that_are_not_synchronised() -> None:
    model = nn.ModuleDict({"local": nn.BatchNorm2d(3), "torch": nn.SyncBatchNorm(3), "custom": StatisticsPerType()})
    assert str(syncbn.summary(model)) == (
        f"not synchronised: 1 BatchNorm2d (local): {unconverted.CONVERTIBLE}; "
        f"1 StatisticsPerType (custom): {unconverted.CUSTOM}\n"
        f"synchronised by torch's nn.SyncBatchNorm, on GPUs only: 1 SyncBatchNorm (torch): {unconverted.CONVERTIBLE}"
    )
    assert len(syncbn.summary(model)) == 0  # The table has rows for synchronised layers only.
    model = syncbn.convert_syncbn_model(nn.Linear(2, 2))
    assert str(syncbn.summary(model)) == "no synchronised layers: the model has no batch-norm layer that trains"


def test_the_summary_of_a_converted_model_names_layers_that_another_converter_has_added() -> None:
    """The forward of StatisticsPerType may call syncbn, so the summary of a converted model does not name the class."""
    model = nn.Sequential(nn.BatchNorm2d(3), StatisticsPerType())
    with pytest.warns(UserWarning, match="1 StatisticsPerType"):
        syncbn.convert_syncbn_model(model)
    assert syncbn.summary(model).others == ()
    split = CallsSuper2d(3)
    split.aux_bn = nn.ModuleList([nn.BatchNorm2d(3)])  # timm's SplitBatchNorm2d has this attribute.
    model.append(split)
    remedy = unconverted.CONVERTIBLE
    expected = f"not synchronised: 1 CallsSuper2d (layer '2'): {remedy}; 1 BatchNorm2d (2.aux_bn.0): {remedy}"
    assert syncbn.summary(model).others == (expected,)


# Modules that call F.batch_norm.


# The byte code of a method is searched for names such as F.batch_norm. Arguments do not count.
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


class CallsBatchNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


def test_conversion_and_summary_name_the_modules_that_call_batch_norm() -> None:
    """BigGAN's layer has its statistics in buffers. OFA's layer passes the tensors of a submodule."""
    model = nn.ModuleDict({"stored": CallsBatchNorm(), "submodule": CallsBatchNorm()})
    model["stored"].running_mean = nn.Buffer(torch.zeros(3))
    model["submodule"].bn = nn.BatchNorm2d(3)
    named = f"2 CallsBatchNorm (stored, submodule): {unconverted.CALLS_FUNCTION}"
    with pytest.warns(UserWarning, match=f"^syncbn did not convert these layers: {re.escape(named)}$"):
        syncbn.convert_syncbn_model(model)
    assert [row.layer for row in syncbn.summary(model)] == ["submodule.bn"]
    assert syncbn.summary(model).others == (f"not synchronised: {named}",)
    assert syncbn.summary(model.eval()).others == ()
    expected = f"not synchronised: 1 CallsBatchNorm (the model): {unconverted.CALLS_FUNCTION}"
    assert str(syncbn.summary(model["stored"])) == expected


# Layers in plain lists and dicts.


class Holder(nn.Module):
    """Keeps a value in an attribute. nn.Module does not register modules inside a list or dict."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def test_conversion_and_summary_name_modules_that_keep_layers_in_plain_lists_and_dicts() -> None:
    """Subclasses of dict are skipped, because Lightning keeps a copy of a module's arguments in a subclass of dict."""
    layer, limit = nn.BatchNorm2d(3), unconverted.MAX_INSPECTED
    named = [[layer], (3, layer), {"a": nn.Sequential(layer)}, [*range(limit - 1), layer]]
    not_inspected = [[*range(limit), layer], OrderedDict(a=layer), [3, None], "a string"]
    not_local = [[nn.InstanceNorm2d(3)], [nn.BatchNorm2d(3).eval()], [nn.SyncBatchNorm(3)], [syncbn.SyncBatchNorm(3)]]
    model = nn.ModuleList([Holder(value) for value in named + not_inspected + not_local])
    expected = f"4 Holder (layer '0', layer '1', layer '2', ...): {unconverted.UNREGISTERED}"
    with pytest.warns(UserWarning, match=f"^syncbn did not convert these layers: {re.escape(expected)}$"):
        syncbn.convert_syncbn_model(model)
    assert str(syncbn.summary(model)) == f"not synchronised: {expected}"
    model.append(layer)  # The model now registers the layer, so the conversion finds it.
    assert syncbn.summary(syncbn.convert_syncbn_model(model)).others == ()
