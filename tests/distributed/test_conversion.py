"""Catches a converted model that does not train as one process does, or a reverted one that cannot be exported.

Also a subclass whose batch norm stays local, or synchronises what is not the layer's; and a layer called synchronised
that is not, or the other way round (pytorch#187298, #41081; timm#2422; mmcv#1253).
"""

import contextlib
import copy
import functools
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d, CallsFunctional, CallsSuper2d, Frozen, OwnMathematics, parametrized
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from training import CountCollectives, mine, require_equal_state, require_trains_as, step, train, whole_batches
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm, sync_batch_stats
from syncbn.texts import warn_once

STEPS = 3


def sequential(*batch_norms: nn.Module, change: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Module:
    return nn.Sequential(change(nn.Conv2d(1, 3, 3)), *batch_norms, nn.Flatten(), nn.Linear(108, 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: sequential(nn.BatchNorm2d(3)),
    "timm's": lambda: sequential(BatchNormAct2d(3)),
    "calls super": lambda: sequential(CallsSuper2d(3)),
    "parametrized": lambda: sequential(parametrized(nn.BatchNorm2d(3))),
    "parametrized subclass": lambda: sequential(parametrized(BatchNormAct2d(3))),
    "fx-traced": lambda: torch.fx.symbolic_trace(sequential(nn.BatchNorm2d(3, momentum=None))),
    "spectral norm beside": lambda: sequential(nn.BatchNorm2d(3), change=parametrizations.spectral_norm),
    "shared": lambda: sequential(*[nn.BatchNorm2d(3)] * 2, nn.Tanh()),
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().double()


@pytest.mark.parametrize("kind", MODELS)
def test_trains_as_one_process_and_reverts_for_export(ranks: Ranks, kind: str) -> None:
    """convert -> train -> revert -> export: the exported model is the unconverted evaluation model, bit for bit."""
    alone, original, model = (make(kind).to(ranks.device) for _ in range(3))
    require_trains_as(alone, ranks, syncbn.convert_syncbn_model(model))

    syncbn.revert_syncbn_model(model.eval())
    original.load_state_dict(model.state_dict())
    assert not any(isinstance(module, syncbn.SyncBatchNorm) for module in model.modules())
    x = whole_batches(ranks, 1)[0][0]
    expected = original.eval()(x)
    assert torch.equal(model(x), expected)
    if ranks.rank == 0 and "parametrized" not in kind:  # of which torch.export warns
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


def test_evaluation_without_running_statistics_is_local(ranks: Ranks) -> None:
    """Also of a part of a subclass that trains."""

    class WithAuxiliary(BatchNormAct2d):
        def forward(self, x: Tensor) -> Tensor:
            self.of_auxiliary = self.auxiliary(x)
            return super().forward(x)

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    for part in (BatchNormAct2d, nn.BatchNorm2d):
        layer, whole = part(3, track_running_stats=False).to(ranks.device).eval(), WithAuxiliary(3).to(ranks.device)
        expected, whole.auxiliary = layer(x), layer
        with CountCollectives() as collectives:
            assert torch.equal(syncbn.convert_syncbn_model(whole).auxiliary(x), expected)
            assert collectives.total == 0
            whole(x)
        assert torch.equal(whole.of_auxiliary, expected)
        assert collectives.total == 1


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["timm's", "calls super", "parametrized subclass"])
def test_subclasses_take_one_collective_each_way_and_compile(ranks: Ranks, kind: str) -> None:
    layer = syncbn.convert_syncbn_model(make(kind))[1].to(ranks.device)
    other = copy.deepcopy(layer)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(ranks.rank))
    x = x.to(ranks.device)
    with CountCollectives() as training:
        expected = step(layer, layer, x)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, other, x), expected)
    with CountCollectives() as evaluation:
        step(layer.eval(), layer, x)
    assert (training.total, evaluation.total) == (2, 0)


