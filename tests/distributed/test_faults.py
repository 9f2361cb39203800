"""Catches a fault of one rank that is not raised on every rank, does not name that rank, or loses something."""

import sys

import pytest
import torch
from torch import Tensor, nn
from training import unchanged
from voting import Ranks

import syncbn
from syncbn.functional import batch_norm_backward
from syncbn.ranks.report import RanksDifferError

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on GPUs the others raise at a later call, see test_status.py"
)

GOOD = torch.arange(24.0).view(2, 3, 4)

# A bad first argument, what every rank raises, and what it says. The nearest good argument is GOOD.
FAULTS = [
    (GOOD.cfloat(), TypeError, "expected a float16, bfloat16, float32 or float64 input, got torch.complex64"),
    (GOOD.to_sparse(), TypeError, "expected a dense input, got layout torch.sparse_coo"),
    (GOOD.tolist(), TypeError, "expected a Tensor as input, got list"),
]


@pytest.mark.parametrize(("bad", "error", "text"), FAULTS)
def test_bad_input_on_one_rank(ranks: Ranks, bad: object, error: type[Exception], text: str) -> None:
    """That rank raises the error that it raises alone, the others one with its text."""
    layer, faulty = syncbn.SyncBatchNorm(3), ranks.size - 1
    message = f"^syncbn: another rank failed in SyncBatchNorm forward, call 1.\nrank {faulty}: {error.__name__}: {text}"
    if ranks.rank == faulty:
        message = f"^SyncBatchNorm: {text}"
    with unchanged(layer), pytest.raises(error, match=message) as raised:
        layer(bad if ranks.rank == faulty else GOOD)
    assert str(raised.value).count(text) == 1
    assert raised.value.__context__ is None or ranks.rank == faulty
    layer(GOOD)  # the group goes on


@pytest.mark.parametrize(
    ("name", "bad", "error", "message"),
    [
        ("input", GOOD[..., :1], ValueError, "expected grad_output of the input's shape"),
        ("mean", torch.ones(2), ValueError, r"expected mean of shape \(3,\), .* got \(2,\)"),
        ("output_mask", map({}.__getitem__, ["my own words"]), KeyError, "my own words"),  # of the user's own code
    ],
)
def test_a_bad_argument_of_the_backward(
    ranks: Ranks, name: str, bad: object, error: type[Exception], message: str
) -> None:
    arguments = {"grad_output": GOOD, "input": GOOD, "mean": torch.zeros(3), "invstd": torch.ones(3)}
    of_others = f"rank 0: {error.__name__}: .*{message}"
    with pytest.raises((error, ValueError), match=message if ranks.rank == 0 else of_others):
        batch_norm_backward(**arguments | ({name: bad} if ranks.rank == 0 else {}))


class TextlessError(ValueError):
    def __str__(self) -> str:
        raise AttributeError("no text")


class OwnCheck(torch.nn.modules.batchnorm._BatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim == 4, "my own words"
        if len(input) > 3:
            raise self.error


@pytest.mark.parametrize(
    ("own_error", "text"),
    [
        (None, "AssertionError: my own words"),  # of another number of dims
        (AssertionError(), "AssertionError$"),
        (TextlessError(), r".*\.TextlessError: <exception str\(\) failed>$"),
        (ValueError("cannot read \udcff.png"), r"ValueError: cannot read \\udcff\.png$"),
    ],
    ids=["words", "no words", "no text", "surrogate"],
)
def test_an_own_check_of_dims_may_raise_any_class(ranks: Ranks, own_error: Exception | None, text: str) -> None:
    layer, good = syncbn.convert_syncbn_model(OwnCheck(3)), GOOD[..., None]
    layer.error = own_error
    error, message = ValueError, f"\nrank 1: {text}"
    if ranks.rank == 1:
        error, message = type(own_error or AssertionError()), None
    bad = GOOD if own_error is None else torch.cat((good, good))
    with pytest.raises(error, match=message):
        layer(bad if ranks.rank == 1 else good)


def test_the_layer_and_every_faulty_rank_are_named(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(3)
    model, faulty = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), layer)), ranks.rank < 2
    with pytest.raises(
        ValueError, match="^layer '1': expected" if faulty else "layer '1' forward, call 1.\nranks 0-1: V"
    ):
        model(torch.randn(2, 2 if faulty else 3))
    of_each = rf"^layer '1': .*got {5 + ranks.rank}" if faulty else r"rank 0: .*got 5.*\nrank 1: .*got 6"
    with pytest.raises(ValueError, match=of_each):
        model(torch.randn(2, 5 + ranks.rank if faulty else 3))


def test_a_bad_argument_in_another_layer(ranks: Ranks) -> None:
    """Every rank raises that the layers differ; the rank at fault has its own error in front of it."""
    first, second = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    with pytest.raises(RanksDifferError, match="rank 0: in layer '0' forward, call 1\n") as raised:
        second(GOOD) if ranks.rank else first(GOOD[:, :2])
    context = raised.value.__context__
    assert context is None if ranks.rank else "expected 3 channels" in str(context)


def test_the_exchange_does_not_need_numpy(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not depend on NumPy, and its all_gather_object does not work without."""
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    with pytest.raises(ValueError, match="expected 3 channels"):
        syncbn.SyncBatchNorm(3)(GOOD.mT if ranks.rank == 0 else GOOD)
    for make in (lambda size: syncbn.SyncBatchNorm(3, process_group=size), syncbn.create_syncbn_process_group):
        with pytest.raises(ValueError, match=rf"{ranks.size} ranks do not divide into groups of {ranks.size + 1}"):
            make(ranks.size + 1)
