"""The pytest plugin for tests on several ranks. It has the votes and, at the end, the fixtures of tests/distributed.

    torchrun --standalone --nproc-per-node 2 -m pytest -p voting ...

A test that fails on one rank fails on all, and affects no other test. Without the plugin, a rank that fails before a
collective would leave the other ranks waiting. Their collective would pair with a collective of the failed rank's NEXT
test, and the wrong test would fail. So set-up, call and teardown of each test end with a vote over the store of
torchrun. Before it votes, a rank that has failed destroys its process group. This raises an error on ranks that wait in
a collective. Then all ranks exchange their outcomes. If a rank has failed, all ranks raise the same AssertionError and
create a new process group.
"""

import contextlib
import functools
import gc
import logging
import os
import re
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from jobs import wait_until

from syncbn.ranks import calls, report, watchdog
from syncbn.ranks.collective import Collective

COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # A rank may be minutes late on a busy machine.
VOTE_TIMEOUT = timedelta(minutes=10)  # A rank that waits in a collective votes after COLLECTIVE_TIMEOUT.


class Ranks(NamedTuple):
    """The rank and device of this process, and the number of ranks."""

    rank: int
    size: int
    device: torch.device

    def local_slice(self, sizes: list[int]) -> slice:
        """Return the slice of this rank for a batch that is split into `sizes`, one for each rank."""
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def even_slice(self, batch: int) -> slice:
        """Return the slice of this rank for a batch that is split evenly."""
        assert batch % self.size == 0
        return self.local_slice([batch // self.size] * self.size)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all ranks."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total


class World:
    """The store of the votes, and the default process group, which can be replaced."""

    def __init__(self) -> None:
        self.store, rank, size = next(dist.rendezvous("env://"))
        self.store.set_timeout(VOTE_TIMEOUT)
        num_gpus = torch.cuda.device_count()
        self.backend = os.environ.get("TESTS_BACKEND") or ("nccl" if num_gpus >= size else "gloo")
        if num_gpus < size:
            os.environ["NCCL_HOSTID"] = str(rank)  # nccl refuses two ranks of a host on one GPU.
        device = torch.device("cuda", rank % num_gpus) if num_gpus else torch.device("cpu")
        if num_gpus:
            torch.cuda.set_device(device)
        self.ranks = Ranks(rank, size, device)
        self.num_groups = self.num_votes = 0

    def create_group(self) -> None:
        """Create the default process group."""
        self.num_groups += 1
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"group {self.num_groups}", self.store),
            rank=self.ranks.rank,
            world_size=self.ranks.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.ranks.device if self.backend == "nccl" else None,
        )
        # A rank that destroys the group at once would close connections that other ranks are still opening.
        dist.barrier()

    def destroy_groups(self) -> None:
        """Destroy all process groups, unless this rank has failed and destroyed them."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def replace_group(self) -> None:
        """Replace the default process group by a new group without subgroups."""
        self.destroy_groups()
        self.create_group()

    def exchange(self, outcome: str) -> list[str]:
        """Return the outcomes of all ranks in the same vote."""
        self.num_votes += 1
        keys = [f"vote {self.num_votes} rank {rank}" for rank in range(self.ranks.size)]
        self.store.set(keys[self.ranks.rank], outcome)
        return [self.store.get(key).decode() for key in keys]


world: World  # The start of the session creates it.


def release_locals(error: BaseException | None) -> None:
    """Release the local variables in the tracebacks of `error` and of the errors before it. Autograd graphs and errors
    keep references to their group, and gloo wakes waiting ranks only when the last reference is released."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            frame.f_locals  # noqa: B018  # Before Python 3.13 a frame caches its locals in a dict. This updates it.
        error = error.__context__
    gc.collect()


