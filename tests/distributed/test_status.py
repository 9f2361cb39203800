"""Tests that a fault which a GPU kernel finds raises an error on every rank in a later call. A CPU plays the GPU."""

import contextlib
import copy
import re
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import voting
from jobs import wait_until
from mixtures import MIXTURES, Model, X
from played_gpu import play
from torch import Tensor
from training import CountCollectives, assert_state_unchanged
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
SEVERAL_POLLS = 0.3  # seconds; the watchdog polls every 0.05 s


@pytest.fixture
def gpu(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Let the CPU play a GPU, see played_gpu.py. `gpu.stream` is the handle of the current stream."""
    yield play(monkeypatch)
    watchdog.this_rank().gpu_statuses.clear()


@pytest.fixture
def model(gpu: SimpleNamespace) -> Model:
    """Return a model after its first step."""
    model = Model()
    model(X).sum().backward()
    return model


def mismatched_layer(model: Model, ranks: Ranks) -> syncbn.SyncBatchNorm:
    """Return bn2 on rank 0 and bn1 on rank 1. If both ranks call their layer, the total shows a fault."""
    return model.bn1 if ranks.rank else model.bn2


def latest_status(layer: syncbn.SyncBatchNorm) -> status.StreamStatus:
    """Return the newest status of the layer's group. The tests that use it have one stream."""
    return status.status_of(layer._syncbn_site.group_state).streams[X.device, None]


def store_fault(layer: syncbn.SyncBatchNorm, sequence_number: int) -> None:
    """Store, like a kernel, that the ranks differ in the all_reduce with this sequence number."""
    latest_status(layer).words[FAULT] = 4 * sequence_number + RANKS_DIFFER  # the host reads divmod(fault, 4)


def error_text(call: Callable[[], object], error: type[Exception] = RanksDifferError) -> str:
    """Check that `call` raises the same error twice, and return the text and the notes of the error."""
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
    call_of_rank_0, call_of_rank_1, expected = MIXTURES[name]
    with assert_state_unchanged(model):
        with contextlib.suppress(RanksDifferError):  # The second all_reduce of a backward with a graph already raises.
            call_of_rank_1(model) if ranks.rank else call_of_rank_0(model)
        text = error_text(lambda: model.bn1(X))
    assert re.search(expected.replace("OTHERS", "rank 1"), text), text
    assert re.search(r"\nThe results of \w+ .*, call \d and of all later calls are invalid", text), text


def test_backwards_of_different_calls_raise_even_if_the_ranks_count_calls_differently(
    ranks: Ranks, model: Model
) -> None:
    """A rank also counts its calls that have raised an error on this rank alone."""
    if ranks.rank == 1:
        model.bn1._syncbn_site.num_calls += 7  # Seven calls of rank 1 have raised an error.
    for order in ([0, 1], [1, 0], [ranks.rank]):  # The ranks differ only in the last order.
        losses = [model.bn1(X).square().sum() for _ in range(2)]
        for index in order:
            losses[index].backward()
    assert "the ranks differentiate different calls of a layer" in error_text(lambda: model(X))


def test_a_model_that_one_rank_reloads_raises_and_the_remedy_is_named(ranks: Ranks, model: Model) -> None:
    """On a CPU the ranks agree on new instance numbers for the layers, see test_signatures.py. On a GPU they
    cannot."""
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
    ranks: Ranks, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, unchecked_ranks: tuple[int, ...]
) -> None:
    if ranks.rank in unchecked_ranks:
        monkeypatch.setenv("SYNCBN_CHECKS", "0")
    model = Model()
    mismatched_layer(model, ranks)(X).sum().backward()
    model(X)
    if ranks.rank == 0:
        with pytest.raises(TypeError, match="expected a float16"):
            model.bn2(X.cfloat())
    else:
        model.bn2(X)
    assert "rank 0: TypeError: expected a float16" in error_text(lambda: model(X), TypeError)


def test_a_layer_refuses_one_value_per_channel_and_sync_batch_stats_accepts_it(ranks: Ranks, model: Model) -> None:
    x = X[:1] if ranks.rank == 0 else X[:0]
    _, _, num_values = syncbn.functional.sync_batch_stats(x, model.bn1.process_group)
    assert num_values == 1
    model.bn1(x)
    message = "Expected more than 1 value per channel when training, got 1 over all ranks in bn1 forward, call 2."
    assert message in error_text(lambda: model.bn2(X), ValueError)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, CountCollectives], ids=["fast path", "dispatched"])
