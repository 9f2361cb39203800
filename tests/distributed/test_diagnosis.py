"""Catches ranks that differ and are not told, and a wait that is not reported, or with the wrong rank or place.

What is said when a rank fails is in test_faults.py; what GPUs find is in test_status.py.
"""

import contextlib
import copy
import gc
import itertools
import json
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import voting
from jobs import wait_until
from mixtures import MIXTURES, Model, X
from subclasses_of_batchnorm import BatchNormAct2d
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode
from training import unchanged
from voting import Ranks, Reports

import syncbn
from syncbn import bad_argument, payload
from syncbn.functional import batch_norm_backward, sync_batch_norm, sync_batch_stats
from syncbn.kernels import cpu, operators, reference
from syncbn.ranks import calls, collective, positions, report, watchdog
from syncbn.ranks.calls import eager_call
from syncbn.ranks.positions import Position, ThisRank
from syncbn.ranks.report import RanksDifferError
from syncbn.ranks.sites import GroupState, Site, smallest_signature
from syncbn.texts import format_ranks, warn_once

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="signatures are for CPUs")
WRITTEN = r"(; written \S+ s ago)?"


def layer_and_input() -> tuple[syncbn.SyncBatchNorm, Tensor]:
    return syncbn.SyncBatchNorm(3), torch.randn(4, 3)


def other_ranks(ranks: Ranks) -> str:
    """All but rank 0, as reports name them."""
    return format_ranks([*range(1, ranks.size)])


# Signatures.


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_that_mix_what_they_send(ranks: Ranks, name: str) -> None:
    """All ranks raise at once, before their statistics are mixed."""
    *calls, expected = MIXTURES[name]
    model = Model(dist.group.WORLD)
    model(X).sum().backward()
    y, other = model.bn2(X), model.bn2(2 * X)
    with unchanged(model), pytest.raises(RanksDifferError, match=expected.replace("OTHERS", other_ranks(ranks))):
        calls[ranks.rank > 0](model, y, other)
    model.bn1.eps = model.bn2.eps
    assert model(X).isfinite().all()  # the group goes on


def test_a_backward_without_forward_beside_a_layer(ranks: Ranks) -> None:
    """Unsigned sums of dy would move the running statistics of the other rank in silence."""
    layer, x = layer_and_input()
    statistics = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    batch_norm_backward(x, x, *statistics)  # no false alarm
    with pytest.raises(RanksDifferError, match="different layers or calls"):
        layer(x) if ranks.rank else batch_norm_backward(x, x, *statistics)
    assert not layer.running_mean.any()


def differentiate(order: list[int], create_graph: bool, shift: float = 0.0) -> None:
    """Call the function twice, and differentiate the calls in this order."""
    inputs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    outputs = [sync_batch_norm(x + shift, None, None, training=True).square().sum() for x in inputs]
    for index in order:
        torch.autograd.grad(outputs[index], inputs[index], retain_graph=True, create_graph=create_graph)


@pytest.mark.parametrize("create_graph", [False, True])
def test_backwards_of_different_calls_of_a_function(ranks: Ranks, create_graph: bool) -> None:
    """The ranks would mix the gradients of two calls in silence. In the same order there is no false alarm, even if one
    rank rounds what it saves, has a NaN, or runs each backward twice."""

    differentiate([0, 1, 1, 0], create_graph)
    rounds = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.to(torch.float16), lambda packed: packed)
    with rounds if ranks.rank == 0 else contextlib.nullcontext():
        differentiate([0, 1], create_graph)
    with mock.patch.object(collective, "warn"), mock.patch.object(collective, "warn_once"):
        differentiate([1, 0], create_graph, torch.nan if ranks.rank == 0 else 0.0)
    with pytest.raises(RanksDifferError, match=r"differentiate different calls of a layer.\nrank 0: in .*, call \d+\n"):
        differentiate([0, 1] if ranks.rank else [1, 0], create_graph)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("num_errors", [1, 2, 300])
def test_backwards_after_errors_of_one_rank(ranks: Ranks, num_errors: int, create_graph: bool) -> None:
    """This rank has counted more calls than the others, for good. That is no fault, and hides none."""
    for _ in range(num_errors if ranks.rank == 0 else 0):
        with pytest.raises(ValueError, match="at least 2"):  # on this rank alone: no argument has channels
            sync_batch_norm(torch.tensor(1.0), None, None, training=True)
    for _ in range(3):
        differentiate([0, 1, 1, 0], create_graph)
    with pytest.raises(RanksDifferError, match="differentiate different calls of a layer"):
        differentiate([0, 1] if ranks.rank else [1, 0], create_graph)


