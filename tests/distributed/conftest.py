"""Settings and fixtures of the tests on ranks, which are collected only under torchrun, with `-p voting`."""

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
    """Run tests marked `two_ranks` or `compiles` on two ranks only, and ignore the compilers' warnings."""
    for item in items:
        if item.get_closest_marker("compiles"):
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS_OF_COMPILERS))
            item.add_marker("two_ranks")
        if NUM_RANKS != "2" and item.get_closest_marker("two_ranks"):
            item.add_marker(pytest.mark.skip(reason="slow, and nothing in it depends on W"))


@pytest.fixture(autouse=True)
def reset_dynamo(request: pytest.FixtureRequest) -> None:
    """Before a test that compiles, reset Dynamo and collect garbage. Otherwise Dynamo could trace the finalizer of a
    group that an error of an earlier test has kept alive."""
    if request.node.get_closest_marker("compiles"):
        torch._dynamo.reset()
        gc.collect()


# Waiting times are constants of the module `report`, except these.
DEFINED_IN: dict[str, object] = {"POLL_SECONDS": watchdog, "next_warning_seconds": Collective}


@pytest.fixture(autouse=True)
def set_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets waiting times by their names. By default an error waits 10 s for the positions of the
    other ranks, enough for a busy machine."""

    def set_by_name(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(DEFINED_IN.get(name, report), name, value)

    set_by_name(SETTLE_SECONDS=10.0)
    return set_by_name


@pytest.fixture
def reports(ranks: Ranks, set_seconds: Callable[..., None]) -> Iterator[Reports]:
    """Return the log messages of all ranks, which report a wait after half a second."""
    set_seconds(next_warning_seconds=0.5, POLL_SECONDS=0.1)
    reports = Reports(ranks.rank, voting.world.store)
    watchdog.log.addHandler(reports)
    dist.barrier()  # A rank may still wait for a report of the previous test.
    yield reports
    watchdog.log.removeHandler(reports)


@pytest.fixture
def wrap_all_reduce(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Return a function that makes this rank call `wrapper(all_reduce, *arguments)` in each pass."""
    all_reduce = calls.all_reduce
    return lambda wrapper: monkeypatch.setattr(calls, "all_reduce", functools.partial(wrapper, all_reduce))
