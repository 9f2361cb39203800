"""Tests that a fault which a GPU kernel finds raises an error on every rank in a later call. A CPU plays the GPU."""

import contextlib
import copy
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
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
from training import CountCollectives, assert_state_unchanged, syncbn_warnings
from voting import Ranks, Reports

import syncbn
from syncbn import torch_internals
from syncbn.kernels.interface import ENDED, FAULT, RANKS_DIFFER
from syncbn.ranks import status, watchdog
from syncbn.ranks.report import RanksDifferError

pytestmark = [
    pytest.mark.two_ranks,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU plays the GPU"),
    # Triton's interpreter causes these warnings of NumPy.
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),
]
SEVERAL_POLLS = 0.3  # seconds; here the watchdog polls every 0.05 s


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, set_seconds: Callable[..., None]) -> Iterator[SimpleNamespace]:
    """Let the CPU play a GPU, see played_gpu.py. After the test the watchdog polls none of its statuses."""
    set_seconds(POLL_SECONDS=0.05)
    yield play(monkeypatch)
    for rank in [*watchdog._ranks.values()]:
        rank.gpu_statuses.clear()


def mismatched_layer(model: Model, ranks: Ranks) -> syncbn.SyncBatchNorm:
    """Return bn2 on rank 0 and bn1 on rank 1. If both ranks call their layer, the total shows a fault."""
    return model.bn1 if ranks.rank else model.bn2


def latest_status(layer: syncbn.SyncBatchNorm) -> status.StreamStatus:
    """Return the latest status of the layer's group, whose key has None in place of the stream."""
    return status.status_of(layer._syncbn_site.group_state).streams[X.device, None]


def store_fault(layer: syncbn.SyncBatchNorm, sequence_number: int) -> None:
    """Store, like a kernel, that the ranks differ in the all_reduce with this sequence number."""
    latest_status(layer).words[FAULT] = 4 * sequence_number + RANKS_DIFFER  # the host reads divmod(fault, 4)


def error_text(call: Callable[[], object], error: type[Exception] = RanksDifferError) -> str:
    """Check that `call` raises an error of this class, and return the text and the notes of the error."""
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error
    return "\n".join((str(raised.value), *getattr(raised.value, "__notes__", ())))


@contextlib.contextmanager
def raises_in_later_calls(expected: str, error: type[Exception] = RanksDifferError) -> Iterator[Model]:
    """Return a model. Check that the block changes none of its state, and that on both ranks every later pass on the
    model's group, a backward or a forward, raises an error of this class that matches `expected`."""
    model = Model()
    loss = syncbn.SyncBatchNorm(3, process_group=model.bn1.process_group)(X).sum()
    model.train_a_step_and_call_bn2_twice()
    with assert_state_unchanged(model):
        yield model
    later_calls = loss.backward, lambda: model(X), lambda: model(X)
    (text,) = {error_text(call, error) for call in later_calls}  # All three errors have the same text.
    assert re.search(expected, text), text
    assert re.search(r"\nThe results of \w+ .* and of all later calls are invalid", text), text
    assert text.count("set SYNCBN_CHECKS=0") == int(error is RanksDifferError)


# Faults.


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_that_differ_raise_in_later_calls(ranks: Ranks, name: str) -> None:
    *calls, expected = MIXTURES[name]
    with raises_in_later_calls(expected.replace("OTHERS", "rank 1")) as model, contextlib.suppress(RanksDifferError):
        calls[ranks.rank](model)  # A backward with create_graph raises in its second all_reduce.


def test_a_layer_that_one_rank_reloads_raises(ranks: Ranks) -> None:
    """On CPUs the ranks agree on new instance numbers, see test_signatures.py. On GPUs they cannot."""
    with raises_in_later_calls(r"rank 0: in bn1 forward, call 2;.*\nrank 1: in bn1 forward, call 1;") as model:
        (copy.deepcopy(model.bn1) if ranks.rank else model.bn1)(X)


def test_backwards_of_different_calls_raise_even_if_the_ranks_count_calls_differently(ranks: Ranks) -> None:
    """A rank also counts its calls that have raised an error on this rank alone."""
    with raises_in_later_calls(r"rank 0: in \w+ backward, call 6\nrank 1: in \w+ backward, call 14\n") as model:
        layer = syncbn.SyncBatchNorm(3, process_group=model.bn1.process_group)
        layer(X)
        layer._syncbn_site.num_calls += 7 * ranks.rank  # Seven calls of rank 1 have raised an error.
        for order in ([0, 1], [1, 0], [ranks.rank]):  # The last: call 6 on rank 0, call 7 on rank 1, counted as 14.
            losses = [layer(X).square().sum() for _ in range(2)]
            for index in order:
                losses[index].backward()


