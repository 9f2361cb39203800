"""Catches a fault of one rank on a GPU that the other ranks do not raise in a later call. A CPU plays the GPU."""

import contextlib
import copy
import gc
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import voting
from jobs import wait_until
from mixtures import MIXTURES, Model, X
from played_gpu import IS_INTERPRETED, Player, play
from torch import Tensor
from training import CountCollectives, unchanged
from voting import Ranks, Reports

import syncbn
from syncbn.kernels.interface import ENDED, FAULT, RANKS_DIFFER
from syncbn.ranks import calls, report, status, watchdog
from syncbn.ranks.report import RanksDifferError

pytestmark = [
    pytest.mark.two_ranks,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU plays the GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),  # NumPy's, in the interpreter
]


@pytest.fixture
def player(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Player]:
    yield play(monkeypatch)
    watchdog.this_rank().gpu_statuses.clear()


@pytest.fixture
def model(player: Player) -> Model:
    model = Model()
    model(X).sum().backward()
    dist.barrier()
    return model


@pytest.fixture
def use_stream(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Let the layers run on the stream with this number from now on; on None, which captures a CUDA graph."""
    return lambda stream: monkeypatch.setattr(calls.internals, "stream_handle", lambda device: stream)


def statuses(layer: syncbn.SyncBatchNorm) -> dict[int | None, status.StreamStatus]:
    """The status of the layer's group on each stream; None is the one that a capture borrows."""
    return {stream: one for (_, stream), one in status.status_of(layer._syncbn_site.group_state).streams.items()}


def text_of(call: Callable[[], object], error: type[Exception]) -> str:
    """Return the text of the error that `call` raises each time, with its notes."""
    with pytest.raises(error) as first:
        call()
    with pytest.raises(error) as again:
        call()
    assert (type(again.value), str(again.value)) == (type(first.value), str(first.value))
    return "\n".join((str(first.value), *getattr(first.value, "__notes__", ())))


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_that_mix_what_they_send_raise_at_the_next_call(ranks: Ranks, model: Model, name: str) -> None:
    *calls, expected = MIXTURES[name]
    y, other = model.bn2(X), model.bn2(2 * X)
    with unchanged(model):
        with contextlib.suppress(RanksDifferError):  # the second all_reduce of a call may raise
            calls[ranks.rank](model, y, other)
        text = text_of(lambda: model.bn1(X), RanksDifferError)
    assert re.search(expected.replace("OTHERS", "rank 1"), text), text
    assert re.search(r"\nThe results of bn\d .*, call \d and of all later calls are invalid", text), text
    dist.barrier()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [(X[:, :2], ValueError, "expected 3 channels"), (X.cfloat(), TypeError, "expected a float16, bfloat16")],
    ids=["channels", "dtype"],
)
def test_a_bad_argument_of_one_rank(
    ranks: Ranks, model: Model, bad: Tensor, error: type[Exception], message: str
) -> None:
    """The faulty rank raises at once, the other rank at its next call, which may be a backward."""
    y = model(X)
    with pytest.raises(error, match=f"^bn1: {message}") if ranks.rank else contextlib.nullcontext():
        model.bn1(bad if ranks.rank else X)
    text = text_of(lambda: y.sum().backward(retain_graph=True), error)
    assert f"another rank failed in bn1 forward, call 3.\nrank 1: {error.__name__}: {message}" in text
    assert text_of(lambda: model(X), error) == text


@pytest.mark.parametrize("unsigned", [(0,), (0, 1)])
def test_without_signatures(
    ranks: Ranks, player: Player, sign_nothing: Callable[[], None], unsigned: tuple[int, ...]
) -> None:
    """Ranks are not compared; a bad argument still raises on all."""
    if ranks.rank in unsigned:
        sign_nothing()
    model = Model()
    model(X).sum().backward()
    (model.bn2 if ranks.rank else model.bn1)(X).sum().backward()
    model(X)
    with pytest.raises(TypeError) if ranks.rank == 0 else contextlib.nullcontext():
        model.bn2(X.cfloat() if ranks.rank == 0 else X)
    assert "rank 0: TypeError: expected a float16" in text_of(lambda: model(X), TypeError)


