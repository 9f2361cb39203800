"""Tests that a fault which a GPU finds raises on every rank in a later call. A CPU plays the GPU."""

import contextlib
import copy
import gc
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import voting
from jobs import wait_until
from mixtures import MIXTURES, Model, X
from played_gpu import play
from torch import Tensor
from training import CountCollectives, preserved_state
from voting import Ranks, Reports

import syncbn
from syncbn.kernels.interface import ENDED, FAULT, RANKS_DIFFER
from syncbn.ranks import calls, status, watchdog
from syncbn.ranks.report import RanksDifferError

pytestmark = [
    pytest.mark.two_ranks,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU plays the GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),  # NumPy's, in the interpreter
]


@pytest.fixture
def gpu(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    yield play(monkeypatch)
    watchdog.this_rank().gpu_statuses.clear()


@pytest.fixture
def model(gpu: SimpleNamespace) -> Model:
    model = Model()
    model(X).sum().backward()
    return model


def statuses(layer: syncbn.SyncBatchNorm) -> dict[int | None, status.StreamStatus]:
    """Return the status of the layer's group on each stream. The key None is for a stream that captures a graph."""
    streams = status.status_of(layer._syncbn_site.group_state).streams
    return {stream: stream_status for (_, stream), stream_status in streams.items()}


def error_text(call: Callable[[], object], error: type[Exception] = RanksDifferError) -> str:
    """Return the text and the notes of the error, which `call` must raise each time."""
    texts = []
    for _ in range(2):
        with pytest.raises(error) as raised:
            call()
        assert raised.type is error
        texts.append("\n".join((str(raised.value), *getattr(raised.value, "__notes__", ()))))
    assert texts[0] == texts[1]
    return texts[0]


# Faults.


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_in_different_calls_raise_at_the_next_call(ranks: Ranks, model: Model, name: str) -> None:
    *calls_of_ranks, expected = MIXTURES[name]
    y, other = model.bn2(X), model.bn2(2 * X)
    with preserved_state(model):
        with contextlib.suppress(RanksDifferError):  # Also the second all_reduce of a call may raise.
            calls_of_ranks[ranks.rank](model, y, other)
        text = error_text(lambda: model.bn1(X))
    assert re.search(expected.replace("OTHERS", "rank 1"), text), text
    assert re.search(r"\nThe results of bn\d .*, call \d and of all later calls are invalid", text), text


def test_backwards_of_different_calls_raise(ranks: Ranks, model: Model) -> None:
    """Ranks may count calls differently, for example if a rank alone has raised errors."""
    model.bn1._syncbn_site.num_calls += 7 * ranks.rank
    for order in ([0, 1], [1, 0], [ranks.rank]):
        losses = [model.bn1(X).square().sum() for _ in range(2)]
        for index in order:
            losses[index].backward()
    assert "the ranks differentiate different calls of a layer" in error_text(lambda: model(X))


def test_a_model_that_a_single_rank_reloads_raises_and_the_remedy_is_named(ranks: Ranks, model: Model) -> None:
    """On a GPU the ranks cannot agree on a new number, so the job stops."""
    reloaded = copy.deepcopy(model) if ranks.rank else model
    reloaded(X, "bn1")
    text = error_text(lambda: reloaded(X))
    assert "rank 0: in bn1 forward, call 2" in text
    assert "rank 1: in bn1 forward, call 1" in text
    assert text.count("set SYNCBN_CHECKS=0") == 1


@pytest.mark.parametrize("collecting_rank", [0, 1])
def test_models_that_ranks_collect_at_different_times_are_not_a_fault(
    ranks: Ranks, gpu: SimpleNamespace, collecting_rank: int
) -> None:
    """The models are in reference cycles. No instance number is used twice."""
    group = dist.new_group()
    for _ in range(3):
        model = Model(group)
        vars(model)["cycle"] = [model]
        for _ in range(2):
            model(X).sum().backward()
        if ranks.rank == collecting_rank:
            del model
            gc.collect()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [(X[:, :2], ValueError, "expected 3 channels"), (X.cfloat(), TypeError, "expected a float16, bfloat16")],
    ids=["channels", "dtype"],
)
def test_a_bad_argument_of_one_rank_raises_on_the_other_rank_later(
    ranks: Ranks, model: Model, bad: Tensor, error: type[Exception], message: str
) -> None:
    """The next call may be a backward."""
    y = model(X)
    with pytest.raises(error, match=f"^bn1: {message}") if ranks.rank else contextlib.nullcontext():
        model.bn1(bad if ranks.rank else X)
    text = error_text(lambda: y.sum().backward(retain_graph=True), error)
    assert f"another rank failed in bn1 forward, call 3.\nrank 1: {error.__name__}: {message}" in text
    assert error_text(lambda: model(X), error) == text


