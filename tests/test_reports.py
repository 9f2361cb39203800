"""Tests the report of one rank about all ranks: positions and causes, also if the store fails."""

import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from jobs import wait_until
from mixtures import HookedStore
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  # importing it registers "fake"

import syncbn
from syncbn.ranks import positions, report, watchdog
from syncbn.ranks.positions import Position, ThisRank, process_state, this_host


@pytest.fixture(params=[dist.HashStore, dist.FileStore])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThisRank]:
    """Return rank 1 of three ranks. No other rank and no thread uses its store."""
    store = dist.HashStore() if request.param is dist.HashStore else dist.FileStore(str(tmp_path / "store"), 3)
    dist.init_process_group("fake", store=store, rank=1, world_size=3)
    yield ThisRank(dist.group.WORLD)
    dist.destroy_process_group()


def position(call_number: int, pass_name: str = "forward", **fields: object) -> Position:
    number, description = 2 * call_number + (pass_name == "backward"), f"bn {pass_name}, call {call_number}"
    return Position("0", number, pass_name, description, call_number)._replace(**fields)


def write_others(reader: ThisRank, position: Position) -> None:
    """Write the position of ranks 0 and 2."""
    for other in (0, 2):
        reader.store.set(f"{reader.prefix}/{other}/position", json.dumps([[0, 0], position]))


# Positions.