@pytest.mark.parametrize("unchecked_ranks", [(), (0,), (0, 1)])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [(X[:, :2], ValueError, "expected 3 channels"), (X.cfloat(), TypeError, "expected a float16, bfloat16")],
    ids=["channels", "dtype"],
)
def test_a_bad_argument_of_one_rank_raises_on_the_other_rank_later(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, unchecked_ranks: tuple[int, ...],
    bad: Tensor, error: type[Exception], message: str,
) -> None:  # fmt: skip
    """SYNCBN_CHECKS=0 permits different layers, but no bad argument."""
    if ranks.rank in unchecked_ranks:
        monkeypatch.setenv("SYNCBN_CHECKS", "0")
    expected = rf"another rank failed in bn1 forward, call 2\.\nrank 1: {error.__name__}: {message}"
    with raises_in_later_calls(expected, error) as model:
        if unchecked_ranks:
            copy.deepcopy(mismatched_layer(model, ranks))(X).sum().backward()  # The copy keeps the model unchanged.
        if ranks.rank == 0:
            model.bn1(X)
        else:
            with pytest.raises(error, match=f"^bn1: {message}"):
                model.bn1(bad)


def test_a_layer_refuses_one_value_per_channel_and_sync_batch_stats_accepts_it(ranks: Ranks) -> None:
    x = X[:1] if ranks.rank == 0 else X[:0]
    with raises_in_later_calls("got 1 over all ranks in bn1 forward, call 2", ValueError) as model:
        _, _, num_values = syncbn.functional.sync_batch_stats(x, model.bn1.process_group)
        assert num_values == 1
        model.bn1(x)


def test_a_fault_in_a_replay_raises_in_later_eager_calls(ranks: Ranks) -> None:
    """The error has layer and pass but no call number, because a replay runs no Python that could count calls."""
    lines = "rank 0: in bn2 forward, in a CUDA graph\nrank 1: in bn1 backward, in a CUDA graph"
    with raises_in_later_calls(lines) as model:
        layer, pass_name = mismatched_layer(model, ranks), ("forward", "backward")[ranks.rank]
        store_fault(layer, status.captured_sequence_number(layer._syncbn_site, pass_name))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, CountCollectives], ids=["fast path", "dispatched"])
def test_a_rank_whose_input_is_not_finite_warns_once(ranks: Ranks, mode: Callable[[], Any]) -> None:
    model, x = Model(), torch.randn(4, 3)
    if ranks.rank == 1:
        x[0, 1] = torch.nan
    with syncbn_warnings() as texts, mode():
        for _ in range(2):
            model.bn1(x)
            wait_until(lambda: model.bn1._syncbn_site.warned_of_nan == (ranks.rank == 1))
        time.sleep(SEVERAL_POLLS)
    warning = "syncbn: NaN or infinity in the input of bn1 forward, call 1 on rank 1."
    assert [text for text in texts if " on rank " in text] == ([warning] if ranks.rank == 1 else [])
    assert model.bn1.running_mean.isfinite().tolist() == [True, False, True]


def test_a_capture_allocates_no_status_words(ranks: Ranks, gpu: SimpleNamespace) -> None:
    """CUDA refuses to allocate pinned memory during a capture. A capturing stream uses the words of another stream, if
    there is one."""
    layer = Model().bn1
    # The stream None captures, and the stream 7 does not.
    for stream, num_statuses in ((None, 0), (7, 1), (None, 1)):
        gpu.stream = stream
        layer(X).sum().backward()
        assert len({*status.status_of(layer._syncbn_site.group_state).streams.values()}) == num_statuses


# The watchdog.


def test_the_watchdog_logs_a_fault_once_if_no_call_follows(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    """The program may wait in torch.cuda.synchronize()."""
    model = Model()
    mismatched_layer(model, ranks)(X)
    wait_until(lambda: "in bn2 forward, call 1" in caplog.text)
    time.sleep(SEVERAL_POLLS)
    assert caplog.text.count(f"syncbn: rank {ranks.rank} has detected a fault on the GPU.\n") == 1
    error_text(lambda: model(X))


@pytest.mark.parametrize("uses_default_group", [True, False])
def test_the_watchdog_logs_a_fault_of_the_last_step_when_the_group_ends(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, set_seconds: Callable[..., None], uses_default_group: bool
) -> None:
    set_seconds(POLL_SECONDS=1000.0)
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
    ranks: Ranks, set_seconds: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank without a fault makes no later call in its group, and writes no report: rank 1 in the first group, rank
    0 in the second. torch reuses names of destroyed groups, so here both groups have one name. In the second group rank
    1 must not read the report that rank 0 wrote in the first."""
    set_seconds(ANSWER_SECONDS=0.5)
    monkeypatch.setattr(torch_internals, "registered_name", lambda group: "a reused name")
    place, silence = "in bn1 backward, call 1", "has not answered within 0.5 s"
    for faulty_rank, lines in enumerate(((place, silence), (silence, place))):
        model = Model()
        model(X).sum().backward()
        if ranks.rank == faulty_rank:
            store_fault(model.bn1, model.bn1._syncbn_site.group_state.num_collectives)
            text = error_text(partial(model, X))
            assert f"rank 0: {lines[0]}\nrank 1: {lines[1]}\nWhere the ranks are" in text


def test_a_long_wait_on_the_gpu_is_reported(ranks: Ranks, reports: Reports) -> None:
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