@contextlib.contextmanager
def vote() -> Iterator[None]:
    """Make the body of the context fail on all ranks if it fails on one."""
    error: BaseException | None = None
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as caught:  # Outcomes of pytest, such as skip, do not derive from Exception.
        error = caught
    passed = error is None or isinstance(error, pytest.skip.Exception)
    if not passed:
        release_locals(error)
        world.destroy_groups()
    outcomes = world.exchange("" if passed else f"{type(error).__name__}: {error}")
    if any(outcomes):
        world.replace_group()
        failures = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome]
        raise AssertionError("\n".join(failures)) from error
    if error is not None:
        raise error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    with vote():
        return (yield)


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give each rank its own temporary folder. Ranks that clean up one folder at the same time fail."""
    if config.option.basetemp is None:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = Path(folder.name) / "tests"


def pytest_sessionstart() -> None:
    global world
    world = World()
    world.create_group()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let only rank 0 exit with an error: torchrun ends all ranks when one fails, and rank 0 prints the summary."""
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # The option -k may select no test.
        session.exitstatus = pytest.ExitCode.OK
    world.exchange("")  # A rank may still be reading the last vote.
    world.destroy_groups()
    if world.ranks.rank > 0 and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    return world.ranks


# Dynamo and Inductor cause these warnings themselves (torch 2.13, November 2026).
WARNINGS_OF_COMPILERS = "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests marked `two_ranks` or `compiles` on two ranks only, and ignore the compilers' warnings."""
    for item in items:
        if item.get_closest_marker("compiles"):
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS_OF_COMPILERS))
            item.add_marker("two_ranks")
        if world.ranks.size != 2 and item.get_closest_marker("two_ranks"):
            item.add_marker(pytest.mark.skip(reason="slow, or written for two ranks"))


@pytest.fixture(autouse=True)
def reset_dynamo(request: pytest.FixtureRequest) -> None:
    """Before a test that compiles, reset Dynamo and collect garbage. Otherwise Dynamo could trace the finalizer of a
    group that an error of an earlier test has kept alive."""
    if request.node.get_closest_marker("compiles"):
        torch._dynamo.reset()
        gc.collect()


@pytest.fixture(autouse=True)
def set_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets waiting times by their names. By default a report waits up to 10 s, enough for a busy
    machine, for a rank to leave."""
    # The other waiting times are constants of the module `report`.
    defined_in: dict[str, object] = {"POLL_SECONDS": watchdog, "next_warning_seconds": Collective}

    def set_by_name(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(defined_in.get(name, report), name, value)

    set_by_name(SETTLE_SECONDS=10.0)
    return set_by_name


class Reports(logging.Handler):
    """The log messages of syncbn in a test. Each rank writes its messages to the store of the votes."""

    text = ""

    def write(self) -> None:
        world.store.set(f"reports of rank {world.ranks.rank}", self.text)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"
        self.write()

    def wait_for(self, expected: str, rank: int = 0) -> None:
        """Wait until the log of `rank`, which may be waiting in a collective, matches a regular expression."""

        def text() -> str:
            return world.store.get(f"reports of rank {rank}").decode()

        wait_until(lambda: re.search(expected, text()), lambda: f"for {expected!r} in the log {text()!r}")


@pytest.fixture
def reports(set_seconds: Callable[..., None]) -> Iterator[Reports]:
    """Return the log messages of all ranks, which report a wait after half a second."""
    set_seconds(next_warning_seconds=0.5, POLL_SECONDS=0.1)
    reports = Reports()
    reports.write()
    watchdog.log.addHandler(reports)
    dist.barrier()  # Now all logs are empty.
    yield reports
    watchdog.log.removeHandler(reports)


@pytest.fixture
def wrap_all_reduce(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., torch.Tensor]], None]:
    """Return a function of `wrapper`. It makes this rank call `wrapper(all_reduce, *arguments)` in each pass."""
    all_reduce = calls.all_reduce
    return lambda wrapper: monkeypatch.setattr(calls, "all_reduce", functools.partial(wrapper, all_reduce))
