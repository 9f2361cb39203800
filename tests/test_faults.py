"""Tests what ranks print, and that they end, if something goes wrong on the last rank of a job, faulty_job.py.

docs/when_ranks_disagree.md has a table of the faults. The collectives of the job have a timeout of 3 s, in which a job
computes nothing, so two jobs run at a time.
"""

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from jobs import start_ranks, wait_until
from starter import Started

from syncbn.ranks.positions import process_state

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the faults are for CPUs and gloo")
JOB = Path(__file__).with_name("faulty_job.py")
STARTING = threading.Lock()  # The server that starts programs answers one request at a time.


class Fault(NamedTuple):
    """The output of the ranks of a job with a fault of the last rank."""

    output: str  # a regular expression for the output of rank 0
    faulty_output: str = ""  # and of the last rank
    num_ranks: int = 2
    num_successful: int = 0  # the first ranks, which end with status 0


WRITTEN = r"(; written \S+ s ago)?"


def lines(rank_0: str, rank_1: str) -> str:
    return rf"rank 0: (last seen )?{rank_0}{WRITTEN}\nrank 1: (last seen )?{rank_1}{WRITTEN}\n"


# Places in the faulty step.
IN_1, IN_2, IN_3 = (f"in body.bn{layer} forward, call 3" for layer in (1, 2, 3))
AFTER_1 = "after body.bn1 forward, call 3"
BEFORE_STEP = "after body.bn1 backward, call 2"
LAST = "after body.bn1 backward, call 6"
FIRST = "in body.bn1 forward, call 1"
MAY_LEAVE = "(; has left with .*)?"
ENDED = r"last seen {}; its process \(\d+\) has ended"
OF_TWO_MODELS = "in layer '1' forward, call 3; number {} of layer '1' in Sequential"
OTHER_CHANNELS = f"({FIRST}; )?has called body.bn1 in Sequential with {{}} channels over ranks 0-1.*"
FEWER_BATCHES = "Possible causes:\n- A rank has fewer batches"
# The broadcast of buffers by DistributedDataParallel fails, and the first rank to fail reports.
OUTSIDE = r"a collective outside of syncbn's layers failed on rank "

FAULTS = {
    "skips a layer": Fault(lines(IN_2, IN_3) + "Possible causes:\n- A rank has left out a layer"),
    "one more step": Fault("", lines(f"{LAST}; has left", "in body.bn1 forward, call 7") + FEWER_BATCHES, 2, 1),
    "one batch less, then a metric": Fault(
        OUTSIDE + r"\d\.\n(ranks? .*: (last seen after|after|in) body.bn1 .*\n)+(.*\n)*.*empty batch", num_ranks=3
    ),
    "one more step, DDP broadcasts buffers": Fault(
        "", OUTSIDE + r"1\.\n" + lines(f"{LAST}; has left", LAST) + FEWER_BATCHES, 2, 1
    ),
    "one more step, then a barrier": Fault(
        OUTSIDE + "0", lines(LAST + MAY_LEAVE, "in body.bn1 forward, call 7")
    ),
    "channels": Fault(
        "gloo::EnforceNotMet",  # gloo ends rank 0 before it can report.
        # The abort of rank 0 may reach rank 1 before its sums.
        r"(sums of different sizes|a collective failed on rank 1 after .*)\.\n"
        + lines(OTHER_CHANNELS.format(4), OTHER_CHANNELS.format(5)) + "Build the same model on every rank",
    ),
    "two numbers of channels": Fault(  # The last rank sends another size, and gloo aborts it.
        r"rank 1: (last seen )?in sync_batch_norm forward, call 1; .*has raised ValueError: expected 3 channels",
        "gloo::EnforceNotMet",
    ),
    "autocast": Fault(lines(*(f"{IN_1}, with an input of torch.{dtype}" for dtype in ("float32", "bfloat16")))),
    "two models, another order": Fault(lines(*map(OF_TWO_MODELS.format, (1, 2))) + "Several models of one class"),
    "evaluates, DDP broadcasts buffers": Fault(lines(IN_1, BEFORE_STEP + MAY_LEAVE)),
    "exception in forward": Fault(
        lines(IN_2, f"{AFTER_1}; has left with KeyError: .*"), r"\nKeyError: [^\n]*\n\Z"  # and no report
    ),
    "kill -9 in forward": Fault(lines(IN_2, ENDED.format(AFTER_1)) + "Possible causes:\n- Read the last output"),
    "kill -9 in the all_reduce": Fault(lines(IN_1, ENDED.format(IN_1))),
    "stopped for longer than the time-out": Fault(
        lines(IN_1, rf"last seen {BEFORE_STEP}; its process \(\d+\) is stopped") + "A debugger or a signal"
    ),
    "out of memory, caught": Fault(
        lines("in body.bn3 backward, call 3", "in body.bn1 forward, call 4")
        + "Possible causes:\n- A rank has called the model once more"
    ),
    "group made anew": Fault(lines(IN_1, "after .*")),
    "fork after use": Fault(
        lines(IN_1, f"{BEFORE_STEP}; has left.*"),
        r'this process \(\d+\) was forked from a process .* Start it by the method "spawn" instead',
    ),
    "threads": Fault("ranks? 0.*: in body.bn[12] forward"),
    "members": Fault(
        rf"ranks? 0(-1)?: {IN_2}{WRITTEN}\n(rank 1: in body.bn2 .*\n)?rank 2: (last seen )?after body.bn1 ", num_ranks=3
    ),
    "sizes of groups": Fault(
        "the ranks ask for different process groups: rank 0 for 4, rank 1 for 4, rank 2 for 4, rank 3 for 2",
        num_ranks=4,
    ),
    "a group on one rank alone": Fault(lines(IN_1, "in the creation of groups for process_group=2.*")),
    "none": Fault(r"^\Z", r"^\Z", num_successful=2),
    "none, DDP broadcasts buffers": Fault(r"^\Z", r"^\Z", num_successful=2),
}  # fmt: skip


