"""A catalogue of what can go wrong on one rank of several: what the ranks say then, and when all of them have ended.

    python tests/faults.py              prints the table of docs/when_ranks_disagree.md, beside a layer written by hand
    python tests/faults.py channels     prints that row alone

The job is faulty_job.py; its collectives wait for 3 s.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from jobs import start_ranks

JOB = Path(__file__).with_name("faulty_job.py")
MOST_SECONDS = 30.0
STOPPED_SECONDS = 5.0  # longer than that


class Fault(NamedTuple):
    """A fault of the last rank, and what is to be expected of it."""

    name: str
    said: str  # a regular expression for what rank 0 says
    said_in_debug: str = ""  # with SYNCBN_DEBUG=1, where it is more; without, gloo may end rank 0 before it says a word
    said_at_fault: str = ""  # by the last rank
    num_ranks: int = 2
    well: int = 0  # so many ranks end well, from rank 0 on
    by_hand: bool = True  # whether it can happen without syncbn


def _where(rank_0: str, rank_1: str) -> str:
    return rf"rank 0: {rank_0}\nrank 1: {rank_1}\n"


# Where a rank is in the faulty step.
IN_1, IN_2, IN_3 = (f"in body.bn{layer} forward, call 3" for layer in (1, 2, 3))
AFTER_1 = "after body.bn1 forward, call 3"
BEFORE_STEP = "after body.bn1 backward, call 2"
LAST = "after body.bn1 backward, call 6"
EVALUATES = rf"{BEFORE_STEP}; has called a layer in evaluation mode(; has left with .*)?"
HAS_ENDED = r"; its process \(\d+\) has ended"
FIRST = "in body.bn1 forward, call 1"


def _says_no_more_than(error: str) -> str:
    """The last line of a rank that ends by its own exception: it is the others' collective that fails."""
    return rf"\n{error}: [^\n]*\n\Z"


def _of_dtypes(where: str, one: str, other: str) -> tuple[str, str]:
    """Said without and in debug mode."""
    said = _where(*(f"{where}, with an input of torch.{dtype}" for dtype in (one, other)))
    return said, _where(f"in body.bn1 .*torch.{one}.*", f"in body.bn1 .*torch.{other}.*")


OF_AUTOCAST, OF_AUTOCAST_IN_DEBUG = _of_dtypes(IN_1, "float32", "bfloat16")


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("skips a layer", _where(IN_2, IN_3)),
        Fault("another order", _where(IN_2, IN_3)),
        Fault("one more step", "", said_at_fault=_where(f"{LAST}; has left", "in body.bn1 forward, call 7"), well=1),
        Fault(
            "one more step, DDP broadcasts buffers",  # whose broadcast fails: not a collective of syncbn
            "",
            said_at_fault=r"a collective outside of syncbn's layers failed on rank 1\.\n"
            + _where(f"{LAST}; has left", LAST)
            + r"A rank that has left .*syncbn\.join",
            well=1,
        ),
        Fault("in evaluation", "", _where(IN_1, EVALUATES)),
        Fault("not converted", _where(FIRST, "has not been seen in body.bn1(; .*)?")),
        Fault("channels", "", _where(f"{FIRST}: 4 channels.*", f"{FIRST}: 5 channels.*")),
        Fault("dtype", *_of_dtypes(FIRST, "float32", "float64")),
        Fault("autocast", OF_AUTOCAST + "Use autocast on every rank or on none", OF_AUTOCAST_IN_DEBUG),
        Fault(
            "two models, another order",
            _where(
                *[
                    rf"in layer '1' forward, call 3; first called at faulty_job.py:\d+, as layer number {n} of .*"
                    for n in (1, 2)
                ]
            ),
            by_hand=False,
        ),
        Fault("evaluates, DDP broadcasts buffers", _where(IN_1, EVALUATES) + r".*call ddp\.module\(x\)"),
        Fault(
            "one more step, then a barrier",  # in which the others wait
            rf"rank 0: {LAST}\nrank 1: in body.bn1 forward, call 7.*\n.*syncbn\.join",
        ),
        Fault(
            "exception in forward",
            _where(IN_2, f"{AFTER_1}; has left with KeyError: .*"),
            said_at_fault=_says_no_more_than("KeyError"),
        ),
        Fault(
            "exception in the data loader",
            _where(IN_1, f"{BEFORE_STEP}; has left with OSError: cannot read image 17"),
            said_at_fault=_says_no_more_than("OSError"),
        ),
        Fault("kill -9 in forward", _where(IN_2, AFTER_1 + HAS_ENDED)),
        Fault(
            "kill -9 in backward", _where("in body.bn3 backward, call 3", "after body.bn3 forward, call 3" + HAS_ENDED)
        ),
        Fault("kill -9 in the all_reduce", _where(IN_1, IN_1 + HAS_ENDED)),
        Fault("stopped for longer than the time-out", _where(IN_1, rf"{BEFORE_STEP}; its process \(\d+\) is stopped")),
        Fault("out of memory, caught", _where("in body.bn3 backward, call 3", "in body.bn1 forward, call 4")),
        Fault("group destroyed", "", _where(IN_1, f"{BEFORE_STEP}; has left.*")),
        Fault("group made anew", _where(IN_1, "after .*")),
        Fault(
            "fork after use",
            _where(IN_1, f"{BEFORE_STEP}; has left.*"),
            said_at_fault=r'this process \(\d+\) was forked from one .* Start it by the method "spawn" instead',
        ),
        Fault("threads", "ranks? 0.*: in body.bn[12] forward"),
        Fault("members", rf"ranks? 0(-1)?: {IN_2}\n(rank 1: in body.bn2 .*\n)?rank 2: after body.bn1 ", num_ranks=3),
        Fault(
            "sizes of groups", "the ranks ask for different process groups: rank 0 for 2, rank 1 for 1", by_hand=False
        ),
        Fault(
            "a group on one rank alone", _where(IN_1, "in the making of groups for process_group=1.*"), by_hand=False
        ),
        Fault(
            "kill -9 inside join",
            r"rank 0: in the other ranks' steps, with no data left\n"
            rf"rank 1: {IN_2}.*\nrank 2: {AFTER_1}{HAS_ENDED}\n",
            num_ranks=3,
            by_hand=False,
        ),
        Fault(
            "kill -9 inside recompute_running_stats",
            _where("in body.bn2 forward, call 1", r"after body.bn1 forward, call 1; .*its process \(\d+\) has ended"),
            by_hand=False,
        ),
    )
}


