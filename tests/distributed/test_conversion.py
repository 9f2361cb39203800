"""Tests that a converted model trains on ranks as one process does, whatever the forwards of its layers call.

A call of batch norm that passes a tensor of its layer is synchronised, also in a graph. Other calls stay local, and a
warning names them. test_convert.py tests what needs no ranks.
"""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d, CallsFunctional, CallsSuper2d, Frozen, ManualBatchNorm, parametrized
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from training import CountCollectives, require_trains_as, step, whole_batches
from voting import Ranks

import syncbn
from syncbn.texts import warn_once

# Models: training, revert and copies.


def sequential(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), *layers, nn.Flatten(), nn.Linear(108, 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: sequential(nn.BatchNorm2d(3)),
    "timm's": lambda: sequential(BatchNormAct2d(3)),
    "traced by torch.fx": lambda: torch.fx.symbolic_trace(sequential(nn.BatchNorm2d(3, momentum=None))),
    "one layer twice": lambda: sequential(*[nn.BatchNorm2d(3)] * 2, nn.Tanh()),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_trains_as_one_process_and_reverts_for_export(ranks: Ranks, build: Callable[[], nn.Module]) -> None:
    """After a revert the exported model equals the evaluation of an unconverted model, bit for bit."""
    alone, original, model = (build().double().to(ranks.device) for _ in range(3))
    require_trains_as(alone, ranks, syncbn.convert_syncbn_model(model))
    syncbn.revert_syncbn_model(model.eval())
    original.load_state_dict(model.state_dict())
    assert not any(isinstance(module, syncbn.SyncBatchNorm) for module in model.modules())
    x = whole_batches(ranks, 1)[0][0]
    expected = original.eval()(x)
    assert torch.equal(model(x), expected)
    if ranks.rank == 0:
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


class CopiesItsDict(nn.BatchNorm2d):
    """Defines how its instances are copied and pickled: with all of `__dict__`."""

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__.copy()


@pytest.mark.parametrize("copy_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_holds_nothing_that_belongs_to_one_layer(ranks: Ranks, copy_by: Callable[..., nn.Module]) -> None:
    """A layer has, for example, a site on its group. The copy trains over all ranks too."""
    model = syncbn.convert_syncbn_model(nn.Sequential(CopiesItsDict(3))).to(ranks.device)
    x = torch.randn(2, 3, 5, 5, device=ranks.device) + ranks.rank
    with syncbn.accumulate_running_stats(model):
        expected = model(x)
        (layer,) = copied = copy_by(model)
    assert layer._syncbn_site is layer._options is layer._train_override is None
    torch.testing.assert_close(copied(x), expected)
    assert layer.num_batches_tracked == 1


# Layers whose forward calls batch norm.

Build = Callable[..., nn.Module]  # the class of a layer, or a function with the same arguments


def subclass(name: str, forward: Callable[[nn.BatchNorm2d, Tensor], Tensor]) -> type[nn.BatchNorm2d]:
    return type(name, (nn.BatchNorm2d,), {"forward": forward})


def running(layer: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    return layer.running_mean, layer.running_var


def ghost(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Normalise two parts of the batch, one after the other."""
    parts = [F.batch_norm(part, *running(layer), layer.weight, layer.bias, True) for part in (x[::2], x[1::2])]
    return torch.stack(parts, 1).flatten(0, 1)


def slice_channels(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Normalise the last two channels, like a slimmable network."""
    tensors = [None if tensor is None else tensor[1:] for tensor in (*running(layer), layer.weight)]
    return F.batch_norm(x[:, 1:], *tensors, training=True)


def normalise_instances(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    n, c, *sizes = x.shape
    return F.batch_norm(x.reshape(1, n * c, *sizes), None, None, layer.weight.repeat(n), training=True).view_as(x)


def parametrized_act(*args: Any, **options: Any) -> nn.Module:
    return parametrized(BatchNormAct2d(*args, **options))


# fmt: off
Ghost = subclass("Ghost", ghost)
Slices = subclass("Slices", slice_channels)
NoStatistics = subclass(
    "NoStatistics", lambda layer, x: F.batch_norm(x, None, None, layer.weight, layer.bias, training=True))
TorchFunction = subclass(
    "TorchFunction",
    lambda layer, x: torch.batch_norm(x, layer.weight, layer.bias, *running(layer), True, 0.1, layer.eps, False))
InstanceNorm = subclass("InstanceNorm", normalise_instances)
InstanceAndBatchNorm = subclass(
    "InstanceAndBatchNorm", lambda layer, x: normalise_instances(layer, NoStatistics.forward(layer, x)))
# fmt: on


def build_layers(ranks: Ranks, build: Build, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return an unconverted layer with 3 channels and random parameters, and a converted copy."""
    plain = build(3, dtype=torch.float64, device=ranks.device, **options)
    for index, parameter in enumerate(plain.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator(ranks.device).manual_seed(index))
    return plain, syncbn.convert_syncbn_model(copy.deepcopy(plain))


def uneven_batch(ranks: Ranks) -> tuple[Tensor, slice]:
    """Return a batch, and the slice of this rank. The slices differ in size."""
    sizes = [2, 4, 6, 2][: ranks.size]
    x = torch.randn(sum(sizes), 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.to(ranks.device), ranks.local_slice(sizes)


def syncbn_warnings(function: Callable[[], object]) -> list[str]:
    """Return syncbn's warnings in a call, including those that this process has given before."""
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught if "syncbn" in str(warning.message)]


@pytest.mark.parametrize(
    ("build", "options", "num_all_reduces", "warns"),
    [
        (BatchNormAct2d, {}, 1, False),
        (parametrized_act, {}, 1, False),
        (CallsSuper2d, {}, 1, False),
        (Ghost, {}, 2, False),
        (Slices, {}, 1, False),
        (Slices, {"track_running_stats": False}, 1, False),
        (Slices, {"affine": False}, 1, False),
        (NoStatistics, {}, 1, False),
        (NoStatistics, {"track_running_stats": False}, 1, False),
        (NoStatistics, {"track_running_stats": False, "affine": False}, 1, False),
        (TorchFunction, {}, 1, False),
        (InstanceNorm, {}, 0, True),
        (InstanceAndBatchNorm, {}, 1, True),
    ],
)
def test_a_call_that_passes_a_tensor_of_the_layer_is_synchronised(
    ranks: Ranks, build: Build, options: dict[str, bool], num_all_reduces: int, warns: bool
) -> None:
    """Each call of a layer without tensors is synchronised too. Other calls stay local, and one warning names the
    class."""
    plain, layer = build_layers(ranks, build, **options)
    whole, own = uneven_batch(ranks)
    x, outputs = whole[own].requires_grad_(), []
    with CountCollectives() as forward:
        warned = syncbn_warnings(lambda: outputs.extend(layer(x) for _ in range(2)))
    with CountCollectives() as backward:
        outputs[1].sum().backward()
    assert (forward.total, backward.total) == (2 * num_all_reduces, num_all_reduces)
    expected = [plain(whole)[own] for _ in range(2)]
    torch.testing.assert_close((outputs, layer.state_dict()), (expected, plain.state_dict()))
    title = f"syncbn is not synchronising: {type(plain).__name__}.forward calls F.batch_norm with none of the layer's "
    assert [text[: len(title)] for text in warned] == [title] * warns
    last_step = f"synchronised over {ranks.size} ranks" if num_all_reduces else "not synchronised"
    assert syncbn.summary(layer)[0].last_step == last_step


@pytest.mark.parametrize(
    ("layer_class", "modes"),
    [(TorchFunction, [True]), (BatchNormAct2d, [True, False]), (CallsSuper2d, [True, False])],
)
def test_options_of_syncbn_in_a_subclass(ranks: Ranks, layer_class: type[nn.Module], modes: list[bool]) -> None:
    """channel_last and fuse_relu apply to the batch norm that a forward calls, in training and evaluation."""
    whole, own = uneven_batch(ranks)
    plain, layer = (layer_class(3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    plain.act = layer.act = nn.Identity()
    syncbn.convert_syncbn_model(layer, channel_last=True).fuse_relu = True
    for training in modes:
        plain.train(training), layer.train(training)
        output = layer(whole[own].movedim(1, -1)).movedim(-1, 1)
        torch.testing.assert_close((output, layer.state_dict()), (plain(whole).relu()[own], plain.state_dict()))


# Forwards that a program has replaced, or that take other inputs.


def shifted(layer: nn.BatchNorm2d, x: Tensor, forward: Callable[..., Tensor] = nn.BatchNorm2d.forward) -> Tensor:
    return forward(layer, x) + 5


OWN = type("OwnForward", (nn.BatchNorm2d,), {})


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("layer_class", "owner"),
    [(nn.BatchNorm2d, nn.BatchNorm2d), (nn.BatchNorm2d, _BatchNorm), (CallsSuper2d, nn.BatchNorm2d), (OWN, OWN)],
)
def test_a_forward_that_is_replaced_on_a_class(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, layer_class: type[nn.Module], owner: type[nn.Module]
) -> None:
    """The new forward is synchronised in layers that were converted before and after, and in a graph."""
    whole, own = uneven_batch(ranks)
    plain, before = build_layers(ranks, layer_class)
    monkeypatch.setattr(owner, "forward", shifted)
    after, compiled = syncbn.convert_syncbn_model(copy.deepcopy(plain)), copy.deepcopy(before)
    calls = before, after, torch.compile(compiled, backend="aot_eager", fullgraph=True)
    expected = plain(whole)[own], plain.state_dict()
    for call, layer in zip(calls, (before, after, compiled), strict=True):
        torch.testing.assert_close((call(whole[own]), layer.state_dict()), expected)
        torch.testing.assert_close(call.eval()(whole), plain.eval()(whole))


class PointBatchNorm(nn.BatchNorm1d):
    """Like torchsparse's: takes values (points, C) and coordinates."""

    def forward(self, input: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(input[0]), input[1]


def test_a_subclass_whose_input_is_not_a_tensor(ranks: Ranks) -> None:
    whole, own = uneven_batch(ranks)
    points = whole[:, :, 0, 0]
    layer, plain = (PointBatchNorm(3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    output, _ = syncbn.convert_syncbn_model(layer)((points[own], points.new_zeros(1, 4)))
    torch.testing.assert_close(output, plain((points, points))[0][own])


# Layers whose forward calls no batch norm, or hides the call in a graph.


class Breaks(CallsSuper2d):
    """Breaks the graph before and after its batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y


@pytest.mark.compiles
@pytest.mark.parametrize(
    "build",
    [BatchNormAct2d, parametrized_act, CallsSuper2d, Slices, TorchFunction, InstanceNorm, InstanceAndBatchNorm,
     CallsFunctional, Frozen, Breaks, ManualBatchNorm],
)  # fmt: skip
def test_a_graph_synchronises_and_warns_as_in_eager_mode(ranks: Ranks, build: Build) -> None:
    """An evaluation does not warn."""
    layer, results = build_layers(ranks, build)[1], []
    compiled_layer, (whole, own) = copy.deepcopy(layer), uneven_batch(ranks)
    compiled = torch.compile(compiled_layer, backend="aot_eager", fullgraph=build is not Breaks)
    expected = syncbn_warnings(lambda: results.append(step(layer, layer, whole[own])))
    assert syncbn_warnings(lambda: results.append(step(compiled, compiled_layer, whole[own]))) == expected
    torch.testing.assert_close(*results)
    if expected:
        assert syncbn_warnings(lambda: compiled.eval()(whole)) == []


class Compiled(nn.BatchNorm2d):
    @torch.compile(backend="eager", fullgraph=True)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.compiles
def test_a_forward_that_is_a_graph_is_not_warned_of(ranks: Ranks) -> None:
    """pytest turns a warning into an error. The graph without gradients calls other operators."""
    plain, layer = build_layers(ranks, Compiled)
    x, own = uneven_batch(ranks)
    for requires_grad in (True, False):
        layer.requires_grad_(requires_grad)
        torch.testing.assert_close(layer(x[own]), nn.BatchNorm2d.forward(plain, x)[own] * 2)
        assert syncbn.summary(layer)[0].last_step == "not known"


def test_one_warning_names_each_class_whose_forward_does_not_synchronise(ranks: Ranks) -> None:
    """The previous step may have synchronised. A layer that contains another layer is not named. Layers of one rank do
    not warn, because they leave no ranks out."""
    outer = subclass("Outer", ManualBatchNorm.forward)(3)
    outer.inner = nn.BatchNorm2d(3)
    model = nn.Sequential(ManualBatchNorm(3), outer, Frozen(3), InstanceNorm(3)).to(ranks.device)
    syncbn.convert_syncbn_model(model)
    model[0]._synchronised_ranks = ranks.size
    x = torch.randn(4, 3, 2, 2, device=ranks.device)
    assert syncbn_warnings(lambda: model(x)) == [
        "syncbn is not synchronising: ManualBatchNorm.forward calls neither super().forward nor F.batch_norm in "
        "training. If it uses the statistics of this rank's batch, let it call one of the two, or "
        "syncbn.functional.sync_batch_norm. A layer that communicates by itself needs no change.",
        "syncbn is not synchronising: InstanceNorm.forward calls F.batch_norm with none of the layer's weight, "
        "bias, running_mean and running_var. If that call uses the statistics of the batch, pass one of the four or a "
        "slice of it, not a copy such as weight.float(), or call syncbn.functional.sync_batch_norm.",
    ]
    last_steps = ["not known", "not known", "none yet", "not synchronised", "not synchronised"]
    assert [row.last_step for row in syncbn.summary(model)] == last_steps
    assert syncbn_warnings(lambda: model.eval()(x)) == []
    assert syncbn_warnings(lambda: syncbn.convert_syncbn_model(model, process_group=1).train()(x)) == []
