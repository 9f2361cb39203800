"""Tests of the reports that a rank logs when it waits for another rank: when it reports, and which cause comes first.

In most tests rank 1 is late until rank 0 has logged the expected report. tests/test_reports.py tests the other lines
and causes of a report, on one process.
"""

import itertools
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import voting
from mixtures import HookedStore
from torch import Tensor, nn
from voting import Ranks, Reports

import syncbn
from syncbn.ranks import positions, report, watchdog
from syncbn.ranks.collective import FIRST_WARNING_SECONDS, Collective
from syncbn.ranks.report import RanksDifferError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="see test_status.py for waits on GPUs"),
    pytest.mark.two_ranks,
]
X = torch.randn(4, 3, requires_grad=True)


# When a rank warns.


def test_a_wait_of_35_s_is_reported_once(
    ranks: Ranks, reports: Reports, set_seconds: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank warns after 30 s of a wait, and again after 60 s. Here rank 0 measures 35 s in its first collective."""

    def seconds(collective: Collective) -> float:
        is_first = collective.description() == "SyncBatchNorm forward, call 1"
        return 35.0 if ranks.rank == 0 and is_first else 0.0

    assert FIRST_WARNING_SECONDS == 30
    # Restore the waiting time at which a collective warns. The fixture `reports` has set this time to half a second.
    set_seconds(next_warning_seconds=FIRST_WARNING_SECONDS)
    monkeypatch.setattr(Collective, "seconds", seconds)
    layer = syncbn.SyncBatchNorm(3)
    if ranks.rank == 1:
        reports.wait_for("syncbn: rank 0 has waited 35 s for others.")
        time.sleep(0.3)  # The watchdog of rank 0 polls every 0.1 s, so it could report the wait again.
    for _ in range(3):
        layer(X).sum().backward()
    # `text` has the messages of this rank; `wait_for` reads those of rank 0.
    assert reports.text.count(" has waited ") == (1 if ranks.rank == 0 else 0)
    dist.barrier()


def test_waits_outside_of_layers_are_not_reported(ranks: Ranks, reports: Reports) -> None:
    """Here a rank waits for 0.7 s outside of layers. In a layer the rank would warn after 0.5 s."""

    def wait_in_backward(_: Tensor) -> None:
        time.sleep(0.7)
        dist.barrier()

    layer = syncbn.SyncBatchNorm(3)
    dist.barrier()  # The ranks start together, so that no rank is late in the layer.
    y = layer(X)
    time.sleep(0.7)  # The program may wait for data.
    y.register_hook(wait_in_backward)
    y.sum().backward()
    dist.barrier()
    assert not reports.text


def test_the_wait_of_one_thread_is_reported_while_another_thread_trains(ranks: Ranks, reports: Reports) -> None:
    """The two threads use different process groups."""
    waiting, training = (syncbn.SyncBatchNorm(3, process_group=dist.new_group()) for _ in range(2))
    for layer in (waiting, training):
        layer(X)

    def call_late_on_rank_1() -> None:
        if ranks.rank == 1:
            reports.wait_for(
                r"rank 0 has waited \d+ s for others.\nrank 0: in SyncBatchNorm forward, call 2.*\n"
                r"rank 1: last seen after SyncBatchNorm forward, call \d+ on another process group\n"
            )
        waiting(X)

    thread = threading.Thread(target=call_late_on_rank_1)
    thread.start()
    # Both ranks call `training` equally often, until the threads of both ranks have ended.
    while ranks.all_reduce_sum(torch.tensor(int(thread.is_alive()))) > 0:
        training(X)


# The likeliest cause of a wait.


def step(model: nn.Module) -> None:
    model.train()(X).square().sum().backward()


@torch.no_grad()
def validate(model: nn.Module) -> None:
    """Call the model in training mode, as a validation that has forgotten model.eval()."""
    model(X)


def expected_report(position_0: str, position_1: str, cause: str) -> str:
    """Return a regular expression for a report with these positions of ranks 0 and 1 and this first cause."""
    age = r"(; written \S+ s ago)?"
    lines = f"rank 0: {position_0}{age}\nrank 1: {position_1}{age}\n"
    return f"{lines}Possible causes:\n- {re.escape(cause)}"


UNSEEN, AFTER_STEP_2 = "has not been seen", "last seen after bn1 backward, call 2"
EVALUATED = f"{AFTER_STEP_2}; the layer is in evaluation mode now"


@pytest.mark.parametrize(
    ("num_steps", "late_call", "evaluates", "position_of_rank_1", "cause"),
    [
        pytest.param(2, step, False, AFTER_STEP_2, report.LATE, id="slow loader"),
        pytest.param(2, validate, False, AFTER_STEP_2, report.EXTRA_CALL, id="validation in training mode"),
        pytest.param(0, validate, False, UNSEEN, report.EXTRA_CALL, id="FLOPs counted before training"),
        pytest.param(2, step, True, EVALUATED, report.EVALUATION, id="evaluation on one rank"),
        pytest.param(0, step, False, UNSEEN, report.NOT_CONVERTED, id="model not converted"),
    ],
)
def test_the_likeliest_cause_of_a_wait_comes_first(
    ranks: Ranks, reports: Reports, num_steps: int, late_call: Callable[[nn.Module], None], evaluates: bool,
    position_of_rank_1: str, cause: str,
) -> None:  # fmt: skip
    """After some steps of both ranks, rank 0 waits in a call that rank 1 makes later. `evaluates`: rank 1 has called
    the model in evaluation mode before."""
    voting.world.replace_group()  # The store then has no positions.
    layers = OrderedDict(linear=nn.Linear(3, 3), bn1=nn.BatchNorm1d(3), bn2=nn.BatchNorm1d(3))
    model = syncbn.convert_syncbn_model(nn.Sequential(layers))
    for _ in range(num_steps):
        step(model)
    dist.barrier()
    if ranks.rank == 1:
        if evaluates:
            model.eval()(X)
        reports.wait_for(expected_report(f"in bn1 forward, call {num_steps + 1}", position_of_rank_1, cause))
    late_call(model)
    dist.barrier()


@pytest.mark.parametrize(
    ("replaces_group", "position_1", "cause"),
    [
        (False, "last seen after bn forward, call 1", report.OTHER_LAYERS),
        (True, "after bn forward, call 1; has left this or an earlier default group", report.LATE),
    ],
)
def test_a_late_rank_is_not_compared_with_the_calls_of_an_earlier_model(
    ranks: Ranks, reports: Reports, monkeypatch: pytest.MonkeyPatch, replaces_group: bool, position_1: str, cause: str
) -> None:
    """In a sweep over widths rank 1 is late in the first call of the second model. The store still has the position
    and the number of channels of rank 1 in the first model. The report may show the position, or name other layers as
    the cause, but must not compare the numbers of channels."""
    # As under torchrun, all default groups use one store. A rank compares the number of the default group in another
    # rank's position with its own number, so both ranks must count from the same number.
    store = dist.PrefixStore(f"sweep {replaces_group}", voting.world.store)
    monkeypatch.setattr(positions, "default_store", lambda: store)
    monkeypatch.setattr(positions, "_default_groups", itertools.count(1000))
    for channels in (3, 4):
        if channels == 3 or replaces_group:
            voting.world.replace_group()
        model = syncbn.convert_syncbn_model(nn.Sequential(OrderedDict(bn=nn.BatchNorm1d(channels))))
        if channels == 4 and ranks.rank == 1:
            reports.wait_for(expected_report("in bn forward, call 1", position_1, cause))
        model(torch.randn(4, channels, requires_grad=True))
        dist.barrier()
    assert "channels over" not in reports.text  # A report with numbers of channels has "with 3 channels over ranks".


# A store that does not answer.


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize(
    ("input_of_rank_1", "errors"),  # `errors`: class and regular expression for ranks 0 and 1
    [
        (X.double(), [(RanksDifferError, "and not all ranks have reported.\n{lines}")] * 2),
        (X[:, :2], [(RuntimeError, "another rank has a bad argument.\n{lines}"), (ValueError, "expected 3 channels")]),
    ],
    ids=["dtypes", "bad argument"],
)
def test_a_rank_reports_its_own_position_if_the_store_does_not_answer(
    ranks: Ranks, set_seconds: Callable[..., None], input_of_rank_1: Tensor, errors: list[Any], is_stopped: bool
) -> None:
    """The process of the store may have ended, or may be stopped. A rank waits for a stopped store for a bounded time,
    and does not call an ended store again, because torch prints a C++ backtrace for each call that fails."""
    set_seconds(ANSWER_SECONDS=0.2, READ_SECONDS=0.2)  # how long a rank waits for other ranks and for the store
    voting.world.replace_group()  # In the new group the test replaces syncbn's store.
    layer, continued, methods = syncbn.SyncBatchNorm(3), threading.Event(), list[str]()
    layer(X)

    def fail(method: str) -> None:
        methods.append(method)
        if is_stopped:
            continued.wait()
        raise RuntimeError("Broken pipe")

    this_rank = watchdog.this_rank()
    this_rank.store = HookedStore(this_rank.store, fail)
    place, other_place = f"rank {ranks.rank}: in SyncBatchNorm forward, call 2", f"rank {1 - ranks.rank}: not known, as"
    lines = ".*\n".join(sorted((place, other_place)))
    error, message = errors[ranks.rank]
    with pytest.raises(error, match=message.format(lines=lines)):
        layer(input_of_rank_1 if ranks.rank == 1 else X)
    assert is_stopped or methods == ["set"]
    continued.set()
    voting.world.replace_group()  # Later tests need a store that answers.
