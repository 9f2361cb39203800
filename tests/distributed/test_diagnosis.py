"""Catches a wait that is not reported, names the wrong rank or place, or advises wrongly, while all ranks run.

What is said when one fails is in test_faults.py.
"""

import contextlib
import copy
import gc
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
from subclasses_of_batchnorm import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._debug_mode import DebugMode
from training import unchanged
from voting import Ranks, Reports

import syncbn
from syncbn import fallback, functional
from syncbn.kernels import cpu, operators
from syncbn.kernels.interface import SIGNATURE_ELEMENTS, TRAILER_ELEMENTS
from syncbn.ranks import collective, positions, reduction, report, watchdog
from syncbn.ranks.positions import Position, ThisRank
from syncbn.ranks.reduction import EagerReduction, eager_reduction
from syncbn.ranks.report import WITH_GRAPH, RanksDifferError
from syncbn.ranks.sites import FunctionCaller, GroupState, Site, smallest_signature
from syncbn.texts import format_ranks, warn_once

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="signatures are for CPUs")


class Block(nn.Module):
    """Two layers under names, one of them in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = syncbn.SyncBatchNorm1d(3)
        self.tail = nn.ModuleList([nn.BatchNorm1d(3)])
        syncbn.convert_syncbn_model(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail[0](self.bn1(x))


def layer_and_input(ranks: Ranks) -> tuple[syncbn.SyncBatchNorm, Tensor]:
    return syncbn.SyncBatchNorm(3, device=ranks.device), torch.randn(4, 3, device=ranks.device)


@pytest.fixture
def description(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each all_reduce is said to be for."""
    seen: list[str] = []
    all_reduce = EagerReduction.all_reduce

    def see(reduction: EagerReduction, payload: Tensor, pass_name: str, *more: Any) -> Tensor:
        seen.append(reduction.new_collective(pass_name).description())
        return all_reduce(reduction, payload, pass_name, *more)

    monkeypatch.setattr(EagerReduction, "all_reduce", see)
    return seen


