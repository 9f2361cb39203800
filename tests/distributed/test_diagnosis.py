"""What a rank knows of where it and the others are; what it makes of that is in test_faults.py."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import unchanged
from voting import Ranks

import syncbn
from syncbn import torch_private
from syncbn.diagnosis import layer_names, observer, process_state, report, signatures, waiting, watchdog
from syncbn.diagnosis.this_rank import Position, ThisRank
from syncbn.diagnosis.waiting import Waiting
from syncbn.distributed import reduction, text_exchange
from syncbn.distributed.reduction import Caller, Collective, Guard, guarded_by
from syncbn.distributed.text_exchange import ranks_in_words

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="signatures are for CPUs")


class Block(nn.Module):
    """Two layers under names, one of them in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = syncbn.SyncBatchNorm1d(3)
        self.tail = nn.ModuleList([syncbn.SyncBatchNorm1d(3)])

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return self.bn1(x) if skip else self.tail[0](self.bn1(x))


def layer_and_input(ranks: Ranks) -> tuple[syncbn.SyncBatchNorm, Tensor]:
    return syncbn.SyncBatchNorm(3, device=ranks.device), torch.randn(4, 3, device=ranks.device)


@pytest.fixture
def doing() -> Iterator[list[str]]:
    """What each all_reduce is said to be for."""
    seen: list[str] = []

    guard = Guard()
    guard.before_all_reduce = lambda called, payload, pass_name: seen.append(called.site.doing(called.call, pass_name))
    with guarded_by(guard):
        yield seen


def test_names_passes_and_calls(ranks: Ranks, doing: list[str]) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), Block()).to(ranks.device))
    x = torch.randn(4, 3, device=ranks.device)
    for _ in range(2):
        model(x).sum().backward()
    passes = "1.bn1 forward", "1.tail.0 forward", "1.tail.0 backward", "1.bn1 backward"
    assert doing == [f"{one}, call {call}" for call in (1, 2) for one in passes]


def test_the_first_position_on_a_group_is_written_at_once(ranks: Ranks) -> None:
    """A rank may be aborted in that all_reduce."""
    layer = syncbn.SyncBatchNorm(3, process_group=dist.new_group(), device=ranks.device)
    layer(torch.randn(4, 3, device=ranks.device))
    written = torch_private.default_store().get(f"syncbn/{ranks.rank}/position").decode()
    assert "SyncBatchNorm forward, call 1" in written


def test_names_without_a_model(ranks: Ranks, doing: list[str]) -> None:
    layer, x = layer_and_input(ranks)
    layer(x.requires_grad_())
    y = syncbn.functional.sync_batch_norm(x, None, None, training=True)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    syncbn.functional.sync_batch_norm_many([x, x])
    passes = [text.partition(",")[0] for text in doing]
    assert passes[:2] == ["SyncBatchNorm forward", "sync_batch_norm forward"]
    assert set(passes[2:-1]) == {"sync_batch_norm backward", "sync_batch_norm double backward"}
    assert passes[-1] == "sync_batch_norm_many forward"


# Ranks that meet in different layers or passes.


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


def require_one_wait(waits: list[Collective | None], layer: nn.Module, pass_name: str, call: int) -> None:
    """It was in the last collective of this layer, and is not any more: the watchdog would else not know in what a
    rank waits for one that never answers."""
    (wait,) = waits
    assert wait is observer.this_rank().last
    assert (wait.site, wait.pass_name, wait.call) == (layer._call_site, pass_name, call)
    assert observer.this_rank().waiting is None
    dist.barrier()  # all have read the positions


@on_cpu
def test_different_layers_with_as_many_channels(ranks: Ranks, waits: list[Collective | None]) -> None:
    """What would otherwise mix the statistics of two layers in silence."""
    model, x = Block(), torch.randn(4, 3)
    model(x)
    last = ranks.size - 1
    layer = model.bn1 if ranks.rank == last else model.tail[0]
    others = ranks_in_words([*range(last)])
    expected = rf"{others}: in tail.0 forward, call 2\nrank {last}: in bn1 forward, call 2\nEvery rank must"
    with unchanged(model.tail[0]), pytest.raises(RuntimeError, match=expected):
        layer(x)
    require_one_wait(waits, layer, "forward", 2)
    assert model(x).isfinite().all()  # the group goes on


