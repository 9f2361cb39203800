"""Tests that an invalid argument of one rank raises an error on every rank, before any tensor changes.

test_errors.py has all messages, on one process. On GPUs the other ranks raise at a later call: test_status.py.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equal_to_torch import clear_kernel_caches
from torch import Tensor, nn
from training import CountCollectives, syncbn_warnings
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.kernels import available, select
from syncbn.ranks.report import RanksDifferError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the other ranks raise at a later call")
C = 3
X = torch.ones(2, C, 4)


@contextlib.contextmanager
def raises_on_all_ranks(ranks: Ranks, text: str, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Check that the block changes no tensor and raises an error on every rank. The error of rank 0 has `text`, and the
    errors of the other ranks quote `text`."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    errors, message = Exception, re.escape(text)
    if ranks.rank > 0:
        errors, message = (TypeError, ValueError), rf"another rank failed(.|\n)*rank 0: \w+Error: (.|\n)*{message}"
    with pytest.raises(errors, match=message) as error:
        yield
    assert str(error.value).count(text) == 1
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


@torch.inference_mode()
def inference_tensor(tensor: Tensor) -> Tensor:
    return tensor.clone()


def nested_tensor() -> Tensor:
    """Return a tensor without strides. A guard that compares its strides aborts the process."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def freed_tensor(*shape: int) -> Tensor:
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


# Arguments of functions.


@pytest.mark.parametrize(
    ("name", "bad", "text"),
    [
        ("eps", 0.0, "eps must be positive"),
        ("channel_dim", 1.0, "channel_dim must be an int, got 1.0"),
        ("input", torch.tensor(1.0), "expected at least 2D input (got 0D input of shape ())"),
        ("input", X.to("meta"), "the input is on meta but running_mean on cpu"),
        ("input", None, "expected a Tensor as input, got NoneType"),
        ("input", inference_tensor(X), "input was made in torch.inference_mode()"),
        ("weight", [1.0], "expected weight to be a float tensor, got list"),
        ("weight", nested_tensor(), "weight is a NestedTensor; pass weight.values()"),
        ("running_var", nn.UninitializedBuffer(), "shape of an uninitialized parameter or buffer"),
        ("mask", X > 0, "(the input's (2, 3, 4) without the channel dim; a dim of size 1 is broadcast)"),
        # A kernel would fail on freed storage after the all_reduce, and the other ranks would continue.
        ("input", freed_tensor(2, C, 4), "the storage of a tensor was freed"),
        ("running_mean", freed_tensor(C), "the storage of a tensor was freed"),
    ],
)
def test_a_bad_argument_raises_on_every_rank(ranks: Ranks, name: str, bad: object, text: str) -> None:
    """The rank with the bad argument joins the all_reduce of the other ranks, which have cached kernels."""
    tensors = {"running_mean": torch.zeros(C), "running_var": torch.ones(C), "weight": torch.ones(C).requires_grad_()}
    arguments = {"input": X, "training": True, **tensors}
    sync_batch_norm(**arguments)
    with raises_on_all_ranks(ranks, text, tensors):
        sync_batch_norm(**arguments | ({name: bad} if ranks.rank == 0 else {}))
    sync_batch_norm(**arguments)  # The group can still be used.


@pytest.mark.parametrize(("name", "known"), [("SYNCBN_KERNELS", "reference"), ("SYNCBN_CHECKS", "0")])
def test_an_unknown_value_of_an_environment_variable_raises_on_every_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, known: str
) -> None:
    select.reason_forced.cache_clear()  # This call and the next make syncbn read the variables again.
    clear_kernel_caches(monkeypatch)
    if ranks.rank == 0:
        monkeypatch.setenv(name, "fast")
    layer = syncbn.SyncBatchNorm1d(C)
    with raises_on_all_ranks(ranks, f"{name} must be {known!r} or not set, got 'fast'", layer.state_dict()):
        layer(X)
    select.reason_forced.cache_clear()


# Layers.


def refuse(x: Tensor) -> None:
    raise AssertionError("refused by a check of the user")


IN_PLACE = "cannot be updated in place, as"


@pytest.mark.parametrize("has_trained", [False, True])  # After a training call the layer has cached its options.
@pytest.mark.parametrize(
    ("name", "bad", "text"),
    [
        ("running_mean", inference_tensor(torch.zeros(C)), f"running_mean {IN_PLACE} it was made in torch.inference"),
        ("num_batches_tracked", inference_tensor(torch.tensor(0)), f"num_batches_tracked {IN_PLACE} it was made in"),
        ("running_mean", torch.zeros(1).expand(C), f"running_mean {IN_PLACE} several of its elements"),
        ("num_batches_tracked", torch.tensor(True), "num_batches_tracked to be a tensor of numbers, got a tensor of"),
        pytest.param("momentum", 10**400, "momentum must fit into a float, got 1000", id="a large momentum"),
        ("fuse_relu", torch.tensor([True, False]), "fuse_relu must be a bool, got tensor([ True, False]) of type"),
        ("channel_last", torch.tensor(True), "channel_last must be a bool, got tensor(True) of type Tensor"),
        ("track_running_stats", None, "track_running_stats must be a bool, got None of type NoneType"),
        ("_check_input_dim", refuse, "refused by a check of the user"),
    ],
)
def test_a_layer_that_cannot_train_on_one_rank_raises_on_every_rank(
    ranks: Ranks, name: str, bad: object, text: str, has_trained: bool
) -> None:
    """Otherwise the other ranks would update their statistics, and wait in backward."""
    layer = syncbn.SyncBatchNorm(C)
    if has_trained:
        layer(X)
    if ranks.rank == 0:
        setattr(layer, name, bad)
    with raises_on_all_ranks(ranks, text, {key: layer.get_buffer(key) for key in ("running_mean", "running_var")}):
        layer(X)
    syncbn.SyncBatchNorm(C)(X)  # The group can still be used.


