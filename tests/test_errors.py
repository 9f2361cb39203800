"""Tests that a bad argument raises an error with its values and the remedy, and a similar valid argument does not."""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from played_gpu import play
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from torch import Tensor, nn

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm

X, ONES = torch.randn(4, 3, 5), torch.ones(3)


def make_layer(**options: object) -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(**({"num_features": 3} | options))


def call_layer(
    x: object = X, z: object = None, mask: object = None, training: bool = True, **options: object
) -> object:
    return make_layer(**options).train(training)(x, z, mask)


def call_function(**changed: object) -> object:
    arguments = {"input": X, "running_mean": torch.zeros(3), "running_var": torch.ones(3), "training": True} | changed
    return sync_batch_norm(**arguments)


def call_backward(**changed: object) -> object:
    arguments = {"grad_output": X, "input": X, "mean": ONES, "invstd": ONES, "weight": ONES} | changed
    return batch_norm_backward(**arguments)


def accumulate_in_a_block(model: object) -> None:
    """Open a block for `model` within a block for LAYER."""
    with syncbn.accumulate_running_stats(LAYER), syncbn.accumulate_running_stats(model):
        pass


FREED = torch.ones(3)
FREED.untyped_storage().resize_(0)
LAYER, LAZY = make_layer(), syncbn.convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))

# ruff: noqa: E501 - one row for each case
# A function, the bad arguments, the nearest arguments that are accepted, the class of the error and a part of its text.
CASES: list[tuple[Callable[..., object], dict[str, object], dict[str, object], type[Exception], str]] = [
    (make_layer, {"num_features": 0}, {"num_features": 1}, ValueError, "num_features must be a positive int, got 0"),
    (make_layer, {"eps": 0}, {"eps": 1e-30}, ValueError, "eps must be positive during training, but got 0"),
    (make_layer, {"eps": "1"}, {"eps": np.float64(0.1)}, TypeError, "eps must be a float, got '1' of type str; pass a float"),
    (make_layer, {"process_group": 0}, {"process_group": 1}, ValueError, "process_group=0: the number of ranks per group is at least 1"),
    (make_layer, {"process_group": "host"}, {"process_group": 2}, TypeError, "got 'host' of type str; for a DeviceMesh, pass mesh.get_group(); for one group per node, int(os.environ"),
    (call_layer, {"momentum": Decimal("0.1")}, {"momentum": Fraction(1, 10)}, TypeError, "momentum must be a float, got Decimal('0.1') of type Decimal; pass a float"),
    (call_layer, {"channel_last": True}, {"channel_last": True, "x": X.mT}, ValueError, "expected 3 channels in dim -1 of the input, got 5"),
    (call_layer, {"x": X[0, 0]}, {"x": X[:, :, 0]}, ValueError, "expected at least 2D input (got 1D input"),
    (call_layer, {"x": X.numpy()}, {"x": X}, TypeError, "expected a Tensor as input, got ndarray"),
    (call_layer, {"x": X.to("meta")}, {"x": X}, ValueError, "the input is on meta but running_mean on cpu; move one with .to(device)"),
    (call_layer, {"z": X[:1]}, {"z": X}, ValueError, "expected z of the input's shape (4, 3, 5), got (1, 3, 5)"),
    (call_layer, {"z": 1.0}, {"z": None}, TypeError, "expected z to be a float tensor, got float"),
    (call_layer, {"z": X[:, 0] > 0}, {"mask": X[:, 0] > 0}, TypeError, "got torch.bool; a mask is passed as mask=, not as z"),
    (call_layer, {"mask": [True] * 4}, {"mask": torch.as_tensor([True] * 4)}, TypeError, "expected mask to be a bool tensor, got list; use torch.as_tensor(mask)"),
    (call_layer, {"mask": torch.ones(4)}, {"mask": torch.ones(4) != 0}, TypeError, "got torch.float32; use mask != 0"),
    (call_layer, {"training": False, "x": X.int()}, {"training": False}, TypeError, "got torch.int32"),
    (call_layer, {"training": False, "channel_last": ONES}, {"training": False, "channel_last": np.False_}, TypeError, "channel_last must be a bool, got tensor([1., 1., 1.]) of type Tensor; pass a bool"),
    (call_function, {"weight": torch.zeros(3, 1)}, {"weight": torch.zeros(3)}, ValueError, "expected weight of shape (3,), as the input has 3 channels in dim 1 (input shape (4, 3, 5)), got (3, 1)"),
    (call_function, {"weight": ONES.int()}, {"weight": ONES.half()}, TypeError, "expected weight to be a float tensor, got torch.int32; convert it first"),
    (call_function, {"running_var": None}, {"running_mean": None, "running_var": None}, ValueError, "must either both be None or neither be None"),
    (call_function, {"momentum": None}, {"momentum": np.float32(0.1)}, TypeError, "momentum must be a float, got None of type NoneType; pass a float"),
    (call_function, {"momentum": torch.ones(2)}, {"momentum": torch.ones(1)}, ValueError, "momentum must be one number, got a tensor of shape (2,)"),
    (call_function, {"channel_dim": 3}, {"channel_dim": -2}, ValueError, "channel_dim=3 does not exist in an input of shape (4, 3, 5)"),
    (call_function, {"training": False, "eps": -1e-5}, {"training": False, "eps": 0}, ValueError, "eps must be non-negative, but got -1e-05"),
    (call_function, {"training": False, "running_mean": None, "running_var": None}, {"training": False}, ValueError, "running_mean must be defined in evaluation mode"),
    (call_backward, {"invstd": None}, {}, TypeError, "expected invstd to be a float tensor, got NoneType; use torch.as_tensor"),
    (call_backward, {"mean": FREED}, {}, RuntimeError, "the storage of a tensor was freed"),
    (call_backward, {"output_mask": "yes"}, {"output_mask": np.array([True, False, True])}, ValueError, "output_mask must be three bools, for input, weight and bias, got 'yes'"),
    (syncbn.convert_syncbn_model, {"model": nn.BatchNorm2d}, {"model": nn.BatchNorm2d(3)}, TypeError, "expected an nn.Module, got <class 'torch.nn.modules.batchnorm.BatchNorm2d'> of type type; pass the model"),
    (syncbn.revert_syncbn_model, {"model": LAYER, "target": syncbn.SyncBatchNorm2d}, {"model": nn.SyncBatchNorm(3), "target": nn.BatchNorm2d}, ValueError, "target must be nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or None, got <class 'syncbn"),
    (syncbn.summary, {"model": [LAYER]}, {"model": LAYER}, TypeError, "expected an nn.Module, got [SyncBatchNorm(3"),
    (accumulate_in_a_block, {"model": LAYER}, {"model": make_layer()}, RuntimeError, "cannot run inside another accumulate_running_stats"),
    (accumulate_in_a_block, {"model": nn.ReLU()}, {"model": make_layer()}, ValueError, "no synchronised layer with running statistics: call syncbn.convert"),
    (accumulate_in_a_block, {"model": LAZY}, {"model": make_layer()}, ValueError, "the layer '0' is lazy"),
    (syncbn.create_syncbn_process_group, {"group_size": "2"}, {"group_size": 0}, ValueError, "group_size must be an int that is not negative, got '2'"),
    (syncbn.create_syncbn_process_group, {"group_size": 2}, {"group_size": 0}, RuntimeError, "needs torch.distributed.init_process_group() first"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "bad", "good", "error", "text"), CASES, ids=[case[-1] for case in CASES])
