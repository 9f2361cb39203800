"""Catches a conversion that replaces the module object, loses what hangs on it, or that a revert does not take back.

Also an attribute, hook, parameter, buffer or subclass's behaviour that is lost, or is left by a revert; a model half
converted after an error; a layer that stays local, or calls another class than its own, and is not named.
"""

import copy
import functools
import pickle
import re
import sys
from abc import ABCMeta
from typing import Any

import pytest
import torch
from jobs import run
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d, Frozen, OnlyAttributes, parametrized
from torch import nn
from torch.nn.utils import parametrize

import syncbn


@pytest.mark.parametrize(
    ("original", "options", "converted"),
    [
        (nn.BatchNorm1d, {"affine": False}, syncbn.SyncBatchNorm1d),
        (nn.BatchNorm2d, {"momentum": None}, syncbn.SyncBatchNorm2d),
        (nn.BatchNorm3d, {"track_running_stats": False}, syncbn.SyncBatchNorm3d),
        (nn.SyncBatchNorm, {}, syncbn.SyncBatchNorm),
    ],
)
def test_only_the_class_changes_and_revert_is_exact(
    original: type[nn.Module], options: dict[str, object], converted: type[nn.Module]
) -> None:
    layer = original(3, **options).eval()
    before = dict(vars(layer))
    assert syncbn.convert_syncbn_model(layer) is layer
    assert (type(layer), layer.training) == (converted, False)
    assert isinstance(layer, original) == (original is not nn.SyncBatchNorm)  # which DDP refuses on CPUs
    state = dict(vars(layer))
    assert vars(syncbn.convert_syncbn_model(layer)) == state  # twice changes nothing
    assert syncbn.convert_syncbn_model(layer, process_group=1).process_group == 1  # but the group, where it is given
    syncbn.revert_syncbn_model(layer)
    assert type(layer) is original
    assert vars(layer) == before


def tensors_of(model: nn.Module) -> list[int]:
    return [id(tensor) for tensor in (*model.parameters(), *model.buffers())]


def test_everything_that_hangs_on_a_layer_survives() -> None:
    shared = nn.BatchNorm2d(4)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(3, 4, 1), shared), "b": shared, "c": nn.BatchNorm1d(4)})
    model["c"].register_parameter("bias", None)
    calls: list[str] = []
    shared.register_forward_hook(lambda *_: calls.append("hook"))
    shared.note = "mine"
    shared.double().weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = tensors_of(model)
    syncbn.SyncBatchNorm.convert_sync_batchnorm(model)  # torch's name
    assert model["a"][1] is model["b"] is shared
    assert tensors_of(model) == before
    assert shared.note == "mine"
    assert (shared.weight.requires_grad, shared.weight.dtype) == (False, torch.float64)
    shared(torch.randn(2, 4, 3, 3, dtype=torch.float64)).sum().backward()
    assert calls == ["hook"]
    optimizer.step()
    assert torch.equal(shared.bias, torch.full((4,), -18.0, dtype=torch.float64))


def warning_of(model: nn.Module) -> str:
    """The one that a conversion gives, at the line of the program that called syncbn."""
    with pytest.warns(UserWarning, match="syncbn did not convert these layers: ") as warned:
        syncbn.convert_syncbn_model(model)
    assert [one.filename for one in warned] == [__file__]
    return str(warned[0].message)


class SubclassOfSyncBatchNorm(nn.SyncBatchNorm):
    """With communication of its own."""


