"""Conversion keeps the module object and everything that hangs on it; revert is exact."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import syncbn

PAIRS = [
    (nn.BatchNorm1d, syncbn.SyncBatchNorm1d),
    (nn.BatchNorm2d, syncbn.SyncBatchNorm2d),
    (nn.BatchNorm3d, syncbn.SyncBatchNorm3d),
    (nn.SyncBatchNorm, syncbn.SyncBatchNorm),
]


@pytest.mark.parametrize(("original", "converted"), PAIRS)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}], ids=str
)
def test_only_the_class_changes_and_revert_is_exact(
    original: type[nn.Module], converted: type[nn.Module], options: dict[str, object]
) -> None:
    layer = original(3, **options).eval()
    before = dict(vars(layer))
    assert syncbn.convert_syncbn_model(layer) is layer
    assert type(layer) is converted
    assert not layer.training
    state = dict(vars(layer))
    assert syncbn.convert_syncbn_model(layer, process_group=1) is layer  # twice changes nothing
    assert vars(layer) == state
    syncbn.revert_syncbn_model(layer)
    assert type(layer) is original
    assert vars(layer) == before


def test_everything_that_hangs_on_a_layer_survives() -> None:
    shared = nn.BatchNorm2d(4)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(3, 4, 1), shared), "b": shared, "c": nn.BatchNorm1d(4, bias=False) if "bias" in nn.BatchNorm1d.__init__.__kwdefaults__ else nn.BatchNorm1d(4)})  # fmt: skip  # noqa: E501
    calls: list[str] = []
    shared.register_forward_hook(lambda *_: calls.append("hook"))
    shared.note = "mine"
    shared.weight.requires_grad_(False)
    shared.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    bias = model["c"].bias
    syncbn.SyncBatchNorm.convert_sync_batchnorm(model)  # torch's name
    assert model["a"][1] is model["b"] is shared
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == ids
    assert shared.note == "mine"
    assert not shared.weight.requires_grad
    assert shared.weight.dtype == torch.float64
    assert model["c"].bias is bias
    shared(torch.randn(2, 4, 3, 3, dtype=torch.float64)).sum().backward()
    assert calls == ["hook"]
    optimizer.step()
    assert torch.equal(shared.bias, torch.full((4,), -18.0, dtype=torch.float64))


def test_converted_models_train_like_the_original() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU(inplace=True), nn.Flatten())
    model = syncbn.convert_syncbn_model(copy.deepcopy(plain))
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    reverted = syncbn.revert_syncbn_model(copy.deepcopy(model)).eval()
    assert torch.equal(reverted(x), model.eval()(x))


def test_copies_and_pickles_of_converted_layers() -> None:
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3)), process_group="node", channel_last=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[0].process_group == "node"
        assert other[0].channel_last
        assert type(syncbn.revert_syncbn_model(other)[0]) is nn.BatchNorm1d


class OwnForward(nn.BatchNorm2d):
    """A BatchNorm with a behaviour of its own."""


def test_what_is_left_alone_is_named_in_one_warning() -> None:
    model = nn.ModuleDict(
        {
            "own": OwnForward(3),
            "parametrized": parametrizations.weight_norm(nn.BatchNorm2d(3), dim=None),
            "lazy": nn.LazyBatchNorm2d(),
            "instance": nn.InstanceNorm2d(3),
            "plain": nn.BatchNorm2d(3),
        }
    )
    classes = {name: type(module) for name, module in model.items()}
    with pytest.warns(UserWarning, match="left these layers unsynchronised") as warned:
        syncbn.convert_syncbn_model(model)
    assert len(warned) == 1
    text = str(warned[0].message)
    assert "own (OwnForward): a subclass whose own behaviour would be lost" in text
    assert "parametrized (ParametrizedBatchNorm2d): parametrized" in text
    assert "lazy (LazyBatchNorm2d): lazy, convert it after its first forward" in text
    assert "instance" not in text
    changed = [name for name, module in model.items() if type(module) is not classes[name]]
    assert changed == ["plain"]
    model["lazy"](torch.randn(2, 3, 2, 2))
    with pytest.warns(UserWarning, match="own"):
        syncbn.convert_syncbn_model(model)
    assert type(model["lazy"]) is syncbn.SyncBatchNorm2d


def test_a_layer_that_fsdp2_wraps_raises_and_nothing_changes() -> None:
    import torch.distributed.fsdp as fsdp

    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    wrapped = type("FSDPBatchNorm2d", (fsdp.FSDPModule, nn.BatchNorm2d), {})  # as fully_shard makes it
    model[1].__class__ = wrapped
    with pytest.raises(RuntimeError, match="'1' is already wrapped by fully_shard; call convert_syncbn_model before"):
        syncbn.convert_syncbn_model(model)
    assert [type(layer) for layer in model] == [nn.BatchNorm2d, wrapped]


def test_layers_built_as_syncbn_stay() -> None:
    model = nn.Sequential(syncbn.SyncBatchNorm2d(3, fuse_relu=True))
    assert type(syncbn.revert_syncbn_model(model)[0]) is syncbn.SyncBatchNorm2d


def test_a_model_without_batch_norm() -> None:
    model = nn.Linear(2, 2)
    assert syncbn.convert_syncbn_model(model) is model
    assert str(syncbn.summary(model)).startswith("no synchronised layers")
