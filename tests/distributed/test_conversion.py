"""Tests that a converted model trains on ranks as one process does, also if its layers define their own forwards.

If a forward passes a parameter or buffer of its layer to F.batch_norm, this call is synchronised, in eager mode and in
graphs. Other calls stay local, and a warning names the class of the layer. test_convert.py tests what needs no ranks.
"""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d, Frozen, parametrized
from torch import Tensor, nn
from training import CountCollectives, require_trains_as, step, syncbn_warnings, whole_batches
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm

# Models.


def small_model(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), *layers, nn.Flatten(), nn.Linear(3 * 6 * 6, 5)).double()


SHARED_LAYER = nn.BatchNorm2d(3)
MODELS = {
    "timm's layer": small_model(BatchNormAct2d(3)),
    "parametrized": small_model(parametrized(BatchNormAct2d(3))),
    "one layer twice": small_model(SHARED_LAYER, nn.Tanh(), SHARED_LAYER),
    "traced by torch.fx": torch.fx.symbolic_trace(small_model(nn.BatchNorm2d(3, momentum=None))),
}


@pytest.mark.parametrize("original", MODELS.values(), ids=MODELS)
def test_a_converted_model_trains_as_one_process_and_reverts_for_export(ranks: Ranks, original: nn.Module) -> None:
    """After a revert the exported model equals the evaluation of an unconverted model, bit for bit."""
    alone, model = (copy.deepcopy(original).to(ranks.device) for _ in range(2))
    syncbn.convert_syncbn_model(model)
    # `alone` trains on whole batches, and `model` on the slices of this rank. Parameters and buffers must be equal.
    require_trains_as(alone, ranks, model)
    syncbn.revert_syncbn_model(model.eval())
    assert not any(isinstance(module, syncbn.SyncBatchNorm) for module in model.modules())
    alone.load_state_dict(model.state_dict())
    x = whole_batches(ranks, num_steps=1)[0][0]
    expected = alone.eval()(x)
    assert torch.equal(model(x), expected)
    if ranks.rank == 0:
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


def copy_attributes(layer: nn.Module) -> nn.Module:
    """Copy a layer without calling its `__getstate__`, as the `__deepcopy__` of some classes does."""
    copied = type(layer).__new__(type(layer))
    copied.__dict__ = copy.deepcopy(layer.__dict__)
    return copied


@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy_attributes, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_layer_that_has_trained_has_the_same_outputs_and_no_site(
    ranks: Ranks, make_copy: Callable[[nn.Module], nn.Module]
) -> None:
    """With a copied site, ranks would take the copy for the original. (Site: see the glossary in how_it_works.md.)"""
    layer = syncbn.convert_syncbn_model(BatchNormAct2d(3)).to(ranks.device)
    x = torch.randn(4, 3, 2, 2, device=ranks.device) + ranks.rank
    expected = layer(x)
    copied = make_copy(layer)
    assert copied._syncbn_site is None
    torch.testing.assert_close(copied(x), expected)


# Layers whose forward calls batch norm.


class GhostBatchNorm(nn.BatchNorm2d):
    """Normalises two halves of the batch, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        halves = [F.batch_norm(half, *running, self.weight, self.bias, training=True) for half in (x[::2], x[1::2])]
        return torch.stack(halves, 1).flatten(0, 1)


class Slices(nn.BatchNorm2d):
    """Normalises the last two channels, like a layer of a slimmable network."""

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean[1:], self.running_var[1:]
        return F.batch_norm(x[:, 1:], *running, self.weight[1:], self.bias[1:], training=True)


class TorchFunction(nn.BatchNorm2d):
    """Calls torch.batch_norm, whose arguments have another order than those of F.batch_norm."""

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        return torch.batch_norm(x, self.weight, self.bias, *running, True, 0.1, self.eps, False)


class InstanceNorm(nn.BatchNorm2d):
    """Normalises each sample by F.batch_norm, with copies of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        n, num_channels, height, width = x.shape
        channels = x.reshape(1, n * num_channels, height, width)
        return F.batch_norm(channels, None, None, self.weight.repeat(n), training=True).view_as(x)


