"""A catalogue of what can go wrong on one rank of several, and what the ranks print then.

docs/when_ranks_disagree.md has a table of these faults. The job is faulty_job.py; its collectives wait for 3 s.
"""

import contextlib
import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from jobs import start_ranks, wait_until

from syncbn.ranks.positions import process_state

JOB = Path(__file__).with_name("faulty_job.py")


class Fault(NamedTuple):
    """A fault of the last rank, and what the ranks print."""

    said: str  # a regular expression for what rank 0 says
    said_at_fault: str = ""  # by the last rank
    num_ranks: int = 2
    well: int = 0  # so many ranks end well, from rank 0 on


LAST_SEEN = "last seen "
WRITTEN = r"(; written \S+ s ago)?"


def _where(rank_0: str, rank_1: str) -> str:
    return rf"rank 0: ({LAST_SEEN})?{rank_0}{WRITTEN}\nrank 1: ({LAST_SEEN})?{rank_1}{WRITTEN}\n"


# The first of several causes that a report names.
OTHER_LAYERS, EXTRA_CALL, FEWER_BATCHES, NOT_CONVERTED, READ_OUTPUT = (
    rf"Possible causes:\n- {cause}"
    for cause in (
        "A rank has left out a layer",
        "A rank has called the model once more",
        "A rank has fewer batches",
        "A rank has not called convert_syncbn_model",
        "Read the last output",
    )
)

# Where a rank is in the faulty step.
IN_1, IN_2, IN_3 = (f"in body.bn{layer} forward, call 3" for layer in (1, 2, 3))
AFTER_1 = "after body.bn1 forward, call 3"
BEFORE_STEP = "after body.bn1 backward, call 2"
LAST = "after body.bn1 backward, call 6"
MAY_LEAVE = "(; has left with .*)?"
ENDED = r"last seen {}; its process \(\d+\) has ended"
NO_MORE = r"[^\n]*\n\Z"  # of a rank that ends by its own exception, and prints nothing of syncbn
FIRST = "in body.bn1 forward, call 1"
IN_BACKWARD = "in body.bn3 backward, call 3"
OF_TWO_MODELS = "in layer '1' forward, call 3; number {} of layer '1' in Sequential"
# DistributedDataParallel broadcasts buffers, as by default. That collective fails, and the first rank to fail reports.
OUTSIDE = r"a collective outside of syncbn's layers failed on rank "
ONE_BATCH_LESS = OUTSIDE + r"\d\.\n(ranks? .*: (last seen after|after|in) body.bn1 .*\n)+(.*\n)*.*empty batch"

FAULTS = {
    "skips a layer": Fault(_where(IN_2, IN_3) + OTHER_LAYERS),
    "another order": Fault(_where(IN_2, IN_3) + OTHER_LAYERS),
    "one more step": Fault("", _where(f"{LAST}; has left", "in body.bn1 forward, call 7") + FEWER_BATCHES, well=1),
    "one batch less, then a metric": Fault(ONE_BATCH_LESS),
    "one batch less of three ranks, then a metric": Fault(ONE_BATCH_LESS, num_ranks=3),
    "one more step, DDP broadcasts buffers": Fault(
        "",
        OUTSIDE + r"1\.\n" + _where(f"{LAST}; has left", LAST) + FEWER_BATCHES,
        well=1,
    ),
    "in evaluation": Fault(_where(IN_1, BEFORE_STEP + "(; the layer is in evaluation mode now)?" + MAY_LEAVE)),
    "not converted": Fault(_where(FIRST, "has not been seen") + NOT_CONVERTED),
    "channels": Fault(
        "gloo::EnforceNotMet",  # gloo ends rank 0 before it says a word
        # The abort of rank 0 may reach rank 1 in place of its sums.
        r"(sums of different sizes|a collective failed on rank 1 after .*)\.\n"
        + _where(*(f"({FIRST}; )?has called body.bn1 in Sequential with {c} channels over ranks 0-1.*" for c in (4, 5)))
        + "Build the same model on every rank",
    ),
    "dtype": Fault(_where(*(f"{FIRST}, with an input of torch.{dtype}" for dtype in ("float32", "float64")))),
    "autocast": Fault(_where(*(f"{IN_1}, with an input of torch.{dtype}" for dtype in ("float32", "bfloat16")))),
    "another eps": Fault(_where(*(f"{IN_1}, with eps={eps}" for eps in ("1e-05", "0.001")))),
    "backwards in another order": Fault(_where(*(f"in body.bn1 backward, call {call}" for call in (5, 6)))),
    "two models, another order": Fault(_where(*map(OF_TWO_MODELS.format, (1, 2))) + "Several models of one class"),
    "evaluates, DDP broadcasts buffers": Fault(_where(IN_1, BEFORE_STEP + MAY_LEAVE)),
    "one more step, then a barrier": Fault(  # in which the others wait
        OUTSIDE + "0", _where(LAST + MAY_LEAVE, "in body.bn1 forward, call 7")
    ),
    "exception in forward": Fault(_where(IN_2, f"{AFTER_1}; has left with KeyError: .*"), rf"\nKeyError: {NO_MORE}"),
    "exception in the data loader": Fault(
        _where(IN_1, f"{BEFORE_STEP}; has left with OSError: cannot read image 17"), rf"\nOSError: {NO_MORE}"
    ),
    "kill -9 in forward": Fault(_where(IN_2, ENDED.format(AFTER_1)) + READ_OUTPUT),
    "kill -9 in backward": Fault(_where(IN_BACKWARD, ENDED.format("after body.bn3 forward, call 3"))),
    "kill -9 in the all_reduce": Fault(_where(IN_1, ENDED.format(IN_1))),
    "stopped for longer than the time-out": Fault(
        _where(IN_1, rf"last seen {BEFORE_STEP}; its process \(\d+\) is stopped") + "A debugger or a signal"
    ),
    "out of memory, caught": Fault(_where(IN_BACKWARD, "in body.bn1 forward, call 4") + EXTRA_CALL),
    "group destroyed": Fault(_where(IN_1, r"after body\.bn\d .*")),
    "group made anew": Fault(_where(IN_1, "after .*")),
    "fork after use": Fault(
        _where(IN_1, f"{BEFORE_STEP}; has left.*"),
        r'this process \(\d+\) was forked from a process .* Start it by the method "spawn" instead',
    ),
    "threads": Fault("ranks? 0.*: in body.bn[12] forward"),
    "members": Fault(
        rf"ranks? 0(-1)?: {IN_2}{WRITTEN}\n(rank 1: in body.bn2 .*\n)?rank 2: ({LAST_SEEN})?after body.bn1 ",
        num_ranks=3,
    ),
    "sizes of groups": Fault(
        "the ranks ask for different process groups: rank 0 for 4, rank 1 for 4, rank 2 for 4, rank 3 for 2",
        num_ranks=4,
    ),
    "a group on one rank alone": Fault(_where(IN_1, "in the creation of groups for process_group=2.*")),
}


def run(name: str) -> tuple[list[int], list[str]]:
    """The exit status of each rank of the job with this fault, or "none", and what the rank wrote. **Raises**
    AssertionError when a process is left."""
    num_ranks = FAULTS[name].num_ranks if name in FAULTS else 2
    ranks, store = start_ranks(num_ranks, JOB, name)
    try:
        store.wait([f"rank {rank} is there" for rank in range(num_ranks)], timedelta(minutes=10))
        if name.startswith("stopped"):
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
    return statuses, [re.sub(r"^(\[rank\d+\]: )+", "", rank.text(), flags=re.MULTILINE) for rank in ranks]
