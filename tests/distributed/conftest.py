"""Settings of tests on several ranks. They are collected only under torchrun, with `-p voting`."""

import functools
import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import voting
from torch import Tensor
from voting import Ranks, Reports

from syncbn.ranks import calls, report, watchdog
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


# Where the waiting times of reports are.
SECONDS: dict[str, object] = {
    **dict.fromkeys(("SETTLE_SECONDS", "READ_SECONDS", "ANSWER_SECONDS"), report),
    "POLL_SECONDS": watchdog,
    "next_warning_seconds": Collective,
}


@pytest.fixture(autouse=True)
def set_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets waiting times by their names. An error waits longer for the other ranks' positions
    than a rank waits for a core on a busy machine."""

    def set_seconds(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(SECONDS[name], name, value)

    set_seconds(SETTLE_SECONDS=10.0)
    return set_seconds


@pytest.fixture
def reports(ranks: Ranks, set_seconds: Callable[..., None]) -> Iterator[Reports]:
    """Return the reports of the ranks, which warn after waiting for half a second."""
    set_seconds(next_warning_seconds=0.5, POLL_SECONDS=0.1)
    reports = Reports(ranks.rank, voting.world.store)
    watchdog.log.addHandler(reports)
    dist.barrier()  # No rank still waits for a report of the previous test.
    yield reports
    watchdog.log.removeHandler(reports)


@pytest.fixture
def sign_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that switches the checks off for layers of this rank that have not been called."""
    return lambda: monkeypatch.setenv("SYNCBN_CHECKS", "0")


@pytest.fixture
def wrap_all_reduce(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Return a function that makes this rank call `wrapper(all_reduce, *arguments)` in each pass."""
    all_reduce = calls.all_reduce
    return lambda wrapper: monkeypatch.setattr(calls, "all_reduce", functools.partial(wrapper, all_reduce))
