"""Tests the parts of reports that need one process: positions of all ranks, causes, the store, errors of this rank.

tests/distributed/test_waits.py has ranks that wait, and test_faults.py ranks that end.
"""

import contextlib
import gc
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import wait_until
from mixtures import HookedStore
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  # importing it registers "fake"
from training import CountCollectives

import syncbn
from syncbn.ranks import calls, positions, report, watchdog
from syncbn.ranks.positions import Position, ThisRank
from syncbn.ranks.sites import GroupState, Site

X = torch.randn(4, 3, requires_grad=True)


@pytest.fixture(params=[dist.HashStore, dist.FileStore])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThisRank]:
    """Return rank 1 of three, the rank that reports. Ranks 0 and 2 have no process: `write` writes their values."""
    store = dist.HashStore() if request.param is dist.HashStore else dist.FileStore(str(tmp_path / "store"), 3)
    dist.init_process_group("fake", store=store, rank=1, world_size=3)
    yield ThisRank(dist.group.WORLD)
    dist.destroy_process_group()


def make_position(call_number: int, pass_name: str = "forward", **fields: object) -> Position:
    """Return a position in the layer bn. Each of its calls issues a collective in forward and one in backward."""
    sequence_number = 2 * call_number + (1 if pass_name == "backward" else 0)
    description = f"bn {pass_name}, call {call_number}"
    return Position("0", sequence_number, pass_name, description, call_number)._replace(**fields)


def write(reader: ThisRank, key: str, value: object, process: int = 0) -> None:
    """Write `value` as process `process` of ranks 0 and 2 would, in default group 0."""
    for rank in (0, 2):
        reader.store.set(f"{reader.prefix}/{rank}/{key}", json.dumps([[process, 0], value]))


def raising(error: Exception) -> Callable[..., None]:
    """Return a function that raises `error`."""

    def fail(*_: object) -> None:
        raise error

    return fail


# Positions.


@pytest.mark.parametrize(("seconds", "age"), [(4000, r"; written 40\d\d s ago"), (-3000, "")])
def test_a_report_has_the_age_of_each_position(reader: ThisRank, seconds: float, age: str) -> None:
    """The clock of another host may be fast. The age is then negative, and is left out."""
    write(reader, "position", make_position(7, time=time.time() - seconds))
    text = report.report_positions(reader, None)
    assert re.search(f"ranks 0, 2: last seen after bn forward, call 7{age}\n", text), text


