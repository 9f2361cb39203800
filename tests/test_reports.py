"""Tests the report of one rank about all ranks: their positions, the likeliest causes, and a store that fails.

tests/distributed/test_waits.py has ranks that wait, and test_faults.py ranks that end.
"""

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from mixtures import HookedStore
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  # importing it registers "fake"

from syncbn.ranks import positions, report, watchdog
from syncbn.ranks.positions import Position, ThisRank, this_host


@pytest.fixture(params=[dist.HashStore, dist.FileStore])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThisRank]:
    """Return rank 1 of three ranks. The other ranks do not exist: the tests write their values to the store."""
    store = dist.HashStore() if request.param is dist.HashStore else dist.FileStore(str(tmp_path / "store"), 3)
    dist.init_process_group("fake", store=store, rank=1, world_size=3)
    yield ThisRank(dist.group.WORLD)
    dist.destroy_process_group()


def make_position(call_number: int, pass_name: str = "forward", **fields: object) -> Position:
    """Return a position in a call of the layer bn. Each call has one forward and one backward."""
    sequence_number = 2 * call_number + (1 if pass_name == "backward" else 0)
    description = f"bn {pass_name}, call {call_number}"
    return Position("0", sequence_number, pass_name, description, call_number)._replace(**fields)


def write(reader: ThisRank, key: str, value: object, process: int = 0) -> None:
    """Write a value of ranks 0 and 2, as processes with this id do in their default group 0."""
    for rank in (0, 2):
        reader.store.set(f"{reader.prefix}/{rank}/{key}", json.dumps([[process, 0], value]))


# Positions.


@pytest.mark.parametrize(("seconds", "age"), [(4000, r"; written 40\d\d s ago"), (-3000, "")])
def test_a_report_has_the_age_of_each_position(reader: ThisRank, seconds: float, age: str) -> None:
    """The clock of another host may be fast. The age is then negative, and is left out."""
    write(reader, "position", make_position(7, time=time.time() - seconds))
    text = report.report_positions(reader, None)
    assert re.search(f"ranks 0, 2: last seen after bn forward, call 7{age}\n", text), text