@pytest.mark.parametrize("unsigned_ranks", [(0,), (0, 1)])
def test_without_signatures_only_a_bad_argument_raises(
    ranks: Ranks, gpu: SimpleNamespace, sign_nothing: Callable[[], None], unsigned_ranks: tuple[int, ...]
) -> None:
    if ranks.rank in unsigned_ranks:
        sign_nothing()
    model = Model()
    model(X).sum().backward()
    (model.bn2 if ranks.rank else model.bn1)(X).sum().backward()
    model(X)
    with pytest.raises(TypeError) if ranks.rank == 0 else contextlib.nullcontext():
        model.bn2(X.cfloat() if ranks.rank == 0 else X)
    assert "rank 0: TypeError: expected a float16" in error_text(lambda: model(X), TypeError)


def test_a_single_value_per_channel_raises(ranks: Ranks, model: Model) -> None:
    """sync_batch_stats accepts a single value."""
    message = "Expected more than 1 value per channel when training, got 1 over all ranks"
    x = X[: 1 - ranks.rank]
    assert syncbn.functional.sync_batch_stats(x, model.bn1.process_group)[2] == 1
    model.bn1(x)
    assert f"{message} in bn1 forward, call 2." in error_text(lambda: model.bn2(X), ValueError)


@pytest.mark.parametrize(
    ("bad", "mode"),
    [(torch.nan, contextlib.nullcontext), (torch.inf, contextlib.nullcontext), (torch.nan, CountCollectives)],
)
def test_a_rank_with_a_nan_warns_once(ranks: Ranks, model: Model, bad: float, mode: Callable[[], Any]) -> None:
    """A later fault is still detected. Under a dispatch mode the kernels are dispatched."""
    x = torch.randn(4, 3)
    x[0, 1] = bad if ranks.rank else 0
    with warnings.catch_warnings(record=True) as caught, mode():
        warnings.simplefilter("always")
        for _ in range(2):
            model.bn1(x)
            wait_until(lambda: ranks.rank == 0 or any("syncbn" in str(warning.message) for warning in caught))
        time.sleep(0.3)
    texts = [str(warning.message) for warning in caught if " on rank " in str(warning.message)]
    assert texts == ["syncbn: NaN or infinity in the input of bn1 forward, call 2 on rank 1."] * ranks.rank
    assert model.bn1.running_mean.isfinite().tolist() == [True, False, True]
    (model.bn1 if ranks.rank else model.bn2)(X)
    error_text(lambda: model.bn1(X))


def test_dispatched_kernels_update_no_running_statistics_after_a_fault(ranks: Ranks, model: Model) -> None:
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    before = copy.deepcopy(buffers)
    with CountCollectives():
        (model.bn1 if ranks.rank else model.bn2)(X)
    error_text(lambda: model(X))
    torch.testing.assert_close(buffers, before, rtol=0, atol=0)


# Groups, streams and CUDA graphs.


