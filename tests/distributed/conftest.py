"""Tests on several ranks, launched by torchrun with `-p voting`; without it there is nothing to collect here."""

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

# of torch's own, in Dynamo and Inductor (torch 2.13, November 2026)
WARNINGS_OF_COMPILERS = "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip on other numbers of ranks what is marked for two, as graphs are: nothing in them depends on W."""
    for item in items:
        if item.get_closest_marker("compiles"):
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS_OF_COMPILERS))
            item.add_marker("two_ranks")
        if NUM_RANKS != "2" and item.get_closest_marker("two_ranks"):
            item.add_marker(pytest.mark.skip(reason="slow, and nothing in it depends on W"))


@pytest.fixture(autouse=True)
def nothing_compiled_yet(request: pytest.FixtureRequest) -> None:
    """No graph of another test, and no group that an error of another test holds: Dynamo would trace what runs when the
    group ends."""
    if request.node.get_closest_marker("compiles"):
        torch._dynamo.reset()
        gc.collect()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error waits for what the other ranks write, longer than a busy machine lets a rank wait for a core."""
    monkeypatch.setattr(report, "SETTLE_SECONDS", 10.0)


@pytest.fixture
def reports(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    """The reports of ranks that warn when they have waited half a second."""
    monkeypatch.setattr(Collective, "next_warning_seconds", 0.5)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.1)
    reports = Reports(ranks.rank, voting.world.store)
    watchdog.log.addHandler(reports)
    dist.barrier()  # no rank waits for a report of the test before
    yield reports
    watchdog.log.removeHandler(reports)


@pytest.fixture
def sign_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The layers of a rank that calls it go on as if it had started with SYNCBN_CHECKS=0, if they have not begun."""
    return lambda: monkeypatch.setenv("SYNCBN_CHECKS", "0")