def test_positions_before_a_restart_are_ignored(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may keep the store when it restarts the ranks."""
    write(reader, "position", make_position(7))
    assert "ranks 0, 2: last seen after bn forward, call 7\n" in report.report_positions(reader, None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "ranks 0-2: has not been seen\n" in report.report_positions(ThisRank(dist.group.WORLD), None)


def test_values_of_an_earlier_process_of_a_rank_are_ignored(reader: ThisRank) -> None:
    """A launcher may replace a process and keep the store. The position shows which process is the present one."""
    write(reader, "position", make_position(7), process=2)
    write(reader, "a key", "value", process=2)
    assert reader.read([0, 2], "a key") == ["value", "value"]
    write(reader, "a key", "value", process=1)
    assert reader.read([0, 2], "a key") == [None, None]


def test_a_rank_that_leaves_during_a_report_has_left(reader: ThisRank) -> None:
    """The report names the reason for the departure, although the process has ended by then."""
    with subprocess.Popen(["true"]) as process:
        pass
    position = make_position(7, process=process.pid, host=this_host())
    write(reader, "position", position)
    reads = []

    def leave_before_second_read(method: str) -> None:
        if method == "check":
            reads.append(method)
            if len(reads) == 2:
                write(reader, "position", position._replace(departure="has left"))

    reader.store = HookedStore(reader.store, leave_before_second_read)
    line = "ranks 0, 2: after bn forward, call 7; has left this or an earlier default group\n"
    assert line in report.report_positions(reader, None)


class FakeCollective(NamedTuple):
    """A collective in which the rank that reports waits."""

    place: Position

    def position(self) -> Position:
        return self.place


def test_a_process_that_has_ended_was_last_seen_in_a_call(reader: ThisRank) -> None:
    position = make_position(3)
    ended = position._replace(process_state="its process (1) has ended")
    line = report._describe(ended, reader, FakeCollective(position))
    assert line == "last seen in bn forward, call 3; its process (1) has ended"


# Causes. tests/distributed/test_waits.py has the causes of waits, and mixtures.py those of ranks that differ.

WAITING, LATE = make_position(3), make_position(2, "backward")
VALIDATING, LEFT = WAITING._replace(lacks_grad=True), LATE._replace(departure="has left")
FAILED = WAITING._replace(error="has raised RuntimeError: syncbn: a collective failed on rank 1 after 3.0 s.")
# The position of the rank that reports, or None outside of layers; the positions of all ranks; the first cause.
CAUSES: dict[str, tuple[Position | None, list[Position], list[str]]] = {
    "one rank of three waits": (WAITING, [WAITING, LATE, LATE], [report.EXTRA_CALL]),
    "all ranks wait in one call, as another thread uses the group": (WAITING, [WAITING, WAITING], [report.ONE_CALL]),
    "a rank validates after another rank has left": (VALIDATING, [VALIDATING, LEFT], [report.EXTRA_CALL]),
    "a rank has failed because another rank failed": (None, [LATE, FAILED], [report.OUTSIDE]),
    "an error explains the failure": (None, [LATE, WAITING._replace(error="has raised KeyError: 1")], []),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_report_names_up_to_three_causes_the_likeliest_first(name: str) -> None:
    place, positions_of_ranks, first_cause = CAUSES[name]
    causes = report._causes(positions_of_ranks, None if place is None else FakeCollective(place))
    assert causes[:1] == first_cause
    assert len(causes) <= 3


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"


@pytest.mark.parametrize(
    ("error", "from_collective", "is_consequence"),
    [
        (RuntimeError(f"{GLOO} Connection closed by peer"), True, True),
        (RuntimeError("Application timeout caused pair closure"), True, True),
        (RuntimeError("Rank 1 successfully reached monitoredBarrier, but received errors"), True, True),
        (dist.DistBackendError("NCCL communicator was aborted"), True, True),
        (RuntimeError(f"syncbn: a collective failed on rank 0 after 3.0 s.\n... {GLOO}"), False, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (RuntimeError("cannot read /data/gloo/image.png"), False, False),
    ],
)
def test_errors_of_collectives_are_recognised(error: Exception, from_collective: bool, is_consequence: bool) -> None:
    """A report follows the error of a collective outside of layers. A rank with an error that is the consequence of
    another rank's error is not the cause of a failure."""
    try:
        raise error
    except RuntimeError:
        assert positions.failed_collective() is (error if from_collective else None)
        reason = positions.exit_reason()
    assert report.is_consequence(reason) == is_consequence


# The store.


def test_a_store_that_has_ended_is_not_called_again(reader: ThisRank) -> None:
    """torch prints a C++ backtrace for each call that fails."""
    methods = list[str]()

    def fail(method: str) -> None:
        methods.append(method)
        raise RuntimeError("Broken pipe")

    reader.store = HookedStore(reader.store, fail)
    for departure in ("has left", "has left with KeyError"):
        reader.departure = departure  # a new position to write
        reader.write_position()
        assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    assert methods == ["set"]


def test_a_store_that_times_out_is_called_again(reader: ThisRank) -> None:
    def time_out(_: str) -> None:
        raise dist.DistStoreError("wait timeout after 3000ms")

    write(reader, "position", Position(departure="has left"))
    store, reader.departure = reader.store, "has left"
    reader.store = HookedStore(store, time_out)
    reader.write_position()
    assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    reader.store = store
    reader.write_position()
    assert "has left" in reader.read([reader.rank], "position")[0]
    assert "ranks 0, 2: has left" in report.report_positions(reader, None)


def test_a_report_waits_a_bounded_time_for_a_slow_store(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next report has the positions of the other ranks again if the store has answered."""
    monkeypatch.setattr(report, "READ_SECONDS", 0.2)
    write(reader, "position", Position(departure="has left"))
    answers = threading.Event()
    reader.store = HookedStore(reader.store, lambda method: answers.wait())
    for _ in range(2):
        assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    answers.set()
    assert "ranks 0, 2: has left" in report.report_positions(reader, None)


@pytest.mark.parametrize("reader", [dist.FileStore], indirect=True)
def test_a_file_gets_a_position_that_is_the_same_in_two_polls(reader: ThisRank) -> None:
    """A file grows with each write, so a position in each second would make the file of a week's job too large."""
    reader.departure = "has left"
    position = watchdog._poll(reader, reader.written_position)
    assert reader.written_position != position == reader.position()
    watchdog._poll(reader, position)
    assert reader.written_position == position