def test_a_bad_argument_raises_and_its_neighbour_does_not(
    call: Callable[..., object], bad: dict[str, object], good: dict[str, object], error: type[Exception], text: str
) -> None:
    call(**good)
    with pytest.raises(error, match=re.escape(text)):
        call(**bad)


@pytest.mark.parametrize(("dims", "x"), [(1, X[None]), (2, X), (3, X), (2, torch.randn(1, 3, 1, 1))])
def test_shapes_that_torch_rejects_raise_the_same_text(dims: int, x: Tensor) -> None:
    """Searching for the text then finds explanations of torch's error."""
    with pytest.raises(ValueError) as expected:
        getattr(nn, f"BatchNorm{dims}d")(3)(x)
    with pytest.raises(ValueError, match=re.escape(str(expected.value).partition(", got")[0])):
        getattr(syncbn, f"SyncBatchNorm{dims}d")(3)(x)


@pytest.mark.parametrize("layer_class", [nn.BatchNorm2d, BatchNormAct2d, CallsSuper2d])
@pytest.mark.parametrize("training", [True, False])
def test_an_error_begins_with_the_name_of_the_layer_and_ends_with_the_remedy(
    layer_class: type[nn.BatchNorm2d], training: bool
) -> None:
    """F.batch_norm, which a subclass may call, would say "running_mean should contain 5 elements not 3"."""
    text = "expected 3 channels in dim 1 of the input, got 5 .*; correct num_features, channel_last or channel_dim$"
    model = syncbn.convert_syncbn_model(nn.ModuleDict({"body": layer_class(3)})).train(training)
    with pytest.raises(ValueError, match=f"^body: {text}"):
        model["body"](torch.randn(2, 5, 4, 4))
    converted_alone = syncbn.convert_syncbn_model(layer_class(3)).train(training)
    with pytest.raises(ValueError, match=f"^Sync{layer_class.__name__}: {text}"):
        converted_alone(torch.randn(2, 5, 4, 4))


@pytest.mark.parametrize("momentum", [0.1, torch.tensor(0.1)], ids=["fast path", "dispatched kernels"])
def test_one_value_per_channel_on_a_gpu_raises_at_once(
    momentum: float | Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single rank knows the number of values from the shape, so the host need not wait for the total on the GPU."""
    play(monkeypatch)  # CPU tensors count as tensors of a GPU.
    call_layer(torch.randn(2, 3, 1), momentum=momentum)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got "):
        call_layer(torch.randn(1, 3, 1), momentum=momentum)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo causes the warning.
def test_one_value_per_channel_raises_in_a_compiled_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(make_layer(), backend="eager", dynamic=True)
    compiled(torch.randn(2, 3, 1))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got "):
        compiled(torch.randn(1, 3, 1))
