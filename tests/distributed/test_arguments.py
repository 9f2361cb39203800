"""Tests that an invalid argument of one rank raises an error on every rank, before any tensor changes.

test_errors.py has all messages, on one process. On GPUs the other ranks raise at a later call: test_status.py.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from equal_to_torch import clear_kernel_caches
from torch import Tensor, nn
from training import CountCollectives
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward, sync_batch_norm
from syncbn.kernels import available, select
from syncbn.ranks.report import RanksDifferError
from syncbn.texts import warn_once

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the other ranks raise at a later call")
Mode = Callable[[], contextlib.AbstractContextManager]
C = 3
X = torch.ones(2, C, 4)


@contextlib.contextmanager
def raises_on_all_ranks(ranks: Ranks, text: str, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Check that the block raises an error with `text` on rank 0, that the other ranks report this text once, and that
    no tensor changes."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    error, reported = Exception, ""
    if ranks.rank:
        error, reported = (TypeError, ValueError), r"another rank failed(.|\n)*rank 0: \w+Error: (.|\n)*"
    with pytest.raises(error, match=reported + re.escape(text)) as e:
        yield
    assert ranks.rank == 0 or (str(e.value).count(text) == 1 and e.value.__context__ is None)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0)


@torch.inference_mode()
def inference_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@torch.inference_mode()
def inference_parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.clone())


def nested() -> Tensor:
    """Return a tensor without strides. A check of its guards would abort the process."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def freed(*shape: int) -> Tensor:
    tensor = torch.ones(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


# Arguments of functions.


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("name", "bad", "text"),
    [
        ("eps", lambda: 0.0, "eps must be positive"),
        ("channel_dim", lambda: 1.0, "channel_dim must be an int, got 1.0"),
        ("input", lambda: torch.tensor(1.0), "expected at least 2D input (got 0D input of shape ())"),
        ("input", lambda: X.to("meta"), "the input is on meta but running_mean on cpu"),
        ("input", lambda: None, "expected a Tensor as input, got NoneType"),
        ("input", lambda: X.cfloat(), "expected a float16, bfloat16, float32 or float64 input, got"),
        ("input", lambda: X.to_sparse(), "expected a dense input, got layout torch.sparse_coo"),
        ("input", lambda: inference_tensor(X), "input was made in torch.inference_mode()"),
        ("weight", lambda: [1.0], "expected weight to be a float tensor, got list"),
        ("weight", nested, "weight is a NestedTensor; pass weight.values()"),
        ("running_var", nn.UninitializedBuffer, "shape of an uninitialized parameter or buffer"),
        ("z", nested, "z is a NestedTensor; pass z.values()"),
        ("mask", lambda: X > 0, "(the input's (2, 3, 4) without the channel dim; a dim of size 1 is broadcast)"),
        ("mask", lambda: torch.ones(2, device="meta") > 0, "the input is on cpu but mask on meta"),
        ("mask", lambda: inference_tensor(torch.ones(2) > 0), "mask was made in torch.inference_mode()"),
        # Without a check, the kernel of this rank would find these after the all_reduce, and the other ranks train.
        ("input", lambda: freed(2, C, 4), "the storage of a tensor was freed"),
        ("running_mean", lambda: freed(C), "the storage of a tensor was freed"),
    ],
)
def test_a_bad_argument_raises_on_every_rank(
    ranks: Ranks, name: str, bad: Callable[[], object], text: str, mode: Mode
) -> None:
    """Kernels are cached, so the other ranks take the fast path. The faulty rank joins their all_reduce."""
    tensors = {"running_mean": torch.zeros(C), "running_var": torch.ones(C), "weight": torch.ones(C).requires_grad_()}
    arguments = tensors | {"input": X, "training": True}
    with mode():
        sync_batch_norm(**arguments)
    with raises_on_all_ranks(ranks, text, tensors):
        sync_batch_norm(**(arguments | {name: bad()} if ranks.rank == 0 else arguments))
    sync_batch_norm(**arguments)  # The group can still be used.


@pytest.mark.parametrize(
    ("name", "bad", "text"),
    [
        ("input", X[..., :1], "expected grad_output of the input's shape"),
        ("mean", torch.ones(2), "expected mean of shape (3,), as the input has 3 channels"),
        ("output_mask", map({}.__getitem__, ["key of the user"]), "key of the user"),  # iterating raises KeyError
    ],
)
def test_a_bad_argument_of_batch_norm_backward_raises_on_every_rank(
    ranks: Ranks, name: str, bad: object, text: str
) -> None:
    arguments = {"grad_output": X, "input": X, "mean": torch.zeros(C), "invstd": torch.ones(C)}
    with raises_on_all_ranks(ranks, text, {}):
        batch_norm_backward(**arguments | ({name: bad} if ranks.rank == 0 else {}))


