"""What a rank knows of where it and the others are; what it makes of that is in test_faults.py."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import queue
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from voting import Ranks

import syncbn
from syncbn import torch_private
from syncbn.diagnosis import layer_names, observer, process_state, report, signatures, waiting, watchdog
from syncbn.diagnosis.this_rank import Position, Site, ThisRank
from syncbn.diagnosis.waiting import Waiting
from syncbn.distributed import reduction, text_exchange
from syncbn.distributed.reduction import Caller, EagerReduction, Guard, guarded_by

# torch's own in Dynamo
ignores_deprecation = pytest.mark.filterwarnings("ignore::DeprecationWarning")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="signatures are for CPUs")


class Block(nn.Module):
    """Two layers under names, one of them in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = syncbn.SyncBatchNorm1d(3)
        self.tail = nn.ModuleList([syncbn.SyncBatchNorm1d(3)])

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return self.bn1(x) if skip else self.tail[0](self.bn1(x))


@pytest.fixture
def doing() -> Iterator[list[str]]:
    """What each all_reduce is said to be for."""
    seen: list[str] = []

    class Recorder(Guard):
        def before_all_reduce(self, called: EagerReduction, payload: Tensor, pass_name: str) -> None:
            assert isinstance(called.site, Site)
            seen.append(called.site.doing(called.call, pass_name))

    with guarded_by(Recorder()):
        yield seen


def test_names_passes_and_calls(ranks: Ranks, doing: list[str]) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), Block()).to(ranks.device))
    x = torch.randn(4, 3, device=ranks.device)
    for _ in range(2):
        model(x).sum().backward()
    assert doing == [
        f"{name} {step}, call {call}"
        for call in (1, 2)
        for name, step in (
            ("1.bn1", "forward"),
            ("1.tail.0", "forward"),
            ("1.tail.0", "backward"),
            ("1.bn1", "backward"),
        )
    ]


def test_the_first_position_on_a_group_is_written_at_once(ranks: Ranks) -> None:
    """A rank may be aborted in that all_reduce."""
    layer = syncbn.SyncBatchNorm(3, process_group=dist.new_group(), device=ranks.device)
    layer(torch.randn(4, 3, device=ranks.device))
    written = torch_private.default_store().get(f"syncbn/{ranks.rank}/position").decode()
    assert "SyncBatchNorm forward, call 1" in written


def test_names_without_a_model(ranks: Ranks, doing: list[str]) -> None:
    x = torch.randn(4, 3, device=ranks.device, requires_grad=True)
    syncbn.SyncBatchNorm(3, device=ranks.device)(x)
    (gradient,) = torch.autograd.grad(
        syncbn.functional.sync_batch_norm(x, None, None, training=True).pow(3).sum(), x, create_graph=True
    )
    gradient.pow(2).sum().backward()
    syncbn.functional.sync_batch_norm_many([x, x])
    steps = [text.partition(",")[0] for text in doing]
    assert steps[:2] == ["SyncBatchNorm forward", "sync_batch_norm forward"]
    assert set(steps[2:-1]) == {"sync_batch_norm backward", "sync_batch_norm double backward"}
    assert steps[-1] == "sync_batch_norm_many forward"


@on_cpu
def test_different_layers_with_as_many_channels(ranks: Ranks) -> None:
    """What would otherwise mix the statistics of two layers in silence."""
    model, x = Block(), torch.randn(4, 3)
    model(x)
    before = copy.deepcopy(model.tail[0].state_dict())
    faulty = ranks.rank == ranks.size - 1
    layer = model.bn1 if faulty else model.tail[0]
    others = "rank 0" if ranks.size == 2 else f"ranks 0-{ranks.size - 2}"
    expected = rf"{others}: in tail.0 forward, call 2\nrank {ranks.size - 1}: in bn1 forward, call 2\nEvery rank must"
    with pytest.raises(RuntimeError, match=expected):
        layer(x)
    for name, buffer in model.tail[0].state_dict().items():
        assert torch.equal(buffer, before[name]), name
    dist.barrier()  # all have read the positions
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
    layer = model.tail[0] if ranks.rank else model.bn1
    expected = (
        r"a collective failed on rank \d .*\nrank 0: in bn1 forward, call 2\n(.*\n)+The process group says: timed out"
    )
    with pytest.raises(RuntimeError, match=expected):
        layer(x)
    dist.barrier()


