"""Tests that instance numbers distinguish layers of one name, and that ranks in the same layers raise no false alarm.

Models of one class have layers of one name. syncbn/ranks/sites.py explains instance numbers.
"""

import collections
import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import voting
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from voting import Ranks

import syncbn
from syncbn.ranks.report import RanksDifferError
from syncbn.texts import format_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs a later call raises, see test_status.py")
DIFFER = "the ranks are in different layers or calls"
on_either_rank = pytest.mark.parametrize("changed_rank", [0, 1])


@pytest.fixture(autouse=True)
def new_group(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Create a new default group, in which instance numbers begin at 1. After the test, check that syncbn has logged
    nothing."""
    voting.world.replace_group()
    yield
    assert not [record for record in caplog.get_records("call") if record.name == "syncbn"]


def build() -> nn.Module:
    """Return a model whose batch norm has the name "layer '1' in Sequential"."""
    return syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def build_without_names() -> nn.Module:
    """Return a model that was not converted. The batch norm has no name, only a class and a number of channels."""
    return nn.Sequential(nn.Linear(3, 3), syncbn.SyncBatchNorm1d(3))


def random_batch() -> Tensor:
    return torch.randn(4, 3, requires_grad=True)


def train(*models: nn.Module) -> None:
    """Train the models one after another, each for one step."""
    for model in models:
        model(random_batch()).square().sum().backward()


# Ranks that differ.

# The models that rank 1 trains, then the models that the other ranks train, with a letter for each step. Only the last
# step must raise an error.
ORDERS = {
    "rank 1 swaps two steps": ("BAA", "ABA"),
    "rank 1 leaves out the first step of B": ("AAB", "ABA"),
    "rank 1 trains the new model B too early": ("AAABA", "AAAAB"),
    "rank 1 trains the new model B instead of A": ("AABA", "AAAA"),
    "rank 1 reloads A as C, and then leaves out B": ("ABABCBCBC", "ABABABABB"),
}


@pytest.mark.parametrize("build_model", [build, build_without_names])
@pytest.mark.parametrize("name", ORDERS)
def test_ranks_that_train_models_of_one_class_in_different_orders_raise(
    ranks: Ranks, name: str, build_model: Callable[[], nn.Module]
) -> None:
    """If a rank trains a model for the first time, the ranks cannot know whether the model is another model or the same
    model, reloaded. The ranks agree on a new number, and raise when some rank uses the old number again."""
    models = collections.defaultdict(build_model)  # builds a model when its letter is first used
    order_of_rank_1, order_of_other_ranks = ORDERS[name]
    *letters, last = order_of_rank_1 if ranks.rank == 1 else order_of_other_ranks
    train(*(models[letter] for letter in letters))
    with pytest.raises(RanksDifferError, match=DIFFER) as error:
        models[last](random_batch())
    assert str(error.value).count("; number ") == 2  # a line for rank 1, and a line for the other ranks
    assert "Several models of one class" in str(error.value)


def test_the_number_of_a_deleted_model_is_not_reused(ranks: Ranks) -> None:
    """Otherwise rank 1 would give its third model the number of the second model, and the ranks would mix the
    statistics of the two models without an error."""
    first, second = build(), build()
    train(first, second)
    if ranks.rank == 1:
        del first
        gc.collect()
        train(build())
    else:
        train(second)  # All ranks give the layer of this step a new number, and retire the number of the second model.
    with pytest.raises(RanksDifferError, match=DIFFER):
        second(random_batch())


def test_an_error_in_a_subgroup_has_the_ranks_of_the_default_group(ranks: Ranks) -> None:
    if ranks.size < 3:
        pytest.skip("needs a group of two ranks without rank 0")
    group = dist.new_group(range(1, ranks.size))
    if ranks.rank > 0:
        first, second = (syncbn.convert_syncbn_model(build(), group) for _ in range(2))
        train(first, second)
        lines = rf"rank 1: .*; number 2 .*\n{format_ranks([*range(2, ranks.size)])}: .*; number 1 "
        with pytest.raises(RanksDifferError, match=lines):
            (second if ranks.rank == 1 else first)(random_batch())


# Ranks in the same layers, although one rank has replaced a model.


def revert_and_convert(model: nn.Module) -> nn.Module:
    return syncbn.convert_syncbn_model(syncbn.revert_syncbn_model(model))


@on_either_rank
@pytest.mark.parametrize("replace", [copy.deepcopy, revert_and_convert])
def test_a_rank_may_replace_a_model(ranks: Ranks, replace: Callable[[nn.Module], nn.Module], changed_rank: int) -> None:
    """For example, the rank loads the model from a file."""
    first, second = build(), build()
    train(first, second)
    for _ in range(2):
        if ranks.rank == changed_rank:
            first = replace(first)
        train(first, second, first, second)


@on_either_rank
def test_ranks_may_replace_models_in_turn(ranks: Ranks, changed_rank: int) -> None:
    """One rank replaces its models twice, then each rank replaces its models once. Each of three folds of a
    cross-validation builds new models."""
    for _ in range(3):
        models = build(), build()
        for rank in (None, changed_rank, changed_rank, None, *range(ranks.size)):  # the rank that replaces its models
            if rank == ranks.rank:
                models = copy.deepcopy(models)
            train(*models)


@on_either_rank
@pytest.mark.parametrize("order", ["in order", "in reverse", "in reverse, with a second derivative"])
def test_a_rank_may_replace_a_model_between_a_forward_and_its_backward(
    ranks: Ranks, order: str, changed_rank: int
) -> None:
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
    """The part ran on its own before it became a part of a larger model. On rank 1 another part ran, because this rank
    has loaded the larger model from a file."""
    part = build()
    y = part(random_batch())
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), build() if ranks.rank == 1 else part))
    train(model)
    assert model[1][1]._syncbn_site.layer == "layer '1.1' in Sequential"
    y.sum().backward()  # On all ranks the forward had the name "layer '1' in Sequential", and so has this backward.


# Ranks in the same layers, although one rank also makes other calls.


@on_either_rank
def test_a_rank_may_wrap_a_model_and_evaluate_other_models(ranks: Ranks, changed_rank: int) -> None:
    """A wrapper, such as that of a profiler, does not change the names. An evaluation gives a model no number."""
    first, second = build(), build()
    called = first
    if ranks.rank == changed_rank:
        build().eval()(random_batch())
        called = nn.Sequential(first)
    train(called, second)
    if ranks.rank == changed_rank:
        copy.deepcopy(first).eval()(random_batch())
    train(called, second)


@on_either_rank
@pytest.mark.parametrize("counted", ["A", "AA", "AB"])
def test_a_rank_may_count_the_flops_of_its_models_at_first(ranks: Ranks, counted: str, changed_rank: int) -> None:
    """The calls with fake tensors give the models numbers on which the ranks have not agreed."""
    models = {"A": build(), "B": build()}
    if ranks.rank == changed_rank:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for letter in counted:
                models[letter](mode.from_tensor(random_batch()))
    train(models["B"], models["A"])
    train(models["B"], models["A"])


def test_a_layer_may_be_called_several_times_in_a_step() -> None:
    """Two models share layers, checkpointing recomputes layers, and a loss is differentiated twice."""
    first, second = build(), build()
    train(first, second, nn.Sequential(first[1], nn.Linear(3, 3), second[1], first[1]))
    for use_reentrant in (True, False):
        y = checkpoint(first, random_batch(), use_reentrant=use_reentrant)
        checkpoint(second, y, use_reentrant=use_reentrant).sum().backward()
    losses = [first(random_batch()).square().sum() for _ in range(2)]
    for loss in losses * 2:
        loss.backward(retain_graph=True)


@pytest.mark.compiles
@on_either_rank
def test_a_rank_may_compile_its_models_at_first(ranks: Ranks, changed_rank: int) -> None:
    """A compiled call gives a model no number and sends no signature. The changed rank then gives its models their
    numbers in the first eager calls, in another order than the other rank."""
    first, second = build(), build()
    called = [first, second]
    if ranks.rank == changed_rank:
        called = [torch.compile(model, backend="eager", fullgraph=True) for model in called]
    train(*called)
    train(second, first, build(), second, first)
    train(*called)


@pytest.mark.compiles
def test_backwards_agree_after_one_rank_has_made_a_compiled_call(ranks: Ranks) -> None:
    """A compiled call is not counted, so the ranks have different counts from then on."""
    model = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    called = [model, model if ranks.rank == 0 else compiled, model]
    losses = [model(random_batch()).square().sum() for model in called]
    for loss in [*reversed(losses), *losses]:
        loss.backward(retain_graph=True)
    first, second = (model(random_batch()).square().sum() for _ in range(2))
    with pytest.raises(RanksDifferError, match="differentiate different calls"):
        (first if ranks.rank == 0 else second).backward()
