"""Tests that a conversion changes only the classes of layers, names the layers that it leaves, and can be reverted.

test_unconverted.py tests how other modules with batch norm are found, and distributed/test_conversion.py trains on
ranks.
"""

import copy
import functools
import re
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import run_text
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d, Frozen, parametrized
from torch import Tensor, nn
from torch.nn.utils import parametrize

import syncbn

# What a conversion changes.


@pytest.mark.parametrize(
    ("original", "options", "converted"),
    [
        (nn.BatchNorm1d, {"affine": False}, syncbn.SyncBatchNorm1d),
        (nn.BatchNorm2d, {"momentum": None}, syncbn.SyncBatchNorm2d),
        (nn.BatchNorm3d, {"track_running_stats": False}, syncbn.SyncBatchNorm3d),
        (nn.SyncBatchNorm, {}, syncbn.SyncBatchNorm),
    ],
)
def test_only_the_class_changes_and_a_revert_restores_the_layer(
    original: type[nn.Module], options: dict[str, object], converted: type[nn.Module]
) -> None:
    layer = original(3, **options).eval()
    before = dict(vars(layer))
    assert syncbn.convert_syncbn_model(layer) is layer
    assert (type(layer), layer.training) == (converted, False)
    assert isinstance(layer, original) == (original is not nn.SyncBatchNorm)  # DDP refuses nn.SyncBatchNorm on CPUs
    attributes = dict(vars(layer))
    assert all(attributes[name] is value for name, value in before.items() if name != "process_group")
    assert vars(syncbn.SyncBatchNorm.convert_sync_batchnorm(layer)) == attributes  # torch's name of the conversion
    assert syncbn.convert_syncbn_model(layer, process_group=1).process_group == 1
    syncbn.revert_syncbn_model(layer)
    assert (type(layer), vars(layer)) == (original, before)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_is_synchronised_from_its_first_forward() -> None:
    layer = syncbn.convert_syncbn_model(nn.LazyBatchNorm2d(momentum=0.2))
    assert type(syncbn.revert_syncbn_model(layer)) is nn.LazyBatchNorm2d
    assert isinstance(syncbn.convert_syncbn_model(layer, process_group=1), nn.LazyBatchNorm2d)
    layer(torch.randn(4, 3, 2, 2))
    assert type(layer) is syncbn.SyncBatchNorm2d
    assert (layer.process_group, layer.num_features, layer.momentum) == (1, 3, 0.2)
    assert syncbn.summary(layer)[0].last_step == "not synchronised"
    assert type(syncbn.revert_syncbn_model(layer)) is nn.BatchNorm2d


# Subclasses.