def test_positions_before_a_restart_are_ignored(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may keep the store when it restarts the ranks."""
    write_others(reader, position(7))
    assert "ranks 0, 2: last seen after bn forward, call 7\n" in report.report_positions(reader, None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "ranks 0-2: has not been seen\n" in report.report_positions(ThisRank(dist.group.WORLD), None)


@pytest.mark.parametrize(("seconds", "age"), [(4000, r"; written 40\d\d s ago"), (-3000, "")])
def test_positions_have_ages(reader: ThisRank, seconds: float, age: str) -> None:
    """The clock of another host may be fast, so that the age is negative."""
    write_others(reader, position(7, time=time.time() - seconds))
    text = report.report_positions(reader, None)
    assert re.search(f"ranks 0, 2: last seen after bn forward, call 7{age}\n", text), text


@pytest.mark.parametrize(
    ("signal_number", "state", "causes"),
    [
        (signal.SIGKILL, "has ended", ["Possible causes:", report.ENDED, report.EXTRA_CALL, report.OTHER_MODEL]),
        (signal.SIGSTOP, "is stopped", [report.STOPPED]),
    ],
)
def test_states_of_processes_on_this_host(reader: ThisRank, signal_number: int, state: str, causes: list[str]) -> None:
    """gloo aborts a process without a message of syncbn, for example if one rank alone validates in training mode."""
    with subprocess.Popen(["sleep", "100"]) as process:
        os.kill(process.pid, signal_number)
        wait_until(lambda: state in process_state(process.pid))
        write_others(reader, position(7, process=process.pid, host=this_host()))
        text = report.report_positions(reader, None)
        process.kill()
    assert f"ranks 0, 2: last seen after bn forward, call 7; its process ({process.pid}) {state}\n" in text
    assert text.endswith("\n" + "\n- ".join(causes))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"departure": "has left"}, "after bn forward, call 7; has left this or an earlier default group"),
        ({"process": 1}, "last seen after bn forward, call 7"),
    ],
)
def test_a_position_that_changes_while_it_is_read(reader: ThisRank, changed: dict[str, object], line: str) -> None:
    """The rank leaves before its process ends, or a launcher has replaced the ended process by a new one. In both cases
    the report must not say that the process has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    written, num_reads = position(7, process=process.pid, host=this_host()), itertools.count(1)
    write_others(reader, written)

    def change_before_second_read(method: str) -> None:
        if method == "check" and next(num_reads) == 2:
            write_others(reader, written._replace(**changed))

    reader.store = HookedStore(reader.store, change_before_second_read)
    text = report.report_positions(reader, None)
    assert f"ranks 0, 2: {line}\n" in text


# Causes. tests/distributed/test_waits.py has the causes of waits, and mixtures.py those of ranks that differ.


class Waiting(NamedTuple):
    here: Position

    def position(self) -> Position:
        return self.here


HERE, LATE, LEFT = position(3), position(2, "backward"), position(2, "backward", departure="has left")
VALIDATING = HERE._replace(lacks_grad=True)
FAILED = HERE._replace(error="has raised RuntimeError: syncbn: a collective failed on rank 1 after 3.0 s.")
# The positions of all ranks and of the reader, which is None outside of layers, and the first cause.
CAUSES: dict[str, tuple[list[Position], Position | None, list[str]]] = {
    "one rank of three waits": ([HERE, LATE, LATE], HERE, [report.EXTRA_CALL]),
    "two ranks of three wait": ([HERE, HERE, LATE], HERE, [report.LATE]),
    "all ranks wait in one call, as another thread uses the group": ([HERE, HERE], HERE, [report.ONE_CALL]),
    "a rank has left": ([HERE, LEFT], HERE, [report.FEWER_BATCHES]),
    "validation after a rank has left": ([VALIDATING, LEFT], VALIDATING, [report.EXTRA_CALL]),
    "an error because another rank failed": ([LATE, FAILED], None, [report.OUTSIDE]),
    "an error": ([LATE, HERE._replace(error="has raised KeyError: 1")], None, []),
}


@pytest.mark.parametrize("name", CAUSES)
def test_first_cause(name: str) -> None:
    read_positions, here, first_cause = CAUSES[name]
    causes = report._causes(read_positions, here and Waiting(here))
    assert causes[:1] == first_cause
    assert len(causes) <= 3


ERRORS = [  # an error that ends a program, and whether a collective has raised it
    (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
    (RuntimeError("Application timeout caused pair closure"), True),
    (RuntimeError("Rank 1 successfully reached monitoredBarrier, but received errors"), True),
    (dist.DistBackendError("NCCL communicator was aborted"), True),
    (RuntimeError("syncbn: a collective failed on rank 0 after 3.0 s.\n... [/pytorch/gloo/pair.cc:553]"), False),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    (FileNotFoundError("/data/gloo/image.png"), False),
    (RuntimeError("cannot read /data/gloo/image.png"), False),
]


@pytest.mark.parametrize(("error", "is_of_collective"), ERRORS)
def test_errors_of_collectives_are_distinguished(error: Exception, is_of_collective: bool) -> None:
    """A report follows an error of a collective, but as a consequence of another rank's error it explains nothing."""
    try:
        raise error
    except type(error):
        assert positions.failed_collective() is (error if is_of_collective else None)
        reason = positions.exit_reason()
    assert report.is_consequence(reason) == (is_of_collective or "syncbn" in str(error))


# The store.


@pytest.mark.parametrize("method", ["set", "check"])
def test_a_store_that_has_ended_is_called_once(reader: ThisRank, method: str) -> None:
    """torch prints a C++ backtrace for each call that fails."""
    failed = list[str]()

    def fail(called: str) -> None:
        if called == method or failed:
            failed.append(called)
            raise RuntimeError("Broken pipe")

    reader.store = HookedStore(reader.store, fail)
    for _ in range(4):
        reader.departure += "-"  # a new position to write
        reader.write_position()
        assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    assert failed == [method]


def time_out(_: str) -> None:
    raise dist.DistStoreError("wait timeout after 3000ms")


def test_a_late_answer_of_the_store_affects_one_report(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may come after READ_SECONDS, or the store may time out."""
    monkeypatch.setattr(report, "READ_SECONDS", 0.2)
    write_others(reader, Position(departure="has left"))
    answers = threading.Event()
    store = reader.store = HookedStore(reader.store, lambda method: answers.wait())
    for _ in range(2):
        assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    answers.set()
    assert "ranks 0, 2: has left" in report.report_positions(reader, None)
    store.hook = time_out
    assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    store.hook = lambda method: None
    assert "ranks 0, 2: has left" in report.report_positions(reader, None)


def test_a_position_is_written_until_the_store_accepts_it(reader: ThisRank) -> None:
    store, methods = reader.store, list[str]()
    reader.departure, reader.store = "has left", HookedStore(store, time_out)
    reader.write_position()
    reader.store = HookedStore(store, methods.append)
    for _ in range(3):
        reader.write_position()
    assert methods == ["set"]


@pytest.mark.parametrize("reader", [dist.FileStore], indirect=True)
def test_a_file_gets_a_position_that_two_polls_have_found(reader: ThisRank) -> None:
    """A file grows with each write. A job of a week would otherwise write gigabytes to it."""
    reader.departure = "has left"
    found = watchdog._poll(reader, reader.written_position)
    assert reader.written_position != found == reader.position()
    watchdog._poll(reader, found)
    assert reader.written_position == found


def test_a_report_waits_for_its_own_thread(reader: ThisRank) -> None:
    """The program and the watchdog may begin reports at once, and the later report replaces `report_thread`."""
    ended = threading.Event()

    def call() -> None:
        reader.report_thread = threading.Thread()
        time.sleep(0.2)
        ended.set()

    assert report.call_store(reader, call, 60.0)
    assert ended.is_set()


def test_an_error_that_cannot_be_recorded_is_raised(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gets its own error, not that of the thread which would write the error to the store."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ValueError, match="got -1"):
        syncbn.create_syncbn_process_group(-1)