class HeteroBatchNorm(nn.Module):
    """As torch_geometric's: statistics for each type of node, by mathematics of its own. Or frozen, as detectron2's."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.running_mean, self.running_var = nn.Buffer(torch.zeros(2, 3)), nn.Buffer(torch.ones(2, 3))
        self.weight = (nn.Buffer if frozen else nn.Parameter)(torch.ones(2, 3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is", "ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_what_is_left_alone_is_named_in_one_warning() -> None:
    exported = torch.export.export(nn.Sequential(nn.BatchNorm2d(3)), (torch.ones(2, 3, 2, 2),))
    model = nn.ModuleDict({"plain": nn.BatchNorm2d(3), "frozen": HeteroBatchNorm(frozen=True)})
    model["instance"], model["built"] = nn.InstanceNorm2d(3, track_running_stats=True), syncbn.SyncBatchNorm(3)
    syncbn.convert_syncbn_model(model)  # of which nothing is to be said
    model.update({"a": SubclassOfSyncBatchNorm(3), "b": BatchNormAct2d(3), "c": torch.jit.script(nn.BatchNorm2d(3))})
    model.update({"d": HeteroBatchNorm(), "e": nn.ModuleList([HeteroBatchNorm()])})
    model.update({"exported": exported.module(), "unflattened": torch.export.unflatten(exported)})
    model["b"].channel_last = "mine"
    classes = {name: type(module) for name, module in model.items()}
    assert re.fullmatch(
        r"syncbn did not convert these layers: 1 SubclassOfSyncBatchNorm \(a\): communicates by itself; "
        r"leave out the conversion that made it, or derive from nn.BatchNorm1d, 2d or 3d; "
        r"1 BatchNormAct2d \(b\): .* rename channel_last; 1 \w*Module \(c\): is part of a scripted .*; "
        r"2 HeteroBatchNorm \(d, e\.0\): may use the statistics of its batch; if so, let its forward call .*; "
        r"1 \w*Module \(exported\.0\): is part of a scripted or exported model; convert before .*; "
        r"1 \w*Module \(unflattened\.0\): is part of a scripted or exported model; .*",
        warning_of(model),
    )
    with pytest.warns(UserWarning, match=r"^syncbn: these layers were not reverted: they were built as .* \(built\)$"):
        syncbn.revert_syncbn_model(model)
    assert {name: type(module) for name, module in model.items()} == classes | {"plain": nn.BatchNorm2d}
    assert model["b"].channel_last == "mine"


SUBCLASSES = {
    "torch's": lambda: nn.BatchNorm2d(3, momentum=None),
    "timm's": lambda: BatchNormAct2d(3),
    "calls super": lambda: CallsSuper2d(3),
    "frozen statistics": lambda: Frozen(3),
    "only attributes": lambda: OnlyAttributes(3),
    "parametrized": lambda: parametrized(nn.BatchNorm2d(3)),
    "parametrized subclass": lambda: parametrized(BatchNormAct2d(3)),
}


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_subclasses_keep_their_behaviour(kind: str) -> None:
    """Training, evaluation, copies, and a revert after which nothing reminds of the conversion."""
    torch.manual_seed(0)
    plain = SUBCLASSES[kind]()
    layer = copy.deepcopy(plain)
    before, original = dict(vars(layer)), type(layer)
    assert syncbn.convert_syncbn_model(layer, process_group=2) is layer
    layers = [layer, copy.deepcopy(layer)]
    if "parametrized" not in kind:  # which torch refuses to pickle
        layers.append(pickle.loads(pickle.dumps(layer)))
        assert issubclass(type(layers[2]), original)
    x = torch.randn(2, 4, 3, 2, 2)
    expected = [*map(plain, x)], plain.state_dict(), plain.eval()(x[0])
    for one in layers:
        assert isinstance(one, syncbn.SyncBatchNorm)
        assert one.process_group == 2
        torch.testing.assert_close(([*map(one, x)], one.state_dict(), one.eval()(x[0])), expected)
        assert syncbn.summary(one)[0].last_step == "not synchronised"
        syncbn.revert_syncbn_model(one)
        assert not isinstance(one, syncbn.SyncBatchNorm)
        assert (type(one).__name__, vars(one).keys()) == (original.__name__, before.keys())
        torch.testing.assert_close(one(x[0]), expected[2])


def test_a_subclass_of_a_converted_subclass() -> None:
    syncbn.convert_syncbn_model(CallsSuper2d(3))
    layer = syncbn.convert_syncbn_model(type("Child", (CallsSuper2d,), {"note": 1})(3))
    x = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    torch.testing.assert_close(layer(x, times=3.0), 3 * x, rtol=1e-4, atol=0)
    assert layer.note == 1


registered: list[str] = []


class Registers(type):
    """A metaclass that keeps a registry, and takes an argument."""

    def __new__(metaclass, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, key: str = "") -> type:
        registered.append(key)
        return super().__new__(metaclass, name, bases, namespace)

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, key: str = "") -> None:
        super().__init__(name, bases, namespace)


class Abstract(Registers, ABCMeta):
    """Such a metaclass that keeps a cache of instances for each class."""


class HasHeirs(nn.BatchNorm2d):
    def __init_subclass__(cls, *, key: str) -> None:
        registered.append(key)


class ByMetaclass(CallsSuper2d, metaclass=Registers, key="metaclass"):
    pass


class ByAbstractMetaclass(CallsSuper2d, metaclass=Abstract, key="abstract"):
    pass


class Heir(HasHeirs, key="heir"):
    pass


@pytest.mark.parametrize("kind", [ByMetaclass, ByAbstractMetaclass, Heir])
def test_a_conversion_makes_classes_without_the_hooks_of_users(kind: type[nn.Module]) -> None:
    """They may refuse a class without a key, or note it in a registry."""
    before, plain = [*registered], kind(3)
    layer = syncbn.convert_syncbn_model(copy.deepcopy(plain))
    made, x = type(layer), torch.randn(4, 3, 2, 2)
    assert (type(made), made.__name__) == (type(kind), f"Sync{kind.__name__}")
    assert issubclass(kind, kind)  # which an ABCMeta caches
    assert (isinstance(layer, kind), isinstance(layer, made), isinstance(plain, made)) == (True, True, False)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), plain(x))
    assert type(syncbn.revert_syncbn_model(layer)) is kind
    assert registered == before


def test_a_class_of_parametrize_is_made_again_without_its_metaclass() -> None:
    layer = parametrized(ByMetaclass(3))
    before = [*registered]
    assert type(syncbn.convert_syncbn_model(layer)).__name__ == "ParametrizedSyncByMetaclass"
    assert type(syncbn.revert_syncbn_model(layer)).__name__ == "ParametrizedByMetaclass"
    assert registered == before


class RefusesAttributes(nn.BatchNorm2d):
    """Once it is built."""

    def __setattr__(self, name: str, value: object) -> None:
        if "num_batches_tracked" in vars(self).get("_buffers", ()):
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)


def test_a_layer_that_refuses_attributes_is_converted_trained_and_reverted() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), RefusesAttributes(3), syncbn.SyncBatchNorm(3))
    syncbn.convert_syncbn_model(model, process_group=1)
    assert [layer.process_group for layer in model] == [1, 1, 1]
    model(torch.randn(4, 3, 2, 2))
    assert [row.last_step for row in syncbn.summary(model)] == ["not synchronised"] * 3
    with pytest.warns(UserWarning, match=r"^syncbn: these layers were not reverted: they were .* \(layer '2'\)$"):
        syncbn.revert_syncbn_model(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, RefusesAttributes, syncbn.SyncBatchNorm]


class RefusesClasses(nn.BatchNorm2d):
    @property
    def __class__(self) -> type:
        return RefusesClasses


@pytest.mark.parametrize(
    ("layer", "error"),
    [
        (nn.LazyBatchNorm2d(), (ValueError, "'2' is lazy and counts channels in dim 1")),
        (RefusesClasses(3), (AttributeError, "has no setter")),
        (SubclassOfSyncBatchNorm(3), (UserWarning, "did not convert")),  # pytest makes warnings errors
    ],
)
def test_an_error_leaves_the_model_as_it_was(layer: nn.Module, error: tuple[type[Exception], str]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), syncbn.SyncBatchNorm(3), layer)
    before = [(type(one), dict(vars(one))) for one in model]
    with pytest.raises(error[0], match=error[1]):
        syncbn.convert_syncbn_model(model, process_group=1, channel_last=True)
    assert [(type(one), vars(one)) for one in model] == before


OVERRIDDEN = "its forward was replaced; convert before layer.forward = ..., or define the forward in a subclass"


def wrap(layer: nn.Module) -> None:
    layer.forward = functools.partial(layer.forward)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_a_layer_whose_forward_was_set_is_left_alone_and_named(kind: type[nn.Module]) -> None:
    """It would normalise by the old class, without a word."""
    model = nn.Sequential(kind(3), nn.BatchNorm2d(3))
    wrap(model[0])
    named = f": 1 {kind.__name__} (layer '0'): {OVERRIDDEN}"
    assert warning_of(model) == f"syncbn did not convert these layers{named}"
    assert [type(layer) for layer in model] == [kind, syncbn.SyncBatchNorm2d]
    assert named in str(syncbn.summary(model))
    model[0] = syncbn.convert_syncbn_model(nn.BatchNorm2d(3))
    wrap(model[1])
    expected = r"^syncbn: these layers were not reverted: layer.forward was replaced; .* revert again \(layer '1'\)$"
    with pytest.warns(UserWarning, match=expected):
        syncbn.revert_syncbn_model(model)
    model(torch.randn(4, 3, 2, 2))
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, syncbn.SyncBatchNorm2d]
    del model[1].forward
    assert type(syncbn.revert_syncbn_model(model)[1]) is nn.BatchNorm2d


def test_parametrizations_come_and_go_around_a_conversion() -> None:
    layer = syncbn.convert_syncbn_model(parametrized(nn.BatchNorm2d(3)))
    assert torch.equal(layer.weight, torch.full((3,), torch.e))
    assert type(parametrize.remove_parametrizations(layer, "weight")) is syncbn.SyncBatchNorm2d
    syncbn.revert_syncbn_model(parametrized(layer))
    assert type(parametrize.remove_parametrizations(layer, "weight")) is nn.BatchNorm2d


REPLACED_BEFORE_THE_IMPORT = """
import torch
from torch.nn.modules import batchnorm
batchnorm._BatchNorm.forward = lambda self, x: x + 5
import syncbn
for layer in torch.nn.BatchNorm1d(3), torch.nn.LazyBatchNorm1d(), torch.nn.SyncBatchNorm(3):
    print(syncbn.convert_syncbn_model(layer).eval()(torch.ones(2, 3)).max().item())
