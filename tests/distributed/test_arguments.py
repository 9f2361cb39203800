"""Tests that a bad argument of one rank raises an error on every rank, before any tensor changes.

test_layer.py has the errors of calls that do not communicate. On GPUs the other ranks raise at a later call:
test_status.py.
"""

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from equal_to_torch import clear_kernel_caches
from torch import Tensor, nn
from training import CountCollectives, assert_state_unchanged, syncbn_warnings
from voting import Ranks

import syncbn
from syncbn import torch_internals
from syncbn.functional import batch_norm_backward, sync_batch_norm
from syncbn.kernels import available, select
from syncbn.ranks.report import RanksDifferError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the other ranks raise at a later call")
C = 3
X, ONES = torch.ones(2, C, 4), torch.ones(C)


@contextlib.contextmanager
def raises_on_all_ranks(
    ranks: Ranks, text: str, layer: nn.Module, error: type[Exception] = ValueError
) -> Iterator[None]:
    """Check that the block does not change the state of `layer`, and raises an error on every rank. Rank 0 raises
    `error` with `text`, and the errors of the other ranks quote `text`."""
    errors, message = error, re.escape(text)
    if ranks.rank > 0:
        errors, message = (TypeError, ValueError), rf"another rank failed(.|\n)*rank 0: \w+Error: (.|\n)*{message}"
    with assert_state_unchanged(layer), pytest.raises(errors, match=message) as raised:
        yield
    assert str(raised.value).count(text) == 1


# Each helper returns the call to test, with its arguments. `layer_call` first sets attributes of the layer.


def layer_call(
    layer: syncbn.SyncBatchNorm, x: object = X, z: object = None, mask: object = None, **attributes: object
) -> Callable[[], object]:
    for name, value in attributes.items():
        setattr(layer, name, value)
    return functools.partial(layer, x, z, mask)


def function_call(layer: syncbn.SyncBatchNorm, **changed: object) -> Callable[[], object]:
    tensors = {"running_mean": layer.running_mean, "running_var": layer.running_var, "weight": layer.weight}
    return functools.partial(sync_batch_norm, **({"input": X, "training": True} | tensors | changed))


def backward_call(layer: syncbn.SyncBatchNorm, **changed: object) -> Callable[[], object]:
    tensors = {"mean": layer.running_mean, "invstd": layer.running_var, "weight": layer.weight}
    return functools.partial(batch_norm_backward, **({"grad_output": X, "input": X} | tensors | changed))


@torch.inference_mode()
def inference_tensor(*shape: int) -> Tensor:
    return torch.ones(shape)


