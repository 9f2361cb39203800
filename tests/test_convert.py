"""Conversion keeps the module object and everything that hangs on it; revert is exact."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d, OnlyAttributes, OwnMathematics, Positive
from torch import nn
from torch.nn.utils import parametrize

import syncbn

PAIRS = [
    (nn.BatchNorm1d, syncbn.SyncBatchNorm1d),
    (nn.BatchNorm2d, syncbn.SyncBatchNorm2d),
    (nn.BatchNorm3d, syncbn.SyncBatchNorm3d),
    (nn.SyncBatchNorm, syncbn.SyncBatchNorm),
]


@pytest.mark.parametrize(("original", "converted"), PAIRS)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_only_the_class_changes_and_revert_is_exact(
    original: type[nn.Module], converted: type[nn.Module], options: dict[str, object]
) -> None:
    layer = original(3, **options).eval()
    before = dict(vars(layer))
    assert syncbn.convert_syncbn_model(layer) is layer
    assert type(layer) is converted
    assert not layer.training
    state = dict(vars(layer))
    assert syncbn.convert_syncbn_model(layer) is layer  # twice changes nothing
    assert vars(layer) == state
    assert syncbn.convert_syncbn_model(layer, process_group=1).process_group == 1  # but the group, where it is given
    syncbn.revert_syncbn_model(layer)
    assert type(layer) is original
    assert vars(layer) == before


def test_everything_that_hangs_on_a_layer_survives() -> None:
    shared = nn.BatchNorm2d(4)
    options = {"bias": False} if "bias" in inspect.signature(nn.BatchNorm1d).parameters else {}  # not in torch 2.11
    first = nn.Sequential(nn.Conv2d(3, 4, 1), shared)
    model = nn.ModuleDict({"a": first, "b": shared, "c": nn.BatchNorm1d(4, **options)})
    calls: list[str] = []
    shared.register_forward_hook(lambda *_: calls.append("hook"))
    shared.note = "mine"
    shared.weight.requires_grad_(False)
    shared.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    bias = model["c"].bias
    syncbn.SyncBatchNorm.convert_sync_batchnorm(model)  # torch's name
    assert model["a"][1] is model["b"] is shared
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == ids
    assert shared.note == "mine"
    assert not shared.weight.requires_grad
    assert shared.weight.dtype == torch.float64
    assert model["c"].bias is bias
    shared(torch.randn(2, 4, 3, 3, dtype=torch.float64)).sum().backward()
    assert calls == ["hook"]
    optimizer.step()
    assert torch.equal(shared.bias, torch.full((4,), -18.0, dtype=torch.float64))


def test_copies_and_pickles_of_converted_layers() -> None:
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3)), process_group="node", channel_last=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[0].process_group == "node"
        assert other[0].channel_last
        assert type(syncbn.revert_syncbn_model(other)[0]) is nn.BatchNorm1d


class SubclassOfSyncBatchNorm(nn.SyncBatchNorm):
    """With communication of its own."""


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_what_is_left_alone_is_named_in_one_warning() -> None:
    model = nn.ModuleDict({"a": SubclassOfSyncBatchNorm(3), "b": BatchNormAct2d(3)})
    model["c"] = torch.jit.script(nn.BatchNorm2d(3))
    model["instance"], model["plain"] = nn.InstanceNorm2d(3), nn.BatchNorm2d(3)
    model["b"].channel_last = "mine"
    classes = {name: type(module) for name, module in model.items()}
    with pytest.warns(
        UserWarning,
        match=r"not convert these layers: 1 SubclassOfSyncBatchNorm \(a\): .* derive it from .*; "
        r"1 BatchNormAct2d \(b\): .* rename channel_last; 1 BatchNorm2d \(c\): scripted, convert before torch.jit",
    ) as warned:
        syncbn.convert_syncbn_model(model)
    assert len(warned) == 1
    assert [name for name, module in model.items() if type(module) is not classes[name]] == ["plain"]
    syncbn.revert_syncbn_model(model)
    assert model["b"].channel_last == "mine"


class HeteroBatchNorm(nn.Module):
    """As torch_geometric's: statistics for each type of node, by mathematics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("running_mean", torch.zeros(2, 3))
        self.register_buffer("running_var", torch.ones(2, 3))


