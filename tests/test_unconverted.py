"""Catches a module that normalises each rank's batch by F.batch_norm, or by a layer in a list, and is not named.

Also one that is named although it does not.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d, CallsFunctional, CallsSuper2d, Frozen, parametrized
from torch import Tensor, nn
from torch.nn.functional import batch_norm

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.unconverted import CALLS_FUNCTION, MAX_INSPECTED, UNREGISTERED, calls_batch_norm

Function = Callable[..., Any]

# fmt: off
MAX_NAMED: list[Function] = [  # each in one line
    lambda self, x: F.batch_norm(x, self.stored_mean, self.stored_var, None, None, self.training, 0.1, 1e-5),
    lambda _, x: batch_norm(x, None, None, training=True),
    lambda _, x: nn.functional.batch_norm(x, None, None, training=True).relu(),
    lambda _, x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, True),
    lambda self, x: F.batch_norm(x, None, None, training=False if self.a else self.b),
    lambda self, x: (lambda: F.batch_norm(x, None, None, training=self.training))(),
    lambda _, x: F.batch_norm(*x),
    lambda _, x: F.batch_norm(x, **x),
    lambda self, x: self.norm(F.batch_norm(self.batch_norm(x), None, None, training=True)),
    lambda self, x: F.batch_norm(x, self.a, self.b, training=False),  # byte code does not show what is passed
]
NOT_NAMED: list[Function] = [
    lambda self, x: self.batch_norm(x, training=True),
    lambda self, x: F.relu(self.batch_norm(x)),
    lambda self, x: self.F.batch_norm(x, None, None, training=True),
    lambda _, x: sync_batch_norm(x, None, None, training=True),
    lambda _, x: syncbn.functional.sync_batch_norm(x, None, None, training=True),
    lambda _, x: F.instance_norm(x),
]
# fmt: on
NORM = """
class Norm:
    def forward(_, x):
        import torch.nn.functional as functional
        return functional.batch_norm(x, None, None, training=True)
"""


def warning_of(model: nn.Module) -> str:
    """The one that a conversion gives."""
    with pytest.warns(UserWarning, match="syncbn did not convert") as warned:
        syncbn.convert_syncbn_model(model)
    (warning,) = warned
    return str(warning.message)


def class_with(**members: object) -> type[nn.Module]:
    return type("Norm", (nn.Module,), members)


@pytest.mark.parametrize("function", MAX_NAMED)
def test_a_class_that_calls_batch_norm(function: Function) -> None:
    """Also inherited, static and decorated."""
    kind = class_with(forward=function)
    assert calls_batch_norm(kind)
    assert calls_batch_norm(type("Child", (kind,), {"forward": None}))
    for decorate in (staticmethod, classmethod, torch.no_grad()):
        assert calls_batch_norm(class_with(helper=decorate(function)))


@pytest.mark.parametrize("function", NOT_NAMED)
def test_a_class_that_normalises_by_no_batch(function: Function) -> None:
    assert not calls_batch_norm(class_with(forward=function))


def test_a_class_without_source_is_named() -> None:
    exec(NORM, namespace := {"__name__": "program"})
    assert calls_batch_norm(namespace["Norm"])


def test_a_method_that_wraps_no_function_is_not_named() -> None:
    """Its code is unknown."""
    assert not calls_batch_norm(class_with(helper=staticmethod(functools.partial(MAX_NAMED[0], None))))


def test_a_function_that_wraps_itself_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAX_NAMED[0], "__wrapped__", MAX_NAMED[0], raising=False)
    assert not calls_batch_norm(class_with(forward=MAX_NAMED[0]))


class AttrDict(dict[str, int]):
    __getattr__ = dict.__getitem__


def test_attributes_of_a_class_are_not_asked() -> None:
    """Theirs may raise anything."""
    assert not calls_batch_norm(class_with(options=AttrDict(a=1)))


class StoresStatistics(nn.Module):
    """As BigGAN's: buffers of other names than BatchNorm's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stored_mean, self.stored_var = nn.Buffer(torch.zeros(channels)), nn.Buffer(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.stored_mean, self.stored_var, training=self.training)


