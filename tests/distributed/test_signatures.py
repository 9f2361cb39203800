"""Tests that ranks in different layers, passes or calls raise, and that ranks which agree do not.

test_order_of_layers.py has layers with one name, and test_status.py what GPUs find.
"""

import contextlib
import copy
import gc
import time
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import voting
from mixtures import MIXTURES, HookedStore, Model, X
from subclasses_of_batchnorm import BatchNormAct2d
from torch import Tensor
from training import CountCollectives, preserved_state
from voting import Ranks

import syncbn
from syncbn import payload
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats
from syncbn.ranks import watchdog
from syncbn.ranks.report import RanksDifferError
from syncbn.ranks.sites import smallest_signature
from syncbn.texts import format_ranks, warn_once

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs a later call raises, see test_status.py")


def layer_and_input() -> tuple[syncbn.SyncBatchNorm, Tensor]:
    return syncbn.SyncBatchNorm(3), torch.randn(4, 3)


def other_ranks(ranks: Ranks) -> str:
    """Return how reports name all ranks but rank 0."""
    return format_ranks([*range(1, ranks.size)])


# Layers and passes.


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_that_differ_raise_before_statistics_are_mixed(ranks: Ranks, name: str) -> None:
    *calls, expected = MIXTURES[name]
    model = Model(dist.group.WORLD)
    model(X).sum().backward()
    y, other = model.bn2(X), model.bn2(2 * X)
    with preserved_state(model), pytest.raises(RanksDifferError, match=expected.replace("OTHERS", other_ranks(ranks))):
        calls[ranks.rank > 0](model, y, other)
    model.bn1.eps = model.bn2.eps
    assert model(X).isfinite().all()  # the group still works


def test_a_backward_without_forward_is_not_a_forward(ranks: Ranks) -> None:
    """Otherwise the sums of dy would move the running statistics of the other ranks."""
    layer, x = layer_and_input()
    arguments = x, x, torch.zeros(3), torch.ones(3)
    batch_norm_backward(*arguments)
    with preserved_state(layer), pytest.raises(RanksDifferError, match="different layers or calls"):
        layer(x) if ranks.rank else batch_norm_backward(*arguments)


def test_a_shallow_copy_is_another_layer(ranks: Ranks) -> None:
    """nn.DataParallel copies modules with all attributes, including the site."""
    first, x = layer_and_input()
    first(x)
    second = copy.copy(first)
    vars(second).update(vars(first))
    second(x)
    with pytest.raises(RanksDifferError, match=r"rank 0: in SyncBatchNorm .*; number \d+ of SyncBatchNorm\(3\)\n"):
        (second if ranks.rank else first)(x)


@pytest.mark.parametrize(
    ("name", "other", "usual"),
    [("momentum", None, "0.1"), ("momentum", torch.tensor(0.1), "0.1"), ("channel_last", True, "False"),
     ("fuse_relu", True, "False"), ("track_running_stats", False, "True"), ("eps", 0.1, "1e-05")], ids=str,
)  # fmt: skip
def test_a_setting_of_one_rank_raises_in_any_call(ranks: Ranks, name: str, other: object, usual: str) -> None:
    """The layer may be of a converted subclass. All ranks may change a setting."""
    x = torch.randn(4, 3, 3, 3)
    for is_first in (True, False):
        layer = syncbn.convert_syncbn_model(BatchNormAct2d(3)) if name == "eps" else syncbn.SyncBatchNorm(3)
        for value in () if is_first else (other, getattr(layer, name)):
            setattr(layer, name, value)
            layer(x).sum().backward()
        if ranks.rank == 0:
            setattr(layer, name, other)
        message = rf"rank 0: in .*, with {name}=.*\n{other_ranks(ranks)}: in .*, with {name}={usual}\nGive the layer"
        with pytest.raises(RanksDifferError, match=message):
            layer(x)


