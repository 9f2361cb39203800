"""Tests that a converted model trains on ranks as one process does, also if its layers define their own forwards.

A call F.batch_norm(..., training=True) is synchronised, in eager mode and in graphs, if it gets a weight, bias or
buffer of its layer, or if the layer has none. Other such calls stay local, and a warning names the class of the layer.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from subclasses import BatchNormAct2d, CallsSuper2d, Frozen, parametrized
from torch import Tensor, nn
from training import CountCollectives, require_trains_as, step, syncbn_warnings, whole_batches
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.subclasses import NO_BATCH_NORM_CALL, NO_LAYER_TENSOR

# Models.


def model_with(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), *layers, nn.Flatten(), nn.Linear(3 * 6 * 6, 5)).double()


SHARED_LAYER = nn.BatchNorm2d(3)
MODELS = {
    "timm's layer": model_with(BatchNormAct2d(3)),
    "parametrized": model_with(parametrized(BatchNormAct2d(3))),
    "one layer twice": model_with(SHARED_LAYER, nn.Tanh(), SHARED_LAYER),
    "traced by torch.fx": torch.fx.symbolic_trace(model_with(nn.BatchNorm2d(3, momentum=None))),
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


def test_a_copy_of_a_layer_that_has_trained_has_the_same_outputs_and_no_site(ranks: Ranks) -> None:
    """With a copied site, ranks would take the copy for the original. (Site: see the glossary in how_it_works.md.)"""
    layer = syncbn.convert_syncbn_model(BatchNormAct2d(3)).to(ranks.device)
    x = torch.randn(4, 3, 2, 2, device=ranks.device) + ranks.rank
    expected = layer(x)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied._syncbn_site is None
        torch.testing.assert_close(copied(x), expected)
    # The `__deepcopy__` of some classes copies the attributes without calling `__getstate__` of the layer.
    assert copy.deepcopy(vars(layer))["_syncbn_site"] is None


# Layers with a forward of their own.


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


class CallsFunctional(nn.BatchNorm2d):
    """Calls the function that syncbn's warning recommends."""

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        return sync_batch_norm(x, *running, self.weight, self.bias, self.training, self.momentum, self.eps)


class BreaksGraph(CallsSuper2d):
    """Breaks the graph before and after its batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y


class InstanceNorm(nn.BatchNorm2d):
    """Normalises each sample by F.batch_norm, with copies of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        n, num_channels, height, width = x.shape
        channels = x.reshape(1, n * num_channels, height, width)
        return F.batch_norm(channels, None, None, self.weight.repeat(n), training=True).view_as(x)


