"""Catches a rank in the fallback that does not fit beside ranks on the fast path, and what keeps a group alive."""

import contextlib
import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import voting
from counting import CountCollectives
from equal_to_torch import with_gaps
from torch import Tensor, nn
from training import frees_first_batch, step
from voting import Ranks

import syncbn
from syncbn.functional import sync_batch_norm
from syncbn.kernels import available
from syncbn.kernels.interface import Layout
from syncbn.ranks import report, watchdog
from syncbn.ranks.reduction import EagerReduction

has_kernels = pytest.mark.skipif("torch operations" in available(), reason="without kernels all take the fallback")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs nobody reads a total")
C = 3
SENT = [2 * C + 4] * 2  # forward and backward
REPORT = 0  # among those: the ranks tell one another what they do, as one of them has a fault


def layer_and_input(ranks: Ranks, **options: object) -> tuple[syncbn.SyncBatchNorm1d, Tensor]:
    generator = torch.Generator().manual_seed(ranks.rank)
    x = torch.randn(2 + ranks.rank, C, 5, generator=generator).to(ranks.device)
    return syncbn.SyncBatchNorm1d(C, device=ranks.device, **options), x


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers this rank has sent in each all_reduce of a layer."""
    numbers: list[int] = []
    exchange = report.gather_calls

    def note_gathering(*arguments: Any) -> list[report.CallReport | None]:
        numbers.append(REPORT)
        return exchange(*arguments)

    monkeypatch.setattr(report, "gather_calls", note_gathering)

    all_reduce = EagerReduction.all_reduce

    def count(reduction: EagerReduction, payload: Tensor, *more: Any) -> Tensor:
        numbers.append(payload.numel())
        return all_reduce(reduction, payload, *more)

    monkeypatch.setattr(EagerReduction, "all_reduce", count)
    return numbers


@has_kernels
@pytest.mark.parametrize("watch", [functools.partial(torch.profiler.profile, acc_events=True), CountCollectives])
@pytest.mark.parametrize("first_pass", ["forward", "backward"])
def test_one_rank_is_watched(
    ranks: Ranks, sent: list[int], watch: Callable[[], contextlib.AbstractContextManager[object]], first_pass: str
) -> None:
    """It takes the fallback, and must send as much as the others, in the same order and signed alike; else gloo
    aborts, or the ranks compare what they do."""
    layer, x = layer_and_input(ranks)
    other = copy.deepcopy(layer)
    expected = step(layer, layer, x)
    sent.clear()
    with contextlib.ExitStack() as contexts:

        def hook(*_: object) -> None:
            contexts.enter_context(watch())

        if ranks.rank == 0:
            (other.register_forward_pre_hook if first_pass == "forward" else other.register_forward_hook)(hook)
        actual = step(other, other, x)
    assert sent == SENT
    torch.testing.assert_close(actual, expected)


def nested() -> Tensor:
    """Without strides: a check of the guards would abort the process."""
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@has_kernels
@on_cpu
@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("eps", lambda: 0.0, "eps must be positive"),
        ("channel_dim", lambda: 1.0, "channel_dim must be an int, got 1.0"),
        ("input", lambda: torch.tensor(1.0), r"expected at least 2D input \(got 0D input of shape \(\)\)"),
        ("input", lambda: torch.ones(2, C, 5, device="meta"), "the input is on meta but running_mean on cpu"),
        ("input", lambda: None, "expected a Tensor as input, got NoneType"),
        ("input", lambda: "text", "expected a Tensor as input, got str"),
        ("input", lambda: [1.0], "expected a Tensor as input, got list"),
        ("weight", lambda: [1.0], "expected weight to be a float tensor, got list"),
        ("weight", lambda: nested(), r"weight is a NestedTensor; pass weight\.values\(\)"),
        ("running_var", lambda: nn.UninitializedBuffer(), "uninitialized"),
        ("z", lambda: nested(), r"z is a NestedTensor; pass z\.values\(\)"),
        ("z", lambda: torch.ones(2, C, 5).to_sparse(), "expected a dense z, got layout torch.sparse_coo; use z"),
        ("mask", lambda: torch.ones(2, C, 5) > 0, r"expected mask of .* got \(2, 3, 5\)"),
        ("mask", lambda: torch.ones(2, device="meta") > 0, "the input is on cpu but mask on meta"),
        # A kernel would find these behind the all_reduce alone, with which the others train.
        ("input", lambda: freed(torch.ones(2, C, 5)), "the storage of a tensor was freed"),
        ("running_mean", lambda: freed(torch.ones(C)), "the storage of a tensor was freed"),
    ],
)
def test_a_bad_argument_after_kernels_were_cached(
    ranks: Ranks, sent: list[int], name: str, bad: Callable[[], object], message: str
) -> None:
    """The faulty rank joins the all_reduce of the others, who are on the fast path; all raise, nothing moves."""
    _, x = layer_and_input(ranks)
    good = {"running_mean": torch.zeros(C), "running_var": torch.ones(C), "weight": torch.ones(C), "eps": 1.0}
    good |= {"input": x, "training": True}
    sync_batch_norm(**good)
    before, faulty = copy.deepcopy(good), ranks.rank == 0
    error = RuntimeError if faulty and message.endswith(("freed", "uninitialized")) else (TypeError, ValueError)
    with pytest.raises(error, match=message):
        sync_batch_norm(**(good | {name: bad()} if faulty else good))
    assert sent == [SENT[0], SENT[0], REPORT]
    torch.testing.assert_close(good, before, rtol=0, atol=0)
    sync_batch_norm(**good)  # the group goes on
    dist.barrier()


@has_kernels
@on_cpu
def test_a_copy_that_does_not_fit_into_memory(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for this rank, and their report has its error. (Here all ranks fail, and none waits.)"""
    layer, x = layer_and_input(ranks)
    for _ in range(2):  # the second takes cached kernels
        layer(with_gaps(x))
    monkeypatch.setattr(Layout, "dense", Mock(side_effect=RuntimeError("memory is exhausted")))
    with pytest.raises(RuntimeError, match="memory is exhausted"):
        layer(with_gaps(x))
    assert watchdog.this_rank().position().error == "has raised RuntimeError: memory is exhausted"
    dist.barrier()