def build_layers(ranks: Ranks, layer_class: type[nn.Module], **options: object) -> tuple[nn.Module, nn.Module]:
    """Return an unconverted layer with 3 channels and random parameters, and a converted copy."""
    original = layer_class(3, dtype=torch.float64, device=ranks.device, **options)
    for index, parameter in enumerate(original.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator(ranks.device).manual_seed(index))
    return original, syncbn.convert_syncbn_model(copy.deepcopy(original))


def uneven_batch(ranks: Ranks) -> tuple[Tensor, slice]:
    """Return a batch, and the slice of this rank. The slices differ in size."""
    sizes = [2, 4, 6, 2][: ranks.size]
    x = torch.randn(sum(sizes), 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x.to(ranks.device), ranks.local_slice(sizes)


LOCAL_CALL = "forward calls F.batch_norm with none of the layer's weight, bias, running_mean and running_var. "


@pytest.mark.parametrize(
    ("layer_class", "options", "num_collectives", "num_warnings"),
    [
        (BatchNormAct2d, {}, 1, 0),
        (CallsSuper2d, {}, 1, 0),
        (GhostBatchNorm, {}, 2, 0),
        (Slices, {}, 1, 0),
        (TorchFunction, {}, 1, 0),
        (TorchFunction, {"affine": False}, 1, 0),
        (TorchFunction, {"track_running_stats": False}, 1, 0),
        # Every call in the forward of a layer without tensors is synchronised.
        (TorchFunction, {"track_running_stats": False, "affine": False}, 1, 0),
        (InstanceNorm, {}, 0, 1),
    ],
)
def test_a_call_that_passes_a_tensor_of_the_layer_is_synchronised(
    ranks: Ranks, layer_class: type[nn.Module], options: dict[str, bool], num_collectives: int, num_warnings: int
) -> None:
    """Other calls stay local. Two local calls of a layer cause one warning, which names the class."""
    original, layer = build_layers(ranks, layer_class, **options)
    batch, local = uneven_batch(ranks)
    x = batch[local].requires_grad_()
    with syncbn_warnings() as warnings, CountCollectives() as forward:
        outputs = layer(x), layer(x)
    with CountCollectives() as backward:
        outputs[1].sum().backward()
    assert (forward.total, backward.total) == (2 * num_collectives, num_collectives)
    expected = original(batch)[local], original(batch)[local]
    torch.testing.assert_close((outputs, layer.state_dict()), (expected, original.state_dict()))
    assert len(warnings) == num_warnings
    assert all(f"{type(original).__name__}.{LOCAL_CALL}" in warning for warning in warnings)
    last_step = f"synchronised over {ranks.size} ranks" if num_collectives else "not synchronised"
    assert syncbn.summary(layer)[0].last_step == last_step


@pytest.mark.parametrize("layer_class", [BatchNormAct2d, CallsSuper2d])
def test_channel_last_and_fuse_relu_apply_to_the_batch_norm_that_a_forward_calls(
    ranks: Ranks, layer_class: type[nn.Module]
) -> None:
    batch, local = uneven_batch(ranks)
    original, layer = (layer_class(3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    layer.act = nn.Identity()  # BatchNormAct2d would apply a relu by itself.
    syncbn.convert_syncbn_model(layer, channel_last=True)
    layer.fuse_relu = True
    for training in (True, False):
        expected = original.train(training)(batch).relu()[local]
        output = layer.train(training)(batch[local].movedim(1, -1)).movedim(-1, 1)
        torch.testing.assert_close((output, layer.state_dict()), (expected, original.state_dict()))


# Forwards that a program has replaced, or whose input is not a tensor.

TORCH_FORWARD = nn.BatchNorm2d.forward


def forward_plus_five(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return TORCH_FORWARD(layer, x) + 5


@pytest.mark.parametrize("layer_class", [nn.BatchNorm2d, CallsSuper2d])
def test_a_forward_that_a_program_assigns_to_nn_batchnorm_is_synchronised(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, layer_class: type[nn.Module]
) -> None:
    """The new forward runs in a layer that was converted before the assignment, and in one that was converted after."""
    batch, local = uneven_batch(ranks)
    original, before = build_layers(ranks, layer_class)
    monkeypatch.setattr(nn.BatchNorm2d, "forward", forward_plus_five)
    after = syncbn.convert_syncbn_model(copy.deepcopy(original))
    expected = original(batch)[local]
    for layer in (before, after):
        torch.testing.assert_close(layer(batch[local]), expected)
        torch.testing.assert_close(layer.eval()(batch), original.eval()(batch))


class PointBatchNorm(nn.BatchNorm1d):
    """Takes values (points, C) and coordinates, like torchsparse's layer."""

    def forward(self, input: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(input[0]), input[1]


def test_a_forward_whose_input_is_not_a_tensor_is_synchronised(ranks: Ranks) -> None:
    batch, local = uneven_batch(ranks)
    points = batch[:, :, 0, 0]
    layer, original = (PointBatchNorm(3, dtype=torch.float64, device=ranks.device) for _ in range(2))
    output, _ = syncbn.convert_syncbn_model(layer)((points[local], points[local]))
    torch.testing.assert_close(output, original((points, points))[0][local])


# Graphs, and layers whose forward calls no batch norm.


class BreaksGraph(CallsSuper2d):
    """Breaks the graph before and after its batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y


class CallsFunctional(nn.BatchNorm2d):
    """Calls the function that syncbn's warning recommends."""

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        return sync_batch_norm(x, *running, self.weight, self.bias, self.training, 0.1, self.eps)


class ManualBatchNorm(nn.BatchNorm2d):
    """Computes batch norm by itself, so no call can be synchronised."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


NOT_WARNING = BatchNormAct2d, CallsSuper2d, CallsFunctional, Frozen, BreaksGraph
WARNING = InstanceNorm, ManualBatchNorm


@pytest.mark.compiles
@pytest.mark.parametrize("layer_class", NOT_WARNING + WARNING)
def test_a_graph_synchronises_and_warns_as_in_eager_mode(ranks: Ranks, layer_class: type[nn.Module]) -> None:
    batch, local = uneven_batch(ranks)
    _, layer = build_layers(ranks, layer_class)
    layer_in_graph = copy.deepcopy(layer)
    compiled = torch.compile(layer_in_graph, backend="aot_eager", fullgraph=layer_class is not BreaksGraph)
    with syncbn_warnings() as expected_warnings:
        expected = step(layer, layer, batch[local])  # the output, the gradients and the buffers of the layer
    with syncbn_warnings() as warnings:
        actual = step(compiled, layer_in_graph, batch[local])
    torch.testing.assert_close(actual, expected)
    assert warnings == expected_warnings
    assert len(warnings) == (1 if layer_class in WARNING else 0)
    with syncbn_warnings() as warnings_in_evaluation:
        compiled.eval()(batch)
    assert warnings_in_evaluation == []


def test_one_warning_names_each_class_whose_forward_does_not_synchronise(ranks: Ranks) -> None:
    """Layers in groups of one rank and in evaluation do not warn."""
    model = nn.Sequential(ManualBatchNorm(3), ManualBatchNorm(3), Frozen(3), InstanceNorm(3))
    syncbn.convert_syncbn_model(model.to(ranks.device))
    x = torch.randn(4, 3, 2, 2, device=ranks.device)
    with syncbn_warnings() as warnings:
        model(x)
    assert warnings == [
        "syncbn is not synchronising: ManualBatchNorm.forward calls neither super().forward nor F.batch_norm in "
        "training. If it uses the statistics of this rank's batch, let it call one of the two, or "
        "syncbn.functional.sync_batch_norm. A layer that communicates by itself needs no change.",
        f"syncbn is not synchronising: InstanceNorm.{LOCAL_CALL}If that call uses the statistics of the batch, pass "
        "one of the four or a slice of it, not a copy such as weight.float(), or call "
        "syncbn.functional.sync_batch_norm.",
    ]
    last_steps = ["not known", "not known", "not synchronised", "not synchronised"]
    assert [row.last_step for row in syncbn.summary(model)] == last_steps
    with syncbn_warnings() as warnings:
        model.eval()(x)
        syncbn.convert_syncbn_model(model, process_group=1).train()(x)
    assert warnings == []
