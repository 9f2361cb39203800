"""torch.fx makes a layer a leaf, as it does nn.BatchNorm, or says why not: no graph computes anything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

import syncbn
from syncbn.functional import sync_batch_norm

X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class Twice(nn.BatchNorm2d):
    """Shows where its mathematics run twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + 1


class OwnTwice(syncbn.SyncBatchNorm2d):
    """The same, derived from ours."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + 1


class Model(nn.Module):
    """The layer in a sub-module, and shared."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
        self.head = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def converted(layer: nn.Module) -> nn.Module:
    return syncbn.convert_syncbn_model(Model(layer))


def nodes(graph: fx.Graph) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in graph.nodes]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "built": lambda: Model(syncbn.SyncBatchNorm(3)),
    "built, of 2 dims": lambda: Model(syncbn.SyncBatchNorm2d(3, momentum=None)),
    "converted": lambda: converted(nn.BatchNorm2d(3)),
    "of torch's SyncBatchNorm": lambda: converted(nn.SyncBatchNorm(3)),
    "calls super": lambda: converted(CallsSuper2d(3)),
    "calls super twice": lambda: converted(Twice(3)),
    "calls F.batch_norm": lambda: converted(BatchNormAct2d(3)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_a_layer_is_a_leaf(kind: str, training: bool) -> None:
    """The graph is that of torch's layer, and computes what the model does."""
    model = MODELS[kind]().train(training)
    graph = fx.symbolic_trace(model)
    assert nodes(graph.graph) == nodes(fx.symbolic_trace(Model(nn.BatchNorm2d(3))).graph)
    assert graph.get_submodule("body.1") is model.head
    assert torch.equal(graph(X), model(X))


def test_z_and_mask_are_arguments_of_the_leaf() -> None:
    class WithOptions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = syncbn.SyncBatchNorm2d(3, fuse_relu=True)

        def forward(self, x: Tensor, z: Tensor, mask: Tensor) -> Tensor:
            return self.layer(self.layer(self.layer(x, z), mask=mask), z=z, mask=mask)

    model, options = WithOptions(), (torch.randn(4, 3, 5, 5), torch.tensor([True, False, True, True]))
    graph = fx.symbolic_trace(model)
    calls = [node for node in graph.graph.nodes if node.op == "call_module"]
    assert [(len(node.args), sorted(node.kwargs)) for node in calls] == [(1, ["z"]), (1, ["mask"]), (1, ["mask", "z"])]
    assert torch.equal(graph(X, *options), model(X, *options))


def test_keywords_of_a_subclass_are_arguments_of_the_leaf() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = syncbn.convert_syncbn_model(CallsSuper2d(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x, 3.0), times=4.0) + self.layer(x=x)

    model = Around()
    graph = fx.symbolic_trace(model)
    assert [node.args[1:] for node in graph.graph.nodes if node.op == "call_module"] == [(3.0,), (), ()]
    assert torch.equal(graph(X), model(X))


def hooked() -> nn.Module:
    model = MODELS["built"]()
    model.head.register_forward_hook(lambda *given: given[-1] * 2 + 1)
    return model


def hooked_before() -> nn.Module:
    model = MODELS["calls super"]()
    model.head.register_forward_pre_hook(lambda _, given: (given[0] * 2 + 1,))
    return model


def wrapped() -> nn.Module:
    model = MODELS["built"]()
    forward = model.head.forward
    model.head.forward = lambda x: forward(x) * 2 + 1
    return model


@pytest.mark.parametrize("make", [lambda: Model(OwnTwice(3)), hooked, hooked_before, wrapped])
def test_what_would_run_twice_is_refused(make: Callable[[], nn.Module]) -> None:
    """And a tracer that makes the leaf before all of it gives what the model does."""
    with pytest.raises(TraceError, match=r"body\.1 \(\w+\) cannot be a leaf here: it has .* twice; .* is_leaf_module"):
        fx.symbolic_trace(make())

    class LeafTracer(fx.Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return isinstance(module, syncbn.SyncBatchNorm) or super().is_leaf_module(module, name)

    model = make()
    assert torch.equal(fx.GraphModule(model, LeafTracer().trace(model))(X), model(X))


def test_what_is_not_inside_a_traced_model_is_refused() -> None:
    """A bare nn.BatchNorm2d is refused by torch in the same way."""
    of_no_tracer = fx.Proxy(fx.Graph().placeholder("x"))
    for layer in (syncbn.SyncBatchNorm2d(3), syncbn.convert_syncbn_model(Twice(3))):
        for trace in (fx.symbolic_trace, lambda layer: layer(of_no_tracer)):
            with pytest.raises(TraceError, match=r"is_leaf_module only of modules inside .*; trace one that holds it"):
                trace(layer)
    with pytest.raises(TraceError):
        fx.symbolic_trace(nn.BatchNorm2d(3))


def of_a_constant(layer: nn.Module) -> nn.Module:
    class OfAConstant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(X)

    return OfAConstant()


def through_function(x: Tensor) -> Tensor:
    return syncbn.functional.sync_batch_norm(x, None, None, training=True)


def through_wrapped_function(x: Tensor) -> Tensor:
    return sync_batch_norm(x, None, None, training=True)


fx.wrap("sync_batch_norm")


def test_nothing_else_is_traced_through() -> None:
    with pytest.raises(TraceError, match=r"\(input: Proxy\).*is_leaf_module.*torch\.fx\.wrap\(\"sync_batch_norm\"\)"):
        fx.symbolic_trace(through_function)
    with pytest.raises(TraceError, match=r"\(weight, bias: Proxy\)"):
        fx.symbolic_trace(of_a_constant(syncbn.SyncBatchNorm2d(3)))
    graph = fx.symbolic_trace(through_wrapped_function)
    assert [op for op, _ in nodes(graph.graph)] == ["placeholder", "call_function", "output"]
    assert torch.equal(graph(X), through_function(X))