def test_a_rank_whose_input_is_not_finite_warns_once(ranks: Ranks, model: Model, mode: Callable[[], Any]) -> None:
    x = torch.randn(4, 3)
    if ranks.rank == 1:
        x[0, 1] = torch.nan
    with warnings.catch_warnings(record=True, action="always") as caught, mode():
        for _ in range(2):
            model.bn1(x)
            if ranks.rank == 1:
                wait_until(lambda: any("syncbn" in str(warning.message) for warning in caught))
        time.sleep(SEVERAL_POLLS)
    texts = [str(warning.message) for warning in caught if " on rank " in str(warning.message)]
    warning = "syncbn: NaN or infinity in the input of bn1 forward, call 2 on rank 1."
    assert texts == ([warning] if ranks.rank == 1 else [])
    assert model.bn1.running_mean.isfinite().tolist() == [True, False, True]


# CUDA graphs.


def test_a_fault_in_a_replay_raises_at_the_next_eager_call(ranks: Ranks, model: Model) -> None:
    """The error has layer and pass but no call number, because a replay runs no Python that could count calls."""
    layer = mismatched_layer(model, ranks)
    store_fault(layer, status.captured_sequence_number(layer._syncbn_site, "backward"))
    text = error_text(lambda: model(X))
    assert "rank 0: in bn2 backward, in a CUDA graph" in text
    assert "rank 1: in bn1 backward, in a CUDA graph" in text


def test_a_capture_allocates_no_status_words(ranks: Ranks, gpu: SimpleNamespace) -> None:
    """CUDA refuses to allocate pinned memory during a capture. A capturing stream uses the words of another stream, if
    there is one."""
    layer = Model().bn1
    for stream, num_statuses in ((None, 0), (7, 1), (None, 1)):  # None: a capturing stream; 7: the handle of another
        gpu.stream = stream
        layer(X).sum().backward()
        assert len({*status.status_of(layer._syncbn_site.group_state).streams.values()}) == num_statuses


# The watchdog.


def test_the_watchdog_logs_a_fault_once_if_no_call_follows(
    ranks: Ranks, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """The program may wait in torch.cuda.synchronize()."""
    mismatched_layer(model, ranks)(X)
    wait_until(lambda: "in bn2 forward, call 2" in caplog.text)
    time.sleep(SEVERAL_POLLS)
    assert caplog.text.count(f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n") == 1
    error_text(lambda: model(X))


@pytest.mark.parametrize("uses_default_group", [True, False])
def test_the_watchdog_logs_a_fault_of_the_last_step_when_the_group_ends(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, uses_default_group: bool
) -> None:
    play(monkeypatch, poll_seconds=1000.0)
    voting.world.replace_group()  # The watchdog of the new group does not poll before the group ends.
    model = Model()
    if uses_default_group:
        model.bn1.process_group = model.bn2.process_group = None
    model(X).sum().backward()
    mismatched_layer(model, ranks)(X)
    voting.world.destroy_groups()
    wait_until(lambda: f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n" in caplog.text)
    assert "rank 0: in bn2 forward, call 2\nrank 1: in bn1 forward, call 2\n" in caplog.text
    voting.world.create_group()


def test_the_error_names_a_rank_that_does_not_answer(
    ranks: Ranks, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here rank 1 has no fault and makes no call, so it writes no report."""
    play(monkeypatch, answer_seconds=0.5)
    if ranks.rank == 0:
        store_fault(model.bn1, model.bn1._syncbn_site.group_state.num_collectives)
        text = error_text(lambda: model(X))
        assert "rank 0: in bn1 backward, call 1\nrank 1: has not answered within 0.5 s\nWhere the ranks are" in text


def test_a_long_wait_on_the_gpu_is_reported(ranks: Ranks, gpu: SimpleNamespace, reports: Reports) -> None:
    """The host may be ahead: the wait is in the oldest all_reduce that the GPU has not ended, and begins when the GPU
    ends the all_reduce before it."""
    model = Model()
    model(X)
    model(X)
    stream_status = latest_status(model.bn1)
    stream_status.words[ENDED] = 2  # The GPU has not ended all_reduces 3 and 4, which are in call 2 of bn1 and bn2.
    stream_status._oldest = None  # The watchdog may have cached a later all_reduce.
    expected = (
        rf"rank {ranks.rank} has waited \d+ s for others, in bn1 forward, call 2 on the GPU; .*\n"
        r"ranks 0-1: in bn2 forward, call 2(; written \S+ s ago)?\n"
    )
    reports.wait_for(expected, ranks.rank)
    now = time.monotonic()
    stream_status.words[ENDED] = 3
    assert stream_status.unfinished().start >= now
    stream_status.words[ENDED] = 4
    assert stream_status.unfinished() is None
    dist.barrier()  # All ranks have read the positions.
