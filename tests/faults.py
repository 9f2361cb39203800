"""A catalogue of what can go wrong on one rank of several: what the ranks say then, and when all of them have ended.

    python tests/faults.py              prints the table of docs/when_ranks_disagree.md, beside a layer written by hand
    python tests/faults.py channels     prints that row alone

The job is faulty_job.py; its collectives wait for 3 s.
"""

import contextlib
import math
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from jobs import start_ranks

from syncbn.ranks.positions import state_of

JOB = Path(__file__).with_name("faulty_job.py")
MOST_SECONDS = 30.0  # of a job in the table; a busy machine may need more
STOPPED_SECONDS = 5.0  # longer than that


class Fault(NamedTuple):
    """A fault of the last rank: what the user is to do, and what the ranks say."""

    remedy: str  # the table's words
    said: str  # a regular expression for what rank 0 says
    said_at_fault: str = ""  # by the last rank
    num_ranks: int = 2
    well: int = 0  # so many ranks end well, from rank 0 on
    by_hand: bool = True  # whether it can happen without syncbn


WRITTEN = r"(; written \S+ s ago)?"


def _where(rank_0: str, rank_1: str) -> str:
    return rf"rank 0: {rank_0}{WRITTEN}\nrank 1: {rank_1}{WRITTEN}\n"


# Where a rank is in the faulty step.
IN_1, IN_2, IN_3 = (f"in body.bn{layer} forward, call 3" for layer in (1, 2, 3))
AFTER_1 = "after body.bn1 forward, call 3"
BEFORE_STEP = "after body.bn1 backward, call 2"
LAST, LAST_BUT_ONE = "after body.bn1 backward, call 6", "after body.bn1 backward, call 5"
MAY_LEAVE = "(; has left with .*)?"
ENDED = r"last seen {}; its process \(\d+\) has ended"
NO_MORE = r"[^\n]*\n\Z"  # of a rank that ends by its own exception, and prints nothing of syncbn
FIRST = "in body.bn1 forward, call 1"
IN_BACKWARD = "in body.bn3 backward, call 3"
OF_TWO_MODELS = r"in layer '1' forward, call 3; first called at faulty_job.py:\d+, as layer number {} of .*"


def _of_dtypes(where: str, *dtypes: str) -> str:
    return _where(*(f"{where}, with an input of torch.{dtype}" for dtype in dtypes))


def _one_batch_less(num_ranks: int = 2) -> Fault:
    """Beside DistributedDataParallel with its defaults, by which it broadcasts buffers: a collective outside of the
    layers fails. The rank that fails first reports, whichever it is."""
    failed = r"a collective outside of syncbn's layers failed on rank \d\.\n"
    said = failed + r"(ranks? .*: (after|in) body.bn1 .*\n)+.*empty batch"
    return Fault(BATCHES, said, num_ranks=num_ranks)


# What to do about several faults.
BATCHES = "give all ranks as many batches, or let a rank go on with empty ones, `images[:0]`"
KILLED = "find what killed the process, such as Linux when memory ran out (`dmesg`)"

