"""A pytest plugin for tests on several ranks: what fails on one rank fails on all, and disturbs no other test.

Without it a rank that fails before a collective leaves its peers waiting there; they would pair with that rank's NEXT
test, and the wrong test would fail. So every phase of every test ends in a vote over a store that torchrun provides. A
failing rank first destroys its process group, whereupon peers that wait in a collective wake with an error; then all
ranks write their outcome, read all others', and raise the same AssertionError; then all make a new process group.

    torchrun --standalone --nproc-per-node 2 -m pytest -p voting ...
"""

import contextlib
import gc
import logging
import os
import re
import tempfile
import traceback
from collections.abc import Generator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: it would keep that group
from jobs import wait_until

COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # on a busy machine one rank may be minutes behind
VOTE_TIMEOUT = timedelta(minutes=10)  # longer than a collective's: a rank that waits in one still comes to vote


class Ranks(NamedTuple):
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device

    def slices(self, sizes: list[int]) -> slice:
        """This rank's part of a batch that is split into `sizes`, one a rank."""
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def even(self, batch: int) -> slice:
        """This rank's part of a batch that every rank has the same share of."""
        assert batch % self.size == 0
        return self.slices([batch // self.size] * self.size)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over all ranks."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total


class World:
    """The store for votes, and a process group that can be made anew."""

    def __init__(self) -> None:
        self.store, rank, size = next(dist.rendezvous("env://"))
        self.store.set_timeout(VOTE_TIMEOUT)
        num_gpus = torch.cuda.device_count()
        self.backend = os.environ.get("TESTS_BACKEND") or ("nccl" if num_gpus >= size else "gloo")
        if num_gpus < size:
            os.environ["NCCL_HOSTID"] = str(rank)  # nccl refuses two ranks of one host on one GPU
        device = torch.device("cuda", rank % num_gpus) if num_gpus else torch.device("cpu")
        if num_gpus:
            torch.cuda.set_device(device)
        self.ranks = Ranks(rank, size, device)
        self.num_groups = 0
        self.num_votes = 0

    def enter(self, backend: str | None = "") -> None:
        """Make the default process group; with another backend than the tests' if one is given."""
        self.num_groups += 1
        dist.init_process_group(
            self.backend if backend == "" else backend,
            store=dist.PrefixStore(f"group {self.num_groups}", self.store),
            rank=self.ranks.rank,
            world_size=self.ranks.size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=self.ranks.device if self.backend == "nccl" else None,
        )
        # A rank that destroyed the group at once would close connections that others are still making.
        dist.barrier()

    def leave(self) -> None:
        """Destroy it and all its subgroups, if a failing rank has not yet."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def make_anew(self, backend: str | None = "") -> None:
        """Another default process group, for which no subgroups are made yet."""
        self.leave()
        self.enter(backend)

    def exchange(self, outcome: str) -> list[str]:
        """Every rank's outcome of the same vote."""
        self.num_votes += 1
        keys = [f"vote {self.num_votes} rank {rank}" for rank in range(self.ranks.size)]
        self.store.set(keys[self.ranks.rank], outcome)
        return [self.store.get(key).decode() for key in keys]


class Reports(logging.Handler):
    """What syncbn logs on the ranks in a test. Each rank keeps its own text in the store of the votes."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        super().__init__()
        self.rank, self.store, self.text = rank, store, ""
        store.set(f"reports of rank {rank}", "")

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"
        self.store.set(f"reports of rank {self.rank}", self.text)

    def wait_for(self, expected: str, rank: int = 0) -> None:
        """Wait until a rank, which may itself be waiting in a collective, has reported this regular expression."""

        def text() -> str:
            return self.store.get(f"reports of rank {rank}").decode()

        try:
            wait_until(lambda: re.search(expected, text()))
        except AssertionError:
            raise AssertionError(f"rank {rank} has reported {text()!r}, not {expected!r}") from None


world: World | None = None


def release_locals(error: BaseException) -> None:
    """Drop what the frames below `error` hold: gloo closes its connections, which wakes the peers, only when the last
    reference to a group goes, and each autograd graph in the test's frames holds one."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        with contextlib.suppress(RuntimeError):  # still running
            frame.clear()
        frame.f_locals  # noqa: B018  # before Python 3.13 a snapshot of the locals, which this refreshes
    gc.collect()


@contextlib.contextmanager
def vote() -> Iterator[None]:
    """Fail the body on every rank when it fails on one."""
    assert world is not None
    error: BaseException | None = None
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as caught:  # pytest's own outcomes derive from BaseException
        error = caught
    passed = error is None or isinstance(error, pytest.skip.Exception)
    if not passed:
        release_locals(error)
        world.leave()
    outcomes = world.exchange("" if passed else f"{type(error).__name__}: {error}")
    if any(outcomes):
        world.make_anew()
        failures = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome]
        raise AssertionError("\n".join(failures)) from error
    if error is not None:
        raise error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    with vote():
        return (yield)


pytest_runtest_call = pytest_runtest_setup


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give each rank temporary folders of its own: pytest's clean-up of common ones fails beside another's."""
    if config.option.basetemp is None:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = Path(folder.name) / "tests"


def pytest_sessionstart() -> None:
    global world
    if "RANK" not in os.environ:
        raise pytest.UsageError("these tests need ranks: torchrun --standalone --nproc-per-node 2 -m pytest ...")
    world = World()
    world.enter()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # as with -k for a test of another part
        session.exitstatus = pytest.ExitCode.OK
    if world is not None:
        world.exchange("")  # the store lives with torchrun, but let nobody leave while another still reads a vote
        world.leave()
        if world.ranks.rank > 0 and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            # Rank 0 failed the same tests. torchrun ends all ranks at the first that fails: let that be the one which
            # has printed its summary.
            session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    assert world is not None
    return world.ranks