@pytest.mark.parametrize("context", [contextlib.nullcontext, DebugMode, torch.autograd.graph.save_on_cpu])
def test_no_total_is_kept(ranks: Ranks, context: Callable[[], Any]) -> None:
    """A loss that the program keeps must not keep the totals of all layers."""
    num_channels = 37  # of no other test
    layer = syncbn.SyncBatchNorm(num_channels)

    def num_totals() -> int:
        shape = (payload.num_elements(num_channels),)
        return sum(type(one) is Tensor and one.shape == shape for one in gc.get_objects())

    with context():
        y = layer(torch.randn(4, num_channels))
        assert num_totals() == 0
        y.sum().backward(retain_graph=True)
        assert num_totals() == 0


@pytest.mark.parametrize(
    "change", [lambda t: t.to(torch.float8_e5m2).to(t.dtype), lambda t: t + 1e-3 * torch.randn_like(t)]
)
def test_hooks_that_change_what_is_saved(ranks: Ranks, change: Callable[[Tensor], Tensor]) -> None:
    """The id of a call is not among the saved tensors: hooks of one rank neither cause a false alarm nor hide that the
    ranks differentiate different calls."""
    layer, x = layer_and_input()
    hooks = torch.autograd.graph.saved_tensors_hooks(change, lambda packed: packed)
    with hooks if ranks.rank == 0 else contextlib.nullcontext():
        for _ in range(20):
            layer(x).square().sum().backward()
            sync_batch_stats(x.requires_grad_())[1].sum().backward()
        losses = [sync_batch_stats(x)[1].sum() for _ in range(2)]
    with pytest.raises(RanksDifferError, match="differentiate different calls"):
        losses[ranks.rank > 0].backward()


def test_second_derivatives_of_other_calls(ranks: Ranks) -> None:
    """The ranks tell the calls apart even if the graph of a first derivative is freed on some ranks."""
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


@pytest.mark.parametrize(
    ("name", "other", "usual"),
    [("momentum", None, "0.1"), ("momentum", torch.tensor(0.1), "0.1"), ("channel_last", True, "False"),
     ("fuse_relu", True, "False"), ("track_running_stats", False, "True"), ("eps", 0.1, "1e-05")], ids=str,
)  # fmt: skip
def test_a_setting_of_one_rank(ranks: Ranks, name: str, other: object, usual: str) -> None:
    """It is detected in the first call and in a later one, also of a subclass. A change on all ranks is no fault."""
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


@pytest.fixture
def change_totals(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor], object]], None]:
    """Call a function on each total that this rank receives."""
    all_reduce = calls.all_reduce

    def set_change(change: Callable[[Tensor], object]) -> None:
        def changed(*arguments: Any) -> Tensor:
            total = all_reduce(*arguments)
            change(total)
            return total

        monkeypatch.setattr(calls, "all_reduce", changed)

    return set_change


@pytest.mark.parametrize("create_graph", [False, True])
def test_totals_that_differ_in_their_bits(ranks: Ranks, change_totals: Callable[..., None], create_graph: bool) -> None:
    """As on a back end that adds in another order on each rank. This is no fault."""
    change_totals(lambda total: payload.sums(total).mul_(1 + (ranks.rank == 0) * 2**-52))
    layer, x = layer_and_input()
    y = layer(x.requires_grad_()).square().sum()
    assert torch.autograd.grad(y, x, create_graph=create_graph)[0].isfinite().all()


def test_sums_of_different_lengths(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, change_totals: Callable[..., None]
) -> None:
    """gloo has then aborted the rank that expected fewer elements. A rank with a bad argument keeps its own error."""
    change_totals(lambda total: total[-1].fill_(torch.nan))
    monkeypatch.setattr(report, "SETTLE_SECONDS", 0.1)
    layer, x = layer_and_input()
    message = "expected 3 channels" if ranks.rank == 0 else r"have sent sums of different sizes\.\nrank"
    with pytest.raises(RuntimeError if ranks.rank else ValueError, match=message):
        layer(x if ranks.rank else x[:, :2])