@on_cpu
def test_the_ranks_cannot_compare_their_layers(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another thread's collective comes between: the error says all the same where the ranks are."""

    def fail(*_: object) -> list[str]:
        raise RuntimeError("timed out")

    monkeypatch.setattr(text_exchange, "all_gather_text", fail)
    monkeypatch.setattr(report, "SETTLE_SECONDS", 2.0)  # no rank is gone: all of it is waited
    model, x = Block(), torch.randn(4, 3)
    model(x)
    expected = (
        r"a collective failed on rank \d .*\nrank 0: in bn1 forward, call 2\n(.*\n)+The process group says: timed out"
    )
    with pytest.raises(RuntimeError, match=expected):
        (model.tail[0] if ranks.rank else model.bn1)(x)
    dist.barrier()


@on_cpu
def test_forward_and_backward_at_once(ranks: Ranks, waits: list[Collective | None]) -> None:
    model, x = Block(), torch.randn(4, 3)
    y = model(x, skip=True)
    call = y.sum().backward if ranks.rank else lambda: model(x, skip=True)
    with pytest.raises(RuntimeError, match=r"rank 0: in bn1 forward, call 2\nranks? 1(-\d)?: in bn1 backward, call 1"):
        call()
    require_one_wait(waits, model.bn1, *(("backward", 1) if ranks.rank else ("forward", 2)))


@on_cpu
def test_faults_are_told_in_the_wait_of_the_all_reduce(ranks: Ranks, waits: list[Collective | None]) -> None:
    layer, x = layer_and_input(ranks)
    layer(x)
    number = observer.this_rank().last.number
    with pytest.raises(ValueError, match="rank 0: expected at least 2D input"):
        layer(x if ranks.rank else x[0])
    require_one_wait(waits, layer, "forward", 2)
    assert waits[0].number == number + 1  # that of the all_reduce, and no other


def with_further_layers(model: nn.Module) -> nn.Module:
    model.metric, model.another = nn.BatchNorm1d(3), Block()
    return nn.Sequential(model)


@pytest.mark.parametrize("debug_first", [False, True])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: syncbn.SyncBatchNorm1d(3), lambda _: nn.Sequential(syncbn.SyncBatchNorm(3))),
        (Block, nn.Sequential),
        (lambda: nn.Sequential(Block()), lambda model: with_further_layers(model[0])),
    ],
    ids=["only rank 0 has a model", "rank 0 wraps the model", "rank 0 has further layers"],
)
def test_other_names_for_the_same_layers(
    ranks: Ranks, make: Callable[[], nn.Module], change: Callable[[nn.Module], nn.Module], debug_first: bool
) -> None:
    model = (make() if ranks.rank else change(make())).to(ranks.device)
    for debug in (debug_first, not debug_first, debug_first):
        with syncbn.debug() if debug else contextlib.nullcontext():
            model(torch.randn(4, 3, device=ranks.device)).sum().backward()


@pytest.mark.parametrize("num_ranks", [2, 3, 64, 1000, 2**14])
def test_signatures_are_exact(num_ranks: int) -> None:
    """The test for equal signatures has no rounding: not with the largest, and so with none."""
    largest = signatures.largest_signature(num_ranks)
    assert largest >= 2**11
    for s in (1, largest - 1, largest):
        squares = total = 0.0
        for _ in range(num_ranks):
            total, squares = total + s, squares + s * s
        assert num_ranks * squares == total * total
        other = s - 1 if s > 1 else 2  # one rank
        assert num_ranks * (squares - s * s + other * other) != (total - s + other) ** 2