def test_backwards_of_other_calls(ranks: Ranks, model: Model) -> None:
    """They are a fault. It is none that a rank has counted more calls, as after errors that it alone has raised."""
    if ranks.rank == 0:
        model.bn1._syncbn_site.num_calls += 7
    for order in ([0, 1], [1, 0], [ranks.rank]):
        losses = [model.bn1(X).square().sum() for _ in range(2)]
        for index in order:
            losses[index].backward()
    text = text_of(lambda: model(X), RanksDifferError)
    assert "the ranks differentiate different calls of a layer" in text


def test_one_value_per_channel(ranks: Ranks, model: Model) -> None:
    """With one rank the host knows the number of values and raises at once. sync_batch_stats accepts one value."""
    message = "Expected more than 1 value per channel when training, got 1 over all ranks"
    with pytest.raises(ValueError, match=message):
        syncbn.SyncBatchNorm1d(3, process_group=1)(X[:1])
    own = X[: 1 - ranks.rank]
    assert syncbn.functional.sync_batch_stats(own, model.bn1.process_group)[2] == 1
    model.bn1(own)
    assert f"{message} in bn1 forward, call 2." in text_of(lambda: model.bn2(X), ValueError)


@pytest.mark.parametrize(
    ("bad", "within"),
    [(torch.nan, contextlib.nullcontext), (torch.inf, contextlib.nullcontext), (torch.nan, CountCollectives)],
)
def test_the_rank_of_a_nan_warns_once(ranks: Ranks, model: Model, bad: float, within: Callable[[], Any]) -> None:
    """A NaN is no fault, and a later fault is still detected. Within a mode the layer takes the fallback."""
    x = torch.randn(4, 3)
    x[0, 1] = bad if ranks.rank else 0
    with warnings.catch_warnings(record=True) as caught, within():
        warnings.simplefilter("always")
        for _ in range(2):
            model.bn1(x)
            wait_until(lambda: ranks.rank == 0 or any("syncbn" in str(one.message) for one in caught))
        time.sleep(0.5)
    texts = [str(one.message) for one in caught if " on rank " in str(one.message)]
    assert texts == ["syncbn: NaN or infinity in the input of bn1 forward, call 2 on rank 1."] * ranks.rank
    assert model.bn1.running_mean.isfinite().tolist() == [True, False, True]
    (model.bn1 if ranks.rank else model.bn2)(X)
    text_of(lambda: model.bn1(X), RanksDifferError)


def test_no_running_statistics_move_after_a_fault_in_the_fallback(ranks: Ranks, model: Model) -> None:
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    before = copy.deepcopy(buffers)
    with CountCollectives():
        (model.bn1 if ranks.rank else model.bn2)(X)
    text_of(lambda: model(X), RanksDifferError)
    torch.testing.assert_close(buffers, before, rtol=0, atol=0)
    dist.barrier()


def test_a_fault_in_a_replay(ranks: Ranks, model: Model) -> None:
    """A captured graph stores the layer and the pass, not a number. The next eager call raises."""
    layer = model.bn1 if ranks.rank else model.bn2
    statuses(layer)[None].words[FAULT] = (
        status.captured_sequence_number(layer._syncbn_site, "backward") * 4 + RANKS_DIFFER
    )
    text = text_of(lambda: model(X), RanksDifferError)
    assert "rank 0: in bn2 backward, in a CUDA graph" in text
    assert "rank 1: in bn1 backward, in a CUDA graph" in text
    assert "The results of bn" in text


def test_a_capture_makes_no_status(ranks: Ranks, player: Player, use_stream: Callable[..., None]) -> None:
    """A stream that captures borrows the status of another stream. Without one nothing is recorded."""
    layer = Model().bn1
    for stream in (None, 7, None):
        use_stream(stream)
        layer(X).sum().backward()
    assert [*statuses(layer)] == [7, None]
    own_status = statuses(layer)[7]
    assert [begun.sequence_number for begun in own_status.recent] == [3, 4]  # not what a graph captures
    assert not own_status.words[FAULT]