@pytest.mark.parametrize("which", ["all ranks", "rank 0"])
def test_without_signatures(ranks: Ranks, sign_nothing: Callable[[], None], which: str) -> None:
    """A rank that does not sign is not compared with ranks that do or do not. Its bad argument still raises on all
    ranks."""
    if which == "all ranks" or ranks.rank == 0:
        sign_nothing()
    model = Model(dist.group.WORLD)
    layer = model.bn2 if ranks.rank else model.bn1
    model(X)
    layer(X).square().sum().backward()
    torch.autograd.grad(layer(X).square().sum(), X, create_graph=True)
    message = "rank 0: ValueError: expected 3 channel" if ranks.rank else "^bn1: expected 3 channel"
    with unchanged(model), pytest.raises(ValueError, match=message):
        model(X if ranks.rank else X[:, :2])
    assert model(X).isfinite().all()


@pytest.mark.parametrize("num_ranks", [2, 3, 1000, 2**14])
def test_signatures_are_exact(num_ranks: int) -> None:
    """The test for equal signatures has no rounding errors, even for the largest signature of a backward."""
    s, total, squares = 2 * smallest_signature(num_ranks) - 1 + payload.NUM_IDS - 1, 0.0, 0.0
    for _ in range(num_ranks):
        total, squares = total + s, squares + s * s
    assert num_ranks * squares == total * total
    other = s - 1  # of one rank
    assert num_ranks * (squares - s * s + other * other) != (total - s + other) ** 2


@pytest.mark.parametrize("fault", ["another layer", "a bad argument"])
def test_a_caught_error_does_not_keep_the_group(ranks: Ranks, fault: str) -> None:
    """A cycle of error, traceback and frame would: gloo's threads would then run until the interpreter ends."""
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


def test_a_copied_layer_is_another_one(ranks: Ranks) -> None:
    """nn.DataParallel copies modules with all attributes, including the site."""
    first, x = layer_and_input()
    first(x)
    second = copy.copy(first)
    vars(second).update(vars(first))
    second(x)
    with pytest.raises(RanksDifferError, match=r"rank 0: in SyncBatchNorm .*; number \d+ of SyncBatchNorm\(3\)\n"):
        (second if ranks.rank else first)(x)


def test_an_explanation_leaves_no_keys(ranks: Ranks) -> None:
    layer, x = layer_and_input()
    layer(x)
    dist.barrier()
    before = voting.world.store.num_keys()
    dist.barrier()
    with pytest.raises(ValueError, match="expected 3 channels"):
        layer(x[:, :2] if ranks.rank else x)
    dist.barrier()
    assert voting.world.store.num_keys() == before
    dist.barrier()


