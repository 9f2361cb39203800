"""Reports where every rank of a group is, from the positions that the ranks write to the store (see positions.py)."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from syncbn.comm.text_exchange import by_rank
from syncbn.diagnosis import processes
from syncbn.diagnosis.guards import in_debug_mode
from syncbn.diagnosis.positions import HAS_LEFT, WITH_GRAPH, Position
from syncbn.diagnosis.waits import IN_COLLECTIVE, Wait

SILENCE_SECONDS = 5.0  # after which a silent rank of another host is reported; more than hosts' clocks differ
SETTLE_SECONDS = 0.3  # in which a rank that leaves can say why
READ_SECONDS = 5.0  # the longest time that reading may take
UNSEEN, EVALUATES = "has not been seen", "has called a layer in evaluation mode"
REMEDY = (
    "Every rank must call the same layers in the same order, all converted with the same process_group and in training "
    "mode. A layer in a branch that only some ranks take must be called on the others too, for their backward as well: "
    "loss = loss + layer(x[:0]).sum(). Ranks that hold different layers, as a pipeline's, need a process_group for "
    "each stage."
)
REMEDY_OF_ONE_CALL = "All ranks are in this call. One of them has other channels, or cannot be reached."
REMEDY_OF_ENDED = (
    "Read what the ended process wrote last. If it wrote nothing, memory may have run out: see dmesg. If it wrote "
    "gloo::EnforceNotMet, the ranks sent different sizes: one of them has other channels, has not converted its model, "
    "evaluates, or left out a layer."
)
REMEDY_OF_EVALUATION = (
    "A layer in evaluation mode waits for nobody: call model.train() on every rank before the next step. To evaluate "
    "on some ranks only, call ddp.module(x): a forward of DistributedDataParallel itself may send buffers to all ranks."
)
REMEDY_OF_UNSEEN = "A rank not seen in a layer is late, or runs a compiled model, or needs convert_syncbn_model(model)."
REMEDY_OF_PASSES = (
    "A rank has left out a layer or a backward; or it had fewer batches: give all ranks as many, or train inside "
    "syncbn.join; or the rank that is ahead called the model once more, as in a validation without model.eval(); or it "
    "called ddp.module where the others call ddp."
)
REMEDY_OF_GRAPHS = "Pass create_graph=True on every rank or on none, and differentiate by torch.func on all or on none."
REMEDY_OF_BATCHES = (
    "The ranks wait in different calls: one has come to the end of its batches, or has left a loop early. Give all "
    "ranks as many batches, or train inside syncbn.join."
)
REMEDY_OF_LATE = (
    "A rank that is in no collective is late, as while it loads data or saves a checkpoint; or it has come to the end "
    "of its batches: give all ranks as many, or train inside syncbn.join."
)
REMEDY_OF_DTYPES = "Use autocast on every rank or on none, and give model and inputs the same dtype on all."


def or_debug(remedy: str) -> str:
    """The remedy, and outside of debug mode that there is such a mode."""
    return remedy if in_debug_mode() else f"{remedy} SYNCBN_DEBUG=1 makes the ranks compare before each all_reduce."


def remedy_of_passes(passes: set[str]) -> str:
    """The remedy where ranks are in these passes of one layer."""
    return REMEDY_OF_GRAPHS if {"backward", WITH_GRAPH} <= passes else REMEDY_OF_PASSES


class Finding(NamedTuple):
    """What was found out about a rank."""

    words: str
    state: str  # its process has ended or is stopped, or it is not heard of
    position: Position


def a_rank_is_gone(findings: list[Finding]) -> bool:
    """Whether a rank has left, has ended, is stopped, or is not heard of."""
    return any(rank.position.left or rank.state for rank in findings)


def where_all_are(wait: Wait, enough: Callable[[list[Finding]], bool] = bool, at_exit: bool = False) -> str:
    """A line for each position of the ranks that wait for one another, and the remedies. The positions are read again
    and again, until the findings are `enough` or 0.3 s have passed. `at_exit` no thread may be started."""
    ranks, tables = wait.ranks(), list[str]()
    if not at_exit:
        wait.rank.write_position()
    if wait.rank.store_answers:
        arguments = wait, ranks, enough, tables
        if at_exit:
            _read_table(*arguments)
        else:
            thread = threading.Thread(target=_read_table, args=arguments, daemon=True)
            thread.start()
            thread.join(READ_SECONDS)  # the store's host may be stopped
        wait.rank.store_answers = bool(tables)  # else it is not called again
    return tables[0] if tables else _without_store(wait, ranks)


def _read_table(wait: Wait, ranks: list[int], enough: Callable[[list[Finding]], bool], tables: list[str]) -> None:
    """Add the table of positions to `tables`."""
    # A store that has ended, or positions that another version of syncbn has written.
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        deadline = time.monotonic() + SETTLE_SECONDS
        while not enough(findings := _read(wait, ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        tables.append("\n".join((by_rank(ranks, [rank.words for rank in findings]), *_remedies(findings))))


def _without_store(wait: Wait, ranks: list[int]) -> str:
    """A line for this rank, and lines for the others, whose positions it cannot read."""
    unknown = "not known, as the process group's store does not answer"
    words = [unknown if processes.on_this_host(rank) else f"on another host; {unknown}" for rank in ranks]
    words[ranks.index(wait.rank.rank)] = "; ".join(
        filter(None, (_place(wait, wait.position), wait.rank.position().blocked))
    )
    return by_rank(ranks, words)


def is_consequence(left: str) -> bool:
    """Whether the error that a rank has left with follows from another rank's end or absence."""
    return "syncbn: a collective failed" in left or processes.FAILED_COLLECTIVE.search(left) is not None


