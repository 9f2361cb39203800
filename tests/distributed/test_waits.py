"""Tests of the reports that a rank logs when it waits for another rank.

The tests check when a rank reports a wait and which cause comes first, what it reports after an error, and what it
reports if the program has replaced the default group. In most tests rank 1 is late until rank 0 has logged the expected
report. tests/test_reports.py tests the other lines and causes of a report.
"""

import contextlib
import gc
import itertools
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import voting
from jobs import wait_until
from mixtures import HookedStore
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from training import CountCollectives
from voting import Ranks, Reports

import syncbn
from syncbn.ranks import positions, report, watchdog
from syncbn.ranks.collective import FIRST_WARNING_SECONDS, Collective
from syncbn.ranks.positions import ThisRank
from syncbn.ranks.report import RanksDifferError
from syncbn.ranks.sites import GroupState, Site

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


def new_model() -> nn.Sequential:
    """Return a model whose layers are named linear, bn1 and bn2."""
    return nn.Sequential(OrderedDict(linear=nn.Linear(3, 3), bn1=nn.BatchNorm1d(3), bn2=nn.BatchNorm1d(3)))


def forward(model: nn.Module) -> None:
    model.y = model(X)


def backward(model: nn.Module) -> None:
    model.y.square().sum().backward()


def step(model: nn.Module) -> None:
    forward(model.train())
    backward(model)


@torch.no_grad()
def validate(model: nn.Module) -> None:
    """Call the model in training mode, as a validation that has forgotten model.eval()."""
    model(X)


def evaluate(model: nn.Module) -> None:
    model.eval()(X)


def step_of_unconverted_model(_: nn.Module) -> None:
    step(new_model())


class Situation(NamedTuple):
    """Rank 0 waits for rank 1. The report of rank 0 has the positions of both ranks, and then a list of causes. The
    first of these causes is `cause`."""

    call_0: Callable[[nn.Module], None]  # the call in which rank 0 waits
    position_0: str
    early_call_1: Callable[[nn.Module], None] | None  # a call that rank 1 makes at once
    late_call_1: Callable[[nn.Module], None]  # the call of rank 1 after the report, for which rank 0 waits
    position_1: str
    cause: str


# Positions of a rank in its first step, after its second step, and in its third step.
UNSEEN, IN_FORWARD_1 = "has not been seen", "in bn1 forward, call 1"
AFTER_STEP_2 = "last seen after bn1 backward, call 2"
EVALUATED = f"{AFTER_STEP_2}; the layer is in evaluation mode now"
IN_FORWARD_3, IN_BACKWARD_3 = "in bn1 forward, call 3", "in bn2 backward, call 3"
AFTER_FORWARD_3 = "last seen after bn2 forward, call 3"
# Name: call and position of rank 0, early call, late call and position of rank 1, first cause.
SITUATIONS = {
    "slow loader": Situation(step, IN_FORWARD_3, None, step, AFTER_STEP_2, report.LATE),
    "validation in training mode": Situation(validate, IN_FORWARD_3, None, forward, AFTER_STEP_2, report.EXTRA_CALL),
    "FLOPs counted before training": Situation(validate, IN_FORWARD_1, None, forward, UNSEEN, report.EXTRA_CALL),
    "evaluation on one rank": Situation(step, IN_FORWARD_3, evaluate, step, EVALUATED, report.EVALUATION),
    "model not converted": Situation(step, IN_FORWARD_1, step_of_unconverted_model, step, UNSEEN, report.NOT_CONVERTED),
    "backward left out": Situation(step, IN_BACKWARD_3, forward, backward, AFTER_FORWARD_3, report.OTHER_LAYERS),
}


def expected_report(position_0: str, position_1: str, cause: str) -> str:
    """Return a regular expression for a report with these positions of ranks 0 and 1 and this first cause."""
    age = r"(; written \S+ s ago)?"
    lines = f"rank 0: {position_0}{age}\nrank 1: {position_1}{age}\n"
    return f"{lines}Possible causes:\n- {re.escape(cause)}"


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_likeliest_cause_of_a_wait_comes_first(ranks: Ranks, reports: Reports, name: str) -> None:
    situation = SITUATIONS[name]
    voting.world.replace_group()  # The store then has no positions.
    model = syncbn.convert_syncbn_model(new_model())
    if situation.position_0 != IN_FORWARD_1:  # Rank 0 waits in the third step of training.
        step(model)
        step(model)
    dist.barrier()
    if ranks.rank == 0:
        situation.call_0(model)
    else:
        if situation.early_call_1 is not None:
            situation.early_call_1(model)
        reports.wait_for(expected_report(situation.position_0, situation.position_1, situation.cause))
        situation.late_call_1(model)
    dist.barrier()


# Errors of one rank, and of the store.


def run_out_of_memory(*_: object) -> None:
    raise MemoryError("no room")


@pytest.mark.parametrize("context", [contextlib.nullcontext, CountCollectives], ids=["fast path", "dispatched"])
@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_an_error_in_a_pass_is_recorded_in_the_position(
    ranks: Ranks, failing: str, context: Callable[[], Any], wrap_all_reduce: Callable[..., None]
) -> None:
    """Ranks that wait for this rank report the error. Here all ranks fail, so that no rank waits."""
    layer = syncbn.SyncBatchNorm(3)
    # A backward fails when it unpacks a saved tensor, and a forward fails in the all_reduce.
    with saved_tensors_hooks(pack_hook=lambda tensor: tensor, unpack_hook=run_out_of_memory):
        y = layer(X)
    if failing == "forward":
        wrap_all_reduce(run_out_of_memory)
    with context(), pytest.raises(MemoryError):
        layer(X) if failing == "forward" else y.sum().backward()
    assert watchdog.this_rank().position().error == "has raised MemoryError: no room"
    dist.barrier()


