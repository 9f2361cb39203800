"""Tests that a fault which a GPU finds raises on every rank in a later call. A CPU plays the GPU."""

import contextlib
import copy
import re
import time
import warnings
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
from syncbn.ranks import status, watchdog
from syncbn.ranks.report import RanksDifferError

pytestmark = [
    pytest.mark.two_ranks,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU plays the GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),  # NumPy's, in the interpreter
]


@pytest.fixture
def gpu(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Return the GPU, whose current stream is `gpu.stream`."""
    yield play(monkeypatch)
    watchdog.this_rank().gpu_statuses.clear()


@pytest.fixture
def model(gpu: SimpleNamespace) -> Model:
    """Return a model after its first step."""
    model = Model()
    model(X).sum().backward()
    return model


def layer_of_rank(model: Model, ranks: Ranks) -> syncbn.SyncBatchNorm:
    """Return bn2 on rank 0 and bn1 on rank 1. If the ranks call these layers, that is a fault."""
    return model.bn1 if ranks.rank else model.bn2


def statuses(layer: syncbn.SyncBatchNorm) -> dict[int | None, status.StreamStatus]:
    """Return the status of each stream for the layer's group. The key None is for streams that capture a CUDA graph."""
    streams = status.status_of(layer._syncbn_site.group_state).streams
    return {stream: stream_status for (_, stream), stream_status in streams.items()}


def store_fault(layer: syncbn.SyncBatchNorm, sequence_number: int) -> None:
    """Store, like a kernel, that the ranks differ in the all_reduce with this sequence number."""
    statuses(layer)[None].words[FAULT] = 4 * sequence_number + RANKS_DIFFER


def error_text(call: Callable[[], object], error: type[Exception] = RanksDifferError) -> str:
    """Return the text and the notes of the error that `call` raises, which must be the same in a second call."""
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
def test_ranks_that_differ_raise_at_the_next_call(ranks: Ranks, gpu: SimpleNamespace, name: str) -> None:
    model = Model()
    model.train_a_step_and_call_bn2_twice()
    *calls, expected = MIXTURES[name]
    with preserved_state(model):
        with contextlib.suppress(RanksDifferError):  # A backward with a graph already raises at its second all_reduce.
            calls[ranks.rank](model)
        text = error_text(lambda: model.bn1(X))
    assert re.search(expected.replace("OTHERS", "rank 1"), text), text
    assert re.search(r"\nThe results of \w+ .*, call \d and of all later calls are invalid", text), text


def test_dispatched_kernels_do_not_change_running_statistics_after_a_fault(ranks: Ranks, model: Model) -> None:
    """CountCollectives is a dispatch mode, so the kernels are dispatched."""
    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    before = copy.deepcopy(statistics)
    with CountCollectives():
        layer_of_rank(model, ranks)(X)
    error_text(lambda: model(X))
    torch.testing.assert_close(statistics, before, rtol=0, atol=0)


def test_backwards_of_different_calls_raise_even_if_the_ranks_count_calls_differently(
    ranks: Ranks, model: Model
) -> None:
    """A rank also counts calls that have raised errors on this rank alone."""
    model.bn1._syncbn_site.num_calls += 7 * ranks.rank
    for order in ([0, 1], [1, 0], [ranks.rank]):  # The ranks differ in the last order only.
        losses = [model.bn1(X).square().sum() for _ in range(2)]
        for index in order:
            losses[index].backward()
    assert "the ranks differentiate different calls of a layer" in error_text(lambda: model(X))


def test_a_model_that_one_rank_reloads_raises_and_the_remedy_is_named(ranks: Ranks, model: Model) -> None:
    """On a GPU the ranks cannot agree on new numbers for the layers."""
    reloaded = copy.deepcopy(model) if ranks.rank else model
    reloaded.bn1(X)
    text = error_text(lambda: reloaded(X))
    assert "rank 0: in bn1 forward, call 2" in text
    assert "rank 1: in bn1 forward, call 1" in text
    assert text.count("set SYNCBN_CHECKS=0") == 1


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [(X[:, :2], ValueError, "expected 3 channels"), (X.cfloat(), TypeError, "expected a float16, bfloat16")],
    ids=["channels", "dtype"],
)
def test_a_bad_argument_of_one_rank_raises_on_the_other_rank_later(
    ranks: Ranks, model: Model, bad: Tensor, error: type[Exception], message: str
) -> None:
    """The later call may be a backward."""
    loss = model(X).sum()
    if ranks.rank == 0:
        model.bn1(X)
    else:
        with pytest.raises(error, match=f"^bn1: {message}"):
            model.bn1(bad)
    text = error_text(lambda: loss.backward(retain_graph=True), error)
    assert f"another rank failed in bn1 forward, call 3.\nrank 1: {error.__name__}: {message}" in text
    assert error_text(lambda: model(X), error) == text