class Outcome(NamedTuple):
    """Of each rank the exit status and what it wrote; and the seconds from when all were there until all had ended."""

    statuses: list[int]
    texts: list[str]
    seconds: float


def run(fault: Fault, layer: str = "syncbn", debug: bool = False) -> Outcome:
    """The job with this fault. **Raises** TimeoutError after 30 s, and AssertionError when a process is left."""
    ranks, store = start_ranks(fault.num_ranks, JOB, fault.name, layer, SYNCBN_DEBUG=str(int(debug)))
    start = time.monotonic()
    try:
        store.wait([f"rank {rank} is there" for rank in range(fault.num_ranks)], timedelta(minutes=2))
        start = time.monotonic()
        if fault.name.startswith("stopped"):
            wait_until_stopped(ranks[-1].pid, start)
            time.sleep(STOPPED_SECONDS)
            os.kill(ranks[-1].pid, signal.SIGCONT)
        statuses = [rank.wait(start + MOST_SECONDS - time.monotonic()) for rank in ranks]
        seconds = time.monotonic() - start
        assert not any(exists_session(rank.pid) for rank in ranks), "a process is left"
    except TimeoutError:
        raise TimeoutError(f"{fault.name}: after {MOST_SECONDS:.0f} s not all ranks have ended") from None
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    texts = [re.sub(r"^(\[rank\d+\]: )+", "", rank.text(), flags=re.MULTILINE) for rank in ranks]
    return Outcome(statuses, texts, seconds)


def wait_until_stopped(process: int, start: float) -> None:
    """By SIGSTOP. **Raises** TimeoutError after 30 s."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        if time.monotonic() - start > MOST_SECONDS:
            raise TimeoutError("the rank has not stopped")
        time.sleep(0.1)


def exists_session(process: int) -> bool:
    """Whether any process is left of those that this one has started."""
    try:
        os.killpg(process, 0)
    except ProcessLookupError:
        return False
    return True


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
    if own := re.search(r"Error: (the ranks ask for .*);", text):
        return own[1]
    if outcome.statuses[failed[0]] == -signal.SIGABRT:
        return "aborts: Received data size doesn't match expected size"
    gloo = re.search(r"Connection closed by peer|Connection reset by peer|Timed out waiting|Connect timeout", text)
    return gloo[0] if gloo else text.splitlines()[-1]


def main() -> None:
    print("| one rank | by hand | syncbn | with SYNCBN_DEBUG=1 | all have ended after |\n|---|---|---|---|---:|")
    for fault in (FAULTS[name] for name in sys.argv[1:] or FAULTS):
        cells, seconds = [fault.name], []
        for layer, debug in (("plain", False), ("syncbn", False), ("syncbn", True)):
            if layer == "plain" and not fault.by_hand:
                cells.append("-")
                seconds.append("-")
                continue
            try:
                outcome = run(fault, layer, debug)
                cells.append(condensed(outcome))
                seconds.append(f"{outcome.seconds:.0f}")
            except TimeoutError:
                cells.append("does not end")
                seconds.append(f"> {MOST_SECONDS:.0f}")
        if cells[3] == cells[2]:
            cells[3] = "the same"
        print("| " + " | ".join(cells) + f" | {', '.join(seconds)} s |", flush=True)


if __name__ == "__main__":
    main()