"""


def test_a_forward_that_was_replaced_before_the_import() -> None:
    """nn.SyncBatchNorm has a forward of its own, which the replacement does not change."""
    printed = run(sys.executable, "-W", "ignore", "-c", REPLACED_BEFORE_THE_IMPORT)
    first, second, third = map(float, printed.split())
    assert first == second == 6
    assert third == pytest.approx(1, rel=1e-4)


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


@pytest.mark.parametrize(
    ("target", "shape", "converted"),
    [(nn.BatchNorm1d, (), False), (nn.BatchNorm2d, (5, 5), True), (nn.BatchNorm3d, (2, 2, 2), False)],
)
def test_what_torchs_converter_made_becomes_the_class_that_the_user_says(
    target: type[nn.Module], shape: tuple[int, ...], converted: bool
) -> None:
    """pytorch#41081, yolov5#1018: exactly the model as it was before torch's converter."""
    plain = nn.Sequential(target(3, momentum=None), target(3, affine=False), parametrized(target(3)))

    def attributes(model: nn.Module) -> list[dict[str, type]]:
        return [{name: type(value) for name, value in vars(module).items()} for module in model.modules()]

    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain[:2])).append(copy.deepcopy(plain[2]))
    model[0].weight.requires_grad_(False)
    if converted:
        syncbn.convert_syncbn_model(model, process_group=1)
    tensors = tensors_of(model)
    assert syncbn.revert_syncbn_model(model, target) is model
    assert type(model[0]) is type(model[1]) is target
    assert type(model[2]).__name__ == f"Parametrized{target.__name__}"
    assert tensors_of(model) == tensors
    assert attributes(model) == attributes(plain)
    assert not model[0].weight.requires_grad
    x = torch.randn(4, 3, *shape)
    torch.testing.assert_close(model(x), plain(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))