class FrozenBatchNorm2d(nn.Module):
    """As detectron2's and torchvision's: nothing in it moves."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(3))


def test_modules_with_statistics_of_their_own_are_named() -> None:
    instance = nn.InstanceNorm2d(3, track_running_stats=True)
    model = nn.Sequential(FrozenBatchNorm2d(), nn.BatchNorm2d(3), instance, syncbn.SyncBatchNorm(3))
    assert syncbn.convert_syncbn_model(copy.deepcopy(model))  # of which nothing is to be said
    model.extend([HeteroBatchNorm(), nn.ModuleList([HeteroBatchNorm()])])
    with pytest.warns(UserWarning, match="HeteroBatchNorm") as warned:
        syncbn.convert_syncbn_model(model)
    assert [str(one.message) for one in warned] == [
        "syncbn did not convert these layers: 2 HeteroBatchNorm (layer '4', layer '5.0'): normalises by itself; "
        "if by its batch, let its forward call syncbn.functional.sync_batch_norm"
    ]
    assert warned[0].filename == __file__, "a warning shows the line of the program that called syncbn"


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
@pytest.mark.parametrize("unflatten", [False, True])
def test_an_exported_graph_is_named(unflatten: bool) -> None:
    exported = torch.export.export(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), (torch.ones(2, 3, 2, 2),))
    model = nn.ModuleDict({"graph": torch.export.unflatten(exported) if unflatten else exported.module()})
    with pytest.warns(UserWarning, match=r"1 \w*Module \(graph\.1\): a part of an exported graph, convert before"):
        syncbn.convert_syncbn_model(model)


def test_the_warning_of_many_layers_is_short() -> None:
    """As of a ResNet whose 49 layers timm's convert_sync_batchnorm has made its SyncBatchNormAct."""
    timms = type("SyncBatchNormAct", (nn.SyncBatchNorm,), {"__module__": "timm.layers.norm_act"})
    layers = nn.Sequential(*[timms(3) for _ in range(49)])
    with pytest.warns(
        UserWarning, match=r"49 SyncBatchNormAct \(layer '0', layer '1', layer '2', \.\.\.\): do not call timm's"
    ):
        syncbn.convert_syncbn_model(layers)
    many = nn.ModuleDict()
    for index in range(40):
        many["a" * 300 + str(index)] = type(f"Norm{index}" * 30, (nn.SyncBatchNorm,), {})(3)
    with pytest.warns(UserWarning, match="and [0-9]+ others") as warned:
        syncbn.convert_syncbn_model(many)
    text = str(warned[0].message)
    assert len(text) < 1000
    named = text.count("derive it")
    assert named > 1
    assert text.endswith(f"; and {40 - named} others")


def parametrized(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Positive())


SUBCLASSES = {
    "torch's": lambda: nn.BatchNorm2d(3, momentum=None),
    "timm's": lambda: BatchNormAct2d(3),
    "timm's, momentum None": lambda: BatchNormAct2d(3, momentum=None),
    "calls super": lambda: CallsSuper2d(3),
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
    assert syncbn.convert_syncbn_model(layer) is layer
    assert isinstance(layer, syncbn.SyncBatchNorm)
    copies = [copy.deepcopy(layer)]
    if "parametrized" not in kind:  # which torch refuses to pickle
        assert isinstance(layer, original)
        copies.append(pickle.loads(pickle.dumps(layer)))
        assert type(copies[1]) is type(layer)
    for x in torch.randn(2, 4, 3, 2, 2):
        expected = plain(x)
        for one in (layer, *copies):
            torch.testing.assert_close(one(x), expected)
    assert syncbn.summary(layer)[0].last_step == "not synchronised"
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())
    assert torch.equal(layer.eval()(x), copy.deepcopy(layer)(x))
    torch.testing.assert_close(layer(x), plain.eval()(x))
    syncbn.revert_syncbn_model(layer)
    assert type(layer).__name__ == original.__name__
    assert vars(layer).keys() == before.keys()
    assert not isinstance(layer, syncbn.SyncBatchNorm)
    torch.testing.assert_close(layer(x), plain(x))


