"""Tests that ranks in different layers, passes or calls raise an error on every rank.

On GPUs a later call raises: test_status.py. Several layers with one name: test_order_of_layers.py.
"""

import copy
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from mixtures import MIXTURES, HookedStore, Model, X
from torch import Tensor
from training import assert_state_unchanged
from voting import Ranks

import syncbn
from syncbn import payload
from syncbn.functional import batch_norm_backward, sync_batch_norm
from syncbn.ranks import watchdog
from syncbn.ranks.report import RanksDifferError
from syncbn.ranks.sites import smallest_signature
from syncbn.texts import format_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs a later call raises, see test_status.py")


def other_ranks(ranks: Ranks) -> str:
    """Return the text by which errors name all ranks but rank 0."""
    return format_ranks([*range(1, ranks.size)])


# Layers, passes and settings.


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_that_differ_raise_before_statistics_are_mixed(ranks: Ranks, name: str) -> None:
    call_of_rank_0, call_of_other_ranks, expected = MIXTURES[name]
    expected = expected.replace("OTHERS", other_ranks(ranks))  # The expression has OTHERS for any number of ranks.
    model = Model(dist.group.WORLD)
    model.train_a_step_and_call_bn2_twice()
    with assert_state_unchanged(model), pytest.raises(RanksDifferError, match=expected):
        call_of_other_ranks(model) if ranks.rank else call_of_rank_0(model)
    assert model(X).isfinite().all()  # The group can still be used.


@pytest.mark.parametrize(
    ("name", "changed", "default"),
    [
        ("momentum", None, "0.1"),
        ("momentum", torch.tensor(0.1), "0.1"),
        ("channel_last", True, "False"),
        ("fuse_relu", True, "False"),
        ("track_running_stats", False, "True"),
        ("eps", 0.1, "1e-05"),
    ],
    ids=str,
)
def test_a_setting_that_differs_on_one_rank_raises(ranks: Ranks, name: str, changed: object, default: str) -> None:
    """The error is raised in the first call of a layer (`new`), and also in a later call, after all ranks have changed
    the setting and restored it (`trained`)."""
    x = torch.randn(4, 3, 3, 3)
    new, trained = syncbn.SyncBatchNorm2d(3), syncbn.SyncBatchNorm2d(3)
    initial = getattr(trained, name)
    for value in (changed, initial):
        setattr(trained, name, value)
        trained(x)
    message = rf"rank 0: in .*, with {name}=.*\n{other_ranks(ranks)}: in .*, with {name}={default}\nGive the layer"
    for layer in (new, trained):
        if ranks.rank == 0:
            setattr(layer, name, changed)
        with pytest.raises(RanksDifferError, match=message):
            layer(x)


def test_a_shallow_copy_is_another_layer(ranks: Ranks) -> None:
    """copy.copy copies all attributes of a layer, also those by which syncbn identifies the layer."""
    first = syncbn.SyncBatchNorm(3)
    first(X)
    second = copy.copy(first)
    # nn.DataParallel copies the `__dict__` of a module. Copy it here too, whatever copy.copy may have left out.
    vars(second).update(vars(first))
    second(X)
    with pytest.raises(RanksDifferError, match=r"rank 0: in SyncBatchNorm .*; number \d+ of SyncBatchNorm\(3\)\n"):
        (second if ranks.rank else first)(X)


@pytest.mark.parametrize("unchecked_ranks", ["all ranks", "rank 0"])
def test_syncbn_checks_0_switches_off_the_comparison_but_not_the_errors_of_bad_arguments(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, unchecked_ranks: str
) -> None:
    if unchecked_ranks == "all ranks" or ranks.rank == 0:
        monkeypatch.setenv("SYNCBN_CHECKS", "0")
    model = Model(dist.group.WORLD)
    layer = model.bn2 if ranks.rank else model.bn1
    layer(X).square().sum().backward()
    torch.autograd.grad(layer(X).square().sum(), X, create_graph=True)  # This backward issues two all_reduces.
    message = "rank 0: ValueError: expected 3 channel" if ranks.rank else "^bn1: expected 3 channel"
    with assert_state_unchanged(model), pytest.raises(ValueError, match=message):
        model(X if ranks.rank else X[:, :2])