@pytest.mark.parametrize(("name", "known"), [("SYNCBN_KERNELS", "reference"), ("SYNCBN_CHECKS", "0")])
def test_an_unknown_environment_variable_raises_on_every_rank(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, known: str
) -> None:
    select.reason_forced.cache_clear()
    clear_kernel_caches(monkeypatch)
    monkeypatch.setenv(name, "fast" if ranks.rank == 0 else os.environ.get(name, ""))
    layer = syncbn.SyncBatchNorm1d(C)
    with raises_on_all_ranks(ranks, f"{name} must be {known!r} or not set, got 'fast'", layer.state_dict()):
        layer(X)
    select.reason_forced.cache_clear()


# Attributes and tensors of layers.

FLAGS = "fuse_relu", "channel_last", "track_running_stats"
IN_PLACE = "cannot be updated in place, as "


@pytest.mark.parametrize("trained", ["", "in training", "in inference mode"])
@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("weight", inference_parameter, "weight was made in torch.inference_mode"),
        ("running_mean", inference_tensor, f"running_mean {IN_PLACE}it was made in torch.inference_mode"),
        ("running_var", inference_tensor, f"running_var {IN_PLACE}it was made in torch.inference_mode"),
        ("num_batches_tracked", inference_tensor, f"num_batches_tracked {IN_PLACE}it was made in torch.inference_mode"),
        ("running_mean", lambda mean: mean[:1].expand(C), f"running_mean {IN_PLACE}several of its elements"),
        ("running_mean", lambda mean: torch._efficientzerotensor(C), f"running_mean {IN_PLACE}it is a tensor of zeros"),
        ("num_batches_tracked", Tensor.bool, "num_batches_tracked to be a tensor of numbers, got a tensor of torch.b"),
        ("momentum", lambda _: 10**400, "momentum must fit into a float, got 1000"),
        ("momentum", lambda _: torch.ones((), device="meta"), "but momentum on meta"),
        ("eps", lambda _: 10**400, "eps must fit into a float, got 1000"),
        *[
            (name, lambda _, value=value: value, f"{name} must be a bool, got {value!r} of type {type(value).__name__}")
            for name in FLAGS
            for value in (torch.tensor([True, False]), torch.tensor(True), "no", None)
        ],
    ],
)
def test_a_layer_of_one_rank_that_cannot_train_raises_on_every_rank(
    ranks: Ranks, name: str, change: Callable[[Tensor], object], text: str, trained: str
) -> None:
    """Otherwise this rank would fail after the other ranks have trained, and they would wait in backward. The kernels
    may be cached, and in inference mode for tensors with the same dispatch keys."""
    layer = syncbn.SyncBatchNorm(C)
    if trained:
        with torch.inference_mode(trained == "in inference mode"):
            layer(X)
        layer.reset_running_stats()
    if ranks.rank == 0:
        setattr(layer, name, change(getattr(layer, name)))
    with raises_on_all_ranks(ranks, text, {key: layer.get_buffer(key) for key in ("running_mean", "running_var")}):
        layer(X)
    syncbn.SyncBatchNorm(C)(X)  # The group can still be used.


@pytest.mark.parametrize("name", FLAGS)
def test_a_number_on_one_rank_equals_a_bool_on_other_ranks(ranks: Ranks, name: str) -> None:
    layer = syncbn.SyncBatchNorm(C)
    if ranks.rank == 0:
        setattr(layer, name, float(getattr(layer, name)))
    layer(X)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_tensors_are_accepted_unless_autograd_saves_them(ranks: Ranks, mode: Mode) -> None:
    layer, x, z = syncbn.SyncBatchNorm(C), inference_tensor(X), inference_tensor(X)
    mask = inference_tensor(X[:, 0] > 0)
    with mode():
        layer(x, z, mask)
    layer(x.clone(), z, mask.clone()).sum().backward()  # the remedy in the message
    assert not layer.requires_grad_(False)(x, z, mask).requires_grad