class WithoutForward(torch.nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim == 4


class RefusesAttributes(nn.BatchNorm2d):
    """Refuses new values of attributes after its construction."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "training" and "num_batches_tracked" in vars(self).get("_buffers", ()):
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


SUBCLASSES: dict[str, Callable[[], nn.Module]] = {
    "torch's": lambda: nn.BatchNorm2d(3, momentum=None),
    "timm's": lambda: BatchNormAct2d(3),
    "calls super": lambda: CallsSuper2d(3),
    "frozen statistics": lambda: Frozen(3),
    "without a forward": lambda: WithoutForward(3),
    "refuses attributes": lambda: RefusesAttributes(3),
    "parametrized": lambda: parametrized(nn.BatchNorm2d(3)),
    "parametrized subclass": lambda: parametrized(BatchNormAct2d(3)),
}


@pytest.mark.parametrize("build", SUBCLASSES.values(), ids=SUBCLASSES)
def test_subclasses_keep_their_behaviour(build: Callable[[], nn.Module]) -> None:
    plain, x = build(), torch.randn(2, 4, 3, 2, 2)
    layer = copy.deepcopy(plain)
    attributes = vars(plain).keys()
    assert syncbn.convert_syncbn_model(layer, process_group=2) is layer
    assert isinstance(layer, syncbn.SyncBatchNorm)
    assert layer.process_group == 2
    expected = [*map(plain, x)], plain.state_dict(), plain.eval()(x[0])
    torch.testing.assert_close(([*map(layer, x)], layer.state_dict(), layer.eval()(x[0])), expected)
    assert syncbn.summary(layer)[0].last_step == "not synchronised"
    syncbn.revert_syncbn_model(layer)
    assert not isinstance(layer, syncbn.SyncBatchNorm)
    assert (type(layer).__name__, vars(layer).keys()) == (type(plain).__name__, attributes)
    torch.testing.assert_close(layer(x[0]), expected[2])


def test_a_subclass_of_a_converted_class_keeps_its_attributes_and_arguments() -> None:
    syncbn.convert_syncbn_model(CallsSuper2d(3))
    layer = syncbn.convert_syncbn_model(type("Child", (CallsSuper2d,), {"note": 1})(3))
    x = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    torch.testing.assert_close(layer(x, times=3.0), 3 * x, rtol=1e-4, atol=0)
    assert layer.note == 1


class Registers(ABCMeta):
    """A metaclass that needs an argument."""

    def __new__(metaclass, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, key: str) -> type:
        return super().__new__(metaclass, name, bases, namespace)


class RegistersSubclasses(nn.BatchNorm2d):
    def __init_subclass__(cls, *, key: str) -> None:
        """Need an argument."""


WithMetaclass = Registers("WithMetaclass", (CallsSuper2d,), {}, key="metaclass")
Child = type("Child", (RegistersSubclasses,), {}, key="child")


@pytest.mark.parametrize("original", [WithMetaclass, Child])
def test_a_conversion_creates_classes_without_calling_metaclasses(original: type[nn.Module]) -> None:
    """Metaclasses and __init_subclass__ may register each class, or require arguments."""
    plain, layer = original(3), original(3)
    created = type(syncbn.convert_syncbn_model(layer))
    assert (type(created), created.__name__) == (type(original), f"Sync{original.__name__}")
    assert issubclass(original, original)  # ABCMeta caches the answer, which the created class must not inherit
    assert (isinstance(layer, original), isinstance(layer, created), isinstance(plain, created)) == (True, True, False)
    assert type(syncbn.revert_syncbn_model(layer)) is original


def test_parametrizations_are_added_and_removed_around_a_conversion() -> None:
    layer = syncbn.convert_syncbn_model(parametrized(nn.BatchNorm2d(3)))
    torch.testing.assert_close(layer.weight, nn.functional.softplus(torch.ones(3)))
    assert type(parametrize.remove_parametrizations(layer, "weight")) is syncbn.SyncBatchNorm2d
    syncbn.revert_syncbn_model(parametrized(layer))
    assert type(parametrize.remove_parametrizations(layer, "weight")) is nn.BatchNorm2d


def test_a_call_that_is_not_replaced_returns_no_view() -> None:
    """Autograd would record an in-place relu after the call as a change of a view."""
    assert not syncbn.convert_syncbn_model(Frozen(3))(torch.ones(2, 3, 2, 2, requires_grad=True))._is_view()


PATCHED_BEFORE_IMPORT = """
import torch
torch.nn.modules.batchnorm._BatchNorm.forward = lambda self, x: x + 5
import syncbn
for layer in torch.nn.BatchNorm1d(3), torch.nn.SyncBatchNorm(3):
    print(syncbn.convert_syncbn_model(layer).eval()(torch.ones(2, 3)).max().item())
"""


def test_a_forward_that_was_patched_before_the_import_stays() -> None:
    """nn.SyncBatchNorm has a forward of its own, which the patch does not change."""
    assert [float(line) for line in run_text(PATCHED_BEFORE_IMPORT).split()] == [6, pytest.approx(1, rel=1e-4)]


# Layers that are not converted.


class SubclassOfSyncBatchNorm(nn.SyncBatchNorm):
    pass


class HeteroBatchNorm(nn.Module):
    """Like torch_geometric's, with statistics for each type of node, or like detectron2's FrozenBatchNorm."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.running_mean, self.running_var = nn.Buffer(torch.zeros(2, 3)), nn.Buffer(torch.ones(2, 3))
        self.weight = (nn.Buffer if frozen else nn.Parameter)(torch.ones(2, 3))


def with_forward_attribute(layer: nn.Module) -> nn.Module:
    layer.forward = functools.partial(layer.forward)
    return layer


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is", "ignore:.*LeafSpec:FutureWarning")  # torch warns
def test_one_warning_names_the_layers_that_are_not_converted() -> None:
    """The warning is at the line that called syncbn. The layers stay as they are."""
    exported = torch.export.export(nn.Sequential(nn.BatchNorm2d(3)), (torch.ones(2, 3, 2, 2),))
    model = nn.ModuleDict({"plain": nn.BatchNorm2d(3), "frozen": HeteroBatchNorm(frozen=True)})
    model["instance"], model["built"] = nn.InstanceNorm2d(3, track_running_stats=True), syncbn.SyncBatchNorm(3)
    syncbn.convert_syncbn_model(model)  # does not warn
    model.update({"a": SubclassOfSyncBatchNorm(3), "b": BatchNormAct2d(3), "c": torch.jit.script(nn.BatchNorm2d(3))})
    model.update({"d": HeteroBatchNorm(), "e": nn.ModuleList([HeteroBatchNorm()])})
    model.update({"exported": exported.module(), "unflattened": torch.export.unflatten(exported)})
    model.update({"f": with_forward_attribute(nn.BatchNorm2d(3)), "g": with_forward_attribute(nn.SyncBatchNorm(3))})
    model["b"].channel_last = "the user's"
    before = {name: (type(module), dict(vars(module))) for name, module in model.items()}
    with pytest.warns(UserWarning, match="syncbn did not convert") as warned:
        syncbn.convert_syncbn_model(model)
    assert [warning.filename for warning in warned] == [__file__]
    remedy = r"convert before layer\.forward = \.\.\., or define the forward in a subclass"
    expected = (
        r"1 SubclassOfSyncBatchNorm \(a\): communicates by itself; "
        r"leave out the conversion that made it, or derive from nn.BatchNorm1d, 2d or 3d; "
        r"1 BatchNormAct2d \(b\): .* rename channel_last; 1 \w*Module \(c\): is part of a scripted .*; "
        r"2 HeteroBatchNorm \(d, e\.0\): may use the statistics of its batch; if so, let its forward call .*; "
        r"1 \w*Module \(exported\.0\): is part of a scripted or exported model; convert before .*; "
        r"1 \w*Module \(unflattened\.0\): is part of a scripted or exported model; .*; "
        rf"1 BatchNorm2d \(f\): its forward was replaced; {remedy}; "
        rf"1 SyncBatchNorm \(g\): its forward was replaced; {remedy}"
    )
    assert re.fullmatch(f"syncbn did not convert these layers: {expected}", str(warned[0].message))
    assert {name: (type(module), vars(module)) for name, module in model.items()} == before


class RefusesClasses(nn.BatchNorm2d):
    @property
    def __class__(self) -> type:
        return RefusesClasses


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (nn.LazyBatchNorm2d(), ValueError, "'2' is lazy and counts channels in dim 1"),
        (RefusesClasses(3), AttributeError, "has no setter"),
        (SubclassOfSyncBatchNorm(3), UserWarning, "did not convert"),  # pytest turns the warning into an error
    ],
)
def test_an_error_leaves_the_model_unchanged(layer: nn.Module, error: type[Exception], message: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), syncbn.SyncBatchNorm(3), layer)
    before = [(type(module), dict(vars(module))) for module in model]
    with pytest.raises(error, match=message):
        syncbn.convert_syncbn_model(model, process_group=1, channel_last=True)
    assert [(type(module), vars(module)) for module in model] == before


