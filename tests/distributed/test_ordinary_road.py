"""Ordinary calls over ranks: beside ranks on a side road, in what they wait, and what they keep of a group."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from roads_taken import side_roads
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from voting import Ranks

import syncbn
from syncbn.diagnosis import observer
from syncbn.distributed import text_exchange
from syncbn.distributed.reduction import Collective, EagerReduction, Guard, guarded_by
from syncbn.functional import sync_batch_norm
from syncbn.kernels import available

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs nobody reads a total")
C = 3
SENT = [2 * C + 1, 2 * C] if torch.cuda.is_available() else [2 * C + 4] * 2  # forward and backward


def own_input(ranks: Ranks) -> Tensor:
    generator = torch.Generator().manual_seed(ranks.rank)
    return torch.randn(2 + ranks.rank, C, 5, generator=generator).to(ranks.device)


def step(call: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, the gradients, and the buffers after a training step."""
    x = x.clone().requires_grad_()
    y = call(x)
    layer.zero_grad()
    y.sin().sum().backward()
    found = {"y": y.detach(), "x": x.grad} | {name: one.grad for name, one in layer.named_parameters()}
    return found | {name: one.clone() for name, one in layer.named_buffers()}


@pytest.fixture
def sent() -> Iterator[list[int]]:
    """How many numbers this rank has sent in each all_reduce of a layer."""
    numbers: list[int] = []

    class Counter(Guard):
        def before_all_reduce(self, called: EagerReduction, payload: Tensor, pass_name: str) -> None:
            numbers.append(payload.numel())

    with guarded_by(Counter()):
        yield numbers


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Collective | None]:
    """In what this rank was whenever it asked the others what they do."""
    seen: list[Collective | None] = []
    exchange = text_exchange.all_gather_text

    def note(text: str, group: dist.ProcessGroup) -> list[str]:
        seen.append(observer.this_rank().waiting)
        return exchange(text, group)

    monkeypatch.setattr(text_exchange, "all_gather_text", note)
    return seen