def test_places_and_steps_have_signatures_of_their_own() -> None:
    found = []
    for path in [f"blocks.{block}.{name}" for name in ("bn1", "bn2") for block in range(50)]:
        site = signatures.Signatures(2)
        site.sign_as(path)
        found += [site[key][1] for key in itertools.product(("forward", "backward"), (torch.float32, torch.bfloat16))]
    assert len(set(found)) == len(found)
    assert all(1 <= signature <= 2**25 for signature in found)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (("a.bn1", "a.bn1"), True),
        (("a.bn1", "a.bn2"), False),
        (("a.bn1", "model.a.bn1"), True),
        (("a.bn1", "aa.bn1"), False),
        (("bn1", "a.bn1", "b.bn1"), False),
        (("", "a.bn1"), True),  # a layer without a model
        (("", ""), True),
    ],
)
def test_paths_of_one_layer(paths: tuple[str, ...], expected: bool) -> None:
    assert layer_names.may_be_one_layer(paths) == layer_names.may_be_one_layer(paths[::-1]) == expected


@on_cpu
def test_one_rank_has_another_dtype(ranks: Ranks) -> None:
    """Whose statistics were added up without a word."""
    layer, x = layer_and_input(ranks)
    layer(x)
    expected = (
        r"have inputs of different dtypes.\nrank 0: in SyncBatchNorm forward, call 2, with an input of torch.bfloat16\n"
        r"ranks? 1.*: in SyncBatchNorm forward, call 2, with an input of torch.float32\nUse autocast on every rank"
    )
    with unchanged(layer), pytest.raises(RuntimeError, match=expected):
        layer(x if ranks.rank else x.bfloat16())
    with pytest.raises((TypeError, RuntimeError), match=r"expected a float16, .* input, got torch.int64"):
        layer(x if ranks.rank else x.long())


# Positions in the store.


def test_positions_in_the_store(ranks: Ranks) -> None:
    layer, x = layer_and_input(ranks)
    with reduction.reduction_of(None, Caller("this test"), x).other_collective("forward") as collective:
        pass
    wait = Waiting(collective)

    def require_all_are(what: str) -> None:
        dist.barrier()  # all have done it
        # a write takes its time
        where = report.where_all_are(wait, lambda found: all(one.words == what for one in found))
        dist.barrier()
        assert where.startswith(f"{ranks_in_words([*range(ranks.size)])}: {what}\n"), where

    require_all_are("in this test forward, call 1")
    layer(x)
    require_all_are("in SyncBatchNorm forward, call 1")
    layer.eval()(x)
    layer.eval()(x)
    require_all_are("in SyncBatchNorm forward, call 1; has called a layer in evaluation mode")
    layer.train()(x)
    require_all_are("in SyncBatchNorm forward, call 2")


