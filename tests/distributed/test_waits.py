"""Tests that a rank which waits or fails reports where all ranks are, and that healthy waits are not reported.

Rank 1 is late until rank 0 has reported the expected text. tests/test_reports.py has the lines and causes of reports.
"""

import contextlib
import gc
import itertools
import queue
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import voting
from jobs import wait_until
from mixtures import HookedStore
from torch import Tensor, nn
from training import CountCollectives
from voting import Ranks, Reports

import syncbn
from syncbn import bad_argument
from syncbn.functional import batch_norm_backward
from syncbn.kernels import cpu, operators, reference
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
WRITTEN = r"(; written \S+ s ago)?"


def first_cause(cause: str) -> str:
    """Return a regular expression for two or three causes, of which this one is the first."""
    return rf"Possible causes:\n- {re.escape(cause)}\n(- .*\n){{1,2}}(?!- )"


@pytest.fixture
def new_group(ranks: Ranks) -> None:
    """Create a default group in which no layer has been called. Each rank numbers its default groups, and an earlier
    test may have let one rank count further, so both ranks continue from the larger number."""
    start = torch.tensor(next(positions._default_groups))
    dist.all_reduce(start, dist.ReduceOp.MAX)
    positions._default_groups = itertools.count(int(start))
    voting.world.replace_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn1, self.bn2 = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.bn1(self.linear(x)))


def step(model: nn.Module) -> None:
    model(X).square().sum().backward()


@torch.no_grad()
def call_without_gradient(model: nn.Module) -> None:
    model(X)


# What the late rank does. It calls `wait` where it is late.


def evaluate_then_step(model: nn.Module, wait: Callable[[], None]) -> None:
    model.eval()(X)
    wait()
    step(model.train())


def train_without_conversion(model: nn.Module, wait: Callable[[], None]) -> None:
    step(Net())
    wait()
    step(model)


def compile_slowly(model: nn.Module, wait: Callable[[], None]) -> None:
    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        wait()
        return graph

    torch.compile(model, backend=compile_graph)(X)


def leave_out_backward(model: nn.Module, wait: Callable[[], None]) -> None:
    y = model(X)
    wait()
    y.square().sum().backward()


class Situation(NamedTuple):
    cause: str
    late: Callable[[nn.Module, Callable[[], None]], object]  # the call of the late rank, and how the rank waits in it
    late_place: str = "last seen after bn1 backward, call 2"
    waits: Callable[[nn.Module], object] = step  # the call of the other rank
    waiting_place: str = "in bn1 forward, call 3"


LATE_STEP = lambda model, wait: (wait(), step(model))  # noqa: E731
LATE_CALL = lambda model, wait: (wait(), model(X))  # noqa: E731
FIRST, UNSEEN = "in bn1 forward, call 1", "has not been seen"
EVALUATES = "last seen after bn1 backward, call 2; the layer is in evaluation mode now"
SITUATIONS = {
    "slow loader": Situation(report.LATE, LATE_STEP),
    "validation in training mode": Situation(report.EXTRA_CALL, LATE_CALL, waits=call_without_gradient),
    "FLOPs counted before training": Situation(report.EXTRA_CALL, LATE_CALL, UNSEEN, call_without_gradient, FIRST),
    "evaluation on one rank": Situation(report.EVALUATION, evaluate_then_step, EVALUATES),
    "model not converted": Situation(report.NOT_CONVERTED, train_without_conversion, UNSEEN, step, FIRST),
    "backward left out": Situation(
        report.OTHER_LAYERS, leave_out_backward, "last seen after bn2 forward, call 3", step, "in bn2 backward, call 3"
    ),
    "compiled on one rank": Situation(report.NOT_CONVERTED, compile_slowly, UNSEEN, lambda model: model(X), FIRST),
}


@pytest.mark.compiles
@pytest.mark.usefixtures("new_group")
@pytest.mark.parametrize("name", SITUATIONS)
def test_first_cause_of_a_wait(ranks: Ranks, reports: Reports, name: str) -> None:
    situation = SITUATIONS[name]
    model = syncbn.convert_syncbn_model(Net())
    for _ in range(0 if situation.waiting_place == FIRST else 2):
        step(model)
    dist.barrier()
    if ranks.rank == 1:
        lines = rf"rank 0: {situation.waiting_place}{WRITTEN}\nrank 1: {situation.late_place}{WRITTEN}\n"
        situation.late(model, lambda: reports.wait_for(lines + first_cause(situation.cause)))
    else:
        situation.waits(model)
    dist.barrier()


# Errors of one rank, for which other ranks may wait.


def fail(*_: object) -> None:
    raise MemoryError("no room")