def test_values_of_an_earlier_process_of_a_rank_are_ignored(reader: ThisRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may replace a process and keep the store. A value counts only if the process that wrote it has also
    written the rank's position. After a restart by torchrun, keys have a new prefix."""
    write(reader, "a key", "value", process=1)
    write(reader, "position", make_position(7), process=1)
    assert reader.read([0, 2], "a key") == ["value", "value"]
    write(reader, "position", make_position(7), process=2)
    assert reader.read([0, 2], "a key") == [None, None]
    assert "ranks 0, 2: last seen after bn forward, call 7\n" in report.report_positions(reader, None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "ranks 0-2: has not been seen\n" in report.report_positions(ThisRank(dist.group.WORLD), None)


# Causes. tests/distributed/test_waits.py has the causes of waits, and mixtures.py those of ranks that differ.


FORWARD, BACKWARD, LATE = make_position(3), make_position(3, "backward"), make_position(2, "backward")
VALIDATING, LEFT = FORWARD._replace(lacks_grad=True), LATE._replace(departure="has left")
FAILED = FORWARD._replace(error="has raised RuntimeError: syncbn: a collective failed on rank 1 after 3.0 s.")
# The columns: the position of the rank that reports (None: it waits outside of layers), the positions of all ranks, and
# a list with the first cause. The list is empty if a position explains the failure.
CAUSES: dict[str, tuple[Position | None, list[Position], list[str]]] = {
    "one rank of three waits": (FORWARD, [FORWARD, LATE, LATE], [report.EXTRA_CALL]),
    "all ranks wait in one call": (FORWARD, [FORWARD, FORWARD], [report.ONE_CALL]),
    "a rank validates after another rank has left": (VALIDATING, [VALIDATING, LEFT], [report.EXTRA_CALL]),
    "a rank has failed because another rank failed": (None, [LATE, FAILED], [report.OUTSIDE]),
    "a rank has left out a backward": (BACKWARD, [BACKWARD, FORWARD], [report.OTHER_LAYERS]),
    "an error explains the failure": (None, [LATE, FORWARD._replace(error="has raised KeyError: 1")], []),
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
    """`from_collective`: a collective outside of layers has failed, so the rank reports all positions.
    `is_consequence`: the error follows from an error of another rank, so it does not explain a failure."""
    try:
        raise error
    except RuntimeError:
        assert positions.failed_collective() is (error if from_collective else None)
        reason = positions.exit_reason()
    assert report.is_consequence(reason) == is_consequence


# The store.


def test_a_store_is_called_again_after_a_timeout(reader: ThisRank) -> None:
    """A later report has the positions of the other ranks. test_waits.py has stores that have ended or are stopped."""
    write(reader, "position", Position(departure="has left"))
    store = reader.store
    reader.store = HookedStore(store, raising(dist.DistStoreError("wait timeout after 3000ms")))
    assert report.STORE_UNKNOWN in report.report_positions(reader, None)
    reader.store = store
    assert "ranks 0, 2: has left" in report.report_positions(reader, None)


@pytest.mark.parametrize("reader", [dist.FileStore], indirect=True)
def test_a_file_store_gets_a_position_only_after_two_equal_polls(reader: ThisRank) -> None:
    """A file grows with each write, so a position in each second would make the file of a week's job too large."""
    reader.departure = "has left"  # changes the position
    position = watchdog._poll(reader, reader.written_position)
    assert position == reader.position()
    assert position != reader.written_position
    watchdog._poll(reader, position)
    assert reader.written_position == position


# Errors and ends of this rank. The backend "fake" returns from collectives without other ranks.


@pytest.mark.parametrize("context", [contextlib.nullcontext, CountCollectives], ids=["fast path", "dispatched"])
@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_an_error_in_a_pass_is_recorded_in_the_position(
    fake_group: dist.ProcessGroup, failing: str, context: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that wait for this rank report the error."""
    layer, run_out_of_memory = syncbn.SyncBatchNorm(3), raising(MemoryError("no room"))
    # A backward fails when it unpacks a saved tensor, and a forward fails in the all_reduce.
    with saved_tensors_hooks(pack_hook=lambda tensor: tensor, unpack_hook=run_out_of_memory):
        y = layer(X)
    if failing == "forward":
        monkeypatch.setattr(calls, "all_reduce", run_out_of_memory)
    with context(), pytest.raises(MemoryError):
        layer(X) if failing == "forward" else y.sum().backward()
    assert watchdog.this_rank().position().error == "has raised MemoryError: no room"


def test_a_gpu_error_gets_a_note_and_no_report(fake_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may raise the error of an earlier kernel in syncbn's collective, although no rank is late."""
    layer, error = syncbn.SyncBatchNorm(3), RuntimeError("CUDA error: an illegal memory access was encountered")
    layer(X)
    monkeypatch.setattr(calls, "all_reduce", raising(error))
    note = r"syncbn: an earlier kernel failed; its error surfaced in SyncBatchNorm forward, call 2\..*"
    with pytest.raises(RuntimeError, match=rf"^SyncBatchNorm: CUDA error: an illegal memory access .*\n{note}\Z"):
        layer(X)


def test_ended_default_groups_leave_two_keys_in_the_store_and_no_object_or_thread() -> None:
    def threads_and_objects() -> list[object]:
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name == "syncbn.watchdog"]
        return threads + [item for item in gc.get_objects() if isinstance(item, (ThisRank, GroupState, Site))]

    num_before = len(threads_and_objects())
    store, layer = dist.HashStore(), syncbn.SyncBatchNorm(3)
    for _ in range(3):
        dist.init_process_group("fake", store=store, rank=0, world_size=2)
        for group in (None, dist.new_group(), dist.new_group()):
            layer.process_group = group
            layer(X).sum().backward()
        del group
        dist.destroy_process_group()
    del layer
    wait_until(lambda: len(threads_and_objects()) <= num_before)  # A thread ends at its next poll.
    assert store.num_keys() == 2  # the keys "position" and "called/SyncBatchNorm" of this rank
