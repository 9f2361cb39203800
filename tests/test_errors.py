"""Tests that a bad argument raises an error with its values and the remedy, and that its nearest neighbour is accepted."""

import re
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from played_gpu import play
from subclasses_of_batchnorm import BatchNormAct2d, CallsSuper2d
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import GroupMember

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm

X = torch.randn(4, 3, 5)


def function(**changed: object) -> object:
    arguments = {"input": X, "running_mean": torch.zeros(3), "running_var": torch.ones(3), "training": True} | changed
    return sync_batch_norm(**arguments)


def layer(**changed: object) -> syncbn.SyncBatchNorm:
    return syncbn.SyncBatchNorm(**({"num_features": 3} | changed))


def backward(**changed: object) -> object:
    ones = torch.ones(3)
    arguments = {"grad_output": X, "input": X, "mean": ones, "invstd": ones, "weight": ones} | changed
    return batch_norm_backward(**arguments)


# ruff: noqa: E501 - one row for each case
# The call with a bad argument, the nearest call that is accepted, the class of the error and a part of its text.
CASES: list[tuple[Callable[[], object], Callable[[], object], type[Exception], str]] = [
    (lambda: layer(num_features=0), lambda: layer(num_features=1), ValueError, "num_features must be a positive int, got 0"),
    (lambda: layer(eps=0), lambda: layer(eps=1e-30), ValueError, "eps must be positive during training, but got 0"),
    (lambda: layer(eps=float("nan")), lambda: layer(eps=1), ValueError, "eps must be positive during training, but got nan"),
    (lambda: function(training=False, eps=-1e-5), lambda: function(training=False, eps=0), ValueError, "eps must be non-negative, but got -1e-05"),
    (lambda: function(training=False, eps=float("nan")), lambda: function(training=False, eps=0), ValueError, "eps must be non-negative, but got nan"),
    (lambda: layer(eps="1"), lambda: layer(eps=np.float64(0.1), momentum=np.float64(0.1))(X), TypeError, "eps must be a float, got '1' of type str; pass a float"),
    (lambda: layer(momentum=Decimal("0.1")), lambda: layer(momentum=Fraction(1, 10))(X), TypeError, "momentum must be a float, got Decimal('0.1') of type Decimal; pass a float"),
    (lambda: function(momentum=None), lambda: function(momentum=np.float32(0.1)), TypeError, "momentum must be a float, got None of type NoneType; pass a float"),
    (lambda: layer(fuse_relu="no")(X), lambda: layer(fuse_relu=0)(X), TypeError, "fuse_relu must be a bool, got 'no' of type str; pass a bool"),
    (lambda: layer(channel_last=torch.ones(2) > 0).eval()(X), lambda: layer(channel_last=np.False_).eval()(X), TypeError, "channel_last must be a bool, got tensor([True, True]) of type Tensor; pass a bool"),
    (lambda: layer(track_running_stats=[1])(X), lambda: layer(track_running_stats=1.0)(X), TypeError, "track_running_stats must be a bool, got [1] of type list; pass a bool"),
    (lambda: function(training=False, fuse_relu=None), lambda: function(training=False, fuse_relu=1), TypeError, "fuse_relu must be a bool, got None of type NoneType; pass a bool"),
    (lambda: layer(process_group=0), lambda: layer(process_group=1), ValueError, "process_group=0: the number of ranks per group is at least 1"),
    (lambda: layer(process_group=True), lambda: layer(process_group=1), TypeError, "got True of type bool"),
    (lambda: layer(process_group="host"), lambda: layer(process_group=2), TypeError, "got 'host' of type str; for a DeviceMesh, pass mesh.get_group(); for one group per node, int(os.environ"),
    (lambda: layer(process_group=GroupMember.NON_GROUP_MEMBER)(X), lambda: layer(process_group=GroupMember.NON_GROUP_MEMBER).eval()(X), ValueError, "this rank is not in the layer's process_group"),
    (lambda: layer()(X[0, 0]), lambda: layer()(X[:, :, 0]), ValueError, "expected at least 2D input (got 1D input"),
    (lambda: layer(channel_last=True)(X), lambda: layer(channel_last=True)(X.mT), ValueError, "expected 3 channels in dim -1 of the input, got 5"),
    (lambda: layer().eval()(X.int()), lambda: layer().eval()(X), TypeError, "got torch.int32"),
    (lambda: layer()(X.numpy()), lambda: layer()(X), TypeError, "expected a Tensor as input, got ndarray"),
    (lambda: layer()(X, X[:1]), lambda: layer()(X, X), ValueError, "expected z of the input's shape (4, 3, 5), got (1, 3, 5)"),
    (lambda: layer()(X, 1.0), lambda: layer()(X, None), TypeError, "expected z to be a float tensor, got float"),
    (lambda: function(weight=torch.zeros(3, 1)), lambda: function(weight=torch.zeros(3)), ValueError, "expected weight of shape (3,), as the input has 3 channels in dim 1 (input shape (4, 3, 5)), got (3, 1)"),
    (lambda: function(weight=[1.0, 1.0, 1.0]), lambda: function(weight=torch.ones(3)), TypeError, "expected weight to be a float tensor, got list; use torch.as_tensor"),
    (lambda: layer()(X.to("meta")), lambda: layer()(X), ValueError, "the input is on meta but running_mean on cpu; move one with .to(device)"),
    (lambda: backward(invstd=None), backward, TypeError, "expected invstd to be a float tensor, got NoneType; use torch.as_tensor"),
    (lambda: backward(mean=torch.ones(5)), backward, ValueError, "expected mean of shape (3,), as the input has 3 channels in dim 1 (input shape (4, 3, 5)), got (5,)"),
    (lambda: backward(output_mask=None), lambda: backward(output_mask=[1, np.True_, False]), ValueError, "output_mask must be three bools, for input, weight and bias, got None"),
    (lambda: backward(output_mask="yes"), lambda: backward(output_mask=np.array([True, False, True])), ValueError, "output_mask must be three bools, for input, weight and bias, got 'yes'"),
    (lambda: backward(grad_output=X[..., :1]), backward, ValueError, "grad_output of the input's shape (4, 3, 5), got (4, 3, 1)"),
    (lambda: backward(input=X.long()), backward, TypeError, "input, got torch.int64"),
    (lambda: syncbn.create_syncbn_process_group("2"), lambda: syncbn.create_syncbn_process_group(0), ValueError, "group_size must be an int that is not negative, got '2'"),
    (lambda: function(running_var=None), lambda: function(running_mean=None, running_var=None), ValueError, "must either both be None or neither be None"),
    (lambda: function(training=False, running_mean=None, running_var=None), lambda: function(training=False), ValueError, "running_mean must be defined in evaluation mode"),
    (lambda: function(weight=torch.ones(3).int()), lambda: function(weight=torch.ones(3).half()), TypeError, "expected weight to be a float tensor, got torch.int32; convert it first"),
    (lambda: function(momentum=torch.ones(2)), lambda: function(momentum=torch.ones(1)), ValueError, "momentum must be one number, got a tensor of shape (2,)"),
    (lambda: layer()(X, X[:, :1] > 0), lambda: layer()(X, mask=X[:, 0] > 0), TypeError, "got torch.bool; a mask is passed as mask=, not as z"),
    (lambda: layer()(X, mask=[True] * 4), lambda: layer()(X, mask=torch.as_tensor([True] * 4)), TypeError, "expected mask to be a bool tensor, got list; use torch.as_tensor(mask)"),
    (lambda: layer()(X, mask=torch.ones(4)), lambda: layer()(X, mask=torch.ones(4) != 0), TypeError, "got torch.float32; use mask != 0"),
    (lambda: syncbn.convert_syncbn_model(torch.nn.BatchNorm2d), lambda: syncbn.convert_syncbn_model(torch.nn.BatchNorm2d(3)), TypeError, "expected an nn.Module, got <class 'torch.nn.modules.batchnorm.BatchNorm2d'> of type type; pass the model"),
    (lambda: syncbn.accumulate_running_stats(None).__enter__(), lambda: syncbn.accumulate_running_stats(layer()).__enter__(), TypeError, "expected an nn.Module, got None of type NoneType; pass the model"),
    (lambda: syncbn.revert_syncbn_model(3), lambda: syncbn.revert_syncbn_model(torch.nn.Linear(2, 2)), TypeError, "expected an nn.Module, got 3 of type int; pass the model"),
    (lambda: syncbn.revert_syncbn_model(layer(), syncbn.SyncBatchNorm2d), lambda: syncbn.revert_syncbn_model(torch.nn.SyncBatchNorm(3), torch.nn.BatchNorm2d), ValueError, "target must be nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d or None, got <class 'syncbn"),
    (lambda: syncbn.summary([layer()]), lambda: syncbn.summary(layer()), TypeError, "expected an nn.Module, got [SyncBatchNorm(3"),
    (lambda: function(channel_dim=3), lambda: function(channel_dim=-2), ValueError, "channel_dim=3 does not exist in an input of shape (4, 3, 5)"),
    (lambda: syncbn.create_syncbn_process_group(2), lambda: syncbn.create_syncbn_process_group(0), RuntimeError, "needs torch.distributed.init_process_group() first"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "good", "error", "text"), CASES, ids=[case[3] for case in CASES])