def test_names_passes_and_calls(ranks: Ranks, description: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Block()).to(ranks.device)
    model = DistributedDataParallel(syncbn.convert_syncbn_model(model))
    x = torch.randn(4, 3, device=ranks.device, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    passes = "1.bn1 forward", "1.tail.0 forward", "1.tail.0 backward", "1.bn1 backward"
    assert description == [f"{one}, call {call}" for call in (1, 2) for one in passes]
    description.clear()
    copy.deepcopy(model.module)(x)
    assert description == ["1.bn1 forward, call 1", "1.tail.0 forward, call 1"]
    description.clear()
    syncbn.SyncBatchNorm(3, device=ranks.device)(x)
    y = syncbn.functional.sync_batch_norm(x, None, None, training=True)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    passes = "forward", WITH_GRAPH, "backward", "derivative of backward", f"derivative of {WITH_GRAPH}"
    of_function = {f"sync_batch_norm {pass_name}" for pass_name in passes}
    assert {text.partition(",")[0] for text in description} == {"SyncBatchNorm forward", *of_function}


# What ranks meet in that have called model, and its layer bn1, which made y: rank 0; the others; what all of them say.
MEETINGS: list[tuple[Callable[..., object], Callable[..., object], str]] = [
    (
        lambda model, x, y: model.tail[0](x),
        lambda model, x, y: model.bn1(x),
        r"rank 0: in tail.0 forward, call 2\nOTHERS: in bn1 forward, call 3\nEvery rank must",
    ),
    (
        lambda model, x, y: model(x),
        lambda model, x, y: y.sum().backward(),
        r"rank 0: in bn1 forward, call 3\nOTHERS: in bn1 backward, call 2\nPossible causes:\n- A rank has left "
        r"out a layer or a backward: .*, loss = loss \+ layer\(x\[:0\]\)(.|\n)* profile it without model\.eval\(\)",
    ),
    (
        lambda model, x, y: model(x.bfloat16()),
        lambda model, x, y: model(x),
        r"have inputs of different dtypes.\nrank 0: in bn1 forward, call 3, with an input of torch.bfloat16\n"
        r"OTHERS: in bn1 forward, call 3, with an input of torch.float32\nUse autocast on every rank",
    ),
]


@on_cpu
@pytest.mark.parametrize(("of_rank_0", "of_others", "said"), MEETINGS, ids=["layers", "passes", "dtypes"])
def test_ranks_in_different_layers_passes_or_dtypes(
    ranks: Ranks, of_rank_0: Callable[..., object], of_others: Callable[..., object], said: str
) -> None:
    """What would otherwise mix their statistics in silence."""
    model, x = Block().to(ranks.device), torch.randn(4, 3, device=ranks.device)
    model(x)
    y = model.bn1(x)
    message = said.replace("OTHERS", format_ranks([*range(1, ranks.size)]))
    with unchanged(model), pytest.raises(RuntimeError, match=message):
        (of_others if ranks.rank else of_rank_0)(model, x, y)
    assert model(x).isfinite().all()  # the group goes on


@on_cpu
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["a layer", "a function"])
def test_backwards_of_different_calls(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, create_graph: bool
) -> None:
    """They would mix their gradients in silence. In one order they go on, also where hooks round what one rank saves,
    where one rank sees NaN, and a second time."""
    # Whose calls are counted from here: an earlier test may have called the function once more on one rank.
    monkeypatch.setattr(functional, "_SYNC_BATCH_NORM", FunctionCaller("sync_batch_norm"))
    model = Block() if name == "a layer" else lambda x: syncbn.functional.sync_batch_norm(x, None, None, training=True)

    def gradients(order: list[int], call: Callable[[Tensor], Tensor] = model) -> None:
        inputs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
        outputs = [call(x).square().sum() for x in inputs]
        for index in order:
            torch.autograd.grad(outputs[index], inputs[index], retain_graph=True, create_graph=create_graph)

    gradients([0, 1, 1, 0])
    rounds = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.to(torch.float16), lambda packed: packed)
    with rounds if ranks.rank == 0 else contextlib.nullcontext(), pytest.MonkeyPatch.context() as patch:
        gradients([0, 1])
        patch.setattr(collective, "warn", lambda text: None)
        patch.setattr(collective, "warn_once", lambda text: None)
        gradients([1, 0], lambda x: model(x + (torch.nan if ranks.rank == 0 else 0)))
    with pytest.raises(RuntimeError, match=r"different calls of a layer.\nrank 0: in .*, call \d+\n.*\nThe layer is"):
        gradients([0, 1] if ranks.rank else [1, 0])


@pytest.mark.parametrize("context", [contextlib.nullcontext, DebugMode, torch.autograd.graph.save_on_cpu])
def test_the_total_is_freed_with_the_graph(
    ranks: Ranks, context: Callable[[], contextlib.AbstractContextManager[object]]
) -> None:
    """Which tells calls apart in backward: a kept loss must not keep the totals of all layers."""
    layer, x = layer_and_input(ranks)
    with context():
        y = layer(x)
        for retain_graph in (True, False):
            assert len(y.grad_fn.reduction.forward_total) == 2 * 3 + 4
            y.sum().backward(retain_graph=retain_graph)
    assert y.grad_fn.reduction.forward_total is None


def test_second_derivatives_of_other_calls(ranks: Ranks) -> None:
    """They are told apart although the graphs of the first are freed, on any rank: those of the second need the total,
    by which ranks tell calls apart."""
    layer, x = layer_and_input(ranks)

    def slope(x: Tensor, retain_graph: bool) -> Tensor:
        y = layer(x)
        (gradient,) = torch.autograd.grad(y, x, y.detach().cos(), create_graph=True, retain_graph=retain_graph)
        return gradient.pow(2).sum()

    inputs = [torch.randn_like(x, requires_grad=True) for _ in range(2)]
    slope(inputs[0], retain_graph=ranks.rank == 0).backward()
    slopes = [slope(x, retain_graph=False) for x in inputs]
    with pytest.raises(RuntimeError, match="the ranks differentiate different calls"):
        slopes[ranks.rank % 2].backward()