@on_cpu
def test_forward_and_backward_at_once(ranks: Ranks) -> None:
    model, x = Block(), torch.randn(4, 3)
    y = model(x, skip=True)
    call = y.sum().backward if ranks.rank else lambda: model(x, skip=True)
    with pytest.raises(RuntimeError, match=r"rank 0: in bn1 forward, call 2\nranks? 1(-\d)?: in bn1 backward, call 1"):
        call()


@pytest.mark.parametrize("debug", [False, True])
def test_a_layer_without_a_model_on_one_rank(ranks: Ranks, debug: bool) -> None:
    layer = syncbn.SyncBatchNorm2d(3) if ranks.rank else syncbn.SyncBatchNorm(3)
    model = nn.Sequential(layer) if ranks.rank == 0 else layer
    with syncbn.debug() if debug else contextlib.nullcontext():
        for _ in range(2):
            model.to(ranks.device)(torch.randn(4, 3, 1, 1, device=ranks.device)).sum().backward()


def test_one_rank_has_further_batch_norms(ranks: Ranks) -> None:
    model = nn.Sequential(Block())
    if ranks.rank == 0:
        model[0].metric = nn.BatchNorm1d(3)
        model[0].add_module("another", Block())
    model.to(ranks.device)(torch.randn(4, 3, device=ranks.device)).sum().backward()


def test_one_rank_wraps_the_model(ranks: Ranks) -> None:
    """Its names are longer, and it is none the less in the same layers; in debug mode, too."""
    model = Block().to(ranks.device)
    outer = nn.Sequential(model) if ranks.rank == 0 else model
    x = torch.randn(4, 3, device=ranks.device)
    outer(x).sum().backward()
    with syncbn.debug():
        outer(x).sum().backward()


@pytest.mark.two_ranks
@on_cpu
@ignores_deprecation
def test_one_rank_is_compiled(ranks: Ranks) -> None:
    """As when its batches have too many sizes for Dynamo: it sends as much, and signs nothing."""
    own_group = dist.new_group()  # as compiled calls are not counted, and the later tests count
    layer, x = syncbn.SyncBatchNorm(3, process_group=own_group), torch.randn(4, 3, requires_grad=True)
    expected = layer(x)
    expected.sum().backward()
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if ranks.rank == 0 else layer
    actual = call(x)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()


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


def test_positions_in_the_store(ranks: Ranks) -> None:
    layer, x = syncbn.SyncBatchNorm(3).to(ranks.device), torch.randn(4, 3, device=ranks.device)
    with reduction.reduction_of(None, Caller("this test"), x).other_collective("forward") as collective:
        pass
    wait = Waiting(collective)

    def all_are(what: str) -> None:
        dist.barrier()  # all have done it
        where = report.where_all_are(
            wait, lambda found: all(one.words == what for one in found)
        )  # a write takes its time
        dist.barrier()
        assert where.startswith(f"ranks 0-{ranks.size - 1}: {what}\n"), where

    all_are("in this test forward, call 1")
    layer(x)
    all_are("in SyncBatchNorm forward, call 1")
    layer.eval()(x)
    layer.eval()(x)
    all_are("in SyncBatchNorm forward, call 1; has called a layer in evaluation mode")
    layer.train()(x)
    all_are("in SyncBatchNorm forward, call 2")