def finish(ranks: list[Started], store: dist.Store, is_stopped: bool = False) -> tuple[list[int], list[str]]:
    """Return the exit status and the output of each rank, without the prefix of torch's errors. If the last rank stops
    itself, continue it after the end of rank 0. **Raises** AssertionError if a process is left."""
    try:
        if is_stopped:
            wait_until(lambda: "stopped" in process_state(ranks[-1].pid))
            ranks[0].wait()
            os.kill(ranks[-1].pid, signal.SIGCONT)
        statuses = [rank.wait() for rank in ranks]
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, 0)
                raise AssertionError("a process is left")
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        del store
    return statuses, [re.sub(r"^(\[rank\d+\]: )+", "", rank.text(), flags=re.MULTILINE) for rank in ranks]


def run(name: str) -> tuple[list[int], list[str]]:
    """Run the job with a fault."""
    with STARTING:
        ranks, store = start_ranks(FAULTS[name].num_ranks, JOB, name)
    return finish(ranks, store, is_stopped=name.startswith("stopped"))


Job = Future[tuple[list[int], list[str]]]


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest) -> Iterator[dict[str, Job]]:
    """Start the jobs of the selected tests in their order, two at a time."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == "test_fault"]
    threads = ThreadPoolExecutor(2)
    yield {name: threads.submit(run, name) for name in (test.callspec.params["name"] for test in tests)}
    threads.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", FAULTS)
def test_fault(jobs: dict[str, Job], name: str) -> None:
    fault, (statuses, texts) = FAULTS[name], jobs[name].result()
    assert re.search(fault.output, texts[0]), texts[0]
    assert re.search(fault.faulty_output, texts[-1]), texts[-1]
    assert [status == 0 for status in statuses] == [rank < fault.num_successful for rank in range(fault.num_ranks)]


WITH_OWN_STORE = """
import time
import torch
import torch.distributed as dist
import syncbn
from syncbn.ranks.positions import ThisRank

rendezvous_store, rank, size = next(dist.rendezvous("env://"))
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous_store.set("port", str(store.port))
else:
    store = dist.TCPStore("127.0.0.1", int(rendezvous_store.get("port")), is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
layer = syncbn.SyncBatchNorm(3)
layer(torch.randn(4, 3))
if rank > 0:
    read = ThisRank.read
    ThisRank.read = lambda *arguments: (time.sleep(rank / 2), read(*arguments))[1]
layer(torch.randn(4, 3 if rank < 2 else 2))
"""


def test_the_rank_that_has_the_store_leaves_last(tmp_path: Path) -> None:
    """Rank 0 raises as all ranks do, and would end at once, and with it the reports that the others read late."""
    (program := tmp_path / "program.py").write_text(WITH_OWN_STORE)
    statuses, texts = finish(*start_ranks(3, program))
    error = "syncbn: another rank failed in SyncBatchNorm forward, call 2.\nrank 2: ValueError: expected 3 channels"
    assert 0 not in statuses
    assert all(f"ValueError: {error}" in text for text in texts[:2]), texts
    assert "ValueError: SyncBatchNorm: expected 3 channels" in texts[2]


WITH_NEW_PARTNER = """
import torch
import torch.distributed as dist
import syncbn
from syncbn.ranks import positions

rendezvous_store, process, _ = next(dist.rendezvous("env://"))
positions.default_store = lambda: rendezvous_store  # one for both groups, as torchrun's
positions.ThisRank.read = None
for number, processes in enumerate(([0, 1], [0, 2])):
    if process in processes:
        store, rank = dist.PrefixStore(f"group {number}", rendezvous_store), processes.index(process)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model = syncbn.convert_syncbn_model(torch.nn.BatchNorm1d(3))
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
"""


def test_a_new_process_on_an_old_rank(tmp_path: Path) -> None:
    """In the earlier group the rank was another process. No rank reads the values of that process, and none warns."""
    (program := tmp_path / "program.py").write_text(WITH_NEW_PARTNER)
    assert finish(*start_ranks(3, program)) == ([0, 0, 0], ["", "", ""])
