"""Catches layers of one name that are taken for one another, and programs that are refused though the ranks agree."""

import collections
import copy
import functools
import gc
import pickle
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import voting
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from voting import Ranks

import syncbn
from syncbn import payload
from syncbn.ranks.collective import all_reduce
from syncbn.ranks.positions import ThisRank
from syncbn.ranks.report import RanksDifferError
from syncbn.torch_internals import all_to_all_size

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="signatures are for CPUs")

DIFFER = "the ranks are in different layers or calls"


@pytest.fixture(autouse=True)
def new_group(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Number the layers from 1 in each test. No program may log a warning."""
    voting.world.make_anew()
    yield
    assert not [record for record in caplog.get_records("call") if record.name == "syncbn"]


def build() -> nn.Module:
    """Return a model with the root class Sequential and a layer with the name 1."""
    return syncbn.convert_syncbn_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def x() -> Tensor:
    return torch.randn(4, 3, requires_grad=True)


def train(*models: Callable[[Tensor], Tensor], num_steps: int = 2) -> None:
    """All ranks call the models in this order."""
    for model in models * num_steps:
        model(x()).square().sum().backward()


# Mixtures.


def test_a_swap_that_ends_is_found(ranks: Ranks) -> None:
    """The ranks cannot detect it in the first step, but they do in the second."""
    models = [build(), build()]
    for one in models[::-1] if ranks.rank else models:
        one(x())
    with pytest.raises(RanksDifferError, match=DIFFER):
        [one(x()) for one in models]


def test_two_models_of_one_class_may_not_share_a_number(ranks: Ranks) -> None:
    """Rank 1 runs compiled graphs at first, so rank 0 alone has numbers for the three models."""
    models = first, second, third = [build() for _ in range(3)]
    num_ranks = all_to_all_size(dist.group.WORLD)
    for model in models:
        if ranks.rank == 0:
            model(x())
        else:  # what a compiled graph sends, of which no layer is known
            all_reduce(torch.zeros(payload.num_elements(3), dtype=torch.float64), dist.group.WORLD, num_ranks)
    for model in (second, first):
        model(x())
    with pytest.raises(RanksDifferError, match=DIFFER):
        (first if ranks.rank else third)(x())


def test_a_reload_does_not_hide_another_layer(ranks: Ranks) -> None:
    """One rank reloads a model; later the ranks call different layers."""
    first, second = build(), build()
    train(first, second)
    if ranks.rank:
        first = copy.deepcopy(first)
    train(first, second)
    with pytest.raises(RanksDifferError, match=DIFFER):
        (first if ranks.rank else second)(x())


def test_a_deleted_model_gives_its_number_to_no_other(ranks: Ranks) -> None:
    """One rank deletes its first model, and both build a third. The number of the third is a new one."""
    models = [build(), build()]
    train(*models)
    if ranks.rank:
        del models[0]
    gc.collect()
    third = build()
    train(models[-1], third)
    with pytest.raises(RanksDifferError, match=DIFFER):
        (third if ranks.rank else models[0])(x())


def build_without_name() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), syncbn.SyncBatchNorm1d(3))


# The models that are trained, one letter for each step, on rank 1 and on the other ranks. Each ends at the call that
# must raise.
OTHER_ORDERS = {
    "leaves out the first step of B": ("AAB", "ABA"),
    "trains a new model B before A": ("AAABA", "AAAAB"),
    "trains a new model C between A and B": ("ABABACB", "ABABABC"),
    "trains a new model instead of A once": ("ABVBA", "ABABA"),
    "trains a new model once more": ("AAVA", "AAAA"),
}


@pytest.mark.parametrize("build_model", [build, build_without_name])
@pytest.mark.parametrize("name", OTHER_ORDERS)
def test_a_new_number_does_not_hide_another_order(
    ranks: Ranks, name: str, build_model: Callable[[], nn.Module]
) -> None:
    """The first mixed call looks as if a rank had reloaded its model. The ranks agree on a new number, and the number
    that they give up may not occur again."""
    models, (own, others) = collections.defaultdict(build_model), OTHER_ORDERS[name]
    *letters, last = own if ranks.rank == 1 else others
    train(*(models[letter] for letter in letters), num_steps=1)
    with pytest.raises(RanksDifferError, match=DIFFER):
        models[last](x())


def test_a_new_number_in_a_subgroup(ranks: Ranks) -> None:
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


# Programs that go on. `at` is the rank that differs.


REPLACED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "converted again": lambda model: syncbn.convert_syncbn_model(syncbn.revert_syncbn_model(model)),
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", [*REPLACED, "rebuilt"])
def test_a_model_that_one_rank_replaces(ranks: Ranks, name: str, at: int) -> None:
    """It may be loaded from a file. The ranks agree on a new number in its first call."""
    first, second = build(), build()
    train(first, second)
    if ranks.rank == at:
        first = build() if name == "rebuilt" else REPLACED[name](first)
    train(first, second)


@pytest.mark.parametrize("at", [0, 1])
def test_models_that_ranks_replace_again_and_again(ranks: Ranks, at: int) -> None:
    """All ranks build new models in each fold. One rank reloads them twice, then the ranks reload in turn."""
    for _ in range(3):
        models = [build(), build()]
        for step in range(4 + ranks.size):
            if (ranks.rank == at and step in (1, 2)) or step == 4 + ranks.rank:
                models = [*map(copy.deepcopy, models)]
            train(*models, num_steps=1)


@pytest.mark.parametrize("at", [0, 1])
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
    for loss in losses if "in order" in backward else losses[::-1]:
        loss.backward(retain_graph=True)
    train(model)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("counted", ["A", "AA", "AB"])
def test_one_rank_counts_flops_first(ranks: Ranks, counted: str, at: int) -> None:
    """Its calls under FakeTensorMode give its models numbers on which the ranks have not agreed."""
    models = {"A": build(), "B": build()}
    if ranks.rank == at:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for name in counted:
                models[name](mode.from_tensor(torch.randn(4, 3)))
    train(models["B"], models["A"])


@pytest.mark.parametrize("at", [0, 1])
def test_a_bad_argument_in_the_first_call_of_a_replaced_model(ranks: Ranks, at: int) -> None:
    """The bad argument is raised, and the ranks have agreed on a number."""
    model = build()
    train(model)
    if ranks.rank == at:
        model = copy.deepcopy(model)
    with pytest.raises(ValueError, match="expected 3 channels"):
        model[1](x()[:, : 2 + ranks.rank])
    train(model)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("alone", ["evaluates", "trains"])
def test_a_second_default_group(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, alone: str, at: int) -> None:
    """One rank alone has called layers in the first group. No rank asks for such calls in the second."""
    if ranks.rank == at:
        models = [build(), build()]
        train(*(syncbn.convert_syncbn_model(model, 1).train(alone == "trains") for model in models))
    voting.world.make_anew()
    monkeypatch.setattr(ThisRank, "read", Mock(side_effect=AssertionError))
    train(build(), build())


@pytest.mark.parametrize("at", [0, 1])
def test_one_rank_wraps_a_block_and_evaluates_other_models(ranks: Ranks, at: int) -> None:
    """It may wrap a block to time it: names are those of the conversion. The other models are of the same class."""
    first, second = build(), build()
    called = first
    if ranks.rank == at:
        build().eval()(x())
        called = nn.Sequential(first)
    train(called, second)
    if ranks.rank == at:
        copy.deepcopy(first).eval()(x())
    train(called, second)


def test_layers_that_are_called_several_times() -> None:
    """Layers are shared by two models, called again by checkpointing, and differentiated twice."""
    first, second = build(), build()
    train(first, second, nn.Sequential(first[1], nn.Linear(3, 3), second[1], first[1]))
    for use_reentrant in (True, False):
        recompute = functools.partial(checkpoint, use_reentrant=use_reentrant)
        train(lambda x, recompute=recompute: recompute(second, recompute(first, x)))
    losses = [first(x()).square().sum() for _ in range(2)]
    for retain_graph in (True, False):
        for loss in losses:
            loss.backward(retain_graph=retain_graph)


@pytest.mark.compiles
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_rank_compiles_the_first_call(ranks: Ranks, order: tuple[int, int], at: int) -> None:
    models = build(), build()
    train(torch.compile(models[0], backend="aot_eager") if ranks.rank == at else models[0], num_steps=1)
    train(*(models[index] for index in order))


@pytest.mark.compiles
@pytest.mark.parametrize("at", [0, 1])
def test_one_rank_is_compiled_at_first(ranks: Ranks, at: int) -> None:
    """A compiled rank sends zeros for the signature. Its first eager calls of two models come after the other rank's,
    and in another order."""
    first, second = build(), build()
    compiled = [torch.compile(model, backend="aot_eager", fullgraph=True) for model in (first, second)]
    train(*compiled if ranks.rank == at else (first, second))
    train(second, first)
    train(build(), second, first)
    train(*compiled[::-1] if ranks.rank == at else (second, first))
    batch = torch.randn(4, 3)
    expected = first(batch)
    torch.testing.assert_close(compiled[0](batch) if ranks.rank == at else first(batch), expected)


@pytest.mark.compiles
@pytest.mark.parametrize("num_compiled", [1, 2])
def test_backwards_after_compiled_calls_of_one_rank(ranks: Ranks, num_compiled: int) -> None:
    """These calls are not counted, so the counts of the ranks differ for good. That is no fault, and hides none."""
    model = build()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    losses = [model(x()).square().sum()]
    for _ in range(num_compiled):
        losses.append((compiled if ranks.rank else model)(x()).square().sum())
    losses.append(model(x()).square().sum())
    for loss in losses[::-1] + losses:
        loss.backward(retain_graph=True)
    losses = [model(x()).square().sum() for _ in range(2)]
    with pytest.raises(RanksDifferError, match="differentiate different calls"):
        losses[ranks.rank].backward()


@pytest.mark.parametrize("way", ["converted again", "reverted and converted"])
def test_a_conversion_renames_layers_that_have_run(ranks: Ranks, way: str) -> None:
    """A body trains, becomes a part of another model, and one rank loads that model instead."""
    body, x = build(), torch.randn(4, 3)
    first = body(x)
    if way == "reverted and converted":
        syncbn.revert_syncbn_model(body)
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), body))
    if ranks.rank == 1:
        model = syncbn.convert_syncbn_model(nn.Sequential(nn.Identity(), build()))
    for _ in range(2):
        model(x).sum().backward()
    assert model[1][1]._syncbn_site.layer == "layer '1.1' in Sequential"
    first.sum().backward()  # signed by the name under which its forward ran


def test_a_conversion_that_changes_no_name_changes_no_number(ranks: Ranks) -> None:
    models = build(), build()
    for _ in range(2):
        for model in models:
            syncbn.convert_syncbn_model(model)(torch.randn(4, 3)).sum().backward()
    assert [model[1]._syncbn_site.instance_number for model in models] == [1, 2]
    assert [model[1]._syncbn_site.num_calls for model in models] == [2, 2]