def test_an_equal_fault_is_explained_anew(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two totals with the same bits share a key. No rank may read what another rank wrote there for the first fault."""
    layer, x, write = *layer_and_input(), ThisRank.write
    if ranks.rank == 0:
        monkeypatch.setattr(ThisRank, "write", lambda *arguments: (time.sleep(0.3), write(*arguments)))
    for call in (1, 2):
        message = rf"SyncBatchNorm forward, call {call}.\nrank 0: .* got {call} " if ranks.rank else f" got {call} "
        with pytest.raises(ValueError, match=message):
            layer(x if ranks.rank else x[:, :call])


def test_nan_is_explained_once(ranks: Ranks) -> None:
    """Each layer warns once, in one line. NaN of rank 0 in the first layer reaches the second on all ranks."""
    warn_once.cache_clear()
    model, x = Model(), torch.full((4, 3), torch.nan if ranks.rank == 0 else 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x)
    line = f"syncbn: NaN or infinity in the input of {{}} forward, call 1 on rank {ranks.rank}."
    texts = [str(one.message) for one in caught]
    assert "Check the batch of the rank that warned first" in texts.pop(1)
    assert texts == [line.format(layer) for layer in ("bn1", "bn2")[ranks.rank > 0 :]]


# Long waits. Rank 1 is late until rank 0 has reported what is expected.


def named_model(root: str, channels: int) -> nn.Module:
    model = type(root, (nn.Module,), {})()
    model.bn = nn.BatchNorm1d(channels)
    return syncbn.convert_syncbn_model(model)


@pytest.mark.two_ranks
@pytest.mark.parametrize("second_root", ["First", "Second"])
def test_models_of_one_name_with_other_channels(ranks: Ranks, reports: Reports, second_root: str) -> None:
    """Rank 1 is late in the second model. The report must not say that it has called another layer, also if both models
    have one class, as in a sweep over widths."""
    for channels, root in ((3, "First"), (4, second_root)):
        model = named_model(root, channels)
        if channels == 4 and ranks.rank == 1:
            reports.wait_for(rf"rank 1: last seen after bn forward, call 1{WRITTEN}\n")
        model.bn(torch.randn(4, channels))
    assert "channels over" not in reports.text
    dist.barrier()


@pytest.mark.two_ranks
@pytest.mark.parametrize("is_seen", [False, True])
def test_models_of_two_default_groups(
    ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    """Both groups use one store, as under torchrun, and rank 1 is late in the second. The store has the channels of its
    first model, and its position in the first group until its first call in the second."""
    store = dist.PrefixStore(f"two groups {is_seen}", voting.world.store)
    monkeypatch.setattr(positions, "default_store", lambda: store)
    # The ranks count from one number, which is above those of all earlier groups. An earlier group, which a traceback
    # may still hold, must not be newer than the groups of this test.
    start = torch.tensor(next(positions._default_groups))
    dist.all_reduce(start, dist.ReduceOp.MAX)
    positions._default_groups = itertools.count(int(start))
    left = r"after bn forward, call 1; has left this or an earlier default group"
    seen, cause = ("has not been seen", report.NOT_CONVERTED) if is_seen else (left, report.LATE)
    for channels in (3, 4):
        voting.world.make_anew()
        model = named_model("Net", channels)
        if channels == 4 and ranks.rank == 1:
            if is_seen:
                watchdog.this_rank()
            where = rf"rank 0: in bn forward, call 1{WRITTEN}\nrank 1: {seen}{WRITTEN}\n"
            reports.wait_for(rf"{where}Possible causes:\n- {re.escape(cause)}\n")
        model.bn(torch.randn(4, channels, requires_grad=True))
        dist.barrier()
    assert "channels over" not in reports.text


class CompilationError(Exception):
    """Stands for Triton's, which is of no class that syncbn knows."""


# What a rank cannot do alone, and the all_reduce that it leaves out.
LONE_ERRORS: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], object], str]] = {
    "forward": (lambda layer, x, y: layer(x), "SyncBatchNorm forward, call 2"),
    "backward": (lambda layer, x, y: y.sum().backward(retain_graph=True), "SyncBatchNorm backward, call 1"),
    "batch_norm_backward": (
        lambda layer, x, y: batch_norm_backward(x, x, torch.zeros(3), torch.ones(3)),
        r"batch_norm_backward backward, call \d+",
    ),
}


