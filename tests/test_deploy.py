"""Tests the tables and programs of docs/deploy.md, for converted and for reverted models."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from guides import NAMES, code_block, run_block
from subclasses import BatchNormAct2d, CallsSuper2d
from torch import Tensor, fx, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.fx.proxy import TraceError

import syncbn
from syncbn.functional import sync_batch_norm

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # TorchScript and torch.ao.quantization are deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),  # torch 2.15 deprecates TorchScript in this way.
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # F.batch_norm compares sizes.
    pytest.mark.filterwarnings("ignore:.*(reduce_range|observer|TypedStorage|quantize|ONNX Preprocess):UserWarning"),
]

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
LAYER_CLASSES = nn.BatchNorm2d, CallsSuper2d, BatchNormAct2d


def converted_model(layer: nn.Module) -> nn.Module:
    return syncbn.convert_syncbn_model(nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.ReLU()))


def prepare_qat(model: nn.Module) -> nn.Module:
    return quantize_fx.prepare_qat_fx(model.train(), quantization.get_default_qat_qconfig_mapping(), (X,))


def test_fusion_of_graphs_leaves_converted_layers_and_fuses_reverted_layers() -> None:
    from torch.fx.experimental import optimization  # The import warns.

    for fuse in (optimization.fuse, quantize_fx.fuse_fx, prepare_qat):
        model = converted_model(nn.BatchNorm2d(4)).eval()
        assert isinstance(fuse(model).get_submodule("1"), syncbn.SyncBatchNorm2d)
        fused = fuse(syncbn.revert_syncbn_model(model))
        assert not any(type(module) is nn.BatchNorm2d for module in fused.children())


def test_a_quantised_input_is_refused() -> None:
    """After torch.ao.quantization.convert a layer that was not reverted gets quantised inputs."""
    layer = syncbn.convert_syncbn_model(nn.BatchNorm2d(3)).eval()
    with pytest.raises(TypeError, match=r"got torch\.quint8; call syncbn\.revert_syncbn_model\(model\) before quant"):
        layer(torch.quantize_per_tensor(X, 0.1, 0, torch.quint8))


@pytest.mark.parametrize("layer_class", LAYER_CLASSES)
def test_torchscript_needs_a_revert_except_for_a_trace_in_evaluation(layer_class: type[nn.Module]) -> None:
    model = converted_model(layer_class(4))
    remedy = r"call syncbn\.revert_syncbn_model\(model\) first"
    for training in (False, True):
        with pytest.raises(RuntimeError, match=rf"cannot compile Sync\w+: {remedy}"):
            torch.jit.script(model.train(training))
    with pytest.raises(RuntimeError, match=f"cannot record .*: {remedy}"):
        torch.jit.trace(model.train(), X)
    options = {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    with pytest.raises(RuntimeError, match=rf"torch\.onnx\.export\(dynamo=False\) uses, .*: {remedy}"):
        torch.onnx.export(model, X, io.BytesIO(), **options)
    expected = model.eval()(X)
    assert torch.equal(torch.jit.trace(model, X)(X), expected)
    if layer_class is not CallsSuper2d:  # TorchScript cannot compile super().
        assert torch.equal(torch.jit.script(syncbn.revert_syncbn_model(model))(X), expected)


def test_the_remedy_of_torchscript_depends_on_how_the_layer_was_made() -> None:
    """A revert changes only converted layers, and can restore nn.SyncBatchNorm, which TorchScript cannot compile."""
    with pytest.raises(RuntimeError, match=r"revert_syncbn_model\(model, nn\.BatchNorm2d\) first"):
        torch.jit.script(syncbn.convert_syncbn_model(nn.SyncBatchNorm(4)))
    with pytest.raises(RuntimeError, match="load its state_dict into a model that is built with"):
        torch.jit.script(nn.Sequential(syncbn.SyncBatchNorm2d(3)))


# torch.fx.


def shared_layer(layer: nn.Module) -> nn.Module:
    """Return a model that calls the same layer under two names: first "0.1", then "1"."""
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), layer), layer)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer_class", LAYER_CLASSES)
def test_a_converted_layer_is_a_leaf_as_nn_batchnorm_is(layer_class: type[nn.Module], training: bool) -> None:
    model = syncbn.convert_syncbn_model(shared_layer(layer_class(3))).train(training)
    graph = fx.symbolic_trace(model)
    assert graph.code == fx.symbolic_trace(shared_layer(nn.BatchNorm2d(3))).code
    assert graph.get_submodule("0.1") is model[1]
    assert torch.equal(graph(X), model(X))


class PassesArguments(nn.Module):
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


def test_code_around_the_forward_is_refused_because_graph_and_leaf_would_run_it() -> None:
    """With the tracer of the guide, which the error recommends, the code runs once."""
    hooked, pre_hooked = syncbn.SyncBatchNorm(3), syncbn.convert_syncbn_model(CallsSuper2d(3))
    hooked.register_forward_hook(lambda layer, inputs, output: output * 2)
    pre_hooked.register_forward_pre_hook(lambda layer, inputs: inputs[0] * 2)
    wrapped = syncbn.SyncBatchNorm(3)
    forward = wrapped.forward
    wrapped.forward = lambda x: forward(x) * 2
    for layer in (DoubleOutput(3), hooked, pre_hooked, wrapped):
        model = shared_layer(layer)
        with pytest.raises(TraceError, match=r"0\.1 \(\w+\) cannot be a leaf here: .* twice; .* is_leaf_module"):
            fx.symbolic_trace(model)
        graph = run_block("deploy.md", "class Tracer", model=model)["graph"]
        assert torch.equal(graph(X), model(X))


fx.wrap("sync_batch_norm")  # Calls by the name syncbn.functional.sync_batch_norm stay unwrapped.


def test_sync_batch_norm_is_traced_only_if_torch_fx_wraps_it() -> None:
    with pytest.raises(TraceError, match=r"\(input: Proxy\).*is_leaf_module.*torch\.fx\.wrap\(\"sync_batch_norm\"\)"):
        fx.symbolic_trace(lambda x: syncbn.functional.sync_batch_norm(x, None, None, training=True))
    graph = fx.symbolic_trace(lambda x: sync_batch_norm(x, None, None, training=True))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_function", "output"]
    assert torch.equal(graph(X), sync_batch_norm(X, None, None, training=True))


# A model that was trained with masks.


class Masked(nn.Module):
    def __init__(self, layer_class: type[nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), layer_class(4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.norm(self.conv(x), mask=mask)


def test_a_model_that_was_trained_with_masks_is_exported_in_evaluation(tmp_path: Path) -> None:
    """The model is exported without a revert, and its state_dict loads into a model without syncbn."""
    model = Masked(syncbn.SyncBatchNorm1d)
    x, mask = torch.randn(5, 3, 9), torch.arange(9) < torch.tensor([9, 7, 3, 1, 5])[:, None]
    model(x, mask)
    names = NAMES | {"ddp": SimpleNamespace(module=model), "Network": Masked}
    program = run_block("deploy.md", "program = torch.export.export", **names, x=x, mask=mask)["program"]
    file = tmp_path / "masked.py"
    file.write_text(code_block("deploy.md", "class MaskedBatchNorm1d"))
    exec(compile(file.read_text(), file, "exec"), names)  # torch.jit.script reads the source in the file.
    plain = names["plain"]
    short_x, short_mask = x[:2, :, :8], mask[:2, :8]  # The exported program accepts any N and T.
    expected = model(short_x, short_mask)
    assert not expected.masked_select(~short_mask[:, None]).any()
    torch.testing.assert_close(program.module()(short_x, short_mask), expected)
    assert "syncbn" not in program.graph_module.code
    assert torch.equal(plain(short_x, short_mask), expected)
    torch.testing.assert_close(torch.jit.trace(model, (x, mask))(x, mask), model(x, mask))
    torch.testing.assert_close(torch.jit.script(plain)(x, mask), model(x, mask))