# Reverts.


@pytest.mark.parametrize(
    ("target", "shape", "converted"),
    [(nn.BatchNorm1d, (), False), (nn.BatchNorm2d, (5, 5), True), (nn.BatchNorm3d, (2, 2, 2), False)],
)
def test_torchs_synchronised_layers_are_reverted_to_the_target_class(
    target: type[nn.Module], shape: tuple[int, ...], converted: bool
) -> None:
    """The model is as before torch's converter (pytorch#41081, yolov5#1018)."""
    plain = nn.Sequential(target(3, momentum=None), target(3, affine=False), parametrized(target(3)))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain[:2])).append(copy.deepcopy(plain[2]))
    model[0].weight.requires_grad_(False)
    if converted:
        syncbn.convert_syncbn_model(model, process_group=1)
    tensors = [*map(id, (*model.parameters(), *model.buffers()))]
    assert syncbn.revert_syncbn_model(model, target) is model
    assert [type(layer).__name__ for layer in model] == [type(layer).__name__ for layer in plain]
    assert [*map(id, (*model.parameters(), *model.buffers()))] == tensors
    assert [vars(module).keys() for module in model.modules()] == [vars(module).keys() for module in plain.modules()]
    assert not model[0].weight.requires_grad
    x = torch.randn(4, 3, *shape)
    torch.testing.assert_close(model(x), plain(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))