def test_a_bad_argument_raises_and_its_neighbour_does_not(
    bad: Callable[[], object], good: Callable[[], object], error: type[Exception], text: str
) -> None:
    good()
    with pytest.raises(error, match=re.escape(text)):
        bad()


@pytest.mark.parametrize(("dims", "x"), [(1, X[None]), (2, X), (3, X), (2, torch.randn(1, 3, 1, 1))])
def test_shapes_that_torch_rejects_raise_the_same_text(dims: int, x: Tensor) -> None:
    """A search for torch's message then also finds ours."""
    with pytest.raises(ValueError) as expected:
        getattr(torch.nn, f"BatchNorm{dims}d")(3)(x)
    with pytest.raises(ValueError, match=re.escape(str(expected.value).partition(", got")[0])):
        getattr(syncbn, f"SyncBatchNorm{dims}d")(3)(x)


@pytest.mark.parametrize("layer_class", [torch.nn.BatchNorm2d, BatchNormAct2d, CallsSuper2d])
def test_errors_of_a_layer_name_it_and_the_remedy(layer_class: type[torch.nn.BatchNorm2d]) -> None:
    """F.batch_norm, which a subclass may call, only raises "running_mean should contain 5 elements not 3"."""
    text = "expected 3 channels in dim 1 of the input, got 5 (input shape (2, 5, 4, 4)); correct num_features, channel_last"
    body = torch.nn.Sequential(syncbn.convert_syncbn_model(layer_class(3)))
    model = torch.nn.Sequential(OrderedDict(body=body))
    for name in (f"Sync{layer_class.__name__}", "body.0"):  # A layer that was converted alone has no name.
        for training in (True, False):
            model.train(training)(torch.randn(2, 3, 4, 4))
            for called in (model, model.body[0]):
                with pytest.raises(ValueError, match="^" + re.escape(f"{name}: {text}")):
                    called(torch.randn(2, 5, 4, 4))
        syncbn.convert_syncbn_model(model)
    with pytest.raises(ValueError, match=r"^body\.0: Expected more than 1 value per channel when training"):
        model.train()(torch.randn(1, 3, 1, 1))