def test_a_gpu_error_gets_a_note_and_no_report(ranks: Ranks, wrap_all_reduce: Callable[..., None]) -> None:
    """CUDA may raise the error of an earlier kernel in syncbn's collective, although no rank is late."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    layer = syncbn.SyncBatchNorm(3)
    layer(X)
    wrap_all_reduce(fail)
    note = r"syncbn: an earlier kernel failed; its error surfaced in SyncBatchNorm forward, call 2\..*"
    with pytest.raises(RuntimeError, match=rf"^SyncBatchNorm: CUDA error: an illegal memory access .*\n{note}\Z"):
        layer(X)


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize("difference", ["dtypes", "bad argument"])
def test_a_rank_reports_its_own_position_if_the_store_does_not_answer(
    ranks: Ranks, set_seconds: Callable[..., None], is_stopped: bool, difference: str
) -> None:
    """The process of the store may have ended, or may be stopped. A rank waits for the store for a bounded time."""
    set_seconds(ANSWER_SECONDS=0.2, READ_SECONDS=0.2)  # how long a rank waits for other ranks and for the store
    voting.world.replace_group()  # In the new group the test replaces syncbn's store.
    layer, continued = syncbn.SyncBatchNorm(3), threading.Event()
    layer(X)

    def fail(_: str) -> None:
        if is_stopped:
            continued.wait()
        raise RuntimeError("Broken pipe")

    this_rank = watchdog.this_rank()
    this_rank.store = HookedStore(this_rank.store, fail)
    shown = [report.STORE_UNKNOWN, report.STORE_UNKNOWN]
    shown[ranks.rank] = "in SyncBatchNorm forward, call 2"
    lines = f"rank 0: {shown[0]}\nrank 1: {shown[1]}\n"
    input_of_rank_1 = X.double() if difference == "dtypes" else X[:, :2]
    if difference == "dtypes":
        error, message = RanksDifferError, rf"not all ranks have reported\.\n{lines}"
    elif ranks.rank == 1:
        error, message = ValueError, "expected 3 channels"
    else:
        error, message = RuntimeError, rf"^syncbn: another rank has a bad argument\.\n{lines}"
    with pytest.raises(error, match=message):
        layer(input_of_rank_1 if ranks.rank == 1 else X)
    continued.set()
    voting.world.replace_group()  # Later tests need a store that answers.


# Default groups, one after another.


@pytest.fixture
def use_store(monkeypatch: pytest.MonkeyPatch) -> Callable[[dist.Store], None]:
    """Return a function that makes syncbn use one store for all later default groups, as it does under torchrun.

    A process numbers the default groups in which a layer has been called. By the number a rank notices that another
    rank is in an earlier group. The ranks may have other numbers from earlier tests, so all of them continue at 1000.
    """

    def use_store(store: dist.Store) -> None:
        monkeypatch.setattr(positions, "default_store", lambda: store)
        monkeypatch.setattr(positions, "_default_groups", itertools.count(1000))

    return use_store


@pytest.mark.parametrize(
    ("replaces_group", "position_1", "cause"),
    [
        (False, "last seen after bn forward, call 1", report.OTHER_LAYERS),
        (True, "after bn forward, call 1; has left this or an earlier default group", report.LATE),
    ],
)
def test_a_late_rank_is_not_compared_with_the_calls_of_an_earlier_model(
    ranks: Ranks, reports: Reports, use_store: Callable[..., None], replaces_group: bool, position_1: str, cause: str
) -> None:
    """In a sweep over widths rank 1 is late in the first call of the second model. The store still has the position of
    rank 1 in the first model, and the number of channels of the first model. The report may show this position, and in
    one default group may take rank 1 for a rank with other layers, but must not name the numbers of channels."""
    use_store(dist.PrefixStore(f"sweep {replaces_group}", voting.world.store))
    for channels in (3, 4):
        if channels == 3 or replaces_group:
            voting.world.replace_group()
        model = syncbn.convert_syncbn_model(nn.Sequential(OrderedDict(bn=nn.BatchNorm1d(channels))))
        if channels == 4 and ranks.rank == 1:
            reports.wait_for(expected_report("in bn forward, call 1", position_1, cause))
        model(torch.randn(4, channels, requires_grad=True))
        dist.barrier()
    assert "channels over" not in reports.text  # A report with numbers of channels has "with 3 channels over ranks".


def test_ended_default_groups_leave_two_keys_in_the_store_and_no_object_or_thread(
    ranks: Ranks, use_store: Callable[..., None]
) -> None:
    def threads_and_objects() -> list[object]:
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name == "syncbn.watchdog"]
        return threads + [item for item in gc.get_objects() if isinstance(item, (ThisRank, GroupState, Site))]

    num_before = len(threads_and_objects())
    store, layer = dist.HashStore(), syncbn.SyncBatchNorm(3)
    use_store(store)
    for _ in range(3):
        voting.world.replace_group()
        for group in (None, dist.new_group(), dist.new_group()):
            layer.process_group = group
            layer(X).sum().backward()
        del group
    del layer
    voting.world.replace_group()
    wait_until(lambda: len(threads_and_objects()) <= num_before)  # A thread ends at its next poll.
    assert store.num_keys() == 2  # the keys "position" and "called/SyncBatchNorm" of this rank
