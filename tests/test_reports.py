"""Tests the report of one rank about all ranks: their positions, the likeliest causes, and the failure of the store.

tests/distributed/test_waits.py has ranks that wait, and test_faults.py ranks that end.
"""

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from mixtures import HookedStore
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  # importing it registers "fake"

from syncbn.ranks import positions, report, watchdog
from syncbn.ranks.positions import Position, ThisRank, this_host


@pytest.fixture(params=[dist.HashStore, dist.FileStore])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThisRank]:
    """Return rank 1 of three ranks, which reports. Ranks 0 and 2 have no process: `write` writes their values."""
    store = dist.HashStore() if request.param is dist.HashStore else dist.FileStore(str(tmp_path / "store"), 3)
    dist.init_process_group("fake", store=store, rank=1, world_size=3)
    yield ThisRank(dist.group.WORLD)
    dist.destroy_process_group()


def make_position(call_number: int, pass_name: str = "forward", **fields: object) -> Position:
    """Return a position in the layer bn, of which each call is a forward and a backward: two collectives."""
    sequence_number = 2 * call_number + (1 if pass_name == "backward" else 0)
    description = f"bn {pass_name}, call {call_number}"
    return Position("0", sequence_number, pass_name, description, call_number)._replace(**fields)


def write(reader: ThisRank, key: str, value: object, process: int = 0) -> None:
    """Write the value of ranks 0 and 2, as if the process with this id wrote it in its default group 0."""
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
    """A launcher may replace a process and keep the store. A rank's present process has written the rank's position."""
    write(reader, "a key", "value", process=1)
    write(reader, "position", make_position(7), process=1)
    assert reader.read([0, 2], "a key") == ["value", "value"]
    write(reader, "position", make_position(7), process=2)
    assert reader.read([0, 2], "a key") == [None, None]


def test_a_rank_that_leaves_during_a_report_has_left(reader: ThisRank) -> None:
    """The report has the departure, although it first reads a position without the departure, and then sees that the
    process has ended."""
    with subprocess.Popen(["true"]) as process:  # waits for the end of the process
        pass
    position = make_position(7, process=process.pid, host=this_host())
    write(reader, "position", position)
    written_positions = iter([position, position._replace(departure="has left")])

    def write_next_position(method: str) -> None:
        if method == "check":  # A read calls this method of the store first.
            write(reader, "position", next(written_positions))

    reader.store = HookedStore(reader.store, write_next_position)
    line = "ranks 0, 2: after bn forward, call 7; has left this or an earlier default group\n"
    assert line in report.report_positions(reader, None)


# Causes. tests/distributed/test_waits.py has the causes of waits, and mixtures.py those of ranks that differ.


WAITING, LATE = make_position(3), make_position(2, "backward")
VALIDATING, LEFT = WAITING._replace(lacks_grad=True), LATE._replace(departure="has left")
FAILED = WAITING._replace(error="has raised RuntimeError: syncbn: a collective failed on rank 1 after 3.0 s.")
# An entry has the position of the rank that reports, or None if this rank waits outside of layers; the positions of
# all ranks; and the first cause in a list, which is empty if a position explains the failure.
CAUSES: dict[str, tuple[Position | None, list[Position], list[str]]] = {
    "one rank of three waits": (WAITING, [WAITING, LATE, LATE], [report.EXTRA_CALL]),
    "all ranks wait in one call": (WAITING, [WAITING, WAITING], [report.ONE_CALL]),
    "a rank validates after another rank has left": (VALIDATING, [VALIDATING, LEFT], [report.EXTRA_CALL]),
    "a rank has failed because another rank failed": (None, [LATE, FAILED], [report.OUTSIDE]),
    "an error explains the failure": (None, [LATE, WAITING._replace(error="has raised KeyError: 1")], []),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_report_names_up_to_three_causes_the_likeliest_first(name: str) -> None:
    place, positions_of_ranks, first_cause = CAUSES[name]
    wait = None if place is None else SimpleNamespace(position=lambda: place)
    causes = report._causes(positions_of_ranks, wait)
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
    """A rank reports all positions after the error of a collective outside of layers. In reports this error is not the
    cause of a failure, because it follows from another rank's error."""
    try:
        raise error
    except RuntimeError:
        assert positions.failed_collective() is (error if from_collective else None)
        reason = positions.exit_reason()
    assert report.is_consequence(reason) == is_consequence


# The store.


def test_a_store_that_has_ended_is_not_called_again(reader: ThisRank) -> None:
    """torch prints a C++ backtrace for each call that fails."""
    methods: list[str] = []

    def fail(method: str) -> None:
        methods.append(method)
        raise RuntimeError("Broken pipe")

    reader.store = HookedStore(reader.store, fail)
    for departure in ("has left", "has left with KeyError"):
        reader.departure = departure  # A rank writes its position only if the position has changed.
        reader.write_position()
        assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    assert methods == ["set"]


def test_a_report_waits_a_bounded_time_for_a_slow_store(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is called again after a timeout, so a later report has the positions of the other ranks."""
    monkeypatch.setattr(report, "READ_SECONDS", 0.2)
    write(reader, "position", Position(departure="has left"))
    store, timeout = reader.store, threading.Event()

    def time_out(_: str) -> None:
        timeout.wait()
        raise dist.DistStoreError("wait timeout after 3000ms")

    reader.store = HookedStore(store, time_out)
    for _ in range(2):
        assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    timeout.set()
    assert reader.wait_for_report(seconds=60)  # The thread of the first report has ended.
    reader.store = store
    assert "ranks 0, 2: has left" in report.report_positions(reader, None)


@pytest.mark.parametrize("reader", [dist.FileStore], indirect=True)
def test_a_file_gets_a_position_that_is_the_same_in_two_polls(reader: ThisRank) -> None:
    """A file grows with each write, so a position in each second would make the file of a week's job too large."""
    reader.departure = "has left"
    position = watchdog._poll(reader, reader.written_position)
    assert reader.written_position != position == reader.position()
    watchdog._poll(reader, position)
    assert reader.written_position == position