def test_a_rank_knows_its_own_position(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a thread has written it."""
    syncbn.SyncBatchNorm(3, device=ranks.device)(torch.randn(4, 3, device=ranks.device))
    dist.barrier()
    monkeypatch.setattr(ThisRank, "write", lambda *_: None)
    with reduction.reduction_of(None, Caller("this test"), None).other_collective("unwritten") as collective:
        where = report.where_all_are(Waiting(collective))
    assert f"rank {ranks.rank}: in this test unwritten, call 1\n" in where
    dist.barrier()


@on_cpu
def test_a_long_wait_is_told(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    layer, x = syncbn.SyncBatchNorm(3), torch.randn(4, 3)
    layer(x)
    impatient = Guard()
    impatient.first_warning_seconds = 0.5
    with guarded_by(impatient), caplog.at_level(logging.WARNING, "syncbn"):
        if ranks.rank == 0:
            layer.eval()(x)
            time.sleep(3)
        layer.train()(x)
    told = "\n".join(caplog.messages)
    if ranks.rank:
        assert re.search(
            rf"rank {ranks.rank} has waited \d+ s for others\.\nrank 0: after .*; has called a layer in evaluation",
            told,
        )
    else:
        assert not told


# Collectives outside of the layers.


def barrier(late: bool) -> None:
    be_late(late)
    dist.barrier()


def first_ddp(late: bool) -> None:
    be_late(late)
    DistributedDataParallel(nn.Linear(3, 3))


def buffers(late: bool) -> None:
    ddp = DistributedDataParallel(Block())
    be_late(late)
    ddp(torch.randn(4, 3))


def gradients(late: bool) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 3))
    y = ddp(torch.randn(4, 3))
    y.register_hook(lambda _: be_late(late))
    y.sum().backward()


def be_late(late: bool) -> None:
    if late:
        time.sleep(2)


def exchanged(late: bool) -> None:
    be_late(late)
    syncbn.assert_synced(nn.BatchNorm1d(3))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A rank warns when it has waited half a second outside of syncbn."""
    monkeypatch.setattr(waiting, "FIRST_WARNING_SECONDS", 0.5)
    caplog.set_level(logging.WARNING, "syncbn")
    return caplog


@pytest.mark.two_ranks
@on_cpu
@pytest.mark.parametrize("collective", [barrier, first_ddp, buffers, gradients, exchanged])
def test_a_long_wait_elsewhere_is_told(
    ranks: Ranks, impatient: pytest.LogCaptureFixture, collective: Callable[[bool], None]
) -> None:
    syncbn.SyncBatchNorm(3)(torch.randn(4, 3))
    collective(late=ranks.rank == 0)
    told = "\n".join(impatient.messages)
    if ranks.rank:
        assert re.search(
            rf"rank {ranks.rank} has waited \d+ s for others, at \w+.py:\d+ in a collective outside of syncbn's layers."
            r"\n"
            rf"ranks 0-{ranks.size - 1}: after SyncBatchNorm forward, call 1\nEvery rank must",
            told,
        ), told
    else:
        assert not told
    dist.barrier()  # all have read the positions


@pytest.mark.two_ranks
@on_cpu
def test_other_waits_are_not_told(ranks: Ranks, impatient: pytest.LogCaptureFixture) -> None:
    """Of data, in a hook of backward, in many short collectives, in evaluation: all longer than the patience."""
    layer, x = syncbn.SyncBatchNorm(3), torch.randn(4, 3, requires_grad=True)
    y = layer(x)
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
    assert not impatient.messages


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
def test_a_long_wait_of_the_gpu_is_told(
    ranks: Ranks, impatient: pytest.LogCaptureFixture, events: list[HeldEvent | None]
) -> None:
    """The oldest unfinished all_reduce is named, though the host has gone on; nothing once all are finished."""
    finished, held, last = (HeldEvent() for _ in range(3))
    finished.happened = True
    own_patience = Guard()
    own_patience.first_warning_seconds = 0.5
    with guarded_by(own_patience):
        for name, event in {"first": finished, "second": held, "third": last}.items():
            events.append(event)
            all_reduce(name)
    time.sleep(1.2)
    told = "\n".join(impatient.messages)
    expected = (
        rf"rank {ranks.rank} has waited \d s for others, in second forward, call 1 on the GPU, .*\n"
        rf"ranks 0-{ranks.size - 1}: in third forward, call 1\n"
    )
    assert re.search(expected, told), told
    held.happened = last.happened = True
    impatient.clear()
    time.sleep(1.2)
    assert not impatient.messages
    dist.barrier()


@on_cpu
def test_no_event_is_asked_while_a_graph_is_captured(
    ranks: Ranks, impatient: pytest.LogCaptureFixture, events: list[HeldEvent | None]
) -> None:
    own_patience = Guard()
    own_patience.first_warning_seconds = 0.5
    asked = []
    with guarded_by(own_patience):
        all_reduce("warm-up")
        held = events[-1]
        assert held is not None
        held.query = lambda: bool(asked.append(True))
        events.append(None)  # as while capturing
        all_reduce("captured")
        time.sleep(1)
    assert not asked
    assert not impatient.messages
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

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch_private, "_exchange_capture_mode", lambda: exchange)
    event = waiting.event_behind(torch.device("cuda", 3))
    assert event is not None
    assert event.query()
    assert current == mode == [0]