class CopiesItsDict(nn.BatchNorm2d):
    """Has the two methods that a class defines to add attributes to its copies, and copies all of `__dict__`."""

    def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__.copy()


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "AveragedModel": lambda model: AveragedModel(model).module,
    "fields of __dict__": lambda model: copy.deepcopy(vars(model))["_modules"],
}


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["plain", "timm's", "parametrized", "copies its dict"])
def test_a_layer_that_has_trained_is_copied_by_anything(ranks: Ranks, kind: str, way: str, in_block: bool) -> None:
    """What belongs to the layer alone, such as its site, is not copied. The copy trains, and over all ranks."""
    if (kind, way) == ("parametrized", "pickle"):
        pytest.skip("torch refuses to pickle a parametrized module")
    layer = nn.Sequential(CopiesItsDict(3)).double() if kind == "copies its dict" else make(kind)[1:2]
    model = syncbn.convert_syncbn_model(layer).to(ranks.device)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, device=ranks.device) + ranks.rank
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with syncbn.accumulate_running_stats(model) if in_block else contextlib.nullcontext():
        copied = COPIES[way](model)
        (layer,) = copied.values() if isinstance(copied, dict) else copied
        assert layer._syncbn_site is layer._options is layer._train_override is None
        actual = step(layer, layer, x)
    model.load_state_dict(before)
    torch.testing.assert_close(actual, step(model[0], model[0], x), rtol=1e-12, atol=1e-12)


def test_averaged_copies(ranks: Ranks) -> None:
    """Their updates and evaluation send nothing; the statistics are averaged, the model's, or by update_bn those of all
    ranks' data, as on one process."""
    ema, whole, results = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, whole_batches(ranks, STEPS), []
    alone, model = (make("plain").to(ranks.device) for _ in range(2))
    ddp = DistributedDataParallel(syncbn.convert_syncbn_model(model))
    for one, trained, x, labels in ((alone, alone, *whole), (model, ddp, *mine(ranks, *whole))):
        copies = [AveragedModel(one, use_buffers=True, **ema), AveragedModel(one, **ema), AveragedModel(one)]
        for index in range(STEPS):
            train(trained, x[index, None], labels[index, None])
            with CountCollectives() as collectives:
                for averaged in copies:
                    averaged.update_parameters(one)
                    averaged.eval()(x[index])
            assert collectives.total == 0
        assert torch.equal(copies[1].module[1].running_var, one[1].running_var)
        update_bn(list(x), copies[2])
        results.append(nn.ModuleList(copies))
    require_equal_state(*results)