def test_a_rank_knows_its_own_position(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a thread has written it."""
    layer, x = layer_and_input(ranks)
    layer(x)
    dist.barrier()
    monkeypatch.setattr(ThisRank, "write", lambda *_: None)
    with reduction.reduction_of(None, Caller("this test"), None).other_collective("unwritten") as collective:
        where = report.where_all_are(Waiting(collective))
    assert f"rank {ranks.rank}: in this test unwritten, call 1\n" in where
    dist.barrier()


def test_the_program_writes_at_first_calls_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread writes all else: a write may take as long as an all_reduce."""
    layer, x = layer_and_input(ranks)
    layer(x)
    written, write = [], ThisRank.write

    def watched(rank: ThisRank, key: str, text: str) -> None:
        written.append(threading.current_thread().name)
        write(rank, key, text)

    monkeypatch.setattr(ThisRank, "write", watched)
    for _ in range(3):
        layer(x).sum().backward()
        time.sleep(0.2)
    assert set(written) == {"syncbn.watchdog"}


def test_ranks_meet_by_the_store(ranks: Ranks) -> None:
    """A rank that does not come is waited for no longer than it takes, and may come later."""
    meet = functools.partial(observer.this_rank().meet, group=dist.group.WORLD)
    assert meet("all", seconds=10.0)
    start = time.monotonic()
    if ranks.rank == 0:
        assert not meet("alone", seconds=0.2)
    assert time.monotonic() - start < 5
    dist.barrier()
    if ranks.rank:
        assert meet("alone", seconds=10.0)
    assert meet("alone", seconds=10.0)  # the next time


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert text_exchange.by_rank([0, 1, 2], ["a", "b", "a"]) == "ranks 0, 2: a\nrank 1: b"


# Long waits.


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """Takes what has been logged."""
    caplog.set_level(logging.WARNING, "syncbn")

    def take() -> str:
        text = "\n".join(caplog.messages)
        caplog.clear()
        return text

    return take


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank warns when it has waited half a second."""
    monkeypatch.setattr(waiting, "FIRST_WARNING_SECONDS", 0.5)


@on_cpu
def test_a_long_wait_is_told(ranks: Ranks, said: Callable[[], str]) -> None:
    layer, x = layer_and_input(ranks)
    layer(x)
    guard = Guard()
    guard.first_warning_seconds = 0.5
    with guarded_by(guard):
        if ranks.rank == 0:
            layer.eval()(x)
            time.sleep(3)
        layer.train()(x)
    text = said()
    expected = rf"rank {ranks.rank} has waited \d+ s for others\.\nrank 0: after .*; has called a layer in evaluation"
    assert re.search(expected, text) if ranks.rank else not text


def forward_and_backward(model: nn.Module) -> None:
    model(torch.randn(4, 3)).sum().backward()


# What comes before a collective outside of the layers, and the collective.
ELSEWHERE: dict[str, Callable[[], Callable[[], object]]] = {
    "barrier": lambda: dist.barrier,
    "first DDP": lambda: functools.partial(DistributedDataParallel, nn.Linear(3, 3)),
    "buffers": lambda: functools.partial(DistributedDataParallel(Block()), torch.randn(4, 3)),
    "gradients": lambda: functools.partial(forward_and_backward, DistributedDataParallel(nn.Linear(3, 3))),
    "exchanged": lambda: functools.partial(syncbn.assert_synced, nn.BatchNorm1d(3)),
}


@pytest.mark.two_ranks
@on_cpu
@pytest.mark.parametrize("kind", ELSEWHERE)
@pytest.mark.usefixtures("impatient")
def test_a_long_wait_elsewhere_is_told(ranks: Ranks, said: Callable[[], str], kind: str) -> None:
    layer, x = layer_and_input(ranks)
    layer(x)
    collective = ELSEWHERE[kind]()
    if ranks.rank == 0:
        time.sleep(2)
    collective()
    text = said()
    expected = (
        rf"rank {ranks.rank} has waited \d+ s for others, at \w+.py:\d+ in a collective outside of syncbn's layers.\n"
        r"ranks 0-1: after SyncBatchNorm forward, call 1\nEvery rank must"
    )
    assert re.search(expected, text) if ranks.rank else not text, text
    dist.barrier()  # all have read the positions


@pytest.mark.two_ranks
@on_cpu
@pytest.mark.usefixtures("impatient")
def test_other_waits_are_not_told(ranks: Ranks, said: Callable[[], str]) -> None:
    """Of data, in a hook of backward, in many short collectives, in evaluation: all longer than the patience."""
    layer, x = layer_and_input(ranks)
    y = layer(x.requires_grad_())
    with contextlib.suppress(queue.Empty):
        queue.SimpleQueue[None]().get(timeout=1)
    y.register_hook(lambda _: time.sleep(1))
    y.sum().backward()
    for _ in range(100):
        dist.barrier()
        time.sleep(0.01)
    end = torch.tensor(time.monotonic() + 1)
    dist.broadcast(end, 0)
    while time.monotonic() < end:
        layer.eval()(x)
    dist.barrier()
    assert not said()


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:94"), True),
        (RuntimeError("Trying to backward through the graph a second time"), False),
        (OSError("/data/gloo/1.png"), False),
        (RuntimeError("syncbn: a collective failed on rank 0: [/gloo/gloo/transport/tcp/pair.cc:553]"), False),
    ],
)
def test_errors_of_collectives(error: Exception, is_one: bool) -> None:
    """Also as the cause of another's error, and of ours never."""
    for outer, expected in ((None, is_one), (ValueError("training failed"), is_one), (RuntimeError("syncbn: "), False)):
        try:
            if outer is None:
                raise error
            raise outer from error
        except (RuntimeError, OSError, ValueError):
            assert process_state.a_collective_failed() is expected
    assert not process_state.a_collective_failed()


# On a GPU the host does not wait; here it is played by an event that a test holds.


class HeldEvent:
    """As torch.cuda.Event."""

    happened = False

    def query(self) -> bool:
        return self.happened


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[HeldEvent | None]:
    """The last is behind the next all_reduce; the tensors say that they are on a GPU."""
    given: list[HeldEvent | None] = [HeldEvent()]
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(watchdog, "event_behind", lambda device: given[-1])
    return given


def all_reduce(name: str) -> None:
    reduction.reduction_of(None, Caller(name), None).total(torch.zeros(4, dtype=torch.float64), "forward")


@pytest.mark.two_ranks
@on_cpu
@pytest.mark.usefixtures("impatient")
def test_a_long_wait_of_the_gpu_is_told(ranks: Ranks, said: Callable[[], str], events: list[HeldEvent | None]) -> None:
    """The oldest unfinished all_reduce is named, though the host has gone on; nothing once all are finished."""
    finished, held, last = (HeldEvent() for _ in range(3))
    finished.happened = True
    for name, event in {"first": finished, "second": held, "third": last}.items():
        events.append(event)
        all_reduce(name)
    time.sleep(1.2)
    text = said()
    expected = (
        rf"rank {ranks.rank} has waited \d s for others, in second forward, call 1 on the GPU, .*\n"
        r"ranks 0-1: in third forward, call 1\n"
    )
    assert re.search(expected, text), text
    held.happened = last.happened = True
    said()
    time.sleep(1.2)
    assert not said()
    dist.barrier()


@on_cpu
@pytest.mark.usefixtures("impatient")
def test_no_event_is_asked_while_a_graph_is_captured(
    ranks: Ranks, said: Callable[[], str], events: list[HeldEvent | None]
) -> None:
    asked = []
    all_reduce("warm-up")
    events[-1].query = lambda: bool(asked.append(True))
    events.append(None)  # as while capturing
    all_reduce("captured")
    time.sleep(1)
    assert not asked
    assert not said()
    dist.barrier()


def test_an_event_is_asked_on_its_own_gpu_and_beside_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever thread: torch's own query sets neither the device nor the mode."""
    current, mode = [0], [0]  # cudaStreamCaptureModeGlobal: other threads' captures fail

    class Event:
        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            assert current[-1] == 3, "a context is made on another GPU"
            assert mode == [1], "the capture of another thread fails"
            return True

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    def exchange(pointer: Any) -> None:
        assert current[-1] == 3, "a context is made on another GPU"
        pointer._obj.value, mode[0] = mode[0], pointer._obj.value

    monkeypatch.setattr(torch_private, "_exchange_capture_mode", lambda: exchange)
    with mock.patch.multiple(
        torch.cuda, Event=Event, device=on, current_stream=lambda _: None, is_current_stream_capturing=lambda: False
    ):
        assert waiting.event_behind(torch.device("cuda", 3)).query()
    assert current == mode == [0]


def test_an_error_of_the_gpu_is_told_as_it_is(ranks: Ranks) -> None:
    """It comes out of the all_reduce because the host waits there first; the ranks do not differ."""
    layer, x = syncbn.SyncBatchNorm(3), torch.randn(2, 3)
    layer(x)
    collective = reduction.reduction_of(None, layer, x).other_collective("forward")
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access") as raised, collective:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert "older than SyncBatchNorm forward, call 2" in raised.value.__notes__[0]


def test_a_gpu_that_is_behind_does_not_wait() -> None:
    """The host may go on long before it: the time counts from when the all_reduce before has finished."""
    on_gpu, events = waiting.OnGpu(), [HeldEvent() for _ in range(3)]
    for event in events:
        on_gpu.add(waiting.Wait(None, Position("0", 1), number=1, start=-1e9), event)
    first = on_gpu.oldest()
    assert first is not None
    assert first.is_long()
    events[0].happened = True
    second = on_gpu.oldest()
    assert second is not None
    assert second is not first
    assert not second.is_long()


# NaN and infinity.


@pytest.mark.parametrize(
    "debug", [pytest.param(False, marks=on_cpu, id="by itself"), pytest.param(True, id="by all, in debug mode")]
)
@pytest.mark.parametrize(
    ("bad", "mask"),
    [(torch.nan, None), (torch.inf, None), (torch.nan, torch.ones(2).bool())],
    ids=["NaN", "infinity", "NaN on a side road"],
)
def test_the_rank_of_a_nan_is_named(ranks: Ranks, bad: float, mask: Tensor | None, debug: bool) -> None:
    """Once, and by no rank to which it comes by the statistics alone. It is no error: as in torch, all becomes NaN."""
    layer, last = syncbn.SyncBatchNorm(3, device=ranks.device), ranks.size - 1
    x = torch.randn(2, 3, device=ranks.device)
    if ranks.rank == last:
        x[0, 1] = bad
    x.requires_grad_()
    mask = None if mask is None else mask.to(ranks.device)
    with warnings.catch_warnings(record=True) as caught, syncbn.debug() if debug else contextlib.nullcontext():
        warnings.simplefilter("always")
        for _ in range(2):
            y = layer(x, mask=mask)
            y.sum().backward()
    messages = [str(one.message) for one in caught]
    if debug:
        assert messages[0] == f"syncbn: NaN or infinity in SyncBatchNorm forward, call 1 on rank {last}"
    else:
        expected = f"syncbn: NaN or infinity in the input of SyncBatchNorm forward, call 1 on rank {ranks.rank}; "
        assert [one[: len(expected)] for one in messages] == [expected] * (ranks.rank == last)
        assert all("Look at this rank's batch first" in one for one in messages)
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2]].isfinite().all()
    assert layer.num_batches_tracked == 2
    assert layer.running_var.isnan().tolist() == [False, True, False]