@pytest.mark.two_ranks
@pytest.mark.parametrize("context", [contextlib.nullcontext, DebugMode], ids=["fast path", "fallback"])
@pytest.mark.parametrize("name", LONE_ERRORS)
def test_an_error_of_one_rank_alone_is_reported_by_the_others(
    ranks: Ranks, reports: Reports, name: str, context: Callable[[], Any]
) -> None:
    """The kernels of a rank fail to compile and the program handles the error, as on an Intel GPU, where no rank reads
    NaN in n."""
    run, description = LONE_ERRORS[name]
    layer, x = layer_and_input()
    y = layer(x.requires_grad_())
    if ranks.rank == 1:
        fail = mock.Mock(side_effect=CompilationError("at 12:4:\nand much more"))
        with contextlib.ExitStack() as broken:
            broken.enter_context(mock.patch.object(bad_argument, "_device_of", return_value=torch.device("xpu")))
            for back_end in (cpu, operators, reference):
                broken.enter_context(mock.patch.object(back_end.Forward, "forward_sums", fail))
                broken.enter_context(mock.patch.object(back_end.Backward, "backward_sums", fail))
            with context(), pytest.raises(CompilationError):
                run(layer, x, y)
        reports.wait_for(
            rf"rank 0 has waited \d+ s for others\.\nrank 0: in {description}{WRITTEN}\n"
            r"rank 1: last seen after SyncBatchNorm forward, call 1; has raised \S*CompilationError: at 12:4:"
            rf"{WRITTEN}\n(?!Possible causes)"
        )
    with context():
        run(layer, x, y)
    dist.barrier()


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
@pytest.mark.parametrize("context", [contextlib.nullcontext, DebugMode], ids=["fast path", "dispatched"])
def test_an_error_after_the_all_reduce_is_recorded(
    ranks: Ranks, pass_name: str, context: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example of a rank without memory for the output, for which the others wait in the next collective."""
    layer, x = layer_and_input()
    y = layer(x.requires_grad_())
    fail = mock.Mock(side_effect=MemoryError("no room for y"))
    for back_end in (cpu, operators, reference):
        monkeypatch.setattr(back_end.Forward, "forward_outputs", fail)
        monkeypatch.setattr(back_end.Backward, "backward_outputs", fail)
    with context(), pytest.raises(MemoryError, match="no room for y"):
        layer(x) if pass_name == "forward" else y.sum().backward()
    assert "has raised MemoryError: no room for y" in watchdog.this_rank().position().error


@pytest.mark.two_ranks
def test_an_error_of_a_saved_tensors_hook_is_reported(ranks: Ranks, reports: Reports) -> None:
    """Such hooks are those of torch.autograd.graph.save_on_cpu, and of activation checkpointing."""
    layer, x = layer_and_input()
    is_broken = ranks.rank == 1

    def unpack(tensor: Tensor) -> Tensor:
        if is_broken:
            raise MemoryError("no room")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = layer(x.requires_grad_())
    if ranks.rank == 1:
        with pytest.raises(MemoryError):
            y.sum().backward(retain_graph=True)
        is_broken = False
        reports.wait_for("rank 1: last seen after SyncBatchNorm forward, call 1; has raised MemoryError: no room")
    y.sum().backward()
    dist.barrier()


@pytest.mark.two_ranks
def test_a_rank_that_is_late_between_two_steps(ranks: Ranks, reports: Reports) -> None:
    """Its last pass is the backward of the step before, but that it is late is the first cause."""
    layer, x = layer_and_input()
    layer(x.requires_grad_()).sum().backward()
    if ranks.rank == 1:
        reports.wait_for(
            rf"rank 0: in SyncBatchNorm forward, call 2{WRITTEN}\n"
            rf"rank 1: last seen after SyncBatchNorm backward, call 1{WRITTEN}\nPossible causes:\n- A rank is late"
        )
    layer(x).sum().backward()
    dist.barrier()


@pytest.mark.two_ranks
def test_a_call_on_one_rank_alone(ranks: Ranks, reports: Reports) -> None:
    """A program calls its model on one rank to count FLOPs, or wraps it in DistributedDataParallel on some ranks."""
    voting.world.make_anew()  # in which no layer has been called
    layer, x = layer_and_input()
    if ranks.rank == 1:
        reports.wait_for(
            rf"rank 0: in SyncBatchNorm forward, call 1{WRITTEN}\nrank 1: has not been seen\nPossible causes:\n"
            r"- A rank has called the model once more, .*call model\.eval\(\) first\.\n"
        )
    layer(x)
    dist.barrier()


@pytest.mark.two_ranks
def test_another_thread_on_the_same_group(ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective of the thread of dcp.async_save meets one of a layer, so all ranks wait in one call. Here rank 1
    takes its time inside the collective."""
    layer, x = layer_and_input()
    all_reduce = calls.all_reduce
    expected = rf"ranks 0-1: in SyncBatchNorm forward, call 1{WRITTEN}\nAll ranks are .*=dist\.new_group\(\)"

    def all_reduce_late(*arguments: Any) -> Tensor:
        for rank in range(2 * ranks.rank):
            reports.wait_for(expected, rank)
        return all_reduce(*arguments)

    monkeypatch.setattr(calls, "all_reduce", all_reduce_late)
    layer(x)
    dist.barrier()  # all have read the positions


@pytest.mark.two_ranks
def test_a_wait_of_one_of_two_threads(ranks: Ranks, reports: Reports) -> None:
    """One thread waits in a layer, while another goes on in a layer of another group."""
    (waits, x), (goes_on, _) = layer_and_input(), layer_and_input()
    waits.process_group, goes_on.process_group = dist.new_group(), dist.new_group()
    for layer in (waits, goes_on):
        layer(x)

    def wait() -> None:
        if ranks.rank == 1:
            reports.wait_for(
                rf"rank 0 has waited \d+ s for others.\nrank 0: in SyncBatchNorm forward, call 2{WRITTEN}\n"
                r"rank 1: last seen after SyncBatchNorm forward, call \d+ on another process group\n"
            )
        waits(x)

    thread = threading.Thread(target=wait)
    thread.start()
    while ranks.total(torch.tensor(thread.is_alive())):
        goes_on(x)


@pytest.mark.two_ranks
def test_the_first_calls_of_two_threads_start_one_watchdog(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    voting.world.make_anew()  # in which no layer has been called
    layers = [syncbn.SyncBatchNorm(3, process_group=dist.new_group()) for _ in range(2)]
    write = ThisRank.write_position  # in the constructor: both threads are to be there at once
    monkeypatch.setattr(ThisRank, "write_position", lambda rank: (time.sleep(0.2), write(rank)))
    threads = [threading.Thread(target=layer, args=[torch.randn(4, 3)]) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert layers[0]._syncbn_site.rank is layers[1]._syncbn_site.rank
    dist.barrier()


@pytest.mark.two_ranks
def test_a_rank_that_is_35_s_late(ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank warns once, and both go on. Here the wait of rank 0 in the first forward counts as one of 35 s."""
    monkeypatch.setattr(collective.Collective, "next_warning_seconds", collective.FIRST_WARNING_SECONDS)
    is_long = lambda begun: ranks.rank == 0 and begun.description() == "SyncBatchNorm forward, call 1"  # noqa: E731
    monkeypatch.setattr(collective.Collective, "seconds", lambda begun: 35.0 * is_long(begun))
    layer, x = layer_and_input()
    if ranks.rank == 1:
        reports.wait_for("syncbn: rank 0 has waited 35 s for others.")
        time.sleep(0.5)  # in which rank 0 does not warn again
    for _ in range(3):
        layer(x).sum().backward()
    assert reports.text.count(" has waited ") == (ranks.rank == 0)
    dist.barrier()


@pytest.mark.two_ranks
def test_other_waits_are_not_reported(ranks: Ranks, reports: Reports) -> None:
    """Ranks wait for data, in a hook of backward, in many short collectives and in evaluation, each for longer than
    half a second."""
    layer, x = layer_and_input()
    dist.barrier()  # else a rank may be late on a busy machine
    y = layer(x.requires_grad_())
    with contextlib.suppress(queue.Empty):
        queue.SimpleQueue[None]().get(timeout=0.8)
    y.register_hook(lambda _: (time.sleep(0.8), dist.barrier())[1])
    y.sum().backward()
    for _ in range(80):
        dist.barrier()
        time.sleep(0.01)
    end = torch.tensor(time.monotonic() + 0.8)
    dist.broadcast(end, 0)
    while time.monotonic() < end:
        layer.eval()(x)
    dist.barrier()
    assert not reports.text


def test_an_error_of_the_gpu_keeps_its_text(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA raises it where the host waits next, here in our all_reduce. The text must not say that the ranks differ."""
    layer, x = syncbn.SyncBatchNorm(3), torch.randn(2, 3)
    layer(x)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(calls, "all_reduce", mock.Mock(side_effect=error))
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access") as raised:
        eager_call(None, layer, x.dtype).all_reduce(torch.zeros(10, dtype=torch.float64), "forward")
    assert "surfaced in SyncBatchNorm forward, call 2" in raised.value.__notes__[0]


# The store.


@pytest.fixture
def reader(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> ThisRank:
    """This rank with a store of its own, and no thread that writes to it."""
    monkeypatch.setattr(positions, "default_store", dist.HashStore)
    return ThisRank(dist.group.WORLD)


def write_as_others(reader: ThisRank, position: Position) -> str:
    """Write the position of all other ranks, and return how reports name them."""
    others = [rank for rank in range(reader.num_ranks) if rank != reader.rank]
    for other in others:
        reader.store.set(f"{reader.prefix}/{other}/position", json.dumps([[0, 0], position]))
    return format_ranks(others)


AFTER_CALL_7 = Position("0", 7, "forward", "bn forward, call 7")


def test_positions_before_a_restart_are_not_read(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may keep the store when it starts the ranks again."""
    others = write_as_others(reader, AFTER_CALL_7)
    assert f"{others}: last seen after bn forward, call 7\n" in report.report_positions(reader, None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(positions, "default_store", lambda: reader.store)
    everyone = format_ranks([*range(reader.num_ranks)])
    assert f"{everyone}: has not been seen\n" in report.report_positions(ThisRank(dist.group.WORLD), None)


def test_ages_are_reported(reader: ThisRank) -> None:
    """They are computed by the clock of the host that wrote the position, which may be slow or fast."""
    for seconds, age in ((4000, r"; written 40\d\d s ago"), (-3000, "")):
        others = write_as_others(reader, AFTER_CALL_7._replace(time=time.time() - seconds))
        where = report.report_positions(reader, None)
        assert re.search(f"{others}: last seen after bn forward, call 7{age}\n", where), where


def test_the_causes_of_an_abort_by_gloo(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends without a word of syncbn, for example when one rank alone validates in training mode."""
    monkeypatch.setattr(positions, "process_state", lambda process: f"its process ({process}) has ended")
    others = write_as_others(reader, AFTER_CALL_7._replace(process=7, host=positions.this_host()))
    text = report.report_positions(reader, None)
    assert f"{others}: last seen after bn forward, call 7; its process (7) has ended\n" in text
    assert re.search(r"gloo::EnforceNotMet.*\n- .*once more, .* validate .* model\.eval\(\) first\.\n- ", text), text


@pytest.mark.parametrize(("change", "line"), [({"departure": "has left"}, "has left"), ({"process": 8}, "has not")])
def test_a_position_that_changes_while_it_is_read(
    reader: ThisRank, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], line: str
) -> None:
    """A rank writes that it leaves after another rank has read its position and before its process ends. Or a launcher
    replaces the process, and the new process overwrites the position of the old one."""
    written = Position(process=7, host=positions.this_host())

    def process_state(process: int) -> str:
        write_as_others(reader, written._replace(**change))
        return f"its process ({process}) has ended"

    monkeypatch.setattr(positions, "process_state", process_state)
    write_as_others(reader, written)
    where = report.report_positions(reader, None)
    assert line in where
    assert "has ended" not in where


@pytest.mark.two_ranks
def test_a_default_group_made_again_on_the_same_store(
    ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 alone is known in the first group, and is late in the second. No rank stalls, and the report has the age
    of what rank 1 wrote in the first group."""
    store = dist.PrefixStore("of this test", voting.world.store)
    monkeypatch.setattr(positions, "default_store", lambda: store)
    voting.world.make_anew()
    if ranks.rank == 1:
        with mock.patch.object(time, "time", return_value=time.time() - 35):
            watchdog.this_rank()
            voting.world.leave()
    voting.world.make_anew()
    layer, x = layer_and_input()
    if ranks.rank == 1:
        reports.wait_for(rf"rank 0: in SyncBatchNorm forward, call 1{WRITTEN}\nrank 1: has left; written \d\d+ s ago\n")
    layer(x)
    dist.barrier()


@pytest.mark.two_ranks
def test_default_groups_one_after_another_leave_nothing(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread, key or record of a group is left. All groups use one store, as under torchrun."""

    def left() -> list[object]:
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name == "syncbn.watchdog"]
        return [*threads, *(one for one in gc.get_objects() if isinstance(one, (ThisRank, GroupState, Site)))]

    before, store, model = left(), dist.HashStore(), syncbn.SyncBatchNorm(3)
    monkeypatch.setattr(positions, "default_store", lambda: store)
    for _ in range(5):
        voting.world.make_anew()
        for group in (None, dist.new_group(), dist.new_group()):
            model.process_group = group
            model(torch.randn(4, 3)).sum().backward()
        del group
    del model
    voting.world.make_anew()
    wait_until(lambda: len(left()) <= len(before))  # threads end soon
    assert store.num_keys() == 2  # the position, and how the layer was called last


def test_an_old_default_group_that_is_released_late(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the old group does not overwrite the position of this rank in the new group. Readers would then ignore
    all values of this rank, and report ranks that differ where layers only get new numbers."""
    store = dist.PrefixStore("released late", voting.world.store)
    monkeypatch.setattr(positions, "default_store", lambda: store)
    voting.world.make_anew()
    watchdog.this_rank()
    old_group = dist.group.WORLD  # as a DistributedDataParallel or a traceback holds it
    voting.world.make_anew()
    rank = watchdog.this_rank()
    rank.write("a key", 1)
    del old_group
    gc.collect()
    assert rank.read([rank.rank], "a key") == [1]
    dist.barrier()


def test_a_report_waits_for_its_own_thread(ranks: Ranks) -> None:
    """The program and the watchdog may begin a report at once, and the last of them replaces `report_thread`."""
    rank, ended = watchdog.this_rank(), list[bool]()

    def call() -> None:
        rank.report_thread = threading.Thread()
        time.sleep(0.5)
        ended.append(True)

    assert report.call_store(rank, call, 60.0)
    assert ended


def test_an_error_that_cannot_be_recorded(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gets its own error, not that of the store or of a thread."""
    monkeypatch.setattr(watchdog, "this_rank", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(ValueError, match="got -1"):
        syncbn.create_syncbn_process_group(-1)


def stopped_store(ends: threading.Event | None) -> mock.Mock:
    """Return a store whose process is stopped until the event, and then ends. None: the process has ended."""

    def call(*_: object) -> None:
        if ends is not None:
            ends.wait()
        raise RuntimeError("Broken pipe")

    return mock.Mock(**dict.fromkeys(("set", "check", "get", "multi_get"), call))


@pytest.mark.two_ranks
@pytest.mark.parametrize("is_stopped", [False, True])
def test_ranks_that_differ_while_the_store_does_not_answer(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """The error says neither that the ranks are in different layers nor how long it has waited."""
    monkeypatch.setattr(report, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(report, "READ_SECONDS", 0.2)
    voting.world.make_anew()
    layer, x = layer_and_input()
    layer(x)
    ends = threading.Event()
    monkeypatch.setattr(layer._syncbn_site.rank, "store", stopped_store(ends if is_stopped else None))
    title = r"^syncbn: the ranks differ in layer, call, settings or dtype, and not all ranks have reported\.\n"
    own = rf"rank {ranks.rank}: in SyncBatchNorm forward, call 2\n"
    other = rf"rank {1 - ranks.rank}: not known, as the process group's store does not answer\n"
    with pytest.raises(RanksDifferError, match=f"{title}({own}{other}|{other}{own})"):
        layer(x.double() if ranks.rank else x)
    ends.set()
    voting.world.make_anew()


@pytest.mark.two_ranks
def test_a_bad_argument_while_the_store_does_not_answer(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank records its error before the all_reduce, and waits for the store for a bounded time."""
    monkeypatch.setattr(report, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(report, "READ_SECONDS", 0.2)
    voting.world.make_anew()
    layer, x = layer_and_input()
    layer(x)
    ends = threading.Event()
    monkeypatch.setattr(layer._syncbn_site.rank, "store", stopped_store(ends))
    message = "expected 3 channels" if ranks.rank else "another rank has a bad argument"
    with pytest.raises(ValueError if ranks.rank else RuntimeError, match=message):
        layer(x[:, :2] if ranks.rank else x)
    ends.set()
    voting.world.make_anew()


@pytest.mark.parametrize("answered", [(), ("set",)])  # a write fails, or what is read
def test_a_store_that_is_gone_is_called_once(
    reader: ThisRank, monkeypatch: pytest.MonkeyPatch, answered: tuple[str, ...]
) -> None:
    """torch prints a backtrace of C++ for each call that fails, of whatever kind."""
    calls = mock.Mock(side_effect=RuntimeError("Broken pipe"))
    failing = {"set", "check", "get", "multi_get"}.difference(answered)
    monkeypatch.setattr(reader, "store", mock.Mock(**dict.fromkeys(failing, calls)))
    for _ in range(4):
        reader.departure += "-"
        reader.write_position()
        assert "the process group's store does not answer" in report.report_positions(reader, None)
    assert calls.call_count == 1


def test_a_slow_answer_of_the_store_ends_one_report_alone(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer comes late, or the time-out of the store ends the call."""
    answers, check = threading.Event(), reader.store.check
    others, unknown = write_as_others(reader, Position(departure="has left")), "store does not answer"
    monkeypatch.setattr(reader, "store", mock.Mock(wraps=reader.store, has_extended_api=lambda: False))
    reader.store.check.side_effect = lambda keys: answers.wait() and check(keys)
    with mock.patch.object(report, "READ_SECONDS", 0.2):
        for _ in range(2):
            assert unknown in report.report_positions(reader, None)
    answers.set()
    assert f"{others}: has left" in report.report_positions(reader, None)
    reader.store.check.side_effect = dist.DistStoreError("wait timeout after 3000ms")
    assert unknown in report.report_positions(reader, None)
    reader.store.check.side_effect = check
    assert f"{others}: has left" in report.report_positions(reader, None)


def test_a_position_that_the_store_did_not_take_is_written_again(
    reader: ThisRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = mock.Mock(side_effect=[dist.DistStoreError("wait timeout after 3000ms"), None])
    monkeypatch.setattr(reader, "store", mock.Mock(set=answers))
    reader.departure = "has left"
    for _ in range(3):
        reader.write_position()
    assert answers.call_count == 2


def test_a_store_that_grows_gets_positions_that_last(reader: ThisRank) -> None:
    """A file is such a store: a job of a week would write gigabytes to it."""
    reader.store_appends = True
    written, moved = reader.written_position, reader.written_position._replace(departure="has left")
    reader.departure = "has left"
    assert watchdog._poll(reader, written) == moved
    assert reader.written_position == written
    watchdog._poll(reader, moved)
    assert reader.written_position == moved