def _remedies(findings: list[Finding]) -> list[str]:
    """No remedy if a rank's own error is known; errors that only follow another rank's end do not count."""
    positions = [rank.position for rank in findings]
    left = [position.left for position in positions if not is_consequence(position.left)]
    if any(len(why) > len(HAS_LEFT) for why in left) or any(position.left_out for position in positions):
        return []
    is_silent = any(rank.state for rank in findings)
    places = {position.blocked for position in positions}
    collectives = [place for place in places if place.startswith(IN_COLLECTIVE)]
    known = [or_debug(REMEDY_OF_ENDED)] * any(rank.state.endswith(processes.HAS_ENDED) for rank in findings)
    known += [REMEDY_OF_BATCHES] * (len(collectives) > 1 and not is_silent)
    known += [REMEDY_OF_EVALUATION] * any(position.has_evaluated for position in positions)
    if known:
        return known
    passes = {position.pass_name for position in positions}
    if HAS_LEFT in left:
        return [remedy_of_passes(passes)]
    if is_silent:
        return []
    if {"forward", "backward"} <= passes or (WITH_GRAPH in passes and len(passes) > 1):
        return [remedy_of_passes(passes)]
    if len(places) > 1 and len({(position.group, position.number) for position in positions}) == 1:
        return [REMEDY_OF_LATE]
    if a_rank_is_gone(findings):
        return []
    if len({(position.group, position.number, position.doing) for position in positions}) == 1:
        return [or_debug(REMEDY_OF_ONE_CALL)]
    return [REMEDY_OF_UNSEEN] * any(UNSEEN in rank.words for rank in findings) + [or_debug(REMEDY)]


def _read(wait: Wait, ranks: list[int]) -> list[Finding]:
    store, keys = wait.rank.store, [f"syncbn/{rank}/position" for rank in ranks]
    if store.has_extended_api() and store.check(keys):  # type: ignore[attr-defined]
        texts = store.multi_get(keys)  # one request for all ranks
    else:
        texts = [store.get(key) if store.check([key]) else b"" for key in keys]
    return [_finding(wait, rank, text) for rank, text in zip(ranks, texts, strict=True)]


def _finding(wait: Wait, rank: int, text: bytes) -> Finding:
    """What the position tells that a rank has written; `text` is empty if it has written none."""
    values, written, process, host = json.loads(text or '[[], 0, 0, ""]')
    allowed = 0.0 if host == processes.host() else SILENCE_SECONDS  # clocks differ
    if written < processes.start_of_this() - allowed:  # torchrun has kept the store and started the ranks again
        values, process, host = [], 0, ""
    position, age = Position(*values), time.time() - written
    is_this = rank == wait.rank.rank
    if is_this:  # its last position may not be written yet, and it may be about to leave
        position = wait.rank.position()._replace(left="")
    state = ""
    if not (position.left or is_this):
        if host == processes.host():
            state = processes.state_of(process)
        elif process and age > SILENCE_SECONDS and wait.rank.beats:
            state = f"not heard of for {age:.0f} s"
    words = [("last seen " if state else "") + _place(wait, position)] if position.doing else []
    if wait.layer and not wait.has_arrived(position):
        called = f"syncbn/{rank}/called/{wait.position.group}/{wait.layer}"
        if not position.doing or not wait.rank.store.check([called]):
            words.append(f"{UNSEEN} in {wait.layer}")
    left_out = position.left_out * (len(position.left) <= len(HAS_LEFT))  # else that has an error of its own
    after = EVALUATES * position.has_evaluated, left_out, position.blocked, position.left, state
    words += filter(None, after)
    return Finding("; ".join(words) or UNSEEN, state, position)


def _place(wait: Wait, position: Position) -> str:
    group = " on another process group" * (wait.position.group not in ("", position.group))
    return f"{'in' if wait.has_arrived(position) else 'after'} {position.doing}{group}"