def test_a_layer_that_was_called_is_freed(ranks: Ranks) -> None:
    """What its group knows of it must not keep it."""

    def call() -> weakref.ref[nn.Module]:
        layer, x = layer_and_input(ranks)
        layer(x).sum().backward()
        return weakref.ref(layer)

    old = call()
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("mode", [contextlib.nullcontext, CountCollectives])
@pytest.mark.parametrize("process_group", [None, 1])
def test_the_first_batch_is_freed(
    ranks: Ranks, mode: Callable[[], contextlib.AbstractContextManager[object]], process_group: int | None
) -> None:
    """No first call may look at the local variables of the functions that it is called in: Python 3.11 and 3.12 keep
    these values."""
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.Conv1d(C, C, 1), nn.BatchNorm1d(C)), process_group)
    with mode():
        assert frees_first_batch(model.to(ranks.device), ranks.device)


@pytest.mark.parametrize("process_group", [None, "all", 1])
def test_a_layer_that_was_called_leaves_its_group_for_a_new_one(ranks: Ranks, process_group: str | int | None) -> None:
    """gloo closes its connections, which wakes the other ranks, when the last reference to a group goes; what the spec
    means from then on is not made yet."""
    voting.world.make_anew()  # which no other test has used, whose error may keep it
    spec = ranks.size if process_group == "all" else process_group
    layer, x = layer_and_input(ranks, process_group=spec, momentum=1.0)
    layer(x).sum().backward()
    expected, old = layer.running_mean.clone(), weakref.ref(dist.group.WORLD)
    voting.world.make_anew()
    gc.collect()
    assert old() is None
    layer.reset_running_stats()
    layer(x)
    assert torch.equal(layer.running_mean, expected)


def test_a_layer_may_have_another_group_in_each_call(ranks: Ranks) -> None:
    """What it keeps of one must not be taken for the next. `syncbn.summary` tells of the last."""
    layer, x = layer_and_input(ranks, momentum=1.0)
    layer(x)
    over_all = layer.running_mean.clone()
    for spec in (dist.new_group(), 1, ranks.size, 1, None):
        layer.process_group = spec
        layer(x)
        torch.testing.assert_close(layer.running_mean, x.mean((0, 2)) if spec == 1 else over_all)
        expected = "not synchronised" if spec == 1 else f"synchronised over {ranks.size} ranks"
        assert syncbn.summary(layer)[0].last_step == expected