@pytest.mark.parametrize("num_ranks", [2, 3, 1000, 2**14])
def test_the_comparison_of_signatures_is_exact(num_ranks: int) -> None:
    """Rounding would hide a difference, or report a difference of equal signatures."""
    largest_signature = 2 * smallest_signature(num_ranks) - 1  # The smallest signature is a power of two.
    largest = largest_signature + payload.NUM_IDS - 1  # A rank adds the id of the call to its signature.

    def are_equal(last: float) -> bool:
        """Return the result of the comparison for ranks of which the last sends `last` and each other sends `largest`.
        Like a collective, the function adds the signatures one after another."""
        total, squares = 0.0, 0.0
        for signature in [*[largest] * (num_ranks - 1), last]:
            total, squares = total + signature, squares + signature**2
        return num_ranks * squares == total**2

    assert are_equal(largest)
    assert not are_equal(largest - 1)


# Backwards of several calls.


@pytest.mark.parametrize("derivative", ["first", "first with create_graph", "second"])
@pytest.mark.parametrize("num_errors", [0, 300])  # 300 exceeds NUM_IDS, the number of ids of calls.
def test_backwards_of_different_calls_raise(ranks: Ranks, num_errors: int, derivative: str) -> None:
    """Without an error the gradients of two calls would be mixed. Backwards of the same call raise no error, even if
    rank 0 has counted more calls than the other ranks, because calls have raised an error on rank 0 alone."""

    def loss(x: Tensor) -> Tensor:
        y = sync_batch_norm(x, None, None, training=True).square().sum()
        if derivative != "second":
            return y
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return gradient.square().sum()

    def differentiate(order: list[int]) -> None:
        inputs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
        losses = [loss(x) for x in inputs]
        create_graph = derivative == "first with create_graph"
        for index in order:
            torch.autograd.grad(losses[index], inputs[index], retain_graph=True, create_graph=create_graph)

    if ranks.rank == 0:
        for _ in range(num_errors):
            # A tensor of shape () does not show how many channels the other ranks have, so only this rank raises.
            with pytest.raises(ValueError, match="at least 2"):
                sync_batch_norm(torch.tensor(1.0), None, None, training=True)
    differentiate([0, 1, 1, 0])  # All ranks run the backwards in the same order.
    with pytest.raises(RanksDifferError, match=r"differentiate different calls of a layer.\nrank 0: in .*, call \d+\n"):
        differentiate([0, 1] if ranks.rank else [1, 0])


# Errors.


def test_sums_of_different_sizes_raise(
    ranks: Ranks, set_seconds: Callable[..., None], wrap_all_reduce: Callable[..., None]
) -> None:
    """gloo aborts a rank that expects fewer elements than another rank sends, and leaves the last elements of the total
    NaN on the other ranks. Here each rank writes this NaN itself, and gloo aborts no rank."""

    def leave_last_element_unwritten(all_reduce: Callable[..., Tensor], *arguments: object) -> Tensor:
        total = all_reduce(*arguments)
        total[-1] = torch.nan
        return total

    wrap_all_reduce(leave_last_element_unwritten)
    set_seconds(SETTLE_SECONDS=0.1)  # A report waits for this time for a rank that leaves. Here no rank leaves.
    layer = syncbn.SyncBatchNorm(3)
    if ranks.rank == 0:
        with pytest.raises(ValueError, match="expected 3 channels"):
            layer(X[:, :2])
    else:
        with pytest.raises(RuntimeError, match=r"have sent sums of different sizes\.\nrank"):
            layer(X)


def test_a_second_error_does_not_have_the_text_of_the_first(ranks: Ranks) -> None:
    """Ranks write the texts to the store under a digest of the total. Here both errors have the same total, and rank 0
    is late to write its second text. If its first text were still in the store, the other ranks would read that."""
    rank = watchdog.this_rank()
    store = rank.store
    if ranks.rank == 0:
        rank.store = HookedStore(store, lambda method: time.sleep(0.3 if method == "set" else 0))
    for size in (1, 2):
        error = rf"expected mean of shape \(3,\), .* got \({size},\)"
        with pytest.raises(ValueError, match=f"rank 0: ValueError: {error}" if ranks.rank else f"^{error}"):
            batch_norm_backward(X, X, torch.zeros(3 if ranks.rank else size), torch.ones(3))
    rank.store = store