def test_an_error_of_the_gpu_is_told_as_it_is(ranks: Ranks) -> None:
    """It comes out of the all_reduce because the host waits there first; the ranks do not differ."""
    layer = syncbn.SyncBatchNorm(3)
    layer(torch.randn(2, 3))
    reduction_of_call = reduction.reduction_of(None, layer, torch.randn(2, 3))
    with (
        pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access") as raised,
        reduction_of_call.other_collective("forward"),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    assert "older than SyncBatchNorm forward, call 2" in raised.value.__notes__[0]


def test_a_gpu_that_is_behind_does_not_wait() -> None:
    """The host may go on long before it: the time counts from when the all_reduce before has finished."""
    on_gpu, events = waiting.OnGpu(), [HeldEvent() for _ in range(3)]
    for event in events:
        wait = waiting.Wait()
        wait.position, wait.start, wait.next_warning_seconds = Position("0", 1, ""), -1e9, 30.0
        on_gpu.add(wait, event)
    first = on_gpu.oldest()
    assert first is not None
    assert waiting.is_long(first)
    events[0].happened = True
    second = on_gpu.oldest()
    assert second not in (None, first)
    assert not waiting.is_long(second)


def test_the_program_writes_at_first_calls_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread writes all else: a write may take as long as an all_reduce."""
    layer, x = syncbn.SyncBatchNorm(3, device=ranks.device), torch.randn(4, 3, device=ranks.device)
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


def test_ranks_in_words() -> None:
    assert text_exchange.ranks_in_words([3]) == "rank 3"
    assert text_exchange.ranks_in_words([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert text_exchange.by_rank([0, 1, 2], ["a", "b", "a"]) == "ranks 0, 2: a\nrank 1: b"


# Debug mode.


def test_debug_mode_changes_no_result(ranks: Ranks) -> None:
    results = []
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(ranks.rank)).to(ranks.device)
    for debug in (False, True):
        layer, leaf = syncbn.SyncBatchNorm(3).to(ranks.device), x.clone().requires_grad_()
        if debug:
            with syncbn.debug():
                layer(leaf).pow(3).sum().backward()
        else:
            layer(leaf).pow(3).sum().backward()
        results.append((leaf.grad, layer.running_var, layer.weight.grad))
    assert all(map(torch.equal, *results))
    assert not reduction.guards


def test_debug_mode_beside_a_group_of_some_ranks(ranks: Ranks) -> None:
    """torch names a group made by its members alone by how many groups a rank is in, which differs here."""
    dist.new_group([0])
    with syncbn.debug():
        syncbn.SyncBatchNorm(3).to(ranks.device)(torch.randn(4, 3, device=ranks.device))


def test_debug_mode_in_a_group(ranks: Ranks) -> None:
    layer = syncbn.SyncBatchNorm(3, process_group=1 if ranks.size % 2 else 2).to(ranks.device)
    with syncbn.debug():
        layer(torch.randn(4, 3, device=ranks.device)).sum().backward()


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        ((3, torch.float32), (4, torch.float32), "4 channels, torch.float32"),  # gloo would abort
        ((3, torch.float32), (3, torch.float64), "3 channels, torch.float64"),
    ],
    ids=["channels", "dtype"],
)
def test_debug_mode_names_the_difference(
    ranks: Ranks, good: tuple[int, torch.dtype], bad: tuple[int, torch.dtype], text: str
) -> None:
    channels, dtype = bad if ranks.rank == 0 else good
    layer = syncbn.SyncBatchNorm(channels, dtype=dtype, device=ranks.device)
    before = copy.deepcopy(layer.state_dict())
    over = f"over ranks 0-{ranks.size - 1}"
    expected = (
        rf"rank 0: in SyncBatchNorm forward, call 1: {text}, {over}\nranks? 1.*: 3 channels, torch.float32, {over}"
    )
    with syncbn.debug(), pytest.raises(RuntimeError, match=expected):
        layer(torch.randn(2, channels, dtype=dtype, device=ranks.device))
    for name, buffer in layer.state_dict().items():
        assert torch.equal(buffer, before[name]), name
    with syncbn.debug():
        syncbn.SyncBatchNorm(3, device=ranks.device)(torch.randn(2, 3, device=ranks.device))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_debug_mode_names_the_rank_of_a_nan(ranks: Ranks, bad: float) -> None:
    layer, x = syncbn.SyncBatchNorm(3).to(ranks.device), torch.randn(2, 3, device=ranks.device)
    if ranks.rank == ranks.size - 1:
        x[0, 1] = bad
    with (
        syncbn.debug(),
        pytest.warns(UserWarning, match=rf"NaN or infinity in SyncBatchNorm .* on rank {ranks.size - 1}$"),
    ):
        y = layer(x)
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2]].isfinite().all()
    expected = nn.functional.batch_norm(torch.tensor([[bad], [0.0]]), None, None, training=True)
    assert expected.isnan().all()  # torch's policy


@on_cpu
@pytest.mark.parametrize(("bad", "mask"), [(torch.nan, None), (torch.inf, None), (torch.nan, torch.ones(2).bool())])
def test_the_rank_of_a_nan_says_so_once(ranks: Ranks, bad: float, mask: Tensor | None) -> None:
    """The others, to which it comes by the statistics alone, say nothing. It is no error. A mask takes a side road."""
    layer, x = syncbn.SyncBatchNorm(3), torch.randn(2, 3, requires_grad=True)
    if is_last := ranks.rank == ranks.size - 1:
        x.data[0, 1] = bad
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            y = layer(x, mask=mask)
            y.sum().backward()
    said = [str(one.message) for one in caught]
    expected = f"syncbn: NaN or infinity in the input of SyncBatchNorm forward, call 1 on rank {ranks.rank}; "
    assert [one[: len(expected)] for one in said] == [expected] * is_last
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2]].isfinite().all()
    assert layer.num_batches_tracked == 2
    assert layer.running_var.isnan().tolist() == [False, True, False]


@on_cpu
def test_one_rank_has_another_dtype(ranks: Ranks) -> None:
    """Whose statistics were added up without a word."""
    layer, x = syncbn.SyncBatchNorm(3), torch.randn(2, 3)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    expected = (
        r"have inputs of different dtypes.\nrank 0: in SyncBatchNorm forward, call 2, with an input of torch.bfloat16\n"
        r"ranks? 1.*: in SyncBatchNorm forward, call 2, with an input of torch.float32\nUse autocast on every rank"
    )
    with pytest.raises(RuntimeError, match=expected):
        layer(x if ranks.rank else x.bfloat16())
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


@on_cpu
def test_a_bad_dtype_on_one_rank_is_told_as_such(ranks: Ranks) -> None:
    layer, x = syncbn.SyncBatchNorm(3), torch.ones(2, 3)
    with pytest.raises((TypeError, RuntimeError), match=r"expected a float16, .* input, got torch.int64"):
        layer(x if ranks.rank else x.long())


def test_ranks_meet_by_the_store(ranks: Ranks) -> None:
    """A rank that does not come is waited for no longer than it takes, and may come later."""
    rank = observer.this_rank()
    world = dist.group.WORLD
    assert world is not None
    assert rank.meet("all", world, 10.0)
    is_first = ranks.rank == 0
    start = time.monotonic()
    if is_first:
        assert not rank.meet("alone", world, 0.2)
    assert time.monotonic() - start < 5
    dist.barrier()
    if not is_first:
        assert rank.meet("alone", world, 10.0)
    assert rank.meet("alone", world, 10.0)  # the next time


@pytest.mark.two_ranks
@ignores_deprecation
def test_debug_mode_runs_compiled_modules_uncompiled(ranks: Ranks, doing: list[str]) -> None:
    layer, x = syncbn.SyncBatchNorm(3).to(ranks.device), torch.randn(2, 3, device=ranks.device)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    compiled(x)
    assert not doing
    with syncbn.debug():
        compiled(x)
    assert doing == ["SyncBatchNorm forward, call 1"]
