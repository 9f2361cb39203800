"""Catches a row of docs/deploy.md that no longer holds: of a converted model, or of a reverted one."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from torch import Tensor, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx

import syncbn

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of TorchScript and torch.ao.quantization
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),  # the same from torch 2.15 on
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # of a comparison in F.batch_norm
    pytest.mark.filterwarnings("ignore:.*(reduce_range|observer|TypedStorage|quantize|ONNX Preprocess):UserWarning"),
]

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def converted(training: bool, layer: nn.Module | None = None) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer or nn.BatchNorm2d(4), nn.ReLU()).train(training)
    return syncbn.convert_syncbn_model(model)


def prepare_qat(model: nn.Module) -> nn.Module:
    return quantize_fx.prepare_qat_fx(model, quantization.get_default_qat_qconfig_mapping(), (X,))


def test_fusion_of_graphs() -> None:
    """It leaves the layers of a converted model, and fuses those of a reverted one."""
    from torch.fx.experimental import optimization  # which warns when it is imported

    for fuse, training in ((optimization.fuse, False), (quantize_fx.fuse_fx, False), (prepare_qat, True)):
        assert isinstance(fuse(converted(training)).get_submodule("1"), syncbn.SyncBatchNorm2d)
        fused = fuse(syncbn.revert_syncbn_model(converted(training)))
        assert not any(type(module) is nn.BatchNorm2d for module in fused.children())


def test_eager_quantisation() -> None:
    """The converted model is refused, with the remedy; torch quantises the reverted one."""

    def quantised(model: nn.Module) -> Tensor:
        model = nn.Sequential(quantization.QuantStub(), model, quantization.DeQuantStub()).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        prepared = quantization.prepare_qat(model)
        prepared(X).sum().backward()
        return quantization.convert(prepared.eval())(X)

    with pytest.raises(TypeError, match=r"got torch\.quint8; call syncbn\.revert_syncbn_model\(model\) before quant"):
        quantised(converted(True))
    quantised(quantization.fuse_modules_qat(syncbn.revert_syncbn_model(converted(True)), [["0", "1", "2"]]))


@pytest.mark.parametrize("layer_class", [nn.BatchNorm2d, CallsSuper2d, BatchNormAct2d])
def test_torchscript_of_a_converted_model(layer_class: type[nn.Module]) -> None:
    """It is refused, with the remedy and the model left whole, but for a trace in evaluation."""
    model = converted(True, layer_class(4))
    modules = {name: (module, type(module)) for name, module in model.named_modules()}
    options = {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    for refused, what in (
        (lambda: torch.jit.script(model), r"cannot compile Sync\w+"),
        (lambda: torch.jit.script(model.eval()), r"cannot compile Sync\w+"),
        (lambda: torch.jit.trace(model.train(), X), "cannot record .*"),
        (lambda: torch.onnx.export(model, X, io.BytesIO(), **options), r"torch\.onnx\.export\(dynamo=False\) uses, .*"),
    ):
        with pytest.raises(RuntimeError, match=rf"{what}: call syncbn\.revert_syncbn_model\(model\) first"):
            refused()
    torchs = syncbn.convert_syncbn_model(nn.SyncBatchNorm(4))  # which would become nn.SyncBatchNorm
    with pytest.raises(RuntimeError, match=r"revert_syncbn_model\(model, nn\.BatchNorm2d\) first"):
        torch.jit.script(torchs)
    assert {name: (module, type(module)) for name, module in model.named_modules()} == modules
    assert torch.equal(torch.jit.trace(model.eval(), X)(X), model(X))


def test_torchscript_of_what_no_revert_reaches() -> None:
    with pytest.raises(RuntimeError, match="load its state_dict into a model that is built with"):
        torch.jit.script(nn.Sequential(syncbn.SyncBatchNorm2d(3)))
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda x: syncbn.functional.sync_batch_norm(x, None, None, training=True), X)


@pytest.mark.parametrize("training", [True, False])
def test_export_and_torchscript(training: bool) -> None:
    """An exported program holds torch's operations, so it runs where syncbn is not installed. TorchScript takes the
    reverted model."""
    for model in (converted(training), reverted := syncbn.revert_syncbn_model(converted(training))):
        program = torch.export.export(model, (X,))
        assert "syncbn" not in program.graph_module.code
        torch.testing.assert_close(program.module()(X), model(X))
    torch.testing.assert_close(torch.jit.script(reverted)(X), reverted(X))


class Masked(nn.Module):
    def __init__(self, layer_class: type[nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), layer_class(4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.norm(self.conv(x), mask=mask)


@pytest.mark.parametrize("layer_class", [syncbn.SyncBatchNorm1d, nn.BatchNorm1d])
def test_a_model_that_was_trained_with_masks(layer_class: type[nn.Module], tmp_path: Path) -> None:
    """The page's two programs: in evaluation it is exported as it is, and loads into a model without syncbn."""
    model = syncbn.convert_syncbn_model(Masked(layer_class))
    x, mask = torch.randn(5, 3, 9), torch.arange(9) < torch.tensor([9, 7, 3, 1, 5])[:, None]
    model(x, mask)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "ddp": SimpleNamespace(module=model), "x": x}
    names |= {"mask": mask, "Network": Masked}
    page = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()
    section = page[page.index("## A model that was trained with masks") :]
    for index, program in enumerate(re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)):
        (file := tmp_path / f"{index}.py").write_text(program)  # from which torch.jit.script reads the source
        exec(compile(program, file, "exec"), names)
    few, short = x[:2, :, :8], mask[:2, :8]
    expected = model(few, short)
    assert torch.equal(expected, expected.masked_fill(~short[:, None], 0))
    torch.testing.assert_close(names["program"].module()(few, short), expected)
    assert "syncbn" not in names["program"].graph_module.code
    assert torch.equal(names["plain"](few, short), expected)
    torch.testing.assert_close(torch.jit.trace(model, (x, mask))(x, mask), model(x, mask))
    torch.testing.assert_close(torch.jit.script(names["plain"])(x, mask), model(x, mask))