def ghost(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """Each of two parts of the batch by itself."""
    own = layer.running_mean, layer.running_var, layer.weight, layer.bias, True
    return torch.stack([F.batch_norm(part, *own) for part in (x[::2], x[1::2])], 1).flatten(0, 1)


def slimmable(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """The last two channels."""
    own = [None if tensor is None else tensor[1:] for tensor in (layer.running_mean, layer.running_var, layer.weight)]
    return F.batch_norm(x[:, 1:], *own, training=True)


def standardised(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    weight = (layer.weight - layer.weight.mean()) / layer.weight.std()
    return F.batch_norm(x, layer.running_mean, layer.running_var, weight, training=True)


def without_statistics(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True)


def instance_norm(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    n, c, *sizes = x.shape
    return F.batch_norm(x.reshape(1, n * c, *sizes), None, None, layer.weight.repeat(n), training=True).view_as(x)


def layer_norm(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return F.batch_norm(x.flatten(1).t(), None, None, training=True).t().view_as(x) * layer.weight.view(-1, 1, 1)


def by_torch(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """torch.batch_norm with cudnn switched off."""
    running = layer.running_mean, layer.running_var
    return torch.batch_norm(x, layer.weight, layer.bias, *running, True, 0.1, layer.eps, False)


def by_torch_with_names(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    running = {"running_mean": layer.running_mean, "running_var": layer.running_var}
    options = {"training": True, "momentum": 0.1, "eps": layer.eps, "cudnn_enabled": True}
    return torch.batch_norm(x, weight=layer.weight, bias=layer.bias, **running, **options)


def instance_norm_by_torch(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    whole, weight = x.reshape(1, -1, *x.shape[2:]), layer.weight.repeat(len(x))
    return torch.batch_norm(whole, weight, None, None, None, True, 0.1, layer.eps, True).view_as(x)


def instance_and_batch_norm(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return instance_norm(layer, without_statistics(layer, instance_norm(layer, x)))


# What a forward does, the options of the layer, and the number of all_reduces of a training forward.
CALLS: dict[str, tuple[Callable[[nn.BatchNorm2d, Tensor], Tensor], dict[str, bool], int]] = {
    "ghost batch norm": (ghost, {}, 2),
    "slices": (slimmable, {}, 1),
    "slices without statistics": (slimmable, {"track_running_stats": False}, 1),
    "slices without weight": (slimmable, {"affine": False}, 1),
    "standardised weight": (standardised, {}, 1),
    "without statistics": (without_statistics, {}, 1),
    "track_running_stats=False": (without_statistics, {"track_running_stats": False}, 1),
    "neither": (without_statistics, {"track_running_stats": False, "affine": False}, 1),
    "parametrized": (without_statistics, {"track_running_stats": False}, 1),
    "instance norm": (instance_norm, {}, 0),
    "layer norm": (layer_norm, {"track_running_stats": False}, 0),
    "both": (instance_and_batch_norm, {}, 1),
    "torch.batch_norm": (by_torch, {}, 1),
    "torch.batch_norm with names": (by_torch_with_names, {}, 1),
    "instance norm by torch.batch_norm": (instance_norm_by_torch, {}, 0),
}
LOCAL = instance_norm, instance_norm_by_torch, layer_norm, instance_and_batch_norm


def layers_that_call(name: str, ranks: Ranks) -> tuple[nn.Module, nn.Module]:
    """An unconverted layer with the forward of this name, and a converted one."""
    forward, options, _ = CALLS[name]
    kind = type(f"Calls{forward.__name__}", (nn.BatchNorm2d,), {"forward": forward})
    plain = kind(3, **options, dtype=torch.float64, device=ranks.device)
    for index, parameter in enumerate(plain.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator(ranks.device).manual_seed(index))
    if name == "parametrized":  # such a layer holds none of its tensors itself
        plain.register_parameter("bias", None)
        parametrized(plain)
    return plain, syncbn.convert_syncbn_model(copy.deepcopy(plain))


def parts_of(ranks: Ranks) -> tuple[Tensor, slice]:
    """A batch of which the ranks have different numbers of samples, and this rank's part."""
    sizes = [2, 4, 6, 2][: ranks.size]
    x = torch.randn(sum(sizes), 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.to(ranks.device), ranks.slices(sizes)


def warnings_of(function: Callable[[], object]) -> list[str]:
    """syncbn's warnings in a call, also those that it has given before."""
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(one.message) for one in caught if "syncbn" in str(one.message)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_synchronises_that_passes_a_tensor_of_the_layer(ranks: Ranks, name: str) -> None:
    """Or a slice of one, or if there is none; others are as before the conversion, and named once."""
    plain, layer = layers_that_call(name, ranks)
    (whole, own), (forward, _, num_collectives) = parts_of(ranks), CALLS[name]
    outputs: list[Tensor] = []
    with CountCollectives() as collectives:
        warned = warnings_of(lambda: outputs.extend(layer(whole[own]) for _ in range(2)))
    assert collectives.total == 2 * num_collectives
    expected = [plain(whole)[own] for _ in range(2)]
    torch.testing.assert_close((outputs, layer.state_dict()), (expected, plain.state_dict()))
    assert len(warned) == (forward in LOCAL)
    assert all(
        one.startswith(f"syncbn is not synchronising: Calls{forward.__name__}.forward calls F.batch_norm with none of")
        for one in warned
    )
    last_step = f"synchronised over {ranks.size} ranks" if num_collectives else "not synchronised"
    assert syncbn.summary(layer)[0].last_step == last_step


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["slices", "layer norm", "both", "torch.batch_norm", "torch.batch_norm with names"])
def test_a_compiled_call_synchronises_where_an_eager_one_does(ranks: Ranks, name: str) -> None:
    _, layer = layers_that_call(name, ranks)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    whole, own = parts_of(ranks)
    outputs: list[Tensor] = []
    first, second = (warnings_of(lambda one=one: outputs.append(one(whole[own]))) for one in (layer, compiled))
    torch.testing.assert_close(*outputs)
    assert first == second


def test_a_function_that_replaces_batch_norm(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program replaces F.batch_norm by a function that calls torch.batch_norm, to switch cudnn off."""

    def without_cudnn(
        input: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, training: bool, *numbers: float
    ) -> Tensor:
        return torch.batch_norm(input, weight, bias, mean, var, training, *(numbers or (0.1, 1e-5)), False)

    monkeypatch.setattr(F, "batch_norm", without_cudnn)
    whole, own = parts_of(ranks)
    layer, plain = (BatchNormAct2d(3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    with CountCollectives() as collectives:
        output = syncbn.convert_syncbn_model(layer)(whole[own])
    assert collectives.total == 1
    torch.testing.assert_close((output, layer.state_dict()), (plain(whole)[own], plain.state_dict()))


def test_a_local_call_of_syncbn_in_a_forward_stays_local(ranks: Ranks) -> None:
    """The batch norm of one rank, which CountCollectives keeps from the fast path, is not replaced a second time."""

    class OfThisRank(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return sync_batch_norm(x, None, None, self.weight, self.bias, training=True, process_group=1)

    whole, own = parts_of(ranks)
    layer = syncbn.convert_syncbn_model(OfThisRank(3, dtype=torch.float64, device=ranks.device))
    with CountCollectives() as collectives:
        output = layer(whole[own])
    assert collectives.total == 0
    torch.testing.assert_close(output, F.batch_norm(whole[own], None, None, training=True))


TORCH_FORWARD = nn.BatchNorm2d.forward


def shifted(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """A forward that a program sets on a class, around torch's."""
    return TORCH_FORWARD(layer, x) + 5


def shifted_by_function(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    running = layer.running_mean, layer.running_var
    return F.batch_norm(x, *running, layer.weight, layer.bias, layer.training, 0.1, layer.eps) + 5


class Inherits(nn.BatchNorm2d):
    """A subclass without a forward."""


wrapper = functools.wraps(TORCH_FORWARD)(lambda layer, x: shifted(layer, x))  # it has the __module__ of torch's forward


@pytest.mark.compiles
@pytest.mark.parametrize("is_converted", [True, False])
@pytest.mark.parametrize(
    ("kind", "owner", "forward"),
    [
        (nn.BatchNorm2d, nn.BatchNorm2d, shifted),
        (nn.BatchNorm2d, nn.BatchNorm2d, shifted_by_function),
        (nn.BatchNorm2d, nn.BatchNorm2d, wrapper),
        (nn.BatchNorm2d, _BatchNorm, shifted),
        (CallsSuper2d, nn.BatchNorm2d, shifted),
        (Inherits, nn.BatchNorm2d, shifted),
        (Inherits, Inherits, shifted),
    ],
)
def test_a_forward_that_is_replaced_on_the_class(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], owner: type[nn.Module],
    forward: Callable[..., Tensor], is_converted: bool,
) -> None:  # fmt: skip
    """The layer trains and evaluates by the new forward, with one collective each way in training; also in a graph."""
    if owner is Inherits:  # a class that no other case has converted
        kind = owner = type("Inherits", (nn.BatchNorm2d,), {})
    whole, own = parts_of(ranks)
    plain, layer = (kind(3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    if is_converted:  # before the forward is replaced
        syncbn.convert_syncbn_model(layer)
    monkeypatch.setattr(owner, "forward", forward)
    syncbn.convert_syncbn_model(layer)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    expected = plain(whole)[own], plain.state_dict()
    assert expected[0].mean() > 4
    with CountCollectives() as collectives:
        output = layer(whole[own])
        output.sum().backward()
    assert collectives.total == 2
    torch.testing.assert_close((output, layer.state_dict()), expected)
    with CountCollectives() as collectives:
        torch.testing.assert_close(layer.eval()(whole), plain.eval()(whole))
    assert collectives.total == 0
    output = compiled(whole[own])
    torch.testing.assert_close((output, compiled._orig_mod.state_dict()), expected)
    torch.testing.assert_close(compiled.eval()(whole), plain(whole))


@pytest.mark.parametrize("forward", [by_torch, BatchNormAct2d.forward, CallsSuper2d.forward])
def test_options_of_syncbn_in_a_subclass(ranks: Ranks, forward: Callable[..., Tensor]) -> None:
    """channel_last and fuse_relu apply to the batch norm that a forward calls, whichever it calls."""
    kind = type("Calls", (CallsSuper2d if forward is CallsSuper2d.forward else BatchNormAct2d,), {"forward": forward})
    whole, own = parts_of(ranks)
    plain, layer = (kind(3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    plain.act = layer.act = nn.Identity()
    syncbn.convert_syncbn_model(layer, channel_last=True).fuse_relu = True
    for is_training in (True, False):
        plain.train(is_training), layer.train(is_training)
        output = layer(whole[own].movedim(1, -1)).movedim(-1, 1)
        torch.testing.assert_close((output, layer.state_dict()), (plain(whole).relu()[own], plain.state_dict()))
        if forward is by_torch:  # a forward that always trains
            break


def test_options_of_syncbn_leave_other_calls_alone(ranks: Ranks) -> None:
    """An instance norm within the forward gets neither channel_last nor fuse_relu."""
    plain, layer = layers_that_call("instance norm", ranks)
    layer.fuse_relu = layer.channel_last = True
    whole, own = parts_of(ranks)
    warnings_of(lambda: torch.testing.assert_close(layer(whole[own]), plain(whole[own])))


def test_a_layer_of_one_rank_is_not_warned_of(ranks: Ranks) -> None:
    """The warnings say that other ranks are left out."""
    layers = nn.Sequential(layers_that_call("instance norm", ranks)[1], OwnMathematics(3).double()).to(ranks.device)
    syncbn.convert_syncbn_model(layers, process_group=1)
    whole, own = parts_of(ranks)
    assert warnings_of(lambda: layers(whole[own])) == []


class OfPoints(nn.BatchNorm1d):
    """As torchsparse's: of values (points, C) and coordinates (https://github.com/mit-han-lab/torchsparse/issues/332)."""

    def forward(self, input: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(input[0]), input[1]


def test_a_subclass_whose_input_is_no_tensor(ranks: Ranks) -> None:
    whole, own = parts_of(ranks)
    points = whole[:, :, 0, 0]
    layer, plain = (OfPoints(3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    output, _ = syncbn.convert_syncbn_model(layer)((points[own], points.new_zeros(1, 4)))
    torch.testing.assert_close(output, plain((points, points))[0][own])


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, CallsSuper2d, nn.LazyBatchNorm2d])
def test_a_forward_that_is_set_after_the_conversion(ranks: Ranks, kind: type[nn.Module]) -> None:
    """A lazy layer is synchronised from its first forward on."""
    whole, own = parts_of(ranks)
    number = () if kind is nn.LazyBatchNorm2d else (3,)
    layer, plain = (kind(*number, dtype=torch.float64, device=ranks.device) for _ in range(2))
    forward = syncbn.convert_syncbn_model(layer).forward
    if number:
        layer.forward = lambda x: forward(x)
    torch.testing.assert_close(layer(whole[own]), plain(whole)[own])
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())
    assert syncbn.summary(layer)[0].last_step == f"synchronised over {ranks.size} ranks"


class Compiled(nn.BatchNorm2d):
    @torch.compile(backend="eager", fullgraph=True)
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class CompiledInside(nn.BatchNorm2d):
    """Takes the mean of each channel too."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.compiled = torch.compile(super().forward, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        self.last_mean = x.mean((0, 2, 3))
        return self.compiled(x) * 2


class Nested(CallsFunctional):
    """A norm within a norm, after its own and before it."""

    def __init__(self, num_features: int, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.inner = CallsSuper2d(num_features, **options)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        y = super().forward(x)
        self.inner(x)
        return y * 2


class Breaks(CallsSuper2d):
    """Breaks the graph before and after its batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y


class CallsStatistics(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        mean, var, _ = sync_batch_stats(x)
        return (x - mean.view(-1, 1, 1)) * (var.view(-1, 1, 1) + self.eps).rsqrt()


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("kind", "backend", "is_warned_of"),
    [
        (OwnMathematics, "aot_eager", True),
        (OwnMathematics, "inductor", True),
        (CallsFunctional, "aot_eager", False),
        (CallsStatistics, "aot_eager", False),
        (CallsSuper2d, "aot_eager", False),
        (BatchNormAct2d, "aot_eager", False),
        (Frozen, "aot_eager", False),
        (Nested, "aot_eager", False),
        (Breaks, "aot_eager", False),
    ],
)
def test_a_layer_that_is_only_compiled(ranks: Ranks, kind: type[nn.Module], backend: str, is_warned_of: bool) -> None:
    """A compiled forward that calls no batch norm is warned of as an eager one is; not in evaluation."""
    own = type("Own", (kind,), {})
    x = torch.randn(4, 3, 2, 2, device=ranks.device)
    model = syncbn.convert_syncbn_model(nn.Sequential(own(3), own(3)).to(ranks.device))
    compiled = torch.compile(model, backend=backend, fullgraph=kind is not Breaks)
    assert warnings_of(lambda: compiled.eval()(x)) == []
    compiled.train()
    warned = warnings_of(lambda: [compiled(x[:size]) for size in (4, 3, 2)])
    title = "syncbn is not synchronising: Own.forward calls neither super().forward nor F.batch_norm in training. "
    assert len(warned) == is_warned_of
    assert all(one.startswith(title) for one in warned)


@pytest.mark.compiles
@pytest.mark.parametrize(("kind", "known"), [(Compiled, False), (CompiledInside, False), (Nested, True)])
def test_a_layer_that_synchronises_is_not_warned_of(ranks: Ranks, kind: type[nn.Module], known: bool) -> None:
    """Graphs without gradients call other operators."""
    x, own = parts_of(ranks)
    layer = syncbn.convert_syncbn_model(kind(3, dtype=torch.float64, device=ranks.device))
    expected = nn.BatchNorm2d(3, dtype=torch.float64, device=ranks.device)(x) * 2
    for requires_grad in (True, False):
        layer.requires_grad_(requires_grad)
        torch.testing.assert_close(layer(x[own]), expected[own])
        last_step = f"synchronised over {ranks.size} ranks" if known else "not known"
        assert {row.last_step for row in syncbn.summary(layer)} == {last_step}


class Delegates(OwnMathematics):
    """Leaves all to a layer within it."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.inner = type("Inner", (OwnMathematics,), {})(num_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_forward_that_calls_no_batch_norm_is_warned_of_once(ranks: Ranks) -> None:
    """Also where it called one in the step before; not where a layer within it may be the one that normalises."""
    own = type("Own", (OwnMathematics,), {})  # of which no other test has made syncbn warn
    model = syncbn.convert_syncbn_model(nn.Sequential(own(3), own(3), Delegates(3), Frozen(3)))
    model[0]._synchronised_ranks = ranks.size
    with pytest.warns(UserWarning, match="syncbn is not synchronising") as warned:
        model.to(ranks.device)(torch.randn(4, 3, 2, 2, device=ranks.device))
    advice = (
        "in training. If it uses the statistics of this rank's batch, let it call one of the two, or "
        "syncbn.functional.sync_batch_norm. A layer that communicates by itself needs no change."
    )
    assert [str(one.message) for one in warned] == [
        f"syncbn is not synchronising: {name}.forward calls neither super().forward nor F.batch_norm {advice}"
        for name in ("Own", "Inner")
    ]
    last_steps = {row.layer: row.last_step for row in syncbn.summary(model)}
    assert last_steps.pop("3") == "not synchronised"
    assert last_steps == dict.fromkeys(("0", "1", "2", "2.inner"), "not known")


class Naive(nn.BatchNorm2d):
    """As detectron2's NaiveSyncBatchNorm: in training it communicates by itself."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        size = dist.get_world_size()
        moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
        mean, mean_square = all_reduce(moments) / size
        scale = self.weight * (mean_square - mean.square() + self.eps).rsqrt()
        self.running_mean += self.momentum * (mean.detach() - self.running_mean)
        return (x - mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def test_a_layer_that_communicates_by_itself(ranks: Ranks) -> None:
    """The warning and the summary do not claim that it trains on this rank alone."""
    whole = torch.randn(2 * ranks.size, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, own = whole.to(ranks.device), ranks.slices([2] * ranks.size)
    layer, plain = (kind(3, dtype=torch.float64, device=ranks.device) for kind in (Naive, nn.BatchNorm2d))
    syncbn.convert_syncbn_model(layer)
    (warned,) = warnings_of(lambda: torch.testing.assert_close(layer(whole[own]), plain(whole)[own]))
    assert warned.startswith("syncbn is not synchronising: Naive.forward calls neither ")
    assert "in training. " in warned
    assert warned.endswith(" A layer that communicates by itself needs no change.")
    layer.num_batches_tracked += 1
    assert syncbn.summary(layer)[0].last_step == "not known"
    assert warnings_of(lambda: layer.eval()(whole)) == []


def test_the_last_step_of_a_layer_is_that_of_its_thread(ranks: Ranks) -> None:
    """Another layer trains in the middle of the forward, and synchronises nothing."""

    class Slow(CallsFunctional):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=other, args=(x,))
            thread.start()
            thread.join()
            return super().forward(x)

    slow, other = (syncbn.convert_syncbn_model(kind(3, device=ranks.device)) for kind in (Slow, OwnMathematics))
    with pytest.warns(UserWarning, match="not synchronising: OwnMathematics"):
        slow(torch.randn(4, 3, 2, 2, device=ranks.device))
    assert syncbn.summary(slow)[0].last_step == f"synchronised over {ranks.size} ranks"
    assert syncbn.summary(other)[0].last_step == "not known"