# name -> (a call that raises before or after its all_reduce, the recorded error). The hooks for tensors that `hooked`
# has saved fail in backward.
ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "layer on meta": (
        lambda y, hooked: syncbn.SyncBatchNorm(3, device="meta")(X),
        "ValueError: the input is on cpu but running_mean on meta",
    ),
    "statistics on meta": (
        lambda y, hooked: batch_norm_backward(X, X, torch.zeros(3, device="meta"), torch.ones(3, device="meta")),
        "ValueError: the input is on cpu but mean on meta",
    ),
    "saved tensors": (lambda y, hooked: hooked.sum().backward(), "MemoryError: no room"),
    "output": (lambda y, hooked: syncbn.SyncBatchNorm(3)(X), "MemoryError: no room"),
    "gradient": (lambda y, hooked: y.sum().backward(), "MemoryError: no room"),
}


@pytest.mark.parametrize("context", [contextlib.nullcontext, CountCollectives], ids=["fast path", "dispatched"])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_recorded_in_the_position_of_its_rank(
    ranks: Ranks, name: str, context: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all ranks fail. In test_groups.py other ranks wait, and report the error."""
    call, error = ERRORS[name]
    y = syncbn.SyncBatchNorm(3)(X)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fail):
        hooked = syncbn.SyncBatchNorm(3)(X)
    # Pretend to have a GPU without kernels: there a rank with a bad argument raises without joining the all_reduce.
    monkeypatch.setattr(bad_argument, "_device_of", lambda tensors: torch.device("xpu"))
    for back_end in (cpu, operators, reference):
        monkeypatch.setattr(back_end.Forward, "forward_outputs", fail)
        monkeypatch.setattr(back_end.Backward, "backward_outputs", fail)
    with context(), pytest.raises((MemoryError, ValueError)):
        call(y, hooked)
    assert error in watchdog.this_rank().position().error
    dist.barrier()


def test_a_gpu_error_is_raised_with_a_note(ranks: Ranks, wrap_all_reduce: Callable[..., None]) -> None:
    """CUDA raises the error of an earlier kernel where the host waits next. The text must not say that ranks differ."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    layer = syncbn.SyncBatchNorm(3)
    layer(X)
    wrap_all_reduce(fail)
    note = "syncbn: an earlier kernel failed; its error surfaced in SyncBatchNorm forward, call 2"
    with pytest.raises(RuntimeError, match=rf"^SyncBatchNorm: CUDA error: an illegal memory access .*\n{note}"):
        layer(X)


@pytest.mark.parametrize(("is_stopped", "has_bad_argument"), [(False, False), (True, False), (True, True)])
def test_errors_while_the_store_does_not_answer(
    ranks: Ranks, set_seconds: Callable[..., None], is_stopped: bool, has_bad_argument: bool
) -> None:
    """The process of the store may have ended, or be stopped. A rank waits for the store for a bounded time, and does
    not report a cause that it cannot know."""
    set_seconds(ANSWER_SECONDS=0.2, READ_SECONDS=0.2)
    voting.world.replace_group()
    layer, ends = syncbn.SyncBatchNorm(3), threading.Event()
    layer(X)

    def fail(_: str) -> None:
        if is_stopped:
            ends.wait()
        raise RuntimeError("Broken pipe")

    layer._syncbn_site.rank.store = HookedStore(layer._syncbn_site.rank.store, fail)
    own = rf"rank {ranks.rank}: in SyncBatchNorm forward, call 2\n"
    other = rf"rank {1 - ranks.rank}: not known, as the process group's store does not answer\n"
    title, error = (
        "the ranks differ in layer, call, settings or dtype, and not all ranks have reported",
        RanksDifferError,
    )
    if has_bad_argument:
        title, error = "another rank has a bad argument", RuntimeError
    message = rf"^syncbn: {title}\.\n({own}{other}|{other}{own})"
    if has_bad_argument and ranks.rank == 1:
        message, error = "expected 3 channels", ValueError
    with pytest.raises(error, match=message):
        layer(X if ranks.rank == 0 else X[:, :2] if has_bad_argument else X.double())
    ends.set()
    voting.world.replace_group()


# When the watchdog warns.


def test_a_rank_that_is_35_s_late(
    ranks: Ranks, reports: Reports, set_seconds: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank warns once, and both continue. Here the wait of rank 0 in the first forward counts as 35 s."""
    is_late = lambda wait: ranks.rank == 0 and wait.description() == "SyncBatchNorm forward, call 1"  # noqa: E731
    assert FIRST_WARNING_SECONDS == 30
    set_seconds(next_warning_seconds=FIRST_WARNING_SECONDS)
    monkeypatch.setattr(Collective, "seconds", lambda wait: 35.0 * is_late(wait))
    layer = syncbn.SyncBatchNorm(3)
    if ranks.rank == 1:
        reports.wait_for("syncbn: rank 0 has waited 35 s for others.")
        time.sleep(0.3)  # Rank 0 does not warn again.
    for _ in range(3):
        layer(X).sum().backward()
    assert reports.text.count(" has waited ") == (ranks.rank == 0)
    dist.barrier()


def test_other_waits_are_not_reported(ranks: Ranks, reports: Reports) -> None:
    """Ranks wait for data, in a hook of backward, in many short collectives and in evaluation."""
    layer = syncbn.SyncBatchNorm(3)
    dist.barrier()  # The ranks start together, so that none is late.
    y = layer(X)
    with contextlib.suppress(queue.Empty):
        queue.SimpleQueue[None]().get(timeout=0.7)
    y.register_hook(lambda _: (time.sleep(0.7), dist.barrier())[1])
    y.sum().backward()
    for _ in range(70):
        dist.barrier()
        time.sleep(0.01)
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        layer.eval()(X)
    dist.barrier()
    assert not reports.text


def test_a_wait_of_one_of_two_threads(ranks: Ranks, reports: Reports) -> None:
    """The other thread trains a layer of another group."""
    waiting, training = (syncbn.SyncBatchNorm(3, process_group=dist.new_group()) for _ in range(2))
    for layer in (waiting, training):
        layer(X)

    def wait() -> None:
        if ranks.rank == 1:
            reports.wait_for(
                rf"rank 0 has waited \d+ s for others.\nrank 0: in SyncBatchNorm forward, call 2{WRITTEN}\n"
                r"rank 1: last seen after SyncBatchNorm forward, call \d+ on another process group\n"
            )
        waiting(X)

    thread = threading.Thread(target=wait)
    thread.start()
    while ranks.all_reduce_sum(torch.tensor(thread.is_alive())):
        training(X)


# Default groups, one after another.


@pytest.mark.usefixtures("new_group")
def test_threads_start_one_watchdog() -> None:
    start = threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        ranks = {*threads.map(lambda _: (start.wait(), watchdog.this_rank())[1], range(8))}
    assert len(ranks) == 1
    dist.barrier()


@pytest.fixture
def use_store(monkeypatch: pytest.MonkeyPatch) -> Callable[[dist.Store], None]:
    """Return a function that makes later default groups use one store, as under torchrun."""
    return lambda store: monkeypatch.setattr(positions, "default_store", lambda: store)


LEFT = "after bn forward, call 1; has left this or an earlier default group"


@pytest.mark.usefixtures("new_group")
@pytest.mark.parametrize(
    ("second_class", "replaces_group", "started_watchdog", "place", "cause"),
    [
        ("First", False, True, "last seen after bn forward, call 1", report.OTHER_LAYERS),
        ("Second", False, True, "last seen after bn forward, call 1", report.OTHER_LAYERS),
        ("First", True, False, LEFT, report.LATE),
        ("First", True, True, "has not been seen", report.NOT_CONVERTED),
    ],
)
def test_a_second_model_with_other_channels(
    ranks: Ranks, reports: Reports, use_store: Callable[..., None], second_class: str, replaces_group: bool,
    started_watchdog: bool, place: str, cause: str,
) -> None:  # fmt: skip
    """In a sweep over widths rank 1 is late in the second model. The store still has the positions of the first model,
    whose channels the report must not compare with those of the second."""
    use_store(dist.PrefixStore(f"{second_class} {replaces_group} {started_watchdog}", voting.world.store))
    for channels, class_name in ((3, "First"), (4, second_class)):
        if channels == 3 or replaces_group:
            voting.world.replace_group()
        model = type(class_name, (nn.Module,), {})()
        model.bn = nn.BatchNorm1d(channels)
        syncbn.convert_syncbn_model(model)
        if channels == 4 and ranks.rank == 1:
            if started_watchdog:
                watchdog.this_rank()
            lines = rf"rank 0: in bn forward, call 1{WRITTEN}\nrank 1: {place}{WRITTEN}\n"
            reports.wait_for(lines + first_cause(cause))
        model.bn(torch.randn(4, channels, requires_grad=True))
        dist.barrier()
    assert "channels over" not in reports.text


def test_ended_default_groups_leave_no_thread_no_record_and_two_keys(
    ranks: Ranks, use_store: Callable[..., None]
) -> None:
    def records() -> list[object]:
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name == "syncbn.watchdog"]
        return [*threads, *(value for value in gc.get_objects() if isinstance(value, (ThisRank, GroupState, Site)))]

    num_records, store, layer = len(records()), dist.HashStore(), syncbn.SyncBatchNorm(3)
    use_store(store)
    for _ in range(3):
        voting.world.replace_group()
        for group in (None, dist.new_group(), dist.new_group()):
            layer.process_group = group
            layer(X).sum().backward()
        del group
    del layer
    voting.world.replace_group()
    wait_until(lambda: len(records()) <= num_records)  # Threads end soon.
    assert store.num_keys() == 2  # the position, and how the layer was called last


def test_an_old_default_group_that_is_released_late(ranks: Ranks, use_store: Callable[..., None]) -> None:
    """The end of the old group does not overwrite the position of this rank in the new group. Otherwise readers would
    ignore all values of this rank, and report that ranks differ although they agree."""
    use_store(dist.PrefixStore("released late", voting.world.store))
    voting.world.replace_group()
    watchdog.this_rank()
    old_group = dist.group.WORLD  # DistributedDataParallel or a traceback may hold it.
    voting.world.replace_group()
    rank = watchdog.this_rank()
    rank.write("a key", 1)
    del old_group
    gc.collect()
    assert rank.read([rank.rank], "a key") == [1]
    dist.barrier()