def test_a_layer_has_as_many_channels_as_its_tensors_whatever_num_features_is(ranks: Ranks) -> None:
    """Programs that prune channels replace the tensors only. A rank with a bad argument must still send as many sums as
    the other ranks."""
    layer = syncbn.SyncBatchNorm(C)
    layer.num_features = 2 * C
    layer(X)
    assert syncbn.summary(layer)[0].channels == C
    text = f"expected {C} channels in dim 1 of the input, got {C + 1}"
    with raises_on_all_ranks(ranks, text, layer.state_dict()):
        layer(X if ranks.rank else torch.ones(2, C + 1, 4))


# The text of the errors.


@pytest.mark.parametrize(
    ("bad_channels", "lines"),
    [((2, 2), "ranks 0-1: V"), ((5, 6), "rank 0: .*got 5.*\nrank 1: .*got 6")],
    ids=["equal errors", "different errors"],
)
def test_an_error_names_the_layer_and_every_faulty_rank(
    ranks: Ranks, bad_channels: tuple[int, int], lines: str
) -> None:
    """Ranks 0 and 1 raise their own errors. Only a third rank raises the error with the lines of both ranks."""
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), nn.BatchNorm1d(C)))
    if ranks.rank < 2:
        channels = bad_channels[ranks.rank]
        message = f"^layer '1': .*got {channels}"
    else:
        channels, message = C, rf"layer '1' forward, call 1.\n{lines}"
    with pytest.raises(ValueError, match=message):
        model(torch.randn(2, channels))


def test_a_bad_argument_is_the_context_of_the_error_that_ranks_are_in_different_layers(ranks: Ranks) -> None:
    first, second = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(C)))
    with pytest.raises(RanksDifferError, match="rank 0: in layer '0' forward, call 1\n") as error:
        second(X) if ranks.rank else first(X[:, :2])
    if ranks.rank == 0:
        assert "expected 3 channels" in str(error.value.__context__)


def test_errors_do_not_use_numpy_or_the_default_device(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not depend on NumPy, but its all_gather_object does. Tensors of the device "meta" have no values."""
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    layer = syncbn.SyncBatchNorm(C)
    text = "expected 3 channels in dim 1 of the input, got 4"
    with torch.device("meta"), raises_on_all_ranks(ranks, text, dict(layer.named_buffers())):
        layer(X if ranks.rank else X.mT)


# Inputs that are not finite, or whose squares are not finite. The statistics then become infinite or NaN, as in torch.


@pytest.mark.parametrize("mode", [contextlib.nullcontext, CountCollectives])  # CountCollectives: dispatched kernels
@pytest.mark.parametrize(
    ("dtype", "value", "cause"),
    [
        (torch.bfloat16, 3e38, "torch.bfloat16 values beyond about 1e19, whose squares overflow"),
        (torch.float64, 1e200, "torch.float64 values beyond about 1e154, whose squares overflow"),
        (torch.float32, 3e38, None),  # The squares are finite, because the C++ kernels compute them in float64.
        (torch.float32, torch.nan, "the input of a layer has NaN or infinity, the statistics"),
    ],
)
def test_the_rank_whose_sums_are_not_finite_warns_once(
    ranks: Ranks, dtype: torch.dtype, value: float, cause: str | None, mode: Callable[[], Any]
) -> None:
    if value == 3e38 and "C++" not in available():
        pytest.skip("other kernels may compute squares in another dtype")
    layer, x = syncbn.SyncBatchNorm(C, dtype=torch.float64), torch.randn(4, C).to(dtype)
    if ranks.rank == 0:
        x[0] = value
    with syncbn_warnings() as texts, mode():
        for _ in range(2):
            layer(x)
    assert layer.running_var.isfinite().all() == (cause is None)
    if ranks.rank > 0 or cause is None:
        assert texts == []
    else:
        warning, explanation = texts
        assert warning == "syncbn: NaN or infinity in the input of SyncBatchNorm forward, call 1 on rank 0."
        assert cause in explanation


def test_nan_of_one_rank_makes_all_ranks_warn_in_the_next_layer(ranks: Ranks) -> None:
    """Each layer warns once. A remedy follows the first warning of a process as the second warning."""
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(C)))
    with syncbn_warnings() as texts:
        for _ in range(2):
            model(X if ranks.rank else X * torch.nan)
    assert "Check the batch of the rank that warned first" in texts.pop(1)
    names = ("layer '0'", "layer '1'") if ranks.rank == 0 else ("layer '1'",)
    warning = "syncbn: NaN or infinity in the input of {} forward, call 1 on rank {}."
    assert texts == [warning.format(name, ranks.rank) for name in names]