def test_a_target_concerns_torchs_synchronised_layers_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), SubclassOfSyncBatchNorm(3), syncbn.SyncBatchNorm(3), nn.SyncBatchNorm(3))
    syncbn.convert_syncbn_model(model[0])
    for target in (nn.BatchNorm2d, None):  # None changes nothing more; a layer that was never converted is always named
        with pytest.warns(UserWarning, match=r"^syncbn: .* not reverted: .* build nn.BatchNorm1d, .* \(layer '2'\)$"):
            syncbn.revert_syncbn_model(model, target)
        kinds = [type(layer) for layer in model]
        assert kinds == [nn.BatchNorm1d, SubclassOfSyncBatchNorm, syncbn.SyncBatchNorm, nn.BatchNorm2d]


def test_summary_says_what_is_not_ours() -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm2d(3), "b": nn.SyncBatchNorm(3), "c": HeteroBatchNorm()})
    assert str(syncbn.summary(model)) == (
        "not synchronised: 1 BatchNorm2d (a): call syncbn.convert_syncbn_model(model); 1 HeteroBatchNorm (c): "
        "may use the statistics of its batch; if so, let its forward call syncbn.functional.sync_batch_norm\n"
        "synchronised by torch's nn.SyncBatchNorm, on GPUs only: 1 SyncBatchNorm (b): call "
        "syncbn.convert_syncbn_model(model)"
    )
    assert syncbn.summary(model) == ()
    without = syncbn.convert_syncbn_model(nn.Linear(2, 2))
    assert str(syncbn.summary(without)) == "no synchronised layers: the model has no batch-norm layer that trains"


