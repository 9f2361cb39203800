"""Tests that layers with one name are distinguished, and that programs in which the ranks agree are not refused."""

import collections
import copy
import functools
import gc
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import voting
from mixtures import HookedStore
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from voting import Ranks

import syncbn
from syncbn import payload
from syncbn.ranks import watchdog
from syncbn.ranks.collective import all_reduce
from syncbn.ranks.report import RanksDifferError
from syncbn.torch_internals import all_to_all_size

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs a later call raises, see test_status.py")
DIFFER = "the ranks are in different layers or calls"
AT_EITHER_RANK = pytest.mark.parametrize("at", [0, 1])  # the rank that differs


@pytest.fixture(autouse=True)
def new_group(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Number the layers from 1 in each test. No program may log a warning."""
    voting.world.replace_group()
    yield
    assert not [record for record in caplog.get_records("call") if record.name == "syncbn"]


def build() -> nn.Module:
    """Return a model with the root class Sequential and a layer with the name 1."""
    return syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def build_without_name() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), syncbn.SyncBatchNorm1d(3))


def x() -> Tensor:
    return torch.randn(4, 3, requires_grad=True)


def loss(model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(x()).square().sum()


def train(*models: Callable[[Tensor], Tensor], num_steps: int = 2) -> None:
    """All ranks call the models in this order."""
    for model in models * num_steps:
        loss(model).backward()


# Ranks that differ.


# The models that are trained, one letter for each step, on rank 1 and on the other ranks. The last call must raise.
OTHER_ORDERS = {
    "trains two models in another order once": ("BAA", "ABA"),
    "leaves out the first step of B": ("AAB", "ABA"),
    "trains a new model B before A": ("AAABA", "AAAAB"),
    "trains a new model C between A and B": ("ABABACB", "ABABABC"),
    "trains a new model instead of A once": ("ABVBA", "ABABA"),
    "trains a new model once more": ("AAVA", "AAAA"),
    "reloads A as V, and then leaves out B": ("ABABVBVBV", "ABABABABB"),
}


@pytest.mark.parametrize("build_model", [build, build_without_name])
@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_another_order_of_models_of_one_class_raises(
    ranks: Ranks, name: str, build_model: Callable[[], nn.Module]
) -> None:
    """At first the ranks may take the other model for a reloaded model, and agree on a new number. Then the old number
    is retired."""
    models, orders = collections.defaultdict(build_model), OTHER_ORDERS[name]
    *letters, last = orders[ranks.rank != 1]
    train(*(models[letter] for letter in letters), num_steps=1)
    with pytest.raises(RanksDifferError, match=DIFFER) as error:
        models[last](x())
    assert str(error.value).count("; number ") == 2  # one line for rank 1, and one for the others
    assert "Several models of one class" in str(error.value)


def test_two_models_of_one_class_never_share_a_number(ranks: Ranks) -> None:
    """Rank 1 runs compiled graphs at first, so rank 0 alone has numbers for the three models."""
    models = first, second, third = [build() for _ in range(3)]
    num_ranks = all_to_all_size(dist.group.WORLD)
    for model in models:
        if ranks.rank == 0:
            model(x())
        else:  # A compiled graph sends no signature.
            all_reduce(torch.zeros(payload.num_elements(3), dtype=torch.float64), dist.group.WORLD, num_ranks)
    for model in (second, first):
        model(x())
    with pytest.raises(RanksDifferError, match=DIFFER):
        (first if ranks.rank else third)(x())


def test_the_number_of_a_deleted_model_is_not_reused(ranks: Ranks) -> None:
    """One rank deletes its first model, and all ranks build a third model."""
    models = [build(), build()]
    train(*models)
    if ranks.rank:
        del models[0]
    gc.collect()
    third = build()
    train(models[-1], third)
    with pytest.raises(RanksDifferError, match=DIFFER):
        (third if ranks.rank else models[0])(x())


def test_ranks_of_a_subgroup_agree_on_a_new_number(ranks: Ranks) -> None:
    """All ranks but rank 0 mix two models, while rank 0 trains models of the same class in a group of its own."""
    if ranks.size < 3:
        pytest.skip("a mixture needs two ranks besides rank 0")
    group = [dist.new_group([0]), dist.new_group(range(1, ranks.size))][ranks.rank > 0]
    first, second = (syncbn.convert_syncbn_model(build(), group) for _ in range(2))
    train(first, num_steps=3)
    train(second if ranks.rank == 1 else first, num_steps=1)
    if ranks.rank:
        with pytest.raises(RanksDifferError, match=DIFFER):
            (first if ranks.rank == 1 else second)(x())


# Programs in which one rank replaces a model.


REPLACED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "converted again": lambda model: syncbn.convert_syncbn_model(syncbn.revert_syncbn_model(model)),
    "rebuilt": lambda model: build(),
}


@AT_EITHER_RANK
@pytest.mark.parametrize("name", REPLACED)
def test_a_model_that_one_rank_replaces(ranks: Ranks, name: str, at: int) -> None:
    """The model may be loaded from a file. The ranks agree on a new number in the next call, also if it raises."""
    first, second = build(), build()
    train(first, second)
    if ranks.rank == at:
        first = REPLACED[name](first)
    if name == "copied":
        with pytest.raises(ValueError, match="expected 3 channels"):
            first[1](x()[:, : 2 + ranks.rank])
    train(first, second)


@AT_EITHER_RANK
def test_models_that_ranks_replace_again_and_again(ranks: Ranks, at: int) -> None:
    """All ranks build new models in each fold. One rank reloads them twice, then the ranks reload in turn."""
    for _ in range(3):
        models = [build(), build()]
        for step in range(4 + ranks.size):
            if (ranks.rank == at and step in (1, 2)) or step == 4 + ranks.rank:
                models = [*map(copy.deepcopy, models)]
            train(*models, num_steps=1)


@AT_EITHER_RANK
@pytest.mark.parametrize("backward", ["in order", "in order, after a new momentum", "in reverse", "twice"])
def test_a_model_that_one_rank_replaces_before_a_backward(ranks: Ranks, backward: str, at: int) -> None:
    """The backward of the old model signs with the old number on all ranks."""
    model, batch = build(), x()
    train(model)
    losses = [model(batch).pow(3).sum()]
    if ranks.rank == at:
        model = copy.deepcopy(model)
    model[1].momentum = 0.5 if "momentum" in backward else 0.1
    losses.append(model(x()).pow(3).sum())
    if backward == "twice":
        (grad,) = torch.autograd.grad(losses[0], batch, create_graph=True)
        losses.append(grad.square().sum())
    for value in losses if "in order" in backward else losses[::-1]:
        value.backward(retain_graph=True)
    train(model)


@pytest.mark.parametrize("way", ["converted again", "reverted and converted"])
def test_a_conversion_renames_layers_that_have_run(ranks: Ranks, way: str) -> None:
    """A body trains, becomes a part of another model, and one rank loads that model instead."""
    body = build()
    first = body(x())
    if way == "reverted and converted":
        syncbn.revert_syncbn_model(body)
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), build() if ranks.rank == 1 else body))
    train(model)
    assert model[1][1]._syncbn_site.layer == "layer '1.1' in Sequential"
    first.sum().backward()  # signed by the name under which its forward ran


def test_a_conversion_that_changes_no_name_changes_no_number(ranks: Ranks) -> None:
    models = build(), build()
    for _ in range(2):
        train(*map(syncbn.convert_syncbn_model, models), num_steps=1)
    assert [model[1]._syncbn_site.instance_number for model in models] == [1, 2]
    assert [model[1]._syncbn_site.num_calls for model in models] == [2, 2]


# Programs in which one rank makes other calls.


@AT_EITHER_RANK
@pytest.mark.parametrize("counted", ["A", "AA", "AB"])
def test_one_rank_counts_flops_first(ranks: Ranks, counted: str, at: int) -> None:
    """The calls under FakeTensorMode give models of this rank numbers on which the ranks have not agreed."""
    models = {"A": build(), "B": build()}
    if ranks.rank == at:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for name in counted:
                models[name](mode.from_tensor(torch.randn(4, 3)))
    train(models["B"], models["A"])


@AT_EITHER_RANK
@pytest.mark.parametrize("training", [False, True])
def test_calls_of_one_rank_in_an_earlier_default_group(ranks: Ranks, training: bool, at: int) -> None:
    """In the next group the ranks need not agree on a new number, so no rank reads the store."""
    if ranks.rank == at:
        train(*(syncbn.convert_syncbn_model(build(), 1).train(training) for _ in range(2)))
    voting.world.replace_group()
    rank, methods = watchdog.this_rank(), list[str]()
    rank.store = HookedStore(rank.store, methods.append)
    train(build(), build())
    assert "check" not in methods


@AT_EITHER_RANK
def test_one_rank_wraps_a_block_and_evaluates_other_models(ranks: Ranks, at: int) -> None:
    """A profiler may wrap a block. Layers keep the names of the conversion. The other models are of the same class."""
    called = first, second = build(), build()
    if ranks.rank == at:
        build().eval()(x())
        called = nn.Sequential(first), second
    train(*called)
    if ranks.rank == at:
        copy.deepcopy(first).eval()(x())
    train(*called)


def test_layers_that_are_called_several_times() -> None:
    """Layers are shared by two models, called again by checkpointing, and differentiated twice."""
    first, second = build(), build()
    train(first, second, nn.Sequential(first[1], nn.Linear(3, 3), second[1], first[1]))
    for use_reentrant in (True, False):
        recompute = functools.partial(checkpoint, use_reentrant=use_reentrant)
        train(lambda x, recompute=recompute: recompute(second, recompute(first, x)))
    losses = [loss(first), loss(first)]
    for value in losses * 2:
        value.backward(retain_graph=True)


@pytest.mark.compiles
@AT_EITHER_RANK
@pytest.mark.parametrize("num_compiled", [1, 2])
def test_one_rank_is_compiled_at_first(ranks: Ranks, num_compiled: int, at: int) -> None:
    """A compiled rank sends zeros for the signature. The first eager calls of its models come after the calls of the
    other rank, and in another order."""
    models = first, second = build(), build()
    compiled = [torch.compile(model, backend="aot_eager", fullgraph=True) for model in models]
    train(*(compiled if ranks.rank == at else models)[:num_compiled])
    train(second, first)
    train(build(), second, first)
    train(*compiled[::-1] if ranks.rank == at else (second, first))
    batch = torch.randn(4, 3)
    expected = first(batch)
    torch.testing.assert_close(compiled[0](batch) if ranks.rank == at else first(batch), expected)


@pytest.mark.compiles
@pytest.mark.parametrize("num_compiled", [1, 2])
def test_backwards_after_compiled_calls_of_one_rank(ranks: Ranks, num_compiled: int) -> None:
    """Compiled calls are not counted, so the counts of the ranks differ from then on. Other errors are still found."""
    model = build()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = [loss(model), *(loss(compiled if ranks.rank else model) for _ in range(num_compiled)), loss(model)]
    for value in losses[::-1] + losses:
        value.backward(retain_graph=True)
    losses = [loss(model), loss(model)]
    with pytest.raises(RanksDifferError, match="differentiate different calls"):
        losses[ranks.rank].backward()
