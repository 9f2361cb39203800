"""Catches a traced graph that computes something else than the model, and a layer that can silently be no leaf."""

from collections.abc import Callable

import pytest
import torch
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

import syncbn
from syncbn.functional import sync_batch_norm

X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


def model_of(layer: nn.Module, forward: Callable[..., Tensor], **others: nn.Module) -> nn.Module:
    model = type("Model", (nn.Module,), {"forward": forward})()
    for name, module in (*others.items(), ("layer", layer)):
        model.add_module(name, module)
    return model


def shared(layer: nn.Module) -> nn.Module:
    """The layer in a sub-module, too."""
    body = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
    return model_of(layer, lambda model, x: model.layer(model.body(x)), body=body)


def nodes(graph: fx.Graph) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in graph.nodes]


def calls_super() -> nn.Module:
    return syncbn.convert_syncbn_model(CallsSuper2d(3))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "built": lambda: syncbn.SyncBatchNorm(3),
    "built, of 2 dims": lambda: syncbn.SyncBatchNorm2d(3, momentum=None),
    "converted": lambda: syncbn.convert_syncbn_model(nn.BatchNorm2d(3)),
    "calls super": calls_super,
    "calls F.batch_norm": lambda: syncbn.convert_syncbn_model(BatchNormAct2d(3)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_a_leaf(kind: str, training: bool) -> None:
    """The graph is that of torch's layer, and computes what the model does."""
    model = shared(LAYERS[kind]()).train(training)
    graph = fx.symbolic_trace(model)
    assert nodes(graph.graph) == nodes(fx.symbolic_trace(shared(nn.BatchNorm2d(3))).graph)
    assert graph.get_submodule("body.1") is model.layer
    assert torch.equal(graph(X), model(X))


def test_arguments_are_those_of_the_leaf() -> None:
    """z and mask, and keywords of a user's subclass."""

    def forward(model: nn.Module, x: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        x = model.layer(model.layer(model.layer(x, z), mask=mask), z=z, mask=mask)
        return model.own(model.own(x, 3.0), times=4.0) + model.own(x=x)

    model = model_of(syncbn.SyncBatchNorm2d(3, fuse_relu=True), forward, own=calls_super())
    options = X.flip(0), torch.tensor([True, False, True, True])
    graph = fx.symbolic_trace(model)
    calls = [(node.args[1:], {*node.kwargs}) for node in graph.graph.nodes if node.op == "call_module"]
    calls_of_own = [((3.0,), set()), ((), {"times"}), ((), {"x"})]
    assert calls == [((), {"z"}), ((), {"mask"}), ((), {"z", "mask"}), *calls_of_own]
    assert torch.equal(graph(X, *options), model(X, *options))


class OwnForward(syncbn.SyncBatchNorm2d):
    """The user's own, derived from ours."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + 1


class LeafTracer(fx.Tracer):
    """As docs/deploy.md has it."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, syncbn.SyncBatchNorm) or super().is_leaf_module(module, name)


def test_what_would_run_twice_is_refused() -> None:
    """And a tracer that makes the leaf before all of it gives what the model does."""
    hooked, pre_hooked, wrapped = syncbn.SyncBatchNorm(3), calls_super(), syncbn.SyncBatchNorm(3)
    hooked.register_forward_hook(lambda *given: given[-1] * 2 + 1)
    pre_hooked.register_forward_pre_hook(lambda _, given: (given[0] * 2 + 1,))
    forward = wrapped.forward
    wrapped.forward = lambda x: forward(x) * 2 + 1
    refused = r"body\.1 \(\w+\) cannot be a leaf here: it has .* twice; .* is_leaf_module"
    for layer in (OwnForward(3), hooked, pre_hooked, wrapped):
        model = shared(layer)
        with pytest.raises(TraceError, match=refused):
            fx.symbolic_trace(model)
        assert torch.equal(fx.GraphModule(model, LeafTracer().trace(model))(X), model(X))


def test_what_is_not_inside_a_traced_model_is_refused() -> None:
    """As torch refuses a bare nn.BatchNorm2d."""
    bare_proxy = fx.Proxy(fx.Graph().placeholder("x"))
    for layer in (syncbn.SyncBatchNorm2d(3), calls_super()):
        for trace in (fx.symbolic_trace, lambda layer: layer(bare_proxy)):
            with pytest.raises(TraceError, match=r"only a submodule .*; trace a module that contains this layer"):
                trace(layer)


def through_function(x: Tensor) -> Tensor:
    return syncbn.functional.sync_batch_norm(x, None, None, training=True)


def through_wrapped_function(x: Tensor) -> Tensor:
    return sync_batch_norm(x, None, None, training=True)


fx.wrap("sync_batch_norm")


def test_nothing_else_is_traced_through() -> None:
    with pytest.raises(TraceError, match=r"\(input: Proxy\).*is_leaf_module.*torch\.fx\.wrap\(\"sync_batch_norm\"\)"):
        fx.symbolic_trace(through_function)
    with pytest.raises(TraceError, match=r"\(weight, bias: Proxy\)"):
        fx.symbolic_trace(model_of(syncbn.SyncBatchNorm2d(3), lambda model, x: x + model.layer(X)))
    graph = fx.symbolic_trace(through_wrapped_function)
    assert [op for op, _ in nodes(graph.graph)] == ["placeholder", "call_function", "output"]
    assert torch.equal(graph(X), through_function(X))