def test_a_subclass_of_a_converted_subclass() -> None:
    syncbn.convert_syncbn_model(CallsSuper2d(3))
    layer = syncbn.convert_syncbn_model(type("Child", (CallsSuper2d,), {"note": 1})(3))
    torch.testing.assert_close(
        layer(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 3, 1, 1), times=3.0).amax(),
        torch.tensor(3.0),
        rtol=1e-4,
        atol=0,
    )
    assert layer.note == 1


class Ghost2d(nn.BatchNorm2d):
    """Each of two parts of the batch is normalised by itself; its names are ones that ours might have taken."""

    original = "mine"

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return x / 255

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.normalize(x).view(len(x) // 2, -1, *x.shape[2:])
        weight, bias = self.weight.repeat(2), self.bias.repeat(2)
        return F.batch_norm(parts, None, None, weight, bias, True, 0.1, self.eps).view_as(x)


def test_a_forward_that_normalises_other_channels() -> None:
    plain, x = Ghost2d(3), 255 * torch.randn(4, 3, 2, 2)
    layer = syncbn.convert_syncbn_model(copy.deepcopy(plain), channel_last=True)
    torch.testing.assert_close(copy.deepcopy(layer)(x), plain(x))


def test_an_error_leaves_the_model_as_it_was() -> None:
    class NoHeirs(nn.BatchNorm2d):
        def __init_subclass__(cls) -> None:
            raise RuntimeError("no heirs")

    lazy = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="'1' is lazy and counts channels in dim 1"):
        syncbn.convert_syncbn_model(lazy, channel_last=True)
    final = nn.Sequential(nn.BatchNorm2d(3), NoHeirs(3))
    with pytest.raises(RuntimeError, match="no heirs"):
        syncbn.convert_syncbn_model(final)
    assert type(lazy[0]) is type(final[0]) is nn.BatchNorm2d


def test_frozen_statistics_of_a_subclass_stay_frozen() -> None:
    class Frozen(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)

    layer = syncbn.convert_syncbn_model(Frozen(3))
    x = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(layer(x), x, rtol=1e-4, atol=1e-4)
    assert syncbn.summary(layer)[0].last_step == "not synchronised"


def test_a_forward_that_cannot_be_synchronised_says_so_once() -> None:
    model = nn.Sequential(*[syncbn.convert_syncbn_model(OwnMathematics(3)) for _ in range(2)])
    with pytest.warns(
        UserWarning, match=r"not synchronising: OwnMathematics.forward calls neither super\(\)"
    ) as warned:
        model(torch.randn(4, 3, 2, 2))
    assert len(warned) == 1


def test_parametrizations_come_and_go_around_a_conversion() -> None:
    layer = syncbn.convert_syncbn_model(parametrized(nn.BatchNorm2d(3)))
    assert parametrize.is_parametrized(layer, "weight")
    assert torch.equal(layer.weight, torch.full((3,), torch.e))
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is syncbn.SyncBatchNorm2d
    parametrized(layer)
    syncbn.revert_syncbn_model(layer)
    assert isinstance(layer, nn.BatchNorm2d)
    assert not isinstance(layer, syncbn.SyncBatchNorm)
    assert parametrize.is_parametrized(layer, "weight")
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.BatchNorm2d


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_layer_is_synchronised_from_its_first_forward() -> None:
    layer = syncbn.convert_syncbn_model(nn.LazyBatchNorm2d(momentum=0.2))
    syncbn.revert_syncbn_model(layer)
    assert type(layer) is nn.LazyBatchNorm2d
    syncbn.convert_syncbn_model(layer, process_group=1)
    assert isinstance(layer, nn.LazyBatchNorm2d)
    layer(torch.randn(4, 3, 2, 2))
    assert type(layer) is syncbn.SyncBatchNorm2d
    assert layer.process_group == 1
    assert syncbn.summary(layer)[0].last_step == "not synchronised"
    assert (layer.num_features, layer.momentum) == (3, 0.2)
    syncbn.revert_syncbn_model(layer)
    assert type(layer) is nn.BatchNorm2d