FAULTS = {
    "skips a layer": Fault(
        "call the same layers on all ranks; skip one with `loss = loss + layer(x[:0]).sum()`", _where(IN_2, IN_3)
    ),
    "another order": Fault("call the layers in the same order on all ranks", _where(IN_2, IN_3)),
    "one more step": Fault(
        BATCHES, "", said_at_fault=_where(f"{LAST}; has left", "in body.bn1 forward, call 7"), well=1
    ),
    "one batch less, then a metric": _one_batch_less(),
    "one batch less of three ranks, then a metric": _one_batch_less(num_ranks=3),
    "one more step, DDP broadcasts buffers": Fault(  # whose broadcast fails: not a collective of syncbn
        BATCHES,
        "",
        said_at_fault=r"a collective outside of syncbn's layers failed on rank 1\.\n"
        + _where(f"{LAST}; has left", LAST)
        + "A rank has left out .*empty batches",
        well=1,
    ),
    "in evaluation": Fault(
        "call `model.train()` on all ranks before a training step",
        _where(IN_1, BEFORE_STEP + MAY_LEAVE),
    ),
    "not converted": Fault("call `convert_syncbn_model(model)` on all ranks", _where(FIRST, "has not been seen")),
    "channels": Fault(
        "build the same model on all ranks",
        "gloo::EnforceNotMet",  # gloo ends rank 0 before it says a word
        said_at_fault=_where(*(f"({FIRST}; )?has called body.bn1 with {c} channels over ranks 0-1.*" for c in (4, 5)))
        + "Build the same model everywhere",
    ),
    "dtype": Fault("give model and inputs the same dtype on all ranks", _of_dtypes(FIRST, "float32", "float64")),
    "autocast": Fault("use autocast on all ranks or on none", _of_dtypes(IN_1, "float32", "bfloat16")),
    "another eps": Fault(
        "give layers the same settings on all ranks", _where(*(f"{IN_1}, with eps={eps}" for eps in ("1e-05", "0.001")))
    ),
    "backwards in another order": Fault(
        "differentiate the calls of a layer in the same order on all ranks",
        _where(*(f"in SyncBatchNorm1d backward, call {call}" for call in (5, 6))),
        by_hand=False,
    ),
    "two models, another order": Fault(
        "call the models in the same order on all ranks", _where(*map(OF_TWO_MODELS.format, (1, 2))), by_hand=False
    ),
    "evaluates, DDP broadcasts buffers": Fault(
        "evaluate with `ddp.module(x)`, not with `ddp(x)`", _where(IN_1, BEFORE_STEP + MAY_LEAVE)
    ),
    "one more step, then a barrier": Fault(  # in which the others wait
        BATCHES,
        "a collective outside of syncbn's layers failed on rank 0",
        said_at_fault=_where(LAST + MAY_LEAVE, "in body.bn1 forward, call 7"),
    ),
    "exception in forward": Fault(
        "correct the error that the rank has left with",
        _where(IN_2, f"{AFTER_1}; has left with KeyError: .*"),
        said_at_fault=rf"\nKeyError: {NO_MORE}",
    ),
    "exception in the data loader": Fault(
        "correct the error that the rank has left with",
        _where(IN_1, f"{BEFORE_STEP}; has left with OSError: cannot read image 17"),
        said_at_fault=rf"\nOSError: {NO_MORE}",
    ),
    "kill -9 in forward": Fault(KILLED, _where(IN_2, ENDED.format(AFTER_1))),
    "kill -9 in backward": Fault(KILLED, _where(IN_BACKWARD, ENDED.format("after body.bn3 forward, call 3"))),
    "kill -9 in the all_reduce": Fault(KILLED, _where(IN_1, ENDED.format(IN_1))),
    "stopped for longer than the time-out": Fault(
        "find what stopped the process; if it must pause, raise `timeout` of `init_process_group`",
        _where(IN_1, rf"last seen {BEFORE_STEP}; its process \(\d+\) is stopped"),
    ),
    "out of memory, caught": Fault(
        "let no rank skip a step alone; use smaller batches", _where(IN_BACKWARD, "in body.bn1 forward, call 4")
    ),
    "group destroyed": Fault(
        "destroy the process group on all ranks, after the last step",
        _where(IN_1, r"after body\.bn\d .*"),
    ),
    "group made anew": Fault("destroy and make groups on all ranks at the same place", _where(IN_1, "after .*")),
    "fork after use": Fault(
        'start processes by the method "spawn"',
        _where(IN_1, f"{BEFORE_STEP}; has left.*"),
        said_at_fault=r'this process \(\d+\) was forked from one .* Start it by the method "spawn" instead',
    ),
    "threads": Fault("call all layers in one thread", "ranks? 0.*: in body.bn[12] forward"),
    "members": Fault(
        "pass the same ranks to `dist.new_group` on all ranks",
        rf"ranks? 0(-1)?: {IN_2}{WRITTEN}\n(rank 1: in body.bn2 .*\n)?rank 2: after body.bn1 ",
        num_ranks=3,
    ),
    "sizes of groups": Fault(
        "pass the same `process_group` on all ranks",
        "the ranks ask for different process groups: rank 0 for 4, rank 1 for 4, rank 2 for 4, rank 3 for 2",
        num_ranks=4,
        by_hand=False,
    ),
    "a group on one rank alone": Fault(
        "set `process_group` on all ranks at the same place",
        _where(IN_1, "in the making of groups for process_group=2.*"),
        by_hand=False,
    ),
}


