"""Tests that a graph of torch.fx computes the same as the model, with each layer as a leaf, or that tracing raises."""

from collections.abc import Callable

import pytest
import torch
from guides import run_block
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

import syncbn
from syncbn.functional import sync_batch_norm

X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


def make_model(layer: nn.Module, forward: Callable[..., Tensor], **modules: nn.Module) -> nn.Module:
    model = type("Model", (nn.Module,), {"forward": forward})()
    for name, module in (*modules.items(), ("layer", layer)):
        model.add_module(name, module)
    return model


def shared(layer: nn.Module) -> nn.Module:
    """Return a model that calls the layer twice, first as a part of a submodule."""
    body = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
    return make_model(layer, lambda model, x: model.layer(model.body(x)), body=body)


def nodes(graph: fx.Graph) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in graph.nodes]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "2d": lambda: syncbn.SyncBatchNorm2d(3, momentum=None),
    "converted": lambda: syncbn.convert_syncbn_model(nn.BatchNorm2d(3)),
    "calls super": lambda: syncbn.convert_syncbn_model(CallsSuper2d(3)),
    "calls F.batch_norm": lambda: syncbn.convert_syncbn_model(BatchNormAct2d(3)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_a_leaf_like_torchs(name: str, training: bool) -> None:
    model = shared(LAYERS[name]()).train(training)
    graph = fx.symbolic_trace(model)
    assert nodes(graph.graph) == nodes(fx.symbolic_trace(shared(nn.BatchNorm2d(3))).graph)
    assert graph.get_submodule("body.1") is model.layer
    assert torch.equal(graph(X), model(X))


def test_a_leaf_has_the_arguments_of_the_call() -> None:
    """The arguments are z, mask, and keywords of a user's subclass."""

    def forward(model: nn.Module, x: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        x = model.layer(model.layer(model.layer(x, z), mask=mask), z=z, mask=mask)
        return model.subclass(model.subclass(x, 3.0), times=4.0) + model.subclass(x=x)

    model = make_model(syncbn.SyncBatchNorm2d(3, fuse_relu=True), forward, subclass=LAYERS["calls super"]())
    z, mask = X.flip(0), torch.tensor([True, False, True, True])
    graph = fx.symbolic_trace(model)
    calls = [(node.args[1:], {*node.kwargs}) for node in graph.graph.nodes if node.op == "call_module"]
    subclass_calls = [((3.0,), set()), ((), {"times"}), ((), {"x"})]
    assert calls == [((), {"z"}), ((), {"mask"}), ((), {"z", "mask"}), *subclass_calls]
    assert torch.equal(graph(X, z, mask), model(X, z, mask))


class DoubleOutput(syncbn.SyncBatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + 1


def test_code_around_the_forward_is_refused_because_it_would_run_twice() -> None:
    """The remedy in the error is the tracer of docs/deploy.md, which creates the leaf itself."""
    hooked, pre_hooked, wrapped = syncbn.SyncBatchNorm(3), LAYERS["calls super"](), syncbn.SyncBatchNorm(3)
    hooked.register_forward_hook(lambda *arguments: arguments[-1] * 2 + 1)
    pre_hooked.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2 + 1,))
    forward = wrapped.forward
    wrapped.forward = lambda x: forward(x) * 2 + 1
    for layer in (DoubleOutput(3), hooked, pre_hooked, wrapped):
        model = shared(layer)
        with pytest.raises(TraceError, match=r"body\.1 \(\w+\) cannot be a leaf here: .* twice; .* is_leaf_module"):
            fx.symbolic_trace(model)
        graph = run_block("deploy.md", "class Tracer", model=model)["graph"]
        assert torch.equal(graph(X), model(X))


fx.wrap("sync_batch_norm")


def test_a_function_is_traced_only_if_it_is_wrapped() -> None:
    def call(x: Tensor) -> Tensor:
        return syncbn.functional.sync_batch_norm(x, None, None, training=True)

    def call_wrapped(x: Tensor) -> Tensor:
        return sync_batch_norm(x, None, None, training=True)

    with pytest.raises(TraceError, match=r"\(input: Proxy\).*is_leaf_module.*torch\.fx\.wrap\(\"sync_batch_norm\"\)"):
        fx.symbolic_trace(call)
    with pytest.raises(TraceError, match=r"\(weight, bias: Proxy\)"):
        fx.symbolic_trace(make_model(syncbn.SyncBatchNorm2d(3), lambda model, x: x + model.layer(X)))
    graph = fx.symbolic_trace(call_wrapped)
    assert [op for op, _ in nodes(graph.graph)] == ["placeholder", "call_function", "output"]
    assert torch.equal(graph(X), call(X))