def nested_tensor() -> Tensor:
    """Return a tensor without strides. A guard that compares its strides aborts the process."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def freed_tensor(*shape: int) -> Tensor:
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


def refuse(x: Tensor) -> None:
    raise AssertionError("refused by a check of the user")


# ruff: noqa: E501 - one row for each case
# A call, the bad arguments of rank 0, the nearest valid arguments, the class of rank 0's error and a part of its text.
CASES: list[tuple[Callable[..., Callable[[], object]], dict[str, object], dict[str, object], type[Exception], str]] = [
    (layer_call, {"x": X.to("meta")}, {}, ValueError, "the input is on meta but running_mean on cpu; move one with .to(device)"),
    (layer_call, {"z": X[:1]}, {"z": X}, ValueError, "expected z of the input's shape (2, 3, 4), got (1, 3, 4)"),
    (layer_call, {"z": X.to("meta")}, {"z": X}, ValueError, "the input is on cpu but z on meta"),
    (layer_call, {"z": X[:, 0] > 0}, {"mask": X[:, 0] > 0}, TypeError, "got torch.bool; a mask is passed as mask=, not as z"),
    (layer_call, {"mask": [True] * 2}, {"mask": torch.as_tensor([True] * 2)}, TypeError, "expected mask to be a bool tensor, got list; use torch.as_tensor(mask)"),
    (layer_call, {"mask": torch.ones(2)}, {"mask": torch.ones(2) != 0}, TypeError, "got torch.float32; use mask != 0"),
    (layer_call, {"mask": X > 0}, {"mask": X[:, 0] > 0}, ValueError, "(the input's (2, 3, 4) without the channel dim; a dim of size 1 is broadcast)"),
    (layer_call, {"momentum": Decimal("0.1")}, {"momentum": Fraction(1, 10)}, TypeError, "momentum must be a float, got Decimal('0.1') of type Decimal; pass a float"),
    (layer_call, {"momentum": 10**400}, {"momentum": 1}, ValueError, "momentum must fit into a float, got 1000"),
    (layer_call, {"channel_last": True}, {"channel_last": True, "x": X.mT}, ValueError, "expected 3 channels in dim -1 of the input, got 4"),
    (layer_call, {"channel_last": torch.tensor(True)}, {"channel_last": np.False_}, TypeError, "channel_last must be a bool, got tensor(True) of type Tensor; pass a bool"),
    (layer_call, {"fuse_relu": torch.tensor([True, False])}, {}, TypeError, "fuse_relu must be a bool, got tensor([ True, False]) of type"),
    (layer_call, {"track_running_stats": None}, {}, TypeError, "track_running_stats must be a bool, got None of type NoneType"),
    (layer_call, {"_check_input_dim": refuse}, {}, AssertionError, "refused by a check of the user"),
    # Programs that prune channels do not update num_features, here 6. Rank 0 must send the sums of 3 channels, not of 6.
    (layer_call, {"num_features": 6, "x": X[:, :2]}, {"num_features": 6}, ValueError, "expected 3 channels in dim 1 of the input, got 2"),
    (layer_call, {"running_mean": inference_tensor(C)}, {}, ValueError, "running_mean cannot be updated in place, as it was made in torch.inference"),
    (layer_call, {"running_mean": torch.zeros(1).expand(C)}, {}, ValueError, "running_mean cannot be updated in place, as several of its elements"),
    (layer_call, {"num_batches_tracked": inference_tensor()}, {}, ValueError, "num_batches_tracked cannot be updated in place, as it was made in"),
    (layer_call, {"num_batches_tracked": torch.tensor(True)}, {}, TypeError, "num_batches_tracked to be a tensor of numbers, got a tensor of"),
    (function_call, {"input": None}, {}, TypeError, "expected a Tensor as input, got NoneType"),
    (function_call, {"input": torch.tensor(1.0)}, {"input": ONES[None]}, ValueError, "expected at least 2D input (got 0D input of shape ())"),
    (function_call, {"input": inference_tensor(2, C, 4)}, {}, ValueError, "input was made in torch.inference_mode()"),
    (function_call, {"weight": [1.0] * C}, {}, TypeError, "expected weight to be a float tensor, got list"),
    (function_call, {"weight": ONES.int()}, {"weight": ONES.half()}, TypeError, "expected weight to be a float tensor, got torch.int32; convert it first"),
    (function_call, {"weight": ONES[None]}, {"weight": ONES}, ValueError, "expected weight of shape (3,), as the input has 3 channels in dim 1 (input shape (2, 3, 4)), got (1, 3)"),
    (function_call, {"running_mean": ONES[:2]}, {"running_mean": ONES.clone()}, ValueError, "expected running_mean of shape (3,)"),
    (function_call, {"weight": nested_tensor()}, {}, TypeError, "weight is a NestedTensor; pass weight.values()"),
    (function_call, {"running_var": None}, {"running_mean": None, "running_var": None}, ValueError, "must either both be None or neither be None"),
    (function_call, {"running_var": nn.UninitializedBuffer()}, {}, RuntimeError, "shape of an uninitialized parameter or buffer"),
    (function_call, {"momentum": None}, {"momentum": np.float32(0.1)}, TypeError, "momentum must be a float, got None of type NoneType; pass a float"),
    (function_call, {"momentum": torch.ones(2)}, {"momentum": torch.ones(1)}, ValueError, "momentum must be one number, got a tensor of shape (2,)"),
    (function_call, {"eps": 0.0}, {"eps": 1e-30}, ValueError, "eps must be positive during training, but got 0.0"),
    (function_call, {"channel_dim": 1.0}, {}, TypeError, "channel_dim must be an int, got 1.0"),
    (function_call, {"channel_dim": 3}, {"channel_dim": -2}, ValueError, "channel_dim=3 does not exist in an input of shape (2, 3, 4)"),
    # A kernel would fail on freed storage after the all_reduce, and the other ranks would continue.
    (function_call, {"input": freed_tensor(2, C, 4)}, {}, RuntimeError, "the storage of a tensor was freed"),
    (function_call, {"running_mean": freed_tensor(C)}, {}, RuntimeError, "the storage of a tensor was freed"),
    (backward_call, {"mean": freed_tensor(C)}, {}, RuntimeError, "the storage of a tensor was freed"),
    (backward_call, {"invstd": None}, {}, TypeError, "expected invstd to be a float tensor, got NoneType; use torch.as_tensor"),
    (backward_call, {"output_mask": "yes"}, {"output_mask": np.array([True, False, True])}, ValueError, "output_mask must be three bools, for input, weight and bias, got 'yes'"),
]  # fmt: skip


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(("call", "bad", "good", "error", "text"), CASES, ids=[case[-1] for case in CASES])
def test_a_bad_argument_of_rank_0_raises_on_every_rank_and_a_similar_argument_does_not(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Callable[[], object]],
    bad: dict[str, object], good: dict[str, object], error: type[Exception], text: str, is_cached: bool,
) -> None:  # fmt: skip
    """Otherwise the other ranks would update their statistics, and wait in backward. After a valid call the options of
    the layer and the kernels are cached. The error is raised without NumPy, and with the default device "meta"."""
    clear_kernel_caches(monkeypatch)
    monkeypatch.setattr(Tensor, "numpy", None)
    layer = syncbn.SyncBatchNorm(C)
    if is_cached:
        call(layer, **good)()
    bad_call = call(layer, **(good if ranks.rank else bad))
    with raises_on_all_ranks(ranks, text, layer, error), torch.device("meta"):
        bad_call()
    call(syncbn.SyncBatchNorm(C), **good)()  # The group can still be used.


@pytest.mark.parametrize(("name", "known"), [("SYNCBN_KERNELS", "reference"), ("SYNCBN_CHECKS", "0")])
def test_an_unknown_value_of_an_environment_variable_raises_on_every_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, known: str
) -> None:
    select.reason_forced.cache_clear()  # These two lines make syncbn read the variables again.
    clear_kernel_caches(monkeypatch)
    if ranks.rank == 0:
        monkeypatch.setenv(name, "fast")
    layer = syncbn.SyncBatchNorm1d(C)
    with raises_on_all_ranks(ranks, f"{name} must be {known!r} or not set, got 'fast'", layer):
        layer(X)
    select.reason_forced.cache_clear()


# The text of the errors.


@pytest.mark.parametrize(
    ("bad_channels", "lines"),
    [((2, 2), "ranks 0-1: ValueError"), ((5, 6), "rank 0: .*got 5.*\nrank 1: .*got 6")],
    ids=["equal errors", "different errors"],
)
def test_an_error_names_the_layer_and_every_faulty_rank(
    ranks: Ranks, bad_channels: tuple[int, int], lines: str
) -> None:
    """Ranks 0 and 1 raise their own errors. Only a third rank raises the error with the lines of both ranks."""
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), nn.BatchNorm1d(C)))
    channels = [*bad_channels, C, C][ranks.rank]
    message = f"^layer '1': .*got {channels}" if ranks.rank < 2 else rf"layer '1' forward, call 1.\n{lines}"
    with pytest.raises(ValueError, match=message):
        model(torch.randn(2, channels))


def test_the_error_of_ranks_in_different_layers_has_a_bad_argument_as_its_context(ranks: Ranks) -> None:
    first, second = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(C)))
    with pytest.raises(RanksDifferError, match="rank 0: in layer '0' forward, call 1\n") as error:
        second(X) if ranks.rank else first(X[:, :2])
    if ranks.rank == 0:
        assert "expected 3 channels" in str(error.value.__context__)


# Inputs that are not finite, or whose squares are not finite. The statistics then become infinite or NaN, as in torch.


# Under CountCollectives and a profiler, the kernels are dispatched.
@pytest.mark.parametrize("mode", [contextlib.nullcontext, CountCollectives, torch.autograd.profiler.profile])
@pytest.mark.parametrize(
    ("dtype", "value", "cause"),
    [
        (torch.bfloat16, 3e38, "torch.bfloat16 values beyond about 1e19, whose squares overflow"),
        (torch.float64, 1e200, "torch.float64 values beyond about 1e154, whose squares overflow"),
        (torch.float32, 3e38, None),  # The squares are finite, because the C++ kernels compute them in float64.
        (torch.float32, torch.nan, "Check the batch of the rank that warned first"),
    ],
)
def test_each_layer_warns_once_on_a_rank_whose_sums_are_not_finite(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float, cause: str | None,
    mode: Callable[[], Any],
) -> None:  # fmt: skip
    """Rank 0 has the value. If the outputs of all ranks become NaN, all ranks warn in the next layer. After its
    first warning a process issues another one, which explains the first."""
    if value == 3e38 and "C++" not in available():
        pytest.skip("other kernels may compute squares in another dtype")
    if mode is torch.autograd.profiler.profile:  # Large groups use all_reduce, which overwrites the sums of this rank.
        monkeypatch.setattr(torch_internals, "all_to_all_size", lambda group: 0)
    first, second = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(C)).double())
    x = torch.randn(4, C).to(dtype)
    if ranks.rank == 0:
        x[0] = value
    with syncbn_warnings() as texts, mode():
        for _ in range(2):
            y = first(x)
            second(y)
    assert first.running_var.isfinite().all() == (cause is None)
    has_nan = value != 3e38  # With 3e38, mean^2 is finite, so the variance is finite or infinite, and no output is NaN.
    assert y.isnan().all() == has_nan
    names = ["layer '0'"] if ranks.rank == 0 and cause is not None else []
    names += ["layer '1'"] if has_nan else []
    if names:
        assert cause in texts.pop(1)
    warning = "syncbn: NaN or infinity in the input of {} forward, call 1 on rank {}."
    assert texts == [warning.format(name, ranks.rank) for name in names]
