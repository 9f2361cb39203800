"""Tests that a graph of torch.fx computes the same as the model, with each layer as a leaf, or that tracing raises."""

import pytest
import torch
from guides import run_block
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError

import syncbn
from syncbn.functional import sync_batch_norm

X = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class CallsLayerTwice(nn.Module):
    """Calls the same layer under two names: first `body.1`, then `layer`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 1), layer)
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.body(x))


def operations(graph: fx.GraphModule) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in graph.graph.nodes]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer_class", [nn.BatchNorm2d, CallsSuper2d, BatchNormAct2d])
def test_a_converted_layer_is_a_leaf_as_nn_batchnorm_is(layer_class: type[nn.Module], training: bool) -> None:
    model = syncbn.convert_syncbn_model(CallsLayerTwice(layer_class(3))).train(training)
    graph = fx.symbolic_trace(model)
    assert operations(graph) == operations(fx.symbolic_trace(CallsLayerTwice(nn.BatchNorm2d(3))))
    assert graph.get_submodule("body.1") is model.layer
    assert torch.equal(graph(X), model(X))


class PassesArguments(nn.Module):
    """Passes a layer a residual and a mask, and a CallsSuper2d its argument `times`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = syncbn.SyncBatchNorm2d(3, fuse_relu=True)
        self.subclass = syncbn.convert_syncbn_model(CallsSuper2d(3))

    def forward(self, x: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        y = self.layer(self.layer(x, z), mask=mask)
        return self.subclass(y, 3.0) + self.subclass(y, times=4.0)


def test_a_leaf_has_the_arguments_of_the_call() -> None:
    model, z, mask = PassesArguments(), X.flip(0), torch.tensor([True, False, True, True])
    graph = fx.symbolic_trace(model)
    assert torch.equal(graph(X, z, mask), model(X, z, mask))


class DoubleOutput(syncbn.SyncBatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_code_around_the_forward_is_refused_because_it_would_run_twice() -> None:
    """With the tracer of docs/deploy.md, which the error recommends, the code runs once."""
    hooked, pre_hooked = syncbn.SyncBatchNorm(3), syncbn.convert_syncbn_model(CallsSuper2d(3))
    hooked.register_forward_hook(lambda layer, inputs, output: output * 2)
    pre_hooked.register_forward_pre_hook(lambda layer, inputs: inputs[0] * 2)
    wrapped = syncbn.SyncBatchNorm(3)
    forward = wrapped.forward
    wrapped.forward = lambda x: forward(x) * 2
    for layer in (DoubleOutput(3), hooked, pre_hooked, wrapped):
        model = CallsLayerTwice(layer)
        with pytest.raises(TraceError, match=r"body\.1 \(\w+\) cannot be a leaf here: .* twice; .* is_leaf_module"):
            fx.symbolic_trace(model)
        graph = run_block("deploy.md", "class Tracer", model=model)["graph"]
        assert torch.equal(graph(X), model(X))


def call_function(x: Tensor) -> Tensor:
    return syncbn.functional.sync_batch_norm(x, None, None, training=True)


fx.wrap("sync_batch_norm")


def call_wrapped_function(x: Tensor) -> Tensor:
    return sync_batch_norm(x, None, None, training=True)


def test_sync_batch_norm_is_traced_only_if_torch_fx_wraps_it() -> None:
    with pytest.raises(TraceError, match=r"\(input: Proxy\).*is_leaf_module.*torch\.fx\.wrap\(\"sync_batch_norm\"\)"):
        fx.symbolic_trace(call_function)
    graph = fx.symbolic_trace(call_wrapped_function)
    assert [operation for operation, _ in operations(graph)] == ["placeholder", "call_function", "output"]
    assert torch.equal(graph(X), call_function(X))