@pytest.mark.parametrize("unchecked_ranks", [(0,), (0, 1)])
def test_syncbn_checks_0_switches_off_the_comparison_but_not_the_errors_of_bad_arguments(
    ranks: Ranks, gpu: SimpleNamespace, sign_nothing: Callable[[], None], unchecked_ranks: tuple[int, ...]
) -> None:
    if ranks.rank in unchecked_ranks:
        sign_nothing()
    model = Model()
    layer_of_rank(model, ranks)(X).sum().backward()
    model(X)
    if ranks.rank == 0:
        with pytest.raises(TypeError, match="expected a float16"):
            model.bn2(X.cfloat())
    else:
        model.bn2(X)
    assert "rank 0: TypeError: expected a float16" in error_text(lambda: model(X), TypeError)


def test_a_layer_refuses_one_value_per_channel_and_sync_batch_stats_accepts_it(ranks: Ranks, model: Model) -> None:
    x = X[:1] if ranks.rank == 0 else X[:0]
    assert syncbn.functional.sync_batch_stats(x, model.bn1.process_group)[2] == 1
    model.bn1(x)
    message = "Expected more than 1 value per channel when training, got 1 over all ranks in bn1 forward, call 2."
    assert message in error_text(lambda: model.bn2(X), ValueError)


@pytest.mark.parametrize(("bad", "mode"), [(torch.nan, contextlib.nullcontext), (torch.inf, CountCollectives)])
def test_a_rank_whose_input_is_not_finite_warns_once(
    ranks: Ranks, model: Model, bad: float, mode: Callable[[], Any]
) -> None:
    """Faults are still detected afterwards."""
    x = torch.randn(4, 3)
    if ranks.rank == 1:
        x[0, 1] = bad
    with warnings.catch_warnings(record=True) as caught, mode():
        warnings.simplefilter("always")
        for _ in range(2):
            model.bn1(x)
            if ranks.rank == 1:
                wait_until(lambda: [warning for warning in caught if "syncbn" in str(warning.message)])
        time.sleep(0.3)  # Several polls of the watchdog, which would issue more warnings.
    texts = [str(warning.message) for warning in caught if " on rank " in str(warning.message)]
    warning = "syncbn: NaN or infinity in the input of bn1 forward, call 2 on rank 1."
    assert texts == ([warning] if ranks.rank == 1 else [])
    assert model.bn1.running_mean.isfinite().tolist() == [True, False, True]
    layer_of_rank(model, ranks)(X)
    error_text(lambda: model.bn1(X))


def test_a_fault_ends_one_group_only(ranks: Ranks, model: Model) -> None:
    model_of_another_group = Model()
    layer_of_rank(model, ranks)(X)
    error_text(lambda: model(X))
    for _ in range(3):
        model_of_another_group(X).sum().backward()


# CUDA graphs.


def test_a_fault_in_a_replay_raises_at_the_next_eager_call(ranks: Ranks, model: Model) -> None:
    """A replay runs no Python that could count all_reduces, so the sequence number identifies only layer and pass."""
    layer = layer_of_rank(model, ranks)
    store_fault(layer, status.captured_sequence_number(layer._syncbn_site, "backward"))
    text = error_text(lambda: model(X))
    assert "rank 0: in bn2 backward, in a CUDA graph" in text
    assert "rank 1: in bn1 backward, in a CUDA graph" in text