@on_cpu
def test_a_setting_of_a_subclass_that_changes(ranks: Ranks) -> None:
    """It calls F.batch_norm with it."""
    layer, x = syncbn.convert_syncbn_model(BatchNormAct2d(3)), torch.randn(4, 3, 2, 2)
    layer(x)
    layer.eps = 0.1 if ranks.rank == 0 else layer.eps
    with pytest.raises(RuntimeError, match="different settings of a layer"):
        layer(x)


@on_cpu
@pytest.mark.parametrize(
    ("name", "other", "usual"),
    [("eps", 1e-3, "1e-05"), ("momentum", None, "0.1"), ("momentum", torch.tensor(0.1), "0.1"),
     ("channel_last", True, "False"), ("fuse_relu", True, "False"), ("track_running_stats", False, "True")], ids=str,
)  # fmt: skip
def test_a_setting_of_one_rank(ranks: Ranks, name: str, other: object, usual: str) -> None:
    """At the first call, and when it changes later. What all ranks change together goes on."""
    x, others = torch.randn(4, 3, device=ranks.device), format_ranks([*range(1, ranks.size)])
    said = rf"settings of a layer.\nrank 0: in .*, with {name}=.*\n{others}: in .*, with {name}={usual}\nGive the layer"
    for is_first in (True, False):
        model = Block().to(ranks.device)
        default = getattr(model.bn1, name)
        if not is_first:
            for value in (default, other, default):
                setattr(model.bn1, name, value)
                model(x).sum().backward()
        if ranks.rank == 0:
            setattr(model.bn1, name, other)
        with unchanged(model), pytest.raises(RuntimeError, match=said):
            model(x)
        setattr(model.bn1, name, default)
        assert model(x).isfinite().all()


@on_cpu
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("signed", [True, False])
def test_totals_that_differ_in_their_bits(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, sign_nothing: Callable[[], None], signed: bool, create_graph: bool
) -> None:
    """A false alarm, whose last remedy is to switch the comparison off."""
    add_up = reduction.all_reduce

    def all_reduce(payload: Tensor, *arguments: Any) -> Tensor:
        total = add_up(payload, *arguments)
        total[:-TRAILER_ELEMENTS] *= 1 + (ranks.rank == 0) * 2**-52
        return total

    monkeypatch.setattr(reduction, "all_reduce", all_reduce)
    monkeypatch.setattr(report, "ANSWER_SECONDS", 0.5)  # the ranks have no key in common
    if not signed:
        sign_nothing()
    layer, x = layer_and_input(ranks)
    y = layer(x.requires_grad_()).square().sum()
    said = (
        r"different layers or calls(.|\n)*has not answered(.|\n)*set SYNCBN_CHECKS=0 on every rank, which .* ranks\.$"
    )
    with pytest.raises(RanksDifferError, match=said) if signed else contextlib.nullcontext():
        torch.autograd.grad(y, x, create_graph=create_graph)