def test_a_layer_that_fsdp2_wraps_raises_and_nothing_changes() -> None:
    import torch.distributed.fsdp as fsdp

    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    wrapped = type("FSDPBatchNorm2d", (fsdp.FSDPModule, nn.BatchNorm2d), {})  # as fully_shard makes it
    model[1].__class__ = wrapped
    with pytest.raises(RuntimeError, match="'1' is already wrapped by fully_shard; call convert_syncbn_model before"):
        syncbn.convert_syncbn_model(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, wrapped]


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(
    ("target", "shape"), [(nn.BatchNorm1d, ()), (nn.BatchNorm2d, (5, 5)), (nn.BatchNorm3d, (2, 2, 2))]
)
def test_what_torchs_converter_made_becomes_the_class_that_the_user_says(
    target: type[nn.Module], shape: tuple[int, ...], converted: bool
) -> None:
    """pytorch#41081, yolov5#1018: exactly the model as it was before torch's converter."""
    plain = nn.Sequential(target(3, momentum=None), nn.Sequential(target(3, affine=False), parametrized(target(3))))
    before = [{name: type(value) for name, value in vars(module).items()} for module in plain.modules()]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain[:1])).extend([copy.deepcopy(plain[1])])
    model[1][0] = nn.SyncBatchNorm.convert_sync_batchnorm(model[1][0])
    model[0].weight.requires_grad_(False)
    calls: list[str] = []
    hook = model[0].register_forward_hook(lambda *_: calls.append("hook"))
    if converted:
        syncbn.convert_syncbn_model(model, process_group=1)
    tensors = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    assert syncbn.revert_syncbn_model(model, target) is model
    assert type(model[0]) is type(model[1][0]) is target
    assert type(model[1][1]).__name__ == f"Parametrized{target.__name__}"
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == tensors
    assert not model[0].weight.requires_grad
    x = torch.randn(4, 3, *shape)
    torch.testing.assert_close(model(x), plain(x))
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert calls == ["hook"] * 2
    hook.remove()
    assert [{name: type(value) for name, value in vars(module).items()} for module in model.modules()] == before
    with pytest.raises(ValueError, match=r"expected .* input"):
        model(torch.randn(2, 3, 2, 2, 2, 2))


def test_a_target_concerns_torchs_synchronised_layers_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), SubclassOfSyncBatchNorm(3), syncbn.SyncBatchNorm(3), nn.SyncBatchNorm(3))
    syncbn.convert_syncbn_model(model[0])
    syncbn.revert_syncbn_model(model, nn.BatchNorm2d)
    expected = [nn.BatchNorm1d, SubclassOfSyncBatchNorm, syncbn.SyncBatchNorm, nn.BatchNorm2d]
    assert [type(layer) for layer in model] == expected
    assert [type(layer) for layer in syncbn.revert_syncbn_model(model)] == expected, "what was built as syncbn stays"


def test_summary_says_why_there_are_no_synchronised_layers() -> None:
    model = nn.ModuleDict({"a": nn.BatchNorm2d(3), "b": nn.SyncBatchNorm(3), "c": HeteroBatchNorm()})
    assert str(syncbn.summary(model)) == (
        "no synchronised layers: 1 BatchNorm2d (a): call syncbn.convert_syncbn_model(model); "
        "1 SyncBatchNorm (b): call syncbn.convert_syncbn_model(model); 1 HeteroBatchNorm (c): normalises by itself; if "
        "by its batch, let its forward call syncbn.functional.sync_batch_norm"
    )
    assert syncbn.summary(model) == ()
    without = nn.Linear(2, 2)
    assert syncbn.convert_syncbn_model(without) is without
    assert str(syncbn.summary(without)) == "no synchronised layers: the model has no batch norm that trains"