def test_a_capture_allocates_no_status(ranks: Ranks, gpu: SimpleNamespace) -> None:
    """CUDA refuses the allocation of pinned memory during a capture. Kernels use the status of another stream, if there
    is one."""
    layer, num_statuses = Model().bn1, []
    for stream in (None, 7, None):  # None is a capturing stream.
        gpu.stream = stream
        layer(X).sum().backward()
        num_statuses.append(len({*statuses(layer).values()}))
    assert num_statuses == [0, 1, 1]


# The watchdog.


def test_the_watchdog_logs_a_fault_once_if_no_call_follows(
    ranks: Ranks, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """The program may wait in torch.cuda.synchronize()."""
    layer_of_rank(model, ranks)(X)
    wait_until(lambda: "in bn2 forward, call 2" in caplog.text)
    time.sleep(0.3)  # Several polls of the watchdog.
    assert caplog.text.count(f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n") == 1
    error_text(lambda: model(X))


@pytest.mark.parametrize("uses_default_group", [True, False])
def test_the_watchdog_logs_a_fault_of_the_last_step_when_the_group_ends(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, uses_default_group: bool
) -> None:
    play(monkeypatch, poll_seconds=1000.0)  # The watchdog does not poll before the end.
    voting.world.replace_group()
    model = Model()
    if uses_default_group:
        model.bn1.process_group = model.bn2.process_group = None
    model(X).sum().backward()
    layer_of_rank(model, ranks)(X)
    voting.world.destroy_groups()
    wait_until(lambda: f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n" in caplog.text)
    assert "rank 0: in bn2 forward, call 2\nrank 1: in bn1 forward, call 2\n" in caplog.text
    voting.world.create_group()


def test_the_error_names_a_rank_that_does_not_answer(
    ranks: Ranks, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here only rank 0 has a fault, so rank 1 writes no report."""
    play(monkeypatch, answer_seconds=0.5)
    if ranks.rank == 0:
        store_fault(model.bn1, model.bn1._syncbn_site.group_state.num_collectives)
        text = error_text(lambda: model(X))
        assert "rank 0: in bn1 backward, call 1\nrank 1: has not answered within 0.5 s\nWhere the ranks are" in text


def test_a_long_wait_on_the_gpu_is_reported(ranks: Ranks, gpu: SimpleNamespace, reports: Reports) -> None:
    """The report names the oldest all_reduce that the GPU has not ended, even if the host is ahead. The wait for the
    next all_reduce begins when the GPU has ended the previous one."""
    model = Model()
    model(X)
    model(X)
    stream_status = statuses(model.bn1)[None]
    stream_status.words[ENDED], stream_status._oldest = 2, None  # The GPU has not ended all_reduces 3 and 4.
    expected = (
        rf"rank {ranks.rank} has waited \d+ s for others, in bn1 forward, call 2 on the GPU; .*\n"
        r"ranks 0-1: in bn2 forward, call 2(; written \S+ s ago)?\n"
    )
    reports.wait_for(expected, ranks.rank)
    now, stream_status.words[ENDED] = time.monotonic(), 3
    assert stream_status.unfinished().start >= now
    stream_status.words[ENDED] = 4
    assert stream_status.unfinished() is None
    dist.barrier()  # All ranks have read the positions.


def test_the_watchdog_logs_an_unexpected_error_once_and_continues(
    ranks: Ranks, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    rank, failing_status = watchdog.this_rank(), mock.Mock(**{"poll.side_effect": RuntimeError("unexpected")})
    rank.gpu_statuses.add(failing_status)
    wait_until(lambda: failing_status.poll.call_count > 3)
    rank.gpu_statuses.discard(failing_status)
    wait_until(lambda: rank.written_position == rank.position())
    text = f"syncbn: the watchdog of rank {ranks.rank} has failed once, and goes on: RuntimeError: unexpected"
    assert caplog.text.count(text) == caplog.text.count("syncbn: ") == 1