class ManualBatchNorm(nn.BatchNorm2d):
    """Computes batch norm by itself, so no call can be synchronised."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)


# A class, its options, the number of collectives of a forward, and the problems that warnings describe.
LAYERS = [
    (BatchNormAct2d, {}, 1, []),
    (CallsSuper2d, {}, 1, []),
    (Slices, {}, 1, []),
    (TorchFunction, {}, 1, []),
    (TorchFunction, {"affine": False}, 1, []),
    (TorchFunction, {"track_running_stats": False}, 1, []),
    # Every call in the forward of a layer without tensors is synchronised.
    (TorchFunction, {"track_running_stats": False, "affine": False}, 1, []),
    # The unconverted layer synchronises too, over W copies of the whole batch. The factor n / (n - 1) of running_var
    # then differs, so momentum 0 keeps the running statistics.
    (CallsFunctional, {"momentum": 0.0}, 1, []),
    (BreaksGraph, {}, 1, []),
    (Frozen, {}, 0, []),
    (InstanceNorm, {}, 0, [NO_LAYER_TENSOR]),
    (ManualBatchNorm, {}, 0, [NO_BATCH_NORM_CALL]),
]


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


@pytest.mark.parametrize(("layer_class", "options", "num_collectives", "problems"), LAYERS)
def test_a_forward_that_uses_the_statistics_of_its_batch_synchronises_them_or_warns(
    ranks: Ranks, layer_class: type[nn.Module], options: dict[str, Any], num_collectives: int, problems: list[str]
) -> None:
    """Two calls of a layer warn once. Layers in evaluation and in groups of one rank do not warn."""
    original, layer = build_layers(ranks, layer_class, **options)
    batch, local = uneven_batch(ranks)
    x = batch[local].requires_grad_()
    with syncbn_warnings() as warnings, CountCollectives() as forward:
        outputs = layer(x), layer(x)
    with CountCollectives() as backward:
        outputs[1].sum().backward()
    assert (forward.total, backward.total) == (2 * num_collectives, num_collectives)
    expected = tuple(original(batch)[local] if num_collectives else original(x) for _ in range(2))  # 2 steps, as layer
    torch.testing.assert_close((outputs, layer.state_dict()), (expected, original.state_dict()))
    assert warnings == [f"syncbn is not synchronising: {layer_class.__name__}.forward {each}" for each in problems]
    without_collective = "not known" if NO_BATCH_NORM_CALL in problems else "not synchronised"
    last_step = f"synchronised over {ranks.size} ranks" if num_collectives else without_collective
    assert syncbn.summary(layer)[0].last_step == last_step
    with syncbn_warnings() as warnings:
        layer.eval()(x)
        syncbn.convert_syncbn_model(layer, process_group=1).train()(x)
    assert warnings == []


@pytest.mark.compiles
@pytest.mark.parametrize(("layer_class", "options"), {row[0]: row[:2] for row in LAYERS}.values())  # each class once
def test_a_graph_synchronises_and_warns_as_in_eager_mode(
    ranks: Ranks, layer_class: type[nn.Module], options: dict[str, Any]
) -> None:
    batch, local = uneven_batch(ranks)
    _, layer = build_layers(ranks, layer_class, **options)
    layer_in_graph = copy.deepcopy(layer)
    compiled = torch.compile(layer_in_graph, backend="aot_eager", fullgraph=layer_class is not BreaksGraph)
    with syncbn_warnings() as expected_warnings:
        expected = step(layer, batch[local])  # the output, the gradients and the buffers of the layer
    with syncbn_warnings() as warnings:
        actual = step(layer_in_graph, batch[local], compiled)
    torch.testing.assert_close(actual, expected)
    assert warnings == expected_warnings
    with syncbn_warnings() as warnings:
        compiled.eval()(batch)
    assert warnings == []


@pytest.mark.parametrize("layer_class", [BatchNormAct2d, CallsSuper2d])
def test_channel_last_and_fuse_relu_apply_to_the_batch_norm_that_a_forward_calls(
    ranks: Ranks, layer_class: type[nn.Module]
) -> None:
    batch, local = uneven_batch(ranks)
    original, layer = build_layers(ranks, layer_class)
    layer.act = original.act = nn.Identity()  # BatchNormAct2d would apply a relu by itself.
    layer.channel_last = layer.fuse_relu = True
    for training in (True, False):
        expected = original.train(training)(batch).relu()[local]
        output = layer.train(training)(batch[local].movedim(1, -1)).movedim(-1, 1)
        torch.testing.assert_close((output, layer.state_dict()), (expected, original.state_dict()))


@pytest.mark.parametrize("layer_class", [nn.BatchNorm2d, CallsSuper2d])
def test_a_forward_that_a_program_assigns_to_nn_batchnorm_is_synchronised(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, layer_class: type[nn.Module]
) -> None:
    """The new forward runs in a layer that was converted before the assignment, and in one that was converted after."""
    batch, local = uneven_batch(ranks)
    original, before = build_layers(ranks, layer_class)
    torch_forward = nn.BatchNorm2d.forward
    monkeypatch.setattr(nn.BatchNorm2d, "forward", lambda layer, x: torch_forward(layer, x) + 5)
    after = syncbn.convert_syncbn_model(copy.deepcopy(original))
    expected = original(batch)[local]
    for layer in (before, after):
        torch.testing.assert_close(layer(batch[local]), expected)
        torch.testing.assert_close(layer.eval()(batch), original.eval()(batch))


class PointBatchNorm(nn.BatchNorm2d):
    """Takes values and coordinates in a tuple, like torchsparse's layer."""

    def forward(self, input: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return super().forward(input[0]), input[1]


def test_a_forward_whose_input_is_not_a_tensor_is_synchronised(ranks: Ranks) -> None:
    batch, local = uneven_batch(ranks)
    original, layer = build_layers(ranks, PointBatchNorm)
    torch.testing.assert_close(layer((batch[local], batch))[0], original((batch, batch))[0][local])
