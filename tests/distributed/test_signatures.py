"""Tests that ranks in different layers, passes or calls raise an error, and ranks in the same layers raise none.

On GPUs a later call raises: test_status.py. Two models of one class have layers of the same name. Instance numbers,
which syncbn/ranks/sites.py explains, tell these layers apart.
"""

import collections
import copy
import itertools
import operator
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import voting
from mixtures import MIXTURES, Model, X
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from training import assert_state_unchanged
from voting import Ranks

import syncbn
from syncbn import payload
from syncbn.functional import sync_batch_norm
from syncbn.ranks.report import RanksDifferError
from syncbn.ranks.sites import smallest_signature
from syncbn.texts import format_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs a later call raises, see test_status.py")
on_either_rank = pytest.mark.parametrize("changed_rank", [0, 1])


@pytest.fixture(autouse=True)
def new_group(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Create a new default group, in which instance numbers begin at 1, and check that syncbn logs nothing."""
    voting.world.replace_group()
    yield
    assert not [record for record in caplog.get_records("call") if record.name == "syncbn"]


# Layers, passes and settings.


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_that_differ_raise_before_statistics_are_mixed(ranks: Ranks, name: str) -> None:
    call_of_rank_0, call_of_other_ranks, expected = MIXTURES[name]
    expected = expected.replace("OTHERS", format_ranks([*range(1, ranks.size)]))
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
    others = format_ranks([*range(1, ranks.size)])
    message = rf"rank 0: in .*, with {name}=.*\n{others}: in .*, with {name}={default}\nGive the layer"
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
    # Copy the `__dict__` too, as nn.DataParallel does, in case a layer ever defines `__copy__` or `__getstate__`.
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
    # The largest signature is 2 * smallest - 1. A rank adds the id of the call to its signature.
    largest = 2 * smallest_signature(num_ranks) - 1 + payload.NUM_IDS - 1
    signatures = torch.full((num_ranks,), largest, dtype=torch.float64)
    for last, are_equal in ((largest, True), (largest - 1, False)):
        signatures[-1] = last
        # cumsum adds one number after another, like a collective.
        total, squares = signatures.cumsum(0)[-1], signatures.square().cumsum(0)[-1]
        assert (num_ranks * squares == total**2) == are_equal


def test_sums_of_different_sizes_raise(
    ranks: Ranks, set_seconds: Callable[..., None], wrap_all_reduce: Callable[..., None]
) -> None:
    """gloo aborts the rank that sends fewer elements, and leaves the last elements of the total NaN on the other ranks.
    Here each rank writes this NaN itself, and gloo aborts no rank."""

    def leave_last_element_unwritten(all_reduce: Callable[..., Tensor], *arguments: object) -> Tensor:
        total = all_reduce(*arguments)
        total[-1] = torch.nan
        return total

    wrap_all_reduce(leave_last_element_unwritten)
    set_seconds(SETTLE_SECONDS=0.1)  # how long a report waits for a rank to leave; here no rank leaves
    error, message = RuntimeError, r"have sent sums of different sizes\.\nrank"
    if ranks.rank == 0:  # This rank has a bad argument, and raises its own error.
        error, message = ValueError, "expected 3 channels"
    with pytest.raises(error, match=message):
        syncbn.SyncBatchNorm(3)(X if ranks.rank else X[:, :2])


def random_batch() -> Tensor:
    return torch.randn(4, 3, requires_grad=True)


@pytest.mark.parametrize("derivative", ["first", "first with create_graph", "second"])
@pytest.mark.parametrize("num_errors", [0, 300])  # 300 exceeds NUM_IDS, the number of ids of calls.
def test_backwards_of_different_calls_raise(ranks: Ranks, num_errors: int, derivative: str) -> None:
    """Otherwise the gradients of two calls would be mixed. Backwards of the same call raise nothing, even if rank 0 has
    counted more calls: it also counts the calls that failed on rank 0 alone."""

    def loss(x: Tensor) -> Tensor:
        y = sync_batch_norm(x, None, None, training=True)
        if derivative == "second":
            (y,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y.square().sum()

    def differentiate(order: list[int]) -> None:
        inputs = [random_batch() for _ in range(2)]
        losses = [loss(x) for x in inputs]
        create_graph = derivative == "first with create_graph"
        for index in order:
            torch.autograd.grad(losses[index], inputs[index], retain_graph=True, create_graph=create_graph)

    if ranks.rank == 0:
        for _ in range(num_errors):
            # From a tensor of shape () this rank cannot tell how many sums to send, so it sends none and raises alone.
            with pytest.raises(ValueError, match="at least 2"):
                sync_batch_norm(torch.tensor(1.0), None, None, training=True)
    differentiate([0, 1, 1, 0])  # All ranks run the backwards in the same order.
    with pytest.raises(RanksDifferError, match=r"differentiate different calls of a layer.\nrank 0: in .*, call \d+\n"):
        differentiate([0, 1] if ranks.rank else [1, 0])


# Layers of one name.


def build() -> nn.Module:
    """Return a model whose batch norm has the name "layer '1' in Sequential"."""
    return syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def build_without_names() -> nn.Module:
    """Return a model that was not converted. The batch norm has no name, only a class and a number of channels."""
    return nn.Sequential(nn.Linear(3, 3), syncbn.SyncBatchNorm1d(3))


def train(*models: nn.Module) -> None:
    """Train the models one after another, each for one step."""
    for model in models:
        model(random_batch()).square().sum().backward()


# The models that rank 1 trains, then the models that the other ranks train, with a letter for each step. A model is
# built before its first step and deleted after its last step. The last step, and no earlier step, must raise an error.
ORDERS = {
    "rank 1 swaps two steps": ("BAA", "ABA"),
    "rank 1 leaves out the first step of B": ("AAB", "ABA"),
    "rank 1 trains the new model B too early": ("AAABA", "AAAAB"),
    "rank 1 trains the new model B instead of A": ("AABA", "AAAA"),
    "rank 1 reloads A as C, and then trains C instead of B": ("ABABCBCBC", "ABABABABB"),
    "rank 1 deletes A, and trains the new model C instead of B": ("ABACB", "ABABB"),
}


@pytest.mark.parametrize("build_model", [build, build_without_names])
@pytest.mark.parametrize("name", ORDERS)
def test_ranks_that_train_models_of_one_class_in_different_orders_raise(
    ranks: Ranks, name: str, build_model: Callable[[], nn.Module]
) -> None:
    """The ranks cannot know whether a model that is new on a rank is a second model or the first one, reloaded. They
    agree on a new number, and raise when a rank uses the old number again."""
    models = collections.defaultdict(build_model)  # builds a model when its letter is first used
    order_of_rank_1, order_of_other_ranks = ORDERS[name]
    *letters, last = order_of_rank_1 if ranks.rank == 1 else order_of_other_ranks
    for index, letter in enumerate(letters, start=1):
        train(models[letter])
        if letter not in [*letters[index:], last]:
            del models[letter]
    with pytest.raises(RanksDifferError, match="the ranks are in different layers or calls") as error:
        models[last](random_batch())
    assert str(error.value).count("; number ") == 2  # a line for rank 1, and a line for the other ranks
    assert "Several models of one class" in str(error.value)


def test_an_error_in_a_subgroup_shows_global_ranks(ranks: Ranks) -> None:
    if ranks.size < 3:
        pytest.skip("needs a group of two ranks without rank 0")
    group = dist.new_group(range(1, ranks.size))
    if ranks.rank > 0:
        first, second = (syncbn.convert_syncbn_model(build(), group) for _ in range(2))
        train(first, second)
        lines = rf"rank 1: .*; number 2 .*\n{format_ranks([*range(2, ranks.size)])}: .*; number 1 "
        with pytest.raises(RanksDifferError, match=lines):
            (second if ranks.rank == 1 else first)(random_batch())


# Ranks in the same layers, although one rank has made changes.


def revert_and_convert(model: nn.Module) -> nn.Module:
    return syncbn.convert_syncbn_model(syncbn.revert_syncbn_model(model))


def evaluate_a_copy(model: nn.Module) -> nn.Module:
    copy.deepcopy(model).eval()(random_batch())
    return model


def count_flops(model: nn.Module) -> nn.Module:
    """Call the model with fake tensors. The call gives the model a number on which the ranks have not agreed."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(random_batch()))
    return model


def compile_model(model: nn.Module) -> nn.Module:
    """Compile the model. Its calls give it no number and send no signature."""
    return torch.compile(model, backend="eager", fullgraph=True)


# A string has a letter for each model that all ranks train, one after another. A pair has a function and the letters of
# models: the changed rank alone calls the function with each of these models, and replaces the model by the result.
@on_either_rank
@pytest.mark.parametrize(
    "story",
    [
        pytest.param(["AB", (copy.deepcopy, "A"), "ABAB", (copy.deepcopy, "A"), "ABAB"], id="reload A twice"),
        pytest.param(["AB", (revert_and_convert, "A"), "ABAB"], id="revert and convert A"),
        pytest.param([(nn.Sequential, "A"), "ABAB"], id="wrap A, for example in a profiler"),
        pytest.param([(evaluate_a_copy, "A"), "AB", (evaluate_a_copy, "A"), "AB"], id="evaluate other models"),
        pytest.param([(count_flops, "A"), "BABA"], id="count the FLOPs of A"),
        pytest.param([(count_flops, "AA"), "BABA"], id="count the FLOPs of A twice"),
        pytest.param([(count_flops, "AB"), "BABA"], id="count the FLOPs of both"),
        pytest.param(
            # The attribute _orig_mod of a compiled model is the model that was compiled.
            [
                (compile_model, "AB"),
                "AB",
                (operator.attrgetter("_orig_mod"), "AB"),
                "BACBA",
                (compile_model, "AB"),
                "AB",
            ],
            id="train compiled models first",
            marks=pytest.mark.compiles,
        ),
    ],
)
def test_a_rank_may_change_its_models_alone(ranks: Ranks, story: list, changed_rank: int) -> None:
    """The story runs twice: `changed_rank` makes the changes, then the other of ranks 0 and 1. Both runs are repeated
    with new models, as in the second fold of a cross-validation."""
    for _ in range(2):
        models = collections.defaultdict(build)
        for rank, step in itertools.product((changed_rank, 1 - changed_rank), story):
            if isinstance(step, str):
                train(*(models[letter] for letter in step))
            elif rank == ranks.rank:
                change, letters = step
                for letter in letters:
                    models[letter] = change(models[letter])


@on_either_rank
@pytest.mark.parametrize("order", ["in order", "in reverse", "in reverse, with a second derivative"])
def test_a_rank_may_replace_a_model_before_its_backward(ranks: Ranks, order: str, changed_rank: int) -> None:
    """The backward is signed with the number that the model had in the forward, on all ranks."""
    model, x = build(), random_batch()
    train(model)
    losses = [model(x).pow(3).sum()]
    if ranks.rank == changed_rank:
        model = copy.deepcopy(model)
    losses.append(model(random_batch()).pow(3).sum())
    if order == "in reverse, with a second derivative":
        (gradient,) = torch.autograd.grad(losses[0], x, create_graph=True)
        losses.append(gradient.square().sum())
    if order != "in order":
        losses.reverse()
    for loss in losses:
        loss.backward(retain_graph=True)
    train(model)


def test_a_second_conversion_renames_a_part_that_has_run(ranks: Ranks) -> None:
    """The part runs on its own, and then becomes a part of a larger model. On rank 1 the larger model has a new part
    instead, as if this rank had loaded the larger model from a file."""
    part = build()
    y = part(random_batch())
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), build() if ranks.rank == 1 else part))
    train(model)
    assert model[1][1]._syncbn_site.layer == "layer '1.1' in Sequential"
    y.sum().backward()  # On all ranks the forward had the name "layer '1' in Sequential", and so has this backward.


def test_a_layer_may_be_called_several_times_in_a_step() -> None:
    """Two models share layers, and checkpointing recomputes layers."""
    first, second = build(), build()
    train(first, second, nn.Sequential(first[1], nn.Linear(3, 3), second[1], first[1]))
    for use_reentrant in (True, False):
        y = checkpoint(first, random_batch(), use_reentrant=use_reentrant)
        checkpoint(second, y, use_reentrant=use_reentrant).sum().backward()


@pytest.mark.compiles
def test_backwards_agree_after_one_rank_has_made_a_compiled_call(ranks: Ranks) -> None:
    """A compiled call is not counted, so the ranks have different counts from then on."""
    model = build()
    called = [model, model if ranks.rank == 0 else compile_model(model), model]
    losses = [model(random_batch()).square().sum() for model in called]
    for loss in [*reversed(losses), *losses]:
        loss.backward(retain_graph=True)