@on_cpu
def test_sums_of_different_lengths(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when gloo has aborted the rank that expected fewer. A rank with a bad argument keeps its error."""
    add_up = reduction.all_reduce

    def all_reduce(payload: Tensor, *arguments: Any) -> Tensor:
        total = add_up(payload, *arguments)
        total[-1] = torch.nan
        return total

    monkeypatch.setattr(reduction, "all_reduce", all_reduce)
    monkeypatch.setattr(report, "SETTLE_SECONDS", 0.1)
    layer, x = layer_and_input(ranks)
    said = r"^syncbn: the ranks have sent the sums of different numbers of channels\.\nrank"
    error, said = (ValueError, "expected 3 channels") if ranks.rank == 0 else (RuntimeError, said)
    with pytest.raises(error, match=said):
        layer(x if ranks.rank else x[:, :2])


@on_cpu
@pytest.mark.parametrize("which", ["all ranks", "rank 0"])
def test_without_signatures(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, sign_nothing: Callable[[], None], which: str
) -> None:
    """A rank is not compared with others, whether these sign or not; its bad argument still raises on all."""
    signed = which == "rank 0" and ranks.rank > 0
    if not signed:
        sign_nothing()
    sent, add_up = [], reduction.all_reduce

    def all_reduce(payload: Tensor, *arguments: Any) -> Tensor:
        sent.append(payload[-SIGNATURE_ELEMENTS:].clone())
        return add_up(payload, *arguments)

    model, x = Block(), torch.randn(4, 3, requires_grad=True)
    with monkeypatch.context() as patched:
        patched.setattr(reduction, "all_reduce", all_reduce)
        model(x).square().sum().backward()
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (model.tail[0] if ranks.rank else model.bn1)(x)
    assert len(sent) == 2 * 2 + 3 * 2 + 1
    assert [bool(signature.all()) for signature in sent] == [signed] * len(sent)
    assert [bool(signature.any()) for signature in sent] == [signed] * len(sent)
    said = "rank 0: ValueError: expected 3 channel" if ranks.rank else "^bn1: expected 3 channel"
    with unchanged(model), pytest.raises(ValueError, match=said):
        model(x if ranks.rank else x[:, :2])
    assert model(x).isfinite().all()


@pytest.mark.parametrize("num_ranks", [2, 3, 1000, 2**14])
def test_signatures_are_exact(num_ranks: int) -> None:
    """The test for equal signatures has no rounding: not with the largest, and so with none."""
    s, total, squares = 2 * smallest_signature(num_ranks) - 1, 0.0, 0.0
    for _ in range(num_ranks):
        total, squares = total + s, squares + s * s
    assert num_ranks * squares == total * total
    other = s - 1  # of one rank
    assert num_ranks * (squares - s * s + other * other) != (total - s + other) ** 2


@on_cpu
@pytest.mark.parametrize("fault", ["another layer", "a bad argument"])
def test_a_caught_error_does_not_keep_the_group(ranks: Ranks, fault: str) -> None:
    """By a cycle of the error, its traceback and a frame: gloo's threads would run until the interpreter ends."""
    group = dist.new_group()
    model, x = (
        syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)), group),
        torch.randn(4, 3),
    )
    model(x)
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError, ValueError):
            model[ranks.rank % 2](x) if fault == "another layer" else model[0](x[:, : 3 - ranks.rank % 2])
        dist.destroy_process_group(group)
        group, model = ref(group), None
        assert group() is None
    finally:
        gc.enable()