class Outcome(NamedTuple):
    """Of each rank the exit status and what it wrote; and the seconds from when all were there until all had ended."""

    statuses: list[int]
    texts: list[str]
    seconds: float


def run(name: str, layer: str = "syncbn", most_seconds: float = math.inf) -> Outcome:
    """The job with this fault, or "none". **Raises** TimeoutError after so many seconds, and AssertionError when a
    process is left."""
    num_ranks = FAULTS[name].num_ranks if name in FAULTS else 2
    ranks, store = start_ranks(num_ranks, JOB, name, layer)
    try:
        store.wait([f"rank {rank} is there" for rank in range(num_ranks)], timedelta(minutes=10))
        start = time.monotonic()
        if name.startswith("stopped"):
            while "stopped" not in state_of(ranks[-1].pid) and time.monotonic() < start + most_seconds:
                time.sleep(0.1)
            time.sleep(STOPPED_SECONDS)
            os.kill(ranks[-1].pid, signal.SIGCONT)
        statuses = [rank.wait(start + most_seconds - time.monotonic()) for rank in ranks]
        seconds = time.monotonic() - start
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, 0)
                raise AssertionError("a process is left")
    except TimeoutError:
        raise TimeoutError(f"{name}: after {most_seconds:.0f} s not all ranks have ended") from None
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    texts = [re.sub(r"^(\[rank\d+\]: )+", "", rank.text(), flags=re.MULTILINE) for rank in ranks]
    return Outcome(statuses, texts, seconds)


def condensed(outcome: Outcome) -> str:
    """What the first rank that failed said, in the table's words."""
    failed = [rank for rank, status in enumerate(outcome.statuses) if status]
    if not failed:
        return "ends as if all were well"
    text = outcome.texts[failed[0]]
    positions = re.findall(r"(?:^ranks? [\d, -]+: .*\n)+", text, re.MULTILINE)
    if positions:
        short = positions[-1].strip().replace("\n", "<br>")
        short = re.sub(r"has left with RuntimeError: .*?(?=<br>|$)", "has left with a RuntimeError", short)
        return re.sub(r"its process \(\d+\)", "its process", short)
    if own := re.search(r"Error: (?:[\w.]+: )?(the ranks ask for .*);", text):
        return own[1]
    if outcome.statuses[failed[0]] == -signal.SIGABRT:
        return "gloo aborts"
    gloo = re.search(r"Connection closed by peer|Connection reset by peer|Timed out waiting|caused pair closure", text)
    return gloo[0] if gloo else text.splitlines()[-1]


def tried(name: str, layer: str) -> tuple[str, str]:
    """What the table says of a fault, and the seconds."""
    if layer == "plain" and not FAULTS[name].by_hand:
        return "-", "-"
    try:
        outcome = run(name, layer, MOST_SECONDS)
    except TimeoutError:
        return "does not end", f"> {MOST_SECONDS:.0f}"
    return condensed(outcome), f"{outcome.seconds:.0f}"


def main() -> None:
    print("| one rank | what to do | syncbn says | by hand | all have ended after |")
    print("|---|---|---|---|---:|")
    for name in sys.argv[1:] or FAULTS:
        (said, by_hand), seconds = zip(*(tried(name, layer) for layer in ("syncbn", "plain")), strict=True)
        cells = name, FAULTS[name].remedy, said, by_hand, ", ".join(seconds) + " s"
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
