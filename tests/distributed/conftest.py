"""Settings of tests on several ranks. They are collected only under torchrun, with `-p voting`."""

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import voting
from voting import Ranks, Reports

from syncbn.ranks import report, watchdog
from syncbn.ranks.collective import Collective

NUM_RANKS = os.environ.get("WORLD_SIZE")
collect_ignore_glob = [] if "RANK" in os.environ else ["*"]

# Dynamo and Inductor cause these warnings themselves (torch 2.13, November 2026).
WARNINGS_OF_COMPILERS = "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that are marked `two_ranks`, such as tests of graphs, on two ranks only."""
    for item in items:
        if item.get_closest_marker("compiles"):
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS_OF_COMPILERS))
            item.add_marker("two_ranks")
        if NUM_RANKS != "2" and item.get_closest_marker("two_ranks"):
            item.add_marker(pytest.mark.skip(reason="slow, and nothing in it depends on W"))


@pytest.fixture(autouse=True)
def nothing_compiled_yet(request: pytest.FixtureRequest) -> None:
    """Discard the graphs of other tests, and groups that an error of another test keeps alive: otherwise Dynamo would
    trace the code that runs at the end of a group."""
    if request.node.get_closest_marker("compiles"):
        torch._dynamo.reset()
        gc.collect()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an error wait longer for the other ranks' positions than a rank waits for a core on a busy machine."""
    monkeypatch.setattr(report, "SETTLE_SECONDS", 10.0)


@pytest.fixture
def reports(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    """Return the reports of the ranks, which warn after waiting for half a second."""
    monkeypatch.setattr(Collective, "next_warning_seconds", 0.5)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.1)
    reports = Reports(ranks.rank, voting.world.store)
    watchdog.log.addHandler(reports)
    dist.barrier()  # no rank still waits for a report of the previous test
    yield reports
    watchdog.log.removeHandler(reports)


@pytest.fixture
def sign_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that switches this rank's checks off, like SYNCBN_CHECKS=0, before its first training call."""
    return lambda: monkeypatch.setenv("SYNCBN_CHECKS", "0")