def test_a_fault_in_a_replay_raises_at_the_next_eager_call(ranks: Ranks, model: Model) -> None:
    """A captured graph stores the layer and the pass instead of a sequence number."""
    layer = model.bn1 if ranks.rank else model.bn2
    number = status.captured_sequence_number(layer._syncbn_site, "backward")
    statuses(layer)[None].words[FAULT] = number * 4 + RANKS_DIFFER
    text = error_text(lambda: model(X))
    assert "rank 0: in bn2 backward, in a CUDA graph" in text
    assert "rank 1: in bn1 backward, in a CUDA graph" in text
    assert "The results of bn" in text


def test_a_capturing_stream_uses_the_status_of_another_stream(ranks: Ranks, gpu: SimpleNamespace) -> None:
    """Nothing may be allocated during a capture. Without another stream no fault is stored."""
    layer = Model().bn1
    for gpu.stream in (None, 7, None):
        layer(X).sum().backward()
    assert [*statuses(layer)] == [7, None]
    stream_status = statuses(layer)[7]
    assert [begun.sequence_number for begun in stream_status.recent] == [3, 4]
    assert not stream_status.words[FAULT]


def test_all_ranks_raise_the_earlier_of_two_faults(
    ranks: Ranks, model: Model, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults are in two streams, which the ranks use in different orders afterwards."""
    # The watchdog, which polls once a second, must not find the first fault before the second.
    monkeypatch.setattr(status.StreamStatus, "poll", lambda own_status, is_last=False: None)
    for gpu.stream in (5, 7):
        model(X, f"bn{1 + (ranks.rank if gpu.stream == 5 else 1 - ranks.rank)}")
    for gpu.stream in (5, 7, 0) if ranks.rank else (7, 5, 0):
        text = error_text(lambda: model(X))
        assert "\nrank 0: in bn1 forward, call 2\nrank 1: in bn2 forward, call 2\n" in text


def test_a_fault_ends_a_single_group(ranks: Ranks, model: Model) -> None:
    """A group of one rank has no status."""
    other, single_rank = Model(), syncbn.SyncBatchNorm1d(3, process_group=1)
    (model.bn1 if ranks.rank else model.bn2)(X)
    error_text(lambda: model(X))
    for _ in range(3):
        other(X).sum().backward()
    assert single_rank(X).isfinite().all()
    assert single_rank._syncbn_site is None
    assert statuses(other.bn1).keys() == {0, None}


def test_the_status_of_a_destroyed_group_is_released_without_its_memory(ranks: Ranks, model: Model) -> None:
    """Queued kernels may still write to the status words."""
    rank, memory_before, before = watchdog.this_rank(), len(status._memory), len(watchdog.this_rank().gpu_statuses)
    old = weakref.ref(statuses(model.bn1)[None])
    dist.destroy_process_group(model.bn1.process_group)
    del model.bn1, model.bn2
    gc.collect()
    wait_until(lambda: len(rank.gpu_statuses) == before - 1)
    wait_until(lambda: (gc.collect(), old() is None)[1])
    assert len(status._memory) == memory_before


@pytest.mark.parametrize("num_cached_calls", [0, 1])
def test_an_error_before_the_all_reduce_is_recorded(
    ranks: Ranks, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, num_cached_calls: int
) -> None:
    """Ranks that wait for this rank report the error. (Here all ranks fail, so no rank waits.)"""
    layer = Model().bn1
    for _ in range(num_cached_calls):
        layer(X)
    gpu.stream = 7
    monkeypatch.setattr(calls, "StreamStatus", mock.Mock(side_effect=RuntimeError("no pinned memory")))
    with pytest.raises(RuntimeError, match="no pinned memory"):
        layer(X)
    assert watchdog.this_rank().position().error == "has raised RuntimeError: no pinned memory"


# The watchdog.


def test_the_watchdog_logs_a_fault_once_if_no_call_follows(
    ranks: Ranks, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """The program may wait in torch.cuda.synchronize()."""
    (model.bn1 if ranks.rank else model.bn2)(X)
    wait_until(lambda: "in bn2 forward, call 2" in caplog.text)
    time.sleep(0.3)
    assert caplog.text.count(f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n") == 1
    error_text(lambda: model(X))


@pytest.mark.parametrize("uses_default_group", [True, False])
def test_the_watchdog_logs_a_fault_of_the_last_step_when_the_group_ends(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, uses_default_group: bool
) -> None:
    play(monkeypatch, poll_seconds=1000.0)
    voting.world.replace_group()
    model = Model()
    if uses_default_group:
        model.bn1.process_group = model.bn2.process_group = None
    model(X).sum().backward()
    (model.bn1 if ranks.rank else model.bn2)(X)
    voting.world.destroy_groups()
    wait_until(lambda: f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n" in caplog.text)
    assert "rank 0: in bn2 forward, call 2\nrank 1: in bn1 forward, call 2\n" in caplog.text
    voting.world.create_group()


def test_the_error_names_a_rank_that_does_not_answer(
    ranks: Ranks, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, answer_seconds=0.5)
    if ranks.rank == 0:
        statuses(model.bn1)[None].words[FAULT] = model.bn1._syncbn_site.group_state.num_collectives * 4 + RANKS_DIFFER
        text = error_text(lambda: model(X))
        assert "rank 0: in bn1 backward, call 1\nrank 1: has not answered within 0.5 s\nWhere the ranks are" in text


def test_a_long_wait_on_the_gpu_is_reported(ranks: Ranks, gpu: SimpleNamespace, reports: Reports) -> None:
    """The report names the oldest unfinished all_reduce, even if the host is ahead."""
    model = Model()
    model(X)
    y, stream_status = model(X), statuses(model.bn1)[None]
    # The GPU has not reached the last two all_reduces.
    stream_status.words[ENDED], stream_status._oldest = stream_status.words[ENDED] - 2, None
    expected = (
        rf"rank {ranks.rank} has waited \d+ s for others, in bn1 forward, call 2 on the GPU; .*\n"
        r"ranks 0-1: in bn2 forward, call 2(; written \S+ s ago)?\n"
    )
    reports.wait_for(expected, ranks.rank)
    dist.barrier()  # all ranks have read the positions
    y.sum().backward()
    assert stream_status.unfinished() is None


def test_a_wait_on_the_gpu_begins_when_the_previous_all_reduce_has_ended(model: Model) -> None:
    """The host may be far ahead of the GPU."""
    recent, last = statuses(model.bn1)[None].recent, statuses(model.bn1)[None].words[ENDED]
    stream_status = status.StreamStatus(model.bn1._syncbn_site, torch.device("cpu"), stream=9)
    watchdog.this_rank().gpu_statuses.discard(stream_status)  # otherwise the watchdog would change it, too
    stream_status.recent.extend(recent)
    for ended, oldest in ((last - 2, last - 1), (last - 2, last - 1), (last - 1, last)):
        for begun in recent:
            begun.start = -1e9
        stream_status.words[ENDED] = ended
        assert stream_status.unfinished().sequence_number == oldest
        assert (stream_status.unfinished().seconds() > 1e8) == (oldest < last)
    stream_status.words[ENDED] = last
    assert stream_status.unfinished() is None


def test_the_watchdog_logs_an_error_once_and_continues(
    ranks: Ranks, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    class FailingStatus:
        num_polls = 0

        def poll(self) -> None:
            self.num_polls += 1
            raise RuntimeError("the store is odd")

    failing, rank = FailingStatus(), watchdog.this_rank()
    rank.gpu_statuses.add(failing)
    wait_until(lambda: failing.num_polls > 3)
    rank.gpu_statuses.discard(failing)
    wait_until(lambda: rank.written_position == rank.position())
    text = f"syncbn: the watchdog of rank {ranks.rank} has failed once, and goes on: RuntimeError: the store is odd"
    assert caplog.text.count(text) == caplog.text.count("syncbn: ") == 1