@pytest.mark.parametrize("unchecked", ["all ranks", "rank 0"])
def test_ranks_unchecked_are_not_compared(ranks: Ranks, sign_nothing: Callable[[], None], unchecked: str) -> None:
    """The error of a bad argument still reaches all ranks."""
    if unchecked == "all ranks" or ranks.rank == 0:
        sign_nothing()
    model = Model(dist.group.WORLD)
    layer = model.bn2 if ranks.rank else model.bn1
    model(X)
    layer(X).square().sum().backward()
    torch.autograd.grad(layer(X).square().sum(), X, create_graph=True)
    message = "rank 0: ValueError: expected 3 channel" if ranks.rank else "^bn1: expected 3 channel"
    with preserved_state(model), pytest.raises(ValueError, match=message):
        model(X if ranks.rank else X[:, :2])
    assert model(X).isfinite().all()


@pytest.mark.parametrize("num_ranks", [2, 3, 1000, 2**14])
def test_signatures_are_compared_without_rounding(num_ranks: int) -> None:
    """All ranks have the largest signature of a backward, then all ranks but one."""
    s, total, squares = 2 * smallest_signature(num_ranks) - 1 + payload.NUM_IDS - 1, 0.0, 0.0
    for _ in range(num_ranks):
        total, squares = total + s, squares + s * s
    assert num_ranks * squares == total * total
    other = s - 1
    assert num_ranks * (squares - s * s + other * other) != (total - s + other) ** 2


# Calls that are differentiated.


def differentiate(order: list[int], create_graph: bool, shift: float = 0.0) -> None:
    """Call the function twice, and differentiate the calls in this order."""
    inputs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    outputs = [sync_batch_norm(x + shift, None, None, training=True).square().sum() for x in inputs]
    for index in order:
        torch.autograd.grad(outputs[index], inputs[index], retain_graph=True, create_graph=create_graph)


@pytest.mark.filterwarnings("ignore:syncbn. ")  # The test makes NaN.
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("num_errors", [0, 1, 300])
def test_backwards_of_different_calls_raise(ranks: Ranks, num_errors: int, create_graph: bool) -> None:
    """The ranks would mix the gradients of two calls. A NaN of one rank raises nothing. Errors of one rank alone, which
    has then counted more calls, neither raise later nor hide that the calls differ."""
    for _ in range(num_errors if ranks.rank == 0 else 0):
        with pytest.raises(ValueError, match="at least 2"):  # Without channels this rank cannot join an all_reduce.
            sync_batch_norm(torch.tensor(1.0), None, None, training=True)
    for shift in (0.0, torch.nan if ranks.rank == 0 else 0.0):
        differentiate([0, 1, 1, 0], create_graph, shift)
    with pytest.raises(RanksDifferError, match=r"differentiate different calls of a layer.\nrank 0: in .*, call \d+\n"):
        differentiate([0, 1] if ranks.rank else [1, 0], create_graph)


@pytest.mark.parametrize(
    "change", [lambda t: t.to(torch.float8_e5m2).to(t.dtype), lambda t: t + 1e-3 * torch.randn_like(t)]
)
def test_the_id_of_a_call_is_not_a_saved_tensor(ranks: Ranks, change: Callable[[Tensor], Tensor]) -> None:
    """Hooks of one rank may round what autograd saves, or add noise."""
    layer, x = layer_and_input()
    hooks = torch.autograd.graph.saved_tensors_hooks(change, lambda packed: packed)
    with hooks if ranks.rank == 0 else contextlib.nullcontext():
        for _ in range(5):
            layer(x).square().sum().backward()
            sync_batch_stats(x.requires_grad_())[1].sum().backward()
        losses = [sync_batch_stats(x)[1].sum() for _ in range(2)]
    with pytest.raises(RanksDifferError, match="differentiate different calls"):
        losses[ranks.rank > 0].backward()


def test_second_derivatives_of_different_calls_raise(ranks: Ranks) -> None:
    """Some ranks may have freed the graph of the first derivative."""
    layer, x = layer_and_input()

    def slope(x: Tensor, retain_graph: bool) -> Tensor:
        y = layer(x)
        (gradient,) = torch.autograd.grad(y, x, y.detach().cos(), create_graph=True, retain_graph=retain_graph)
        return gradient.pow(2).sum()

    inputs = [torch.randn_like(x, requires_grad=True) for _ in range(2)]
    slope(inputs[0], retain_graph=ranks.rank == 0).backward()
    slopes = [slope(x, retain_graph=False) for x in inputs]
    with pytest.raises(RanksDifferError, match="the ranks differentiate different calls"):
        slopes[ranks.rank % 2].backward()


