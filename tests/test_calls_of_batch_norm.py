"""Catches a module that normalises each rank's batch by F.batch_norm, or by a layer in a list, and is not named.

Also one that is named although it does not.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d, CallsFunctional, CallsSuper2d, Frozen, parametrized
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.functional import batch_norm as renamed

import syncbn
from syncbn.calls_of_batch_norm import calls_batch_norm
from syncbn.functional import sync_batch_norm

CALLS = (
    "calls F.batch_norm itself; if that normalises by the batch, call syncbn.functional.sync_batch_norm in its place"
)
IN_LIST = "keeps batch norm in a plain list or dict, where no conversion finds it; use nn.ModuleList or ModuleDict"
Function = Callable[..., Any]


def in_a_handler(self: Any, x: Any, *, training: bool) -> Any:
    try:
        with x:
            return F.batch_norm(x, self.mean, self.var, training=False)
    except ValueError:
        return F.batch_norm(x, self.mean, self.var, training=training)


# fmt: off
NAMED: list[Function] = [
    lambda self, x: F.batch_norm(x, self.stored_mean, self.stored_var, None, None, self.training, 0.1, 1e-5),
    lambda _, x: F.batch_norm(x, None, None, training=True),
    lambda _, x: batch_norm(x, None, None, training=True),
    lambda _, x: renamed(x, None, None, None, None, True),
    lambda _, x: nn.functional.batch_norm(x, None, None, training=True).relu(),
    lambda _, x: torch.nn.functional.batch_norm(x, None, None, training=True),
    lambda _, x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, True),
    lambda _, x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0],
    lambda self, x: F.batch_norm(x, None, None, training=False if self.a else self.b),
    lambda self, x: F.batch_norm(x, None, None, training=self.b if self.a else False),
    lambda self, x: F.batch_norm(x, None, None, training=self.a and False, eps=self.b),
    lambda self, x: F.batch_norm(x, self.a[False], self.b[False], self.a[False], self.b[False], self.training),
    lambda self, x: F.batch_norm(x, self.a if self.b else False, None, None, None, self.training or not self.a),
    lambda _, x: F.batch_norm(*x),
    lambda _, x: F.batch_norm(x, **x),
    lambda _, x: partial(F.batch_norm, training=False)(x, None, None),  # not known
    lambda _, x: partial(F.batch_norm)(x, None, None),
    lambda _, x: [F.batch_norm(part, None, None, training=True) for part in x],
    lambda self, x: (lambda: (lambda: F.batch_norm(x, None, None, training=self.training))())(),
    lambda self, x: F.batch_norm(F.batch_norm(x, None, None, training=True), self.a, self.b),
    lambda self, x: F.batch_norm(F.batch_norm(x, self.a, self.b), None, None, training=True),
    in_a_handler,
]
NOT_NAMED: list[Function] = [
    lambda self, x: self.batch_norm(x, training=True),
    lambda _, x: x.batch_norm(x, None, None, None, None, True),
    lambda self, x: self.F.batch_norm(x, None, None, training=True),
    lambda _, x: sync_batch_norm(x, None, None, training=True),
    lambda _, x: F.instance_norm(x, None, None),
    lambda self, x: F.batch_norm(x, self.a, self.b),
    lambda self, x: F.batch_norm(x, self.a, self.b, self.a, self.b),
    lambda self, x: F.batch_norm(x, self.a, self.b, training=False),
    lambda self, x: F.batch_norm(x, self.a, self.b, self.a, self.b, False, 0.1, self.eps),
    lambda self, x: torch.batch_norm(x, self.a, self.b, self.a, self.b, False, 0.1, 1e-5, True),
    lambda self, x: F.batch_norm(training=False, input=x, running_mean=self.a, running_var=self.b),
    lambda self, x: F.batch_norm(x, self.a if x else self.b, self.a and self.b, training=False, eps=1 if x else 2),
    lambda self, x: F.batch_norm(x.a.b(x, y=3), x[1:2], x + 3, self.a if x else self.b if self else None, None, False),
    lambda self, x: [F.batch_norm(part, self.a, self.b, None, None, False).view_as(x) for part in x],
    lambda self, x: x + F.batch_norm(F.batch_norm(x, self.a, self.b), self.a, self.b, training=False),
]
# fmt: on


def warning_of(model: nn.Module) -> str:
    """The one that a conversion gives."""
    with pytest.warns(UserWarning, match="syncbn did not convert") as warned:
        syncbn.convert_syncbn_model(model)
    (warning,) = warned
    return str(warning.message)


def class_with(**members: object) -> type[nn.Module]:
    return type("Norm", (nn.Module,), members)


@pytest.mark.parametrize("function", NAMED)
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


def test_many_names_and_jumps_over_many_instructions() -> None:
    """Python then puts EXTENDED_ARG before instructions."""
    names = "\n".join(f"    f{index}(c{index})" for index in range(300))
    for training in ("True", "False"):
        code = f"def forward(_, x):\n{names}\n    return F.batch_norm(x, f1 if x else f2, f3, None, None, {training})"
        exec(code, namespace := {"F": F})
        assert calls_batch_norm(class_with(forward=namespace["forward"])) == (training == "True")


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
    named = f"1 StoresStatistics (stores): {CALLS}; 1 Slices (slices): {CALLS}"
    assert warning_of(model) == f"syncbn did not convert these layers: {named}"
    assert [row.layer for row in syncbn.summary(model)] == ["slices.bn", "bn"]
    assert f"not synchronised: {named}" in str(syncbn.summary(model)).splitlines()
    assert syncbn.summary(model.eval()).others == ()
    assert str(syncbn.summary(model["stores"])) == f"not synchronised: 1 StoresStatistics (the model): {CALLS}"


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
    assert f"1 Sequential (the model): {CALLS}" in warning_of(traced)


class Arguments(dict[str, object]):
    """As that in which Lightning keeps a copy of a module's arguments."""


class Keeps(nn.Module):
    """A container that registers nothing."""

    def __init__(self, value: object) -> None:
        super().__init__()
        vars(self)["value"] = value


def test_layers_in_lists_and_dicts_are_named() -> None:
    """Each beside one that is not."""
    layer, built, frozen = nn.BatchNorm2d(3), syncbn.SyncBatchNorm(3), nn.BatchNorm2d(3).eval()
    circle: list[object] = [nn.BatchNorm2d(3)]
    circle.append(circle)
    kept = [[layer], OrderedDict(a=layer), ({"a": [nn.Sequential(layer)]},), layer, circle]
    kept += [
        Arguments(a=layer),
        [nn.InstanceNorm2d(3)],
        {"a": built},
        [frozen],
        [nn.SyncBatchNorm(3)],
        [3, None],
        "norm",
    ]
    model = nn.ModuleList([Keeps(value) for value in kept])
    named = f"5 Keeps (layer '0', layer '1', layer '2', ...): {IN_LIST}"
    assert warning_of(model) == f"syncbn did not convert these layers: {named}"
    assert str(syncbn.summary(model)) == f"not synchronised: {named}"
    model = nn.ModuleList([*map(copy.copy, model), layer, circle[0]])  # which registers both
    assert len(syncbn.summary(syncbn.convert_syncbn_model(model))) == 2
    assert syncbn.summary(model).others == ()