@pytest.mark.parametrize("before", [0, 1])
def test_a_status_that_cannot_be_made(
    ranks: Ranks, player: Player, monkeypatch: pytest.MonkeyPatch, use_stream: Callable[..., None], before: int
) -> None:
    """The others wait for this rank, and their report has its error. (Here all ranks fail, and none waits.)"""
    layer = Model().bn1
    for _ in range(before):  # so that kernels are cached
        layer(X)
    use_stream(7)
    monkeypatch.setattr(calls, "StreamStatus", mock.Mock(side_effect=RuntimeError("no pinned memory")))
    with pytest.raises(RuntimeError, match="no pinned memory"):
        layer(X)
    assert watchdog.this_rank().position().error == "has raised RuntimeError: no pinned memory"
    dist.barrier()


def test_a_program_that_makes_no_later_call(ranks: Ranks, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """It may wait in torch.cuda.synchronize(). The watchdog logs the fault once."""
    (model.bn1 if ranks.rank else model.bn2)(X)
    wait_until(lambda: "in bn2 forward, call 2" in caplog.text)
    time.sleep(0.3)
    assert caplog.text.count(f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n") == 1
    text_of(lambda: model(X), RanksDifferError)


@pytest.mark.parametrize("over_all", [True, False])
def test_a_fault_of_the_last_step(
    ranks: Ranks, player: Player, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, over_all: bool
) -> None:
    """No later step raises it. The watchdog logs it when the group ends."""
    with monkeypatch.context() as patched:
        patched.setattr(watchdog, "POLL_SECONDS", 1000.0)
        voting.world.make_anew()
        model = Model()
        if over_all:
            model.bn1.process_group = model.bn2.process_group = None
        model(X).sum().backward()
        (model.bn1 if ranks.rank else model.bn2)(X)
        voting.world.leave()
    text = f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n"
    wait_until(lambda: text in caplog.text)
    assert "rank 0: in bn2 forward, call 2\nrank 1: in bn1 forward, call 2\n" in caplog.text
    voting.world.enter()


def test_a_rank_that_does_not_answer(ranks: Ranks, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names that rank, and reports where all ranks are."""
    monkeypatch.setattr(report, "ANSWER_SECONDS", 0.5)
    if ranks.rank == 0:
        statuses(model.bn1)[None].words[FAULT] = model.bn1._syncbn_site.group_state.num_collectives * 4 + RANKS_DIFFER
        text = text_of(lambda: model(X), RanksDifferError)
        assert "rank 0: in bn1 backward, call 1\nrank 1: has not answered within 0.5 s\nWhere the ranks are" in text
    dist.barrier()


def test_several_groups(ranks: Ranks, model: Model) -> None:
    """A fault ends one group alone, and a group of one rank has no status."""
    other, alone = Model(), syncbn.SyncBatchNorm1d(3, process_group=1)
    (model.bn1 if ranks.rank else model.bn2)(X)
    text_of(lambda: model(X), RanksDifferError)
    for _ in range(3):
        other(X).sum().backward()
    assert alone(X).isfinite().all()
    assert alone._syncbn_site is None
    assert statuses(other.bn1).keys() == {0, None}


def test_faults_in_two_streams_at_once(
    ranks: Ranks, model: Model, monkeypatch: pytest.MonkeyPatch, use_stream: Callable[..., None]
) -> None:
    """All ranks raise the earlier, whichever they have seen first, in any stream."""
    monkeypatch.setattr(
        status.StreamStatus, "poll", lambda own_status, is_last=False: None
    )  # the watchdog has seen none
    for stream in (5, 7):
        use_stream(stream)
        model(X, f"bn{1 + (ranks.rank if stream == 5 else 1 - ranks.rank)}")
    for stream in (5, 7, 0) if ranks.rank else (7, 5, 0):
        use_stream(stream)
        text = text_of(lambda: model(X), RanksDifferError)
        assert "\nrank 0: in bn1 forward, call 2\nrank 1: in bn2 forward, call 2\n" in text
    dist.barrier()


def test_a_group_that_was_destroyed(ranks: Ranks, model: Model) -> None:
    """The watchdog releases its status, whose memory stays: queued kernels may still write to it."""
    rank, kept, before = watchdog.this_rank(), len(status._memory), len(watchdog.this_rank().gpu_statuses)
    old = weakref.ref(statuses(model.bn1)[None])
    dist.destroy_process_group(model.bn1.process_group)
    del model.bn1, model.bn2
    gc.collect()
    wait_until(lambda: len(rank.gpu_statuses) == before - 1)
    wait_until(lambda: (gc.collect(), old() is None)[1])
    assert len(status._memory) == kept


def test_ranks_that_begin_in_different_layers(ranks: Ranks, player: Player) -> None:
    model = Model()
    model(X, f"bn{1 + ranks.rank}")
    text = text_of(lambda: model(X), RanksDifferError)
    assert "rank 0: in bn1 forward, call 1\nrank 1: in bn2 forward, call 1\n" in text
    dist.barrier()


def test_two_models_of_one_class_in_another_order(ranks: Ranks, model: Model) -> None:
    """Their layers have the same names and different instance numbers."""
    other = Model(model.bn1.process_group)
    other(X).sum().backward()
    (other if ranks.rank else model)(X, "bn1")
    text = text_of(lambda: model(X), RanksDifferError)
    assert re.search("rank 0: .*; number 1 of bn1 in Model\nrank 1: .*; number 2 of bn1 in Model\n", text), text
    dist.barrier()


@pytest.mark.parametrize("at", [0, 1])
def test_folds_in_reference_cycles(ranks: Ranks, player: Player, at: int) -> None:
    """The ranks collect their models at different times. No instance number is given twice."""
    group = dist.new_group()
    for _ in range(3):
        model = Model(group)
        vars(model)["cycle"] = [model]
        for _ in range(2):
            model(X).sum().backward()
        if ranks.rank == at:
            del model
            gc.collect()
    dist.barrier()


def test_a_model_that_one_rank_reloads(ranks: Ranks, model: Model) -> None:
    """On a GPU the ranks cannot agree on a new number: the job stops, and the error names the remedy."""
    copied = copy.deepcopy(model) if ranks.rank else model
    copied(X, "bn1")
    text = text_of(lambda: copied(X), RanksDifferError)
    assert "rank 0: in bn1 forward, call 2" in text
    assert "rank 1: in bn1 forward, call 1" in text
    assert text.count("set SYNCBN_CHECKS=0") == 1
    dist.barrier()


# Waits.


@pytest.mark.skipif(IS_INTERPRETED, reason="the kernels run at once")
def test_a_long_wait_on_the_gpu_is_reported(ranks: Ranks, player: Player, reports: Reports) -> None:
    """The report names the oldest unfinished all_reduce, even if the host is ahead."""
    model = Model()
    model(X)
    player.behind = True
    y = model(X)
    expected = (
        rf"rank {ranks.rank} has waited \d+ s for others, in bn1 forward, call 2 on the GPU; .*\n"
        r"ranks 0-1: in bn2 forward, call 2(; written \S+ s ago)?\n"
    )
    reports.wait_for(expected, ranks.rank)
    dist.barrier()  # all have read the positions
    player.behind = False
    y.sum().backward()
    assert statuses(model.bn1)[None].unfinished() is None
    dist.barrier()


def test_a_gpu_that_is_behind_does_not_wait(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may be far ahead. A wait begins when the previous all_reduce has ended."""
    look = mock.Mock(side_effect=lambda rank, seen: seen)
    monkeypatch.setattr(watchdog, "_poll", look)  # whose thread would change the status, too
    wait_until(lambda: look.called)
    own_status = statuses(model.bn1)[None]
    own_status._oldest = None
    ended = own_status.words[ENDED]
    for seen, number in ((ended - 2, ended - 1), (ended - 2, ended - 1), (ended - 1, ended)):
        for begun in own_status.recent:
            begun.start = -1e9
        own_status.words[ENDED] = seen
        assert own_status.unfinished().sequence_number == number
        assert (own_status.unfinished().seconds() > 1e8) == (number < ended)
    own_status.words[ENDED] = ended
    assert own_status.unfinished() is None


def test_the_watchdog_survives_an_error(
    ranks: Ranks, model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It logs the error once, and goes on writing positions."""
    look = mock.Mock(side_effect=[RuntimeError("the store is odd")] * 3 + [None] * 1000)
    monkeypatch.setattr(status.StreamStatus, "poll", look)
    rank = watchdog.this_rank()
    wait_until(lambda: look.call_count > 3 and rank.written_position == rank.position())
    text = f"syncbn: the watchdog of rank {ranks.rank} has failed once, and goes on: RuntimeError: the store is odd"
    assert caplog.text.count(text) == caplog.text.count("syncbn: ") == 1