# Totals.


def test_sums_of_different_sizes_raise(
    ranks: Ranks, set_seconds: Callable[..., None], wrap_all_reduce: Callable[..., None]
) -> None:
    """gloo aborts the rank that expects fewer elements, and the last elements stay NaN on the others. A rank with a bad
    argument raises its own error."""

    def leave_end_unwritten(all_reduce: Callable[..., Tensor], *arguments: object) -> Tensor:
        total = all_reduce(*arguments)
        total[-1] = torch.nan
        return total

    wrap_all_reduce(leave_end_unwritten)
    set_seconds(SETTLE_SECONDS=0.1)
    layer, x = layer_and_input()
    message = "expected 3 channels" if ranks.rank == 0 else r"have sent sums of different sizes\.\nrank"
    with pytest.raises(RuntimeError if ranks.rank else ValueError, match=message):
        layer(x if ranks.rank else x[:, :2])


@pytest.mark.parametrize("context", [contextlib.nullcontext, CountCollectives, torch.autograd.graph.save_on_cpu])
def test_a_loss_keeps_no_totals(ranks: Ranks, context: Callable[[], Any]) -> None:
    num_channels = 37  # no other test has as many
    layer = syncbn.SyncBatchNorm(num_channels)

    def num_totals() -> int:
        shape = (payload.num_elements(num_channels),)
        return sum(type(value) is Tensor and value.shape == shape for value in gc.get_objects())

    with context():
        y = layer(torch.randn(4, num_channels))
        assert num_totals() == 0
        y.sum().backward(retain_graph=True)
        assert num_totals() == 0


# Errors and warnings.


@pytest.mark.parametrize("fault", ["another layer", "a bad argument"])
def test_a_caught_error_does_not_keep_the_group(ranks: Ranks, fault: str) -> None:
    """A reference cycle of error, traceback and frame would keep gloo's threads running."""
    group = dist.new_group()
    model = Model(group)
    model(X)
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError, ValueError):
            model(X, f"bn{1 + ranks.rank % 2}") if fault == "another layer" else model(X[:, : 3 - ranks.rank % 2])
        dist.destroy_process_group(group)
        group, model = ref(group), None
        assert group() is None
    finally:
        gc.enable()


def test_equal_totals_are_explained_by_new_reports(ranks: Ranks) -> None:
    """The reports of both faults have one key, and rank 0 writes late. No rank may read the first report again, so
    the reports are deleted."""
    rank, x = watchdog.this_rank(), torch.ones(4, 3)
    store = rank.store
    dist.barrier()
    num_keys = voting.world.store.num_keys()
    dist.barrier()
    if ranks.rank == 0:
        rank.store = HookedStore(store, lambda method: time.sleep(0.3 * (method == "set")))
    for size in (1, 2):
        error = rf"expected mean of shape \(3,\), .* got \({size},\)"
        with pytest.raises(ValueError, match=f"rank 0: ValueError: {error}" if ranks.rank else f"^{error}"):
            batch_norm_backward(x, x, torch.zeros(3 if ranks.rank else size), torch.ones(3))
    rank.store = store
    dist.barrier()
    assert voting.world.store.num_keys() == num_keys
    dist.barrier()


def test_each_layer_warns_of_nan_once(ranks: Ranks) -> None:
    """A NaN of rank 0 in the first layer reaches the second layer on all ranks. A remedy follows the first warning."""
    warn_once.cache_clear()
    model, x = Model(), torch.full((4, 3), torch.nan if ranks.rank == 0 else 1.0)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            model(x)
    texts = [str(warning.message) for warning in caught]
    assert "Check the batch of the rank that warned first" in texts.pop(1)
    warning = f"syncbn: NaN or infinity in the input of {{}} forward, call 1 on rank {ranks.rank}."
    assert texts == [warning.format(layer) for layer in ("bn1", "bn2")[ranks.rank > 0 :]]
