"""Tests that a conversion names, with a remedy, the modules that call F.batch_norm or keep layers in plain lists."""

import copy
import functools
import re
from collections import OrderedDict
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

Forward = Callable[..., Any]


def import_locally(_: nn.Module, x: Tensor) -> Tensor:
    import torch.nn.functional as functional

    return functional.batch_norm(x, None, None, training=True)


# fmt: off
CALLS: list[Forward] = [
    lambda self, x: F.batch_norm(x, self.stored_mean, self.stored_var, None, None, self.training, 0.1, 1e-5),
    lambda _, x: batch_norm(x, None, None, training=True),
    lambda _, x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, True),
    lambda self, x: (lambda: F.batch_norm(x, None, None, training=self.training))(),
    lambda _, x: F.batch_norm(*x, **x),
    lambda self, x: self.norm(F.batch_norm(self.batch_norm(x), None, None, training=True)),
    lambda self, x: F.batch_norm(x, self.a, self.b, training=False),  # byte code does not show values of arguments
    import_locally,
]
OTHER_CALLS: list[Forward] = [
    lambda self, x: self.batch_norm(x, training=True),
    lambda self, x: F.relu(self.batch_norm(x)),
    lambda self, x: self.F.batch_norm(x, None, None, training=True),
    lambda _, x: sync_batch_norm(x, None, None, training=True),
    lambda _, x: F.instance_norm(x),
]
# fmt: on


def module_class(**members: object) -> type[nn.Module]:
    return type("Norm", (nn.Module,), members)


@pytest.mark.parametrize("forward", CALLS)
def test_a_method_that_may_call_batch_norm_is_found(forward: Forward) -> None:
    """The method may also be inherited, static or decorated."""
    parent = module_class(forward=forward)
    assert calls_batch_norm(parent)
    assert calls_batch_norm(type("Child", (parent,), {"forward": None}))
    for decorate in (staticmethod, classmethod, torch.no_grad()):
        assert calls_batch_norm(module_class(helper=decorate(forward)))


@pytest.mark.parametrize("member", [*OTHER_CALLS, staticmethod(functools.partial(CALLS[0], None))])
def test_other_members_of_a_class_are_ignored(member: object) -> None:
    assert not calls_batch_norm(module_class(member=member))


def test_conversion_and_summary_name_the_modules_that_call_batch_norm() -> None:
    """BigGAN's has statistics in buffers, OFA's the tensors of a layer. detectron2's frozen batch norm, whose weight
    is a buffer, is not named."""
    layer_class = module_class(forward=CALLS[0])
    model = nn.ModuleDict({name: layer_class() for name in ("stores", "slices", "frozen")} | {"bn": nn.BatchNorm2d(3)})
    model["stores"].running_mean, model["slices"].bn = nn.Buffer(torch.zeros(3)), nn.BatchNorm2d(3)
    model["frozen"].weight = nn.Buffer(torch.ones(3))
    named = f"2 Norm (stores, slices): {CALLS_FUNCTION}"
    with pytest.warns(UserWarning, match=f"^syncbn did not convert these layers: {re.escape(named)}$"):
        syncbn.convert_syncbn_model(model)
    assert [row.layer for row in syncbn.summary(model)] == ["slices.bn", "bn"]
    assert syncbn.summary(model).others == (f"not synchronised: {named}",)
    assert syncbn.summary(model.eval()).others == ()
    assert str(syncbn.summary(model["stores"])) == f"not synchronised: 1 Norm (the model): {CALLS_FUNCTION}"


def test_a_graph_of_torch_fx_with_a_call_is_named() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(module_class(forward=CALLS[1])()))
    with pytest.warns(UserWarning, match=re.escape(f"1 Sequential (the model): {CALLS_FUNCTION}")):
        syncbn.convert_syncbn_model(traced)


def test_layers_that_are_converted_are_not_named() -> None:
    """pytest turns a warning into an error."""
    assert not any(map(calls_batch_norm, (nn.BatchNorm2d, nn.SyncBatchNorm, CallsSuper2d, syncbn.SyncBatchNorm2d)))
    layers = [nn.BatchNorm2d(3), BatchNormAct2d(3), CallsSuper2d(3), CallsFunctional(3), Frozen(3)]
    model = nn.Sequential(*layers, parametrized(BatchNormAct2d(3)), nn.InstanceNorm2d(3), syncbn.SyncBatchNorm2d(3))
    for _ in range(2):
        assert syncbn.summary(syncbn.convert_syncbn_model(model)).others == ()
    syncbn.convert_syncbn_model(torch.fx.symbolic_trace(nn.Sequential(nn.BatchNorm2d(3))))


class Holder(nn.Module):
    """Keeps a value in an attribute, without registering the value's modules."""

    def __init__(self, value: object) -> None:
        super().__init__()
        vars(self)["value"] = value


def test_layers_in_plain_lists_and_dicts_are_named() -> None:
    """Subclasses of dict are skipped, because Lightning keeps a copy of a module's arguments in one."""
    layer, built, frozen = nn.BatchNorm2d(3), syncbn.SyncBatchNorm(3), nn.BatchNorm2d(3).eval()
    values = [[layer], {"a": nn.Sequential(layer)}, (3, layer), [*range(MAX_INSPECTED - 1), layer]]
    values += [OrderedDict(a=layer), [nn.InstanceNorm2d(3)], {"a": built}, [frozen], [nn.SyncBatchNorm(3)], [3, None]]
    values += ["norm", [*range(MAX_INSPECTED), layer]]
    model = nn.ModuleList([Holder(value) for value in values])
    named = f"4 Holder (layer '0', layer '1', layer '2', ...): {UNREGISTERED}"
    with pytest.warns(UserWarning, match=f"^syncbn did not convert these layers: {re.escape(named)}$"):
        syncbn.convert_syncbn_model(model)
    assert str(syncbn.summary(model)) == f"not synchronised: {named}"
    model = nn.ModuleList([*map(copy.copy, model), layer])  # registers the layer
    assert len(syncbn.summary(syncbn.convert_syncbn_model(model))) == 1
    assert syncbn.summary(model).others == ()