def fake(x: Tensor) -> object:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return layer()(mode.from_tensor(x))


def compiled(x: Tensor, **options: object) -> object:
    torch._dynamo.reset()
    return torch.compile(layer(), backend="eager", **options)(x)


ON_GPU: dict[str, Callable[[Tensor], object]] = {
    "layer": lambda x: layer()(x),
    "dispatched": lambda x: layer(momentum=torch.tensor(0.1))(x),
    "function": lambda x: function(input=x),
}
CALLS = ON_GPU | {
    "meta": lambda x: layer(device="meta")(x.to("meta")),
    "fake": fake,
    "vmap": lambda x: torch.vmap(layer(track_running_stats=False))(x[None]),
    "compiled": compiled,
    "compiled, dynamic": lambda x: compiled(x, dynamic=True),
    "exported": lambda x: torch.export.export(layer(), (x,)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo causes such a warning itself.
@pytest.mark.parametrize("name", CALLS)
def test_one_value_per_channel_raises_from_its_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank knows the number of values from the shape, even where the host cannot read a tensor."""
    if name in ON_GPU:
        play(monkeypatch)
    CALLS[name](torch.randn(2, 3, 1))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got "):
        CALLS[name](torch.randn(1, 3, 1))


def test_a_mask_on_a_gpu_hides_one_value_per_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not know the number of values, so the variance of one value is not used."""
    play(monkeypatch)
    masked = layer()
    masked(torch.randn(2, 3), mask=torch.tensor([True, False]))
    assert torch.equal(masked.running_var, torch.ones(3))