def test_a_pruned_layer_has_the_channels_of_its_tensors(ranks: Ranks) -> None:
    """A faulty rank must join an all_reduce of the length that the other ranks send, whatever num_features is."""
    layer = syncbn.SyncBatchNorm(C)
    layer.num_features = 2 * C  # A program has replaced the tensors by shorter tensors.
    layer(X)
    assert syncbn.summary(layer)[0][2:6] == (C, ranks.size, 8 * (2 * C + 5), 8 * (2 * C + 5))
    bad, text = torch.ones(2, C + 1, 4), f"expected {C} channels in dim 1 of the input, got {C + 1}"
    with raises_on_all_ranks(ranks, text, layer.state_dict()):
        layer(X if ranks.rank else bad)
    with pytest.raises(ValueError, match=text):
        layer.eval()(bad)


# The text of the errors.


def test_an_error_names_the_layer_and_every_faulty_rank(ranks: Ranks) -> None:
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), nn.BatchNorm1d(C)))
    for channels in (2, 5 + ranks.rank):  # First, two ranks have the same error, then different errors.
        is_faulty = ranks.rank < 2
        causes = "ranks 0-1: V" if channels == 2 else r"rank 0: .*got 5.*\nrank 1: .*got 6"
        message = rf"^layer '1': .*got {channels}" if is_faulty else rf"layer '1' forward, call \d.\n{causes}"
        with pytest.raises(ValueError, match=message):
            model(torch.randn(2, channels if is_faulty else C))


def test_ranks_in_different_layers_are_the_error_and_a_bad_argument_its_context(ranks: Ranks) -> None:
    first, second = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(C), nn.BatchNorm1d(C)))
    with pytest.raises(RanksDifferError, match="rank 0: in layer '0' forward, call 1\n") as raised:
        second(X) if ranks.rank else first(X[:, :2])
    context = raised.value.__context__
    assert context is None if ranks.rank else "expected 3 channels" in str(context)


def test_an_error_of_a_check_of_the_user_is_reported(ranks: Ranks) -> None:
    """The store accepts no surrogates, which Python uses for bytes in names of files that are not UTF-8."""

    def check_input_dim(x: Tensor) -> None:
        raise AssertionError("cannot read \udcff.png")

    layer, is_faulty = syncbn.SyncBatchNorm(C), ranks.rank == 1
    if is_faulty:
        layer._check_input_dim = check_input_dim
    text = "cannot read \udcff" if is_faulty else r"\nrank 1: AssertionError: cannot read \\udcff"
    with pytest.raises(AssertionError if is_faulty else ValueError, match=text):
        layer(X)


def test_errors_need_neither_numpy_nor_the_default_device(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not depend on NumPy. Without NumPy its all_gather_object fails."""
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    layer = syncbn.SyncBatchNorm(C)
    text = "expected 3 channels in dim 1 of the input, got 4"
    with torch.device("meta"), raises_on_all_ranks(ranks, text, dict(layer.named_buffers())):
        layer(X.mT if ranks.rank == 0 else X)


# Values that are not finite, or whose squares are not.


@pytest.mark.parametrize("mode", [contextlib.nullcontext, CountCollectives])
@pytest.mark.parametrize(
    ("dtype", "value", "cause"),
    [
        (torch.bfloat16, 3e38, "or torch.bfloat16 values beyond about 1e19, whose squares overflow, the"),
        (torch.float64, 1e200, "or torch.float64 values beyond about 1e154, whose squares overflow, the"),
        (torch.float32, 3e38, None),  # The squares are finite in float64.
        (torch.float32, torch.nan, "has NaN or infinity, the"),
        (torch.float32, torch.inf, "has NaN or infinity, the"),
    ],
)
def test_the_rank_whose_sums_are_not_finite_warns_once(
    ranks: Ranks, dtype: torch.dtype, value: float, cause: str | None, mode: Mode
) -> None:
    """The input is not refused, and running_var becomes infinite or NaN, as in torch."""
    layer = syncbn.SyncBatchNorm2d(C, dtype=torch.float64)
    x = torch.randn(4, C, 5, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(dtype)
    if ranks.rank == 0:
        x = x.clamp(-1, 1) * value
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True, action="always") as caught, mode():
        for _ in range(2):
            layer(x)
    texts = [str(warning.message) for warning in caught if "syncbn" in str(warning.message)]
    if value != 3e38 or "C++" in available():  # Other kernels may square float32 in float32.
        assert layer.running_var.isfinite().all() == (cause is None)
    if ranks.rank or layer.running_var.isfinite().all():
        assert texts == []
    else:
        first, second = texts
        assert first == "syncbn: NaN or infinity in the input of SyncBatchNorm2d forward, call 1 on rank 0."
        assert cause in second