def test_summary_names_layers_that_another_converter_has_made_local() -> None:
    """Also if others are synchronised; but no layer that normalises by itself, as its forward may call syncbn."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), HeteroBatchNorm())
    with pytest.warns(UserWarning, match="1 HeteroBatchNorm"):
        syncbn.convert_syncbn_model(model)
    assert "not synchronised" not in str(syncbn.summary(model))
    model[0] = CallsSuper2d(3)  # as timm's SplitBatchNorm2d
    model[0].aux_bn = nn.ModuleList([nn.BatchNorm2d(3)])
    remedy = "call syncbn.convert_syncbn_model(model)"
    expected = f"not synchronised: 1 CallsSuper2d (layer '0'): {remedy}; 1 BatchNorm2d (0.aux_bn.0): {remedy}"
    assert expected in str(syncbn.summary(model)).splitlines()
    with pytest.warns(UserWarning, match="1 HeteroBatchNorm"):
        syncbn.convert_syncbn_model(model)
    assert [row.kind for row in syncbn.summary(model)] == ["SyncCallsSuper2d", *["SyncBatchNorm2d"] * 2]
    assert "not synchronised" not in str(syncbn.summary(model))


def test_a_revert_names_the_layers_that_compute_something_else() -> None:
    model = syncbn.convert_syncbn_model(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(3))))
    model[1].fuse_relu = model[2].channel_last = True
    expected = r"an nn.ReLU after each layer \(layer '1'\); these layers take the channels in dim 1 .* \(layer '2'\)$"
    with pytest.warns(UserWarning, match=expected):
        syncbn.revert_syncbn_model(model)
    assert all(type(layer) is nn.BatchNorm1d for layer in model)
    assert not {"fuse_relu", "channel_last"} & {*vars(model[1]), *vars(model[2])}


@pytest.mark.parametrize(("name", "value"), [("channel_last", torch.tensor([1, 0])), ("fuse_relu", "no"),
                                             ("track_running_stats", "no")])  # fmt: skip
def test_flags_of_a_layer_that_calls_f_batch_norm_are_checked(name: str, value: object) -> None:
    """Its call of F.batch_norm goes to `train` with the flags of the layer."""
    layer = syncbn.convert_syncbn_model(BatchNormAct2d(3))
    setattr(layer, name, value)
    with pytest.raises(TypeError, match=f"{name} must be a bool, got"):
        layer(torch.ones(2, 3, 2, 2))


@pytest.mark.parametrize("training", [True, False])
def test_a_call_that_stays_torchs_returns_no_view(training: bool) -> None:
    """An in-place relu after it would be recorded as a change of a view."""
    layer = syncbn.convert_syncbn_model(Frozen(3)).train(training)
    assert not layer(torch.ones(2, 3, 2, 2, requires_grad=True))._is_view()