# Debug mode.


def test_debug_mode_changes_no_result(ranks: Ranks) -> None:
    results = []
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    for context in (contextlib.nullcontext(), syncbn.debug()):
        layer, leaf = syncbn.SyncBatchNorm(3).to(ranks.device), x.clone().requires_grad_()
        with context:
            layer(leaf).pow(3).sum().backward()
        results.append((leaf.grad, layer.running_var, layer.weight.grad))
    assert all(map(torch.equal, *results))
    assert not reduction.guards


def test_debug_mode_in_groups_of_some_ranks(ranks: Ranks) -> None:
    """torch names a group made by its members alone by how many groups a rank is in, which differs here."""
    dist.new_group([0])
    x = torch.randn(4, 3, device=ranks.device)
    with syncbn.debug():
        for size in (None, 1 if ranks.size % 2 else 2):
            syncbn.SyncBatchNorm(3, process_group=size, device=ranks.device)(x).sum().backward()


@pytest.mark.parametrize(
    ("channels", "dtype"), [(4, torch.float32), (3, torch.float64)], ids=["channels: gloo would abort", "dtype"]
)
def test_debug_mode_names_the_difference(ranks: Ranks, channels: int, dtype: torch.dtype) -> None:
    faulty, x = layer_and_input(ranks)
    if ranks.rank == 0:
        options = {"device": ranks.device, "dtype": dtype}
        faulty, x = syncbn.SyncBatchNorm(channels, **options), torch.randn(2, channels, **options)
    over = f"over {ranks_in_words([*range(ranks.size)])}"
    expected = (
        rf"rank 0: in SyncBatchNorm forward, call 1: {channels} channels, {dtype}, {over}\n"
        rf"ranks? 1.*: 3 channels, torch.float32, {over}"
    )
    with syncbn.debug(), unchanged(faulty), pytest.raises(RuntimeError, match=expected):
        faulty(x)
    layer, x = layer_and_input(ranks)
    with syncbn.debug():
        layer(x)


@pytest.mark.compiles
def test_debug_mode_runs_compiled_modules_uncompiled(ranks: Ranks, doing: list[str]) -> None:
    layer, x = layer_and_input(ranks)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    compiled(x)
    assert not doing
    with syncbn.debug():
        compiled(x)
    assert doing == ["SyncBatchNorm forward, call 1"]