class Mode(TorchDispatchMode):
    """Watches, and changes nothing."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operator(*args, **(kwargs or {}))


def profiler() -> AbstractContextManager[object]:
    return torch.profiler.profile(acc_events=True)


# Beside a rank on a side road.


@pytest.mark.parametrize("watch", [profiler, Mode])
def test_one_rank_is_watched(
    ranks: Ranks, sent: list[int], waits: list[object], watch: Callable[[], AbstractContextManager[object]]
) -> None:
    """It takes the side roads, and must send as much as the others, in the same order; else gloo aborts."""
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), own_input(ranks)
    other = copy.deepcopy(layer)
    expected = step(layer, layer, x)
    sent.clear()
    watched = ranks.rank == 0
    with side_roads() as taken, watch() if watched else nullcontext():
        actual = step(other, other, x)
    assert taken == ["forward"] * watched  # whose Function has a backward of its own
    assert sent == SENT
    assert not waits  # the signatures are the same
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("watch", [profiler, Mode])
def test_one_rank_is_watched_from_backward_on(
    ranks: Ranks, sent: list[int], waits: list[object], watch: Callable[[], AbstractContextManager[object]]
) -> None:
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), own_input(ranks).requires_grad_()
    y = layer(x)
    (expected,) = torch.autograd.grad(y.sin().sum(), x, retain_graph=True)
    watched = ranks.rank == 0
    with side_roads() as taken, watch() if watched else nullcontext():
        (actual,) = torch.autograd.grad(y.sin().sum(), x)
    assert taken == ["backward"] * watched
    assert sent == [*SENT, SENT[1]]
    assert not waits
    torch.testing.assert_close(actual, expected)


def test_an_input_that_one_rank_has_frozen(ranks: Ranks, sent: list[int]) -> None:
    """It has no gradient to compute from the sums, but the others have."""
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), own_input(ranks)
    frozen = ranks.rank == 0
    with side_roads() as taken:
        layer(x.requires_grad_(not frozen)).sin().sum().backward()
    assert not taken
    assert sent == SENT
    assert (x.grad is None) == frozen


@on_cpu
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"eps": 0.0}, "eps must be positive"),
        ({"eps": True}, "eps must be a number, got True"),
        ({"eps": [1.0]}, r"eps must be a number, got \[1.0\]"),
        ({"channel_dim": 1.0}, "channel_dim must be an int, got 1.0"),
        ({"momentum": "0.1"}, "momentum must be a number, got '0.1'"),
        ({"weight": torch.ones(C + 1)}, "weight should contain 3 elements not 4"),
        ({"bias": torch.ones(C).int()}, "expected bias to be a float tensor"),
        ({"running_var": None}, "running_mean and running_var must either both be None"),
        ({"z": torch.ones(1)}, "expected z of the input's shape"),
    ],
    ids=lambda one: "".join(one) if isinstance(one, dict) else None,
)
def test_a_bad_argument_after_a_plan_was_made(
    ranks: Ranks, sent: list[int], bad: dict[str, object], message: str
) -> None:
    """The faulty rank joins the all_reduce of the others, who are on the ordinary road; all raise, nothing moves."""
    x = own_input(ranks)
    good = {"running_mean": torch.zeros(C), "running_var": torch.ones(C), "weight": torch.ones(C), "eps": 1.0}
    sync_batch_norm(x, **good, training=True)
    before = copy.deepcopy(good)
    faulty = ranks.rank == 0
    with side_roads() as taken, pytest.raises((TypeError, ValueError), match=f"rank 0: .*{message}"):
        sync_batch_norm(x, **(good | bad if faulty else good), training=True)
    assert taken == ["forward"] * faulty
    assert sent == [SENT[0]] * 2
    for name in ("running_mean", "running_var"):
        assert torch.equal(good[name], before[name])
    sync_batch_norm(x, **good, training=True)  # the group goes on
    dist.barrier()


@on_cpu
@pytest.mark.skipif("cpu: C++" not in available(), reason="torch's operations may crash on such tensors")
def test_an_input_without_memory_on_one_rank(ranks: Ranks, sent: list[int]) -> None:
    """It is found by a kernel, when the others wait already."""
    layer, x = syncbn.SyncBatchNorm1d(C), own_input(ranks)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    if ranks.rank == 0:
        x.untyped_storage().resize_(0)
    with side_roads() as taken, pytest.raises(ValueError, match="rank 0: a tensor has no memory"):
        layer(x)
    assert not taken
    assert sent == [SENT[0]] * 2
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)
    layer(own_input(ranks))  # the group goes on
    dist.barrier()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_recompute_on_the_ordinary_road(
    ranks: Ranks, sent: list[int], use_reentrant: bool, momentum: float | None
) -> None:
    """It communicates again, and moves nothing. (test_checkpointing.py counts by a mode, which is a side road.)"""
    layer, x = syncbn.SyncBatchNorm1d(C, momentum=momentum, device=ranks.device), own_input(ranks)
    other = copy.deepcopy(layer)
    for _ in range(2):
        expected = step(layer, layer, x)
        sent.clear()
        with side_roads() as taken:
            actual = step(lambda x: checkpoint(other, x, use_reentrant=use_reentrant), other, x)
        assert not taken
        assert sent == [SENT[0], *SENT]
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# In what a rank waits while it finds out what is wrong.


def check_waits(waits: list[Collective | None], layer: nn.Module, pass_name: str, call: int) -> None:
    """It was once, in this collective; and it is not any more."""
    assert len(waits) == 1
    assert waits[0] is not None
    assert waits[0] is observer.this_rank().last
    assert (waits[0].site, waits[0].pass_name, waits[0].call) == (layer._call_site, pass_name, call)
    assert observer.this_rank().waiting is None
    dist.barrier()


@on_cpu
def test_ranks_are_compared_in_the_wait_of_their_all_reduce(ranks: Ranks, waits: list[Collective | None]) -> None:
    """The watchdog would else not know in what a rank waits for one that never answers."""
    model = nn.ModuleDict({"a": syncbn.SyncBatchNorm1d(C), "b": syncbn.SyncBatchNorm1d(C)})
    call = type("Both", (nn.Module,), {"forward": lambda self, x: self.model["b"](self.model["a"](x))})()
    call.model = model
    x = own_input(ranks).requires_grad_()
    y = call(x)
    assert not waits
    layer = model["a"] if ranks.rank else model["b"]
    with pytest.raises(RuntimeError, match=r"rank 0: in model\.b forward, call 2\n.*model\.a forward, call 2"):
        layer(x)
    check_waits(waits, layer, "forward", 2)
    waits.clear()
    faulty = ranks.rank == 0
    with pytest.raises(RuntimeError, match=r"rank 0: in model\.a forward, call 2\n.*model\.b backward, call 1"):
        model["a"](x) if faulty else y.sum().backward()
    check_waits(waits, model["a" if faulty else "b"], *(("forward", 2) if faulty else ("backward", 1)))


@on_cpu
def test_faults_are_told_in_the_wait_of_the_all_reduce(ranks: Ranks, waits: list[Collective | None]) -> None:
    layer, x = syncbn.SyncBatchNorm1d(C), own_input(ranks)
    layer(x)
    number = observer.this_rank().last.number
    with side_roads() as taken, pytest.raises(ValueError, match="rank 0: expected 2D or 3D input"):
        layer(x[0, 0] if ranks.rank == 0 else x)
    assert taken == ["forward"] * (ranks.rank == 0)
    check_waits(waits, layer, "forward", 2)
    assert waits[0].number == number + 1  # that of the all_reduce, and no other


# What a layer keeps.


def make_world_anew() -> None:
    """Another default group."""
    import voting  # whose world is there by now

    assert voting.world is not None
    voting.world.leave()
    voting.world.enter()


def test_a_layer_that_was_called_does_not_keep_its_group(ranks: Ranks) -> None:
    """gloo closes its connections, which wakes the other ranks, when the last reference to a group goes."""
    make_world_anew()  # which no other test has used, whose error may keep it
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), own_input(ranks)
    y = layer(x)
    y.sum().backward()
    old = weakref.ref(dist.group.WORLD)
    del y
    make_world_anew()
    gc.collect()
    assert old() is None
    layer(x)
    assert layer._call_site.group() is dist.group.WORLD


def test_a_layer_that_was_called_is_freed(ranks: Ranks) -> None:
    """What its group knows of it must not keep it."""

    def call() -> weakref.ref[nn.Module]:  # a frame that ends: in its first call a layer looks for its name in it
        layer = syncbn.SyncBatchNorm1d(C, device=ranks.device)
        layer(own_input(ranks)).sum().backward()
        return weakref.ref(layer)

    old = call()
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("process_group", ["all", "node", 1])
def test_a_layer_that_was_called_finds_its_new_group(ranks: Ranks, process_group: str | int) -> None:
    """The one before is gone, and that which its spec means now is not made yet."""
    spec = ranks.size if process_group == "all" else process_group
    layer, x = syncbn.SyncBatchNorm1d(C, process_group=spec, momentum=1.0, device=ranks.device), own_input(ranks)
    layer(x)
    expected = layer.running_mean.clone()
    make_world_anew()
    gc.collect()
    layer.reset_running_stats()
    with side_roads() as taken:
        layer(x)
    assert not taken
    assert torch.equal(layer.running_mean, expected)


def test_a_layer_may_have_another_group_in_each_call(ranks: Ranks) -> None:
    """What it keeps of one must not be taken for the next. `syncbn.summary` tells of the last."""
    layer, x = syncbn.SyncBatchNorm1d(C, momentum=1.0, device=ranks.device), own_input(ranks)
    alone = nn.BatchNorm1d(C, momentum=1.0, device=ranks.device)
    alone(x)
    means = []
    for spec in (None, dist.new_group(), 1, ranks.size, 1, None):
        layer.process_group = spec
        with side_roads() as taken:
            layer(x)
        assert not taken
        means.append(layer.running_mean.clone())
        expected = "not synchronised" if spec == 1 else f"synchronised over {ranks.size} ranks"
        assert syncbn.summary(layer)[0].last_step == expected
    for mean in (means[2], means[4]):
        torch.testing.assert_close(mean, alone.running_mean)
    for mean in (means[1], means[3], means[5]):
        assert torch.equal(mean, means[0])
    assert not torch.equal(means[0], means[2])


def test_copies_of_a_layer_that_was_called_are_layers_of_their_own(ranks: Ranks) -> None:
    """With what the first keeps of itself and its group they could not be pickled, and would count in its name."""
    layer, x = syncbn.SyncBatchNorm1d(C, device=ranks.device), own_input(ranks)
    layer(x)
    copies = [copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    replica = layer._replicate_for_data_parallel()
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        setattr(replica, name, tensor.detach().clone())  # as torch.nn.parallel.replicate does, which needs GPUs
    for other in copies:
        assert not {"_call_site", "_synchronised_ranks"} & vars(other).keys()
        other(x)
        assert other._call_site is not layer._call_site
        assert other._call_site.caller() is other
        assert other._call_site.num_calls == 1
    replica._train_over_ranks = layer._train_over_ranks  # as if it were called here: it has the site of the layer
    replica(x)
    assert replica._call_site.caller() is replica
    layer(x)
    assert layer._call_site.num_calls == 2