class Slices(nn.Module):
    """As OFA's: calls F.batch_norm with the tensors of a layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)

    @staticmethod
    def normalise(x: Tensor, bn: nn.BatchNorm2d) -> Tensor:
        statistics = bn.running_mean[: x.shape[1]], bn.running_var[: x.shape[1]]
        return F.batch_norm(x, *statistics, training=bn.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.bn)


def test_conversion_and_summary_name_the_module_and_the_remedy() -> None:
    model = nn.ModuleDict({"stores": StoresStatistics(3), "slices": Slices(3), "bn": nn.BatchNorm2d(3)})
    model["stores"].running_mean = nn.Buffer(torch.zeros(3))  # without the call it might normalise by itself
    named = f"1 StoresStatistics (stores): {CALLS_FUNCTION}; 1 Slices (slices): {CALLS_FUNCTION}"
    assert warning_of(model) == f"syncbn did not convert these layers: {named}"
    assert [row.layer for row in syncbn.summary(model)] == ["slices.bn", "bn"]
    assert f"not synchronised: {named}" in str(syncbn.summary(model)).splitlines()
    assert syncbn.summary(model.eval()).others == ()
    assert str(syncbn.summary(model["stores"])) == f"not synchronised: 1 StoresStatistics (the model): {CALLS_FUNCTION}"


def test_a_frozen_batch_norm_is_not_named() -> None:
    """As detectron2's, which calls F.batch_norm with training=False: its weight is a buffer."""
    frozen = class_with(forward=MAX_NAMED[-1])()
    frozen.weight = nn.Buffer(torch.ones(3))
    assert not syncbn.unconverted.unsynchronised(frozen)


def test_classes_of_torch_and_converted_layers_are_not_named() -> None:
    """Pytest makes warnings errors."""
    assert not any(map(calls_batch_norm, (nn.BatchNorm2d, nn.SyncBatchNorm, CallsSuper2d, syncbn.SyncBatchNorm2d)))
    layers = [nn.BatchNorm2d(3), BatchNormAct2d(3), CallsSuper2d(3), CallsFunctional(3), Frozen(3)]
    model = nn.Sequential(*layers, parametrized(BatchNormAct2d(3)), nn.InstanceNorm2d(3), syncbn.SyncBatchNorm2d(3))
    for _ in range(2):
        assert syncbn.summary(syncbn.convert_syncbn_model(model)).others == ()
    syncbn.convert_syncbn_model(torch.fx.symbolic_trace(nn.Sequential(nn.BatchNorm2d(3))))


def test_a_traced_call_is_named() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(StoresStatistics(3)))
    assert f"1 Sequential (the model): {CALLS_FUNCTION}" in warning_of(traced)


class Arguments(dict[str, object]):
    """As that in which Lightning keeps a copy of a module's arguments."""


class Keeps(nn.Module):
    """A container that registers nothing."""

    def __init__(self, value: object) -> None:
        super().__init__()
        vars(self)["value"] = value


def test_layers_in_lists_and_dicts_are_named() -> None:
    """Each with a neighbour that is not named."""
    layer, built, frozen = nn.BatchNorm2d(3), syncbn.SyncBatchNorm(3), nn.BatchNorm2d(3).eval()
    kept = [[layer], {"a": nn.Sequential(layer)}, (3, layer), [*range(MAX_INSPECTED - 1), layer]]
    kept += [Arguments(a=layer), [nn.InstanceNorm2d(3)], {"a": built}, [frozen], [nn.SyncBatchNorm(3)], [3, None]]
    kept += ["norm", [*range(MAX_INSPECTED), layer]]
    model = nn.ModuleList([Keeps(value) for value in kept])
    named = f"4 Keeps (layer '0', layer '1', layer '2', ...): {UNREGISTERED}"
    assert warning_of(model) == f"syncbn did not convert these layers: {named}"
    assert str(syncbn.summary(model)) == f"not synchronised: {named}"
    model = nn.ModuleList([*map(copy.copy, model), layer])  # which registers it
    assert len(syncbn.summary(syncbn.convert_syncbn_model(model))) == 1
    assert syncbn.summary(model).others == ()