@on_cpu
def test_nan_is_explained_once(ranks: Ranks) -> None:
    """Each layer warns once, in one line. NaN of rank 0 in the first layer reaches the second on all ranks."""
    warn_once.cache_clear()
    model, x = Block(), torch.full((4, 3), torch.nan if ranks.rank == 0 else 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(x)
    line = f"syncbn: NaN or infinity in the input of {{}} forward, call 1 on rank {ranks.rank}."
    lines = [line.format(layer) for layer in ("bn1", "tail.0")[ranks.rank > 0 :]]
    texts = [str(one.message) for one in caught]
    assert "Check the batch of the rank that warned first" in texts.pop(1)
    assert texts == lines


@pytest.mark.two_ranks
@on_cpu
def test_models_of_one_name_with_other_channels(ranks: Ranks, reports: Reports) -> None:
    """A rank that is late in the second is late: it has not called another layer."""
    for channels in (3, 4):
        model = syncbn.convert_syncbn_model(nn.ModuleDict({"bn": nn.BatchNorm1d(channels)}).eval()).train()
        if channels == 4:
            model = type("Other", (nn.Module,), {})()
            model.bn = nn.BatchNorm1d(channels)
            syncbn.convert_syncbn_model(model)
            if ranks.rank == 1:
                reports.wait_for(rf"rank 1: last seen after bn forward, call 1{WRITTEN}\n")
        model.get_submodule("bn")(torch.randn(4, channels))
    assert "channels over" not in reports.text
    dist.barrier()


# Long waits.


WRITTEN = r"(; written \S+ s ago)?"


class CompilationError(Exception):
    """Stands for Triton's, which is of no class that syncbn knows."""


# What a rank cannot do alone, and the all_reduce that it leaves out.
LONE_ERRORS: dict[str, tuple[Callable[[nn.Module, Tensor, Tensor], object], str]] = {
    "forward": (lambda layer, x, y: layer(x), "SyncBatchNorm forward, call 2"),
    "backward": (lambda layer, x, y: y.sum().backward(retain_graph=True), "SyncBatchNorm backward, call 1"),
    "forward on the general road": (
        lambda layer, x, y: within_mode(lambda: layer(x)), "SyncBatchNorm forward, call 2"
    ),
    "backward on the general road": (
        lambda layer, x, y: within_mode(lambda: y.sum().backward(retain_graph=True)), "SyncBatchNorm backward, call 1"
    ),
    "batch_norm_backward": (
        lambda layer, x, y: syncbn.functional.batch_norm_backward(x, x, torch.zeros(3), torch.ones(3)),
        r"batch_norm_backward backward, call \d+",
    ),
}  # fmt: skip


def within_mode(call: Callable[[], object]) -> None:
    with DebugMode():
        call()


@pytest.mark.two_ranks
@on_cpu
@pytest.mark.parametrize("name", LONE_ERRORS)
def test_an_error_of_one_rank_alone_is_told_by_the_others(
    ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU of Intel, where no rank reads a mark: its kernels do not compile; the program handles the error."""
    run, description = LONE_ERRORS[name]
    layer, x = layer_and_input(ranks)
    y = layer(x.requires_grad_())
    if ranks.rank == 1:
        error = CompilationError("at 12:4:\nand much more")
        with monkeypatch.context() as broken:
            broken.setattr(fallback, "_device_of", lambda arguments: torch.device("xpu"))
            for back_end in (cpu, operators):
                broken.setattr(back_end.Forward, "forward_sums", mock.Mock(side_effect=error))
                broken.setattr(back_end.Backward, "backward_sums", mock.Mock(side_effect=error))
            with pytest.raises(CompilationError):
                run(layer, x, y)
        reports.wait_for(
            rf"rank 0 has waited \d+ s for others\.\nrank 0: in {description}{WRITTEN}\n"
            rf"rank 1: last seen after SyncBatchNorm forward, call 1; has raised "
            rf"\S*CompilationError: at 12:4:{WRITTEN}\n"
        )
    run(layer, x, y)
    assert "Every rank must" not in reports.text
    dist.barrier()


@pytest.mark.two_ranks
@on_cpu
def test_an_error_of_a_saved_tensors_hook_is_told(ranks: Ranks, reports: Reports) -> None:
    """As of torch.autograd.graph.save_on_cpu, or of activation checkpointing, which computes again."""
    layer, x = layer_and_input(ranks)
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
        reports.wait_for("rank 1: last seen after SyncBatchNorm forward, call 1; has raised MemoryError: no room")
        is_broken = False
    y.sum().backward()
    dist.barrier()


@pytest.mark.two_ranks
@on_cpu
def test_a_call_on_one_rank_alone_is_advised(ranks: Ranks, reports: Reports) -> None:
    """As to count FLOPs, or inside a DistributedDataParallel of some ranks."""
    voting.world.make_anew()  # in which no layer has been called
    layer, x = layer_and_input(ranks)
    if ranks.rank == 1:
        reports.wait_for(
            rf"rank 0: in SyncBatchNorm forward, call 1{WRITTEN}\nrank 1: has not been seen\nPossible causes:\n"
            r"- A rank is late, .*\n(- .*\n)+Every rank .* a call on one rank only, for example to profile the model, "
            r"call model\.eval\(\)\. .* DistributedDataParallel .* convert_syncbn_model\(model, process_group\)"
        )
    layer(x)


@pytest.mark.two_ranks
@on_cpu
def test_another_thread_on_the_same_group_is_advised(
    ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective of dcp.async_save's thread meets one of the layers, so all ranks wait in one call. Here rank 1 only
    takes its time there."""
    layer, x = layer_and_input(ranks)
    all_reduce = reduction.all_reduce
    expected = rf"ranks 0-1: in SyncBatchNorm forward, call 1{WRITTEN}\nAll ranks are .*=dist\.new_group\(\)"

    def all_reduce_late(*arguments: Any) -> Tensor:
        for rank in range(2 * ranks.rank):
            reports.wait_for(expected, rank)
        return all_reduce(*arguments)

    monkeypatch.setattr(reduction, "all_reduce", all_reduce_late)
    layer(x)
    dist.barrier()  # all have read the positions


@pytest.mark.two_ranks
@on_cpu
def test_a_wait_beside_another_thread_is_told(ranks: Ranks, reports: Reports) -> None:
    """A thread waits in a layer, while another thread goes on in one of another group."""
    (waits, x), (goes_on, _) = layer_and_input(ranks), layer_and_input(ranks)
    waits.process_group, goes_on.process_group = dist.new_group(), dist.new_group()
    for layer in (waits, goes_on):
        layer(x)
    expected = (
        rf"rank 0 has waited \d+ s for others.\nrank 0: in SyncBatchNorm forward, call 2{WRITTEN}\n"
        r"rank 1: last seen after SyncBatchNorm forward, call \d+ on another process group\n"
    )

    def wait() -> None:
        if ranks.rank == 1:
            reports.wait_for(expected)
        waits(x)

    thread = threading.Thread(target=wait)
    thread.start()
    while ranks.total(torch.tensor(thread.is_alive())):
        goes_on(x)
    dist.barrier()


@pytest.mark.two_ranks
@on_cpu
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
    assert layers[0]._call_site.rank is layers[1]._call_site.rank
    dist.barrier()


def test_a_copied_layer_is_another_one(ranks: Ranks) -> None:
    """Though it has the attributes of the first, and so its call site: nn.DataParallel copies modules so."""
    first, x = layer_and_input(ranks)
    first(x)
    second = copy.copy(first)
    vars(second).update(vars(first))
    second(x)
    layer = second if ranks.rank else first
    if torch.cuda.is_available():
        assert second._call_site is not first._call_site
        return
    with pytest.raises(
        RuntimeError,
        match=r"layers or calls.\nrank 0: in SyncBatchNorm forward, call 2; number \d+ of SyncBatchNorm\(3\)\n",
    ):
        layer(x)


@pytest.mark.two_ranks
@on_cpu
def test_a_rank_that_is_35_s_late(ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other warns once, and both go on. (Here rank 0's wait in the first forward counts as one of 35 s.)"""
    monkeypatch.setattr(collective.Collective, "next_warning_seconds", collective.FIRST_WARNING_SECONDS)
    is_long = lambda begun: ranks.rank == 0 and begun.description() == "SyncBatchNorm forward, call 1"  # noqa: E731
    monkeypatch.setattr(collective.Collective, "seconds", lambda begun: 35.0 * is_long(begun))
    layer, x = layer_and_input(ranks)
    if ranks.rank == 1:
        reports.wait_for("syncbn: rank 0 has waited 35 s for others.")
    for _ in range(3):
        layer(x).sum().backward()
    assert reports.text.count(" has waited ") == (ranks.rank == 0)
    dist.barrier()


# The store.


@pytest.fixture
def reader(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> ThisRank:
    """This rank with a store of its own, and no thread that writes to it."""
    monkeypatch.setattr(positions, "default_store", dist.HashStore)
    return ThisRank(dist.group.WORLD)


def write_as_others(reader: ThisRank, position: Position) -> str:
    """Write the position of all other ranks, whose words are returned."""
    others = [rank for rank in range(reader.num_ranks) if rank != reader.rank]
    for other in others:
        reader.store.set(f"{reader.prefix}/{other}/position", json.dumps(position))
    return format_ranks(others)


def test_positions_before_a_restart_are_not_read(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may keep the store when it starts the ranks again."""
    others = write_as_others(reader, Position("0", 10**9, "forward", "bn forward, call 7"))
    assert f"{others}: last seen after bn forward, call 7\n" in report.report_positions(reader, None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(positions, "default_store", lambda: reader.store)
    assert f"{format_ranks([*range(reader.num_ranks)])}: has not been seen\n" in report.report_positions(
        ThisRank(dist.group.WORLD), None
    )


def test_ages_are_reported(reader: ThisRank) -> None:
    """By the clock of the host that wrote the position, which may be behind or ahead: it decides nothing."""
    for seconds, age in ((40, "; written 40 s ago"), (-3000, ""), (10**6, "; written 1000000 s ago")):
        others = write_as_others(reader, Position("0", 7, "forward", "bn forward, call 7", time=time.time() - seconds))
        assert f"{others}: last seen after bn forward, call 7{age}\n" in report.report_positions(reader, None)


def test_the_causes_of_an_abort_by_gloo(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends without a word of syncbn, for example when one rank alone validates in training mode."""
    monkeypatch.setattr(report, "process_state", lambda process: f"its process ({process}) has ended")
    position = Position("0", 7, "forward", "bn forward, call 7", process=7, host=positions.this_host())
    others, text = write_as_others(reader, position), report.report_positions(reader, None)
    assert f"{others}: last seen after bn forward, call 7; its process (7) has ended\n" in text
    assert re.search(r"gloo::EnforceNotMet.*\n(- .*\n)+- .*once more, .* validate .* model\.eval\(\)\.\n", text), text


def test_a_rank_may_leave_while_its_position_is_read(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes so before its process ends, but after another rank has read its position."""
    written = Position(process=7, host=positions.this_host())

    def process_state(process: int) -> str:
        write_as_others(reader, written._replace(departure="has left with care"))
        return f"its process ({process}) has ended"

    monkeypatch.setattr(report, "process_state", process_state)
    others = write_as_others(reader, written)
    assert f"{others}: has left with care" in report.report_positions(reader, None)


def test_a_process_in_place_of_another_has_not_ended(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher of the user's own may start one rank again: its position takes the place of the ended process's."""
    written = Position("0", 7, "forward", "bn forward, call 7", process=7, host=positions.this_host())

    def process_state(process: int) -> str:
        write_as_others(reader, Position(process=8, host=positions.this_host()))
        return f"its process ({process}) has ended"

    write_as_others(reader, written)
    monkeypatch.setattr(report, "process_state", process_state)
    assert f"{format_ranks([*range(reader.num_ranks)])}: has not been seen" in report.report_positions(reader, None)


@pytest.mark.two_ranks
@on_cpu
def test_a_default_group_made_again_on_the_same_store(
    ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone is known in the first, and late in the second: no rank stalls, and the report has the age of what
    the late rank wrote in the first group, here 35 s before."""
    store = dist.PrefixStore("of this test", voting.world.store)
    monkeypatch.setattr(positions, "default_store", lambda: store)
    voting.world.make_anew()
    if ranks.rank == 1:
        with mock.patch.object(time, "time", return_value=time.time() - 35):
            watchdog.this_rank()
            voting.world.leave()
    voting.world.make_anew()
    layer, x = layer_and_input(ranks)
    if ranks.rank == 1:
        reports.wait_for(rf"rank 0: in SyncBatchNorm forward, call 1{WRITTEN}\nrank 1: has left; written \d\d+ s ago\n")
    layer(x)


@on_cpu
def test_an_explanation_leaves_no_keys(ranks: Ranks) -> None:
    layer, x = layer_and_input(ranks)
    layer(x)
    dist.barrier()
    before = voting.world.store.num_keys()
    dist.barrier()
    with pytest.raises(ValueError, match="expected 3 channels"):
        layer(x[:, :2] if ranks.rank else x)
    dist.barrier()
    assert voting.world.store.num_keys() == before
    dist.barrier()


@on_cpu
def test_an_equal_fault_is_explained_anew(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two totals of the same bits have the same key, under which no rank reads what another has written before."""
    layer, x, write = *layer_and_input(ranks), ThisRank.write
    if ranks.rank == 0:
        monkeypatch.setattr(ThisRank, "write", lambda *arguments: (time.sleep(0.3), write(*arguments)))
    for call in (1, 2):
        said = rf"SyncBatchNorm forward, call {call}.\nrank 0: .* got {call} " if ranks.rank else f" got {call} "
        with pytest.raises(ValueError, match=said):
            layer(x if ranks.rank else x[:, :call])


@pytest.mark.two_ranks
def test_default_groups_one_after_another_leave_nothing(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """No threads, no keys, and nothing that syncbn knows of a group. Keys are of one store, as of torchrun's."""

    def left() -> list[object]:
        gc.collect()
        kinds = ThisRank, GroupState, Site
        threads = [thread for thread in threading.enumerate() if thread.name == "syncbn.watchdog"]
        return [*threads, *(one for one in gc.get_objects() if isinstance(one, kinds))]

    before, store, model = left(), dist.HashStore(), Block().to(ranks.device)
    monkeypatch.setattr(positions, "default_store", lambda: store)
    for _ in range(20):
        voting.world.make_anew()
        model(torch.randn(4, 3, device=ranks.device)).sum().backward()
    del model
    voting.world.make_anew()
    while len(left()) > len(before):  # threads end soon
        time.sleep(0.02)
    assert store.num_keys() == 1 + 2  # the position, and how each layer was called


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
        where = report.report_positions(reader, None)
        assert "not known, as the process group's store does not answer" in where
    assert calls.call_count == 1


def test_a_slow_answer_of_the_store_ends_one_report_alone(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it comes late, or the store's time-out ends the call."""
    monkeypatch.setattr(report, "READ_SECONDS", 0.2)
    answers, check = threading.Event(), reader.store.check
    others, unknown = (
        write_as_others(reader, Position(departure="has left")),
        "the process group's store does not answer",
    )
    monkeypatch.setattr(reader, "store", mock.Mock(wraps=reader.store, has_extended_api=lambda: False))
    reader.store.check.side_effect = lambda keys: answers.wait() and check(keys)
    for _ in range(2):
        assert unknown in report.report_positions(reader, None)
    answers.set()
    reader.report_thread.join()
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
    """As a file does, to which a job of a week would write gigabytes."""
    reader.store_appends = True
    written, moved = reader.written_position, reader.written_position._replace(departure="has left")
    reader.departure = "has left"
    assert watchdog._poll(reader, written) == moved
    assert reader.written_position == written
    watchdog._poll(reader, moved)
    assert reader.written_position == moved


@pytest.mark.two_ranks
@on_cpu
def test_other_waits_are_not_told(ranks: Ranks, reports: Reports) -> None:
    """Of data, in a hook of backward, in many short collectives, in evaluation: all longer than the patience."""
    layer, x = layer_and_input(ranks)
    y = layer(x.requires_grad_())
    with contextlib.suppress(queue.Empty):
        queue.SimpleQueue[None]().get(timeout=1)
    y.register_hook(lambda _: (time.sleep(1), dist.barrier())[1])
    y.sum().backward()
    for _ in range(100):
        dist.barrier()
        time.sleep(0.01)
    end = torch.tensor(time.monotonic() + 1)
    dist.broadcast(end, 0)
    while time.monotonic() < end:
        layer.eval()(x)
    dist.barrier()
    assert not reports.text


def test_an_error_of_the_gpu_is_told_as_it_is(ranks: Ranks) -> None:
    """CUDA raises it where the host waits next, here in our all_reduce: the text must not say that the ranks differ."""
    layer, x = syncbn.SyncBatchNorm(3), torch.randn(2, 3)
    layer(x)
    context = eager_reduction(None, layer, x.dtype).new_collective("forward")
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access") as raised, context:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert "surfaced in SyncBatchNorm forward, call 2" in raised.value.__notes__[0]