def test_a_target_is_the_class_of_torchs_synchronised_layers_only() -> None:
    model = nn.Sequential(syncbn.convert_syncbn_model(nn.BatchNorm1d(3)), SubclassOfSyncBatchNorm(3))
    syncbn.revert_syncbn_model(model, nn.BatchNorm2d)
    assert [type(layer) for layer in model] == [nn.BatchNorm1d, SubclassOfSyncBatchNorm]


def test_one_warning_names_the_layers_that_are_not_reverted_or_now_compute_something_else() -> None:
    model = syncbn.convert_syncbn_model(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(4)), syncbn.SyncBatchNorm(3)))
    model[1].fuse_relu = model[2].channel_last = True
    with_forward_attribute(model[3])
    expected = (
        r"syncbn: these layers have lost their relu: put an nn.ReLU after each layer \(layer '1'\); "
        r"these layers take the channels in dim 1 again: .* \(layer '2'\); "
        r"these layers were not reverted: layer.forward was replaced; .* revert again \(layer '3'\); "
        r"these layers were not reverted: they were built as syncbn layers; build nn.BatchNorm1d, .* \(layer '4'\)"
    )
    with pytest.warns(UserWarning, match=f"^{expected}$"):
        syncbn.revert_syncbn_model(model)
    assert [type(layer) for layer in model] == [*[nn.BatchNorm1d] * 3, syncbn.SyncBatchNorm1d, syncbn.SyncBatchNorm]
    assert not {"fuse_relu", "channel_last"} & {*vars(model[1]), *vars(model[2])}
    del model[3].forward
    assert type(syncbn.revert_syncbn_model(model[3])) is nn.BatchNorm1d


# The summary.


def test_the_summary_names_layers_that_are_not_synchronised() -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm2d(3), "b": nn.SyncBatchNorm(3), "c": HeteroBatchNorm()})
    assert str(syncbn.summary(model)) == (
        "not synchronised: 1 BatchNorm2d (a): call syncbn.convert_syncbn_model(model); 1 HeteroBatchNorm (c): "
        "may use the statistics of its batch; if so, let its forward call syncbn.functional.sync_batch_norm\n"
        "synchronised by torch's nn.SyncBatchNorm, on GPUs only: 1 SyncBatchNorm (b): call "
        "syncbn.convert_syncbn_model(model)"
    )
    assert syncbn.summary(model) == ()
    expected = "no synchronised layers: the model has no batch-norm layer that trains"
    assert str(syncbn.summary(syncbn.convert_syncbn_model(nn.Linear(2, 2)))) == expected


def test_the_summary_names_layers_that_another_converter_has_added_later() -> None:
    """A HeteroBatchNorm in a converted model is not named, because its forward may call syncbn."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), HeteroBatchNorm())
    with pytest.warns(UserWarning, match="1 HeteroBatchNorm"):
        syncbn.convert_syncbn_model(model)
    assert syncbn.summary(model).others == ()
    model[0] = CallsSuper2d(3)
    model[0].aux_bn = nn.ModuleList([nn.BatchNorm2d(3)])  # like timm's SplitBatchNorm2d
    remedy = "call syncbn.convert_syncbn_model(model)"
    expected = f"not synchronised: 1 CallsSuper2d (layer '0'): {remedy}; 1 BatchNorm2d (0.aux_bn.0): {remedy}"
    assert syncbn.summary(model).others == (expected,)
    with pytest.warns(UserWarning, match="1 HeteroBatchNorm"):
        syncbn.convert_syncbn_model(model)
    assert [row.kind for row in syncbn.summary(model)] == ["SyncCallsSuper2d", *["SyncBatchNorm2d"] * 2]
    assert syncbn.summary(model).others == ()
