"""Reports where every rank of a group is, from the positions that the ranks write to the store (see this_rank.py)."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from syncbn.diagnosis import process_state
from syncbn.diagnosis.this_rank import HAS_LEFT, Position
from syncbn.diagnosis.waiting import Wait
from syncbn.ranks import reductions
from syncbn.ranks.text_exchange import by_rank

SILENCE_SECONDS = 5.0  # after which a silent rank of another host is reported; more than hosts' clocks differ
SETTLE_SECONDS = 0.3  # in which a rank that leaves can say why
READ_SECONDS = 5.0  # the longest time that reading may take
UNSEEN, EVALUATES = "has not been seen", "has called a layer in evaluation mode"
CONSEQUENCES = "syncbn: a collective failed", "/gloo/", "caused pair closure"  # of another rank's fault
REMEDY = (
    "Every rank must call the same layers in the same order, all converted with the same process_group and in training "
    "mode. A layer in a branch that only some ranks take must be called on the others too, for their backward as well: "
    "loss = loss + layer(x[:0]).sum(). Ranks that hold different layers, as a pipeline's, need a process_group for "
    "each stage."
)
REMEDY_OF_ENDED = (
    "Read what the ended process wrote last. If it wrote nothing, memory may have run out: see dmesg. If it wrote "
    "gloo::EnforceNotMet, the ranks sent different sizes: one of them has other channels, has not converted its model, "
    "or evaluates."
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
REMEDY_OF_NAN = (
    "Look at this rank's batch first, then at the learning rate and the loss scale; "
    "torch.autograd.set_detect_anomaly(True) finds a backward that makes NaN."
)
REMEDY_OF_DTYPES = "Use autocast on every rank or on none, and give model and inputs the same dtype on all."


def or_debug(remedy: str) -> str:
    """The remedy, and outside of debug mode that there is such a mode."""
    if reductions.in_debug_mode():
        return remedy
    return f"{remedy} SYNCBN_DEBUG=1 makes the ranks compare before each all_reduce."


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers, or about to be."""

    def __init__(self, where: str, what: str = "are in different layers or calls") -> None:
        super().__init__(f"syncbn: the ranks {what}.\n{where}")


class Found(NamedTuple):
    """The findings about a rank."""

    words: str
    state: str  # its process has ended or is stopped, or it is not heard of
    position: Position


def one_is_gone(found: list[Found]) -> bool:
    """Whether one of the ranks will not come any more, is stopped, or is not heard of."""
    return any(one.position.left or one.state for one in found)


def where_all_are(wait: Wait, enough: Callable[[list[Found]], bool] = bool, at_exit: bool = False) -> str:
    """A line for each position of the ranks that wait for one another, and the remedies. The positions are read again
    for 0.3 s, until they are `enough`. `at_exit` no thread may be started."""
    tables: list[str] = []
    if at_exit:
        if wait.rank.store_answers:
            _read_table(wait, enough, tables)
    else:
        wait.rank.write_position()
        thread = threading.Thread(target=_read_table, args=[wait, enough, tables], daemon=True)
        thread.start()
        thread.join(READ_SECONDS)  # the store's host may be stopped
        wait.rank.store_answers = bool(tables)  # else it is not called again
    return tables[0] if tables else _without_store(wait)


def _read_table(wait: Wait, enough: Callable[[list[Found]], bool], tables: list[str]) -> None:
    """Add the table of positions to `tables`."""
    # A store or a group that has ended, or positions that another version of syncbn has written.
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        deadline = time.monotonic() + SETTLE_SECONDS
        ranks = wait.ranks()
        while not enough(found := _read(wait, ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        tables.append("\n".join((by_rank(ranks, [one.words for one in found]), *_remedies(found))))


def _without_store(wait: Wait) -> str:
    """A line for this rank, and lines for the others, whose positions it cannot read."""
    ranks, unknown = wait.ranks(), f"not known, as the process group's store has not answered for {READ_SECONDS:.0f} s"
    words = [unknown if process_state.on_this_host(rank) else f"on another host; {unknown}" for rank in ranks]
    words[ranks.index(wait.rank.rank)] = _place(wait, wait.position)
    return by_rank(ranks, words)


def _remedies(found: list[Found]) -> list[str]:
    """The remedies. None where a rank has said why it left, unless it left because another had."""
    positions = [one.position for one in found]
    left = [one.left for one in positions if not any(part in one.left for part in CONSEQUENCES)]
    if any(len(why) > len(HAS_LEFT) for why in left):
        return []
    known = [or_debug(REMEDY_OF_ENDED)] * any(one.state.endswith(process_state.HAS_ENDED) for one in found)
    known += [REMEDY_OF_EVALUATION] * any(one.has_evaluated for one in positions)
    if known:
        return known
    in_other_passes = {"forward", "backward"} <= {one.pass_name for one in positions}
    if HAS_LEFT in left or (in_other_passes and not any(one.state for one in found)):
        return [REMEDY_OF_PASSES]
    if one_is_gone(found):
        return []
    return [REMEDY_OF_UNSEEN] * any(UNSEEN in one.words for one in found) + [or_debug(REMEDY)]


def _read(wait: Wait, ranks: list[int]) -> list[Found]:
    keys = [f"syncbn/{rank}/position" for rank in ranks]
    store: Any = wait.rank.store
    if store.has_extended_api() and store.check(keys):
        texts = store.multi_get(keys)  # two round trips in all
    else:
        texts = [store.get(key) if store.check([key]) else None for key in keys]
    return [_found(wait, rank, text) for rank, text in zip(ranks, texts, strict=True)]


def _found(wait: Wait, rank: int, text: bytes | None) -> Found:
    position, age, process, host = _parsed(text)
    is_this = rank == wait.rank.rank
    if is_this:  # its last position may not be written yet, and it may be about to leave
        position = wait.rank.position()._replace(left="")
    state = ""
    if not (position.left or is_this):
        if host == process_state.host():
            state = process_state.state_of(process)
        elif process and age > SILENCE_SECONDS and wait.rank.beats:
            state = f"not heard of for {age:.0f} s"
    words = [("last seen " if state else "") + _place(wait, position)] if position.doing else []
    if wait.layer and not wait.has_arrived(position):
        called = f"syncbn/{rank}/called/{wait.position.group}/{wait.layer}"
        if not position.doing or not wait.rank.store.check([called]):
            words.append(f"{UNSEEN} in {wait.layer}")
    words += [text for text in (EVALUATES * position.has_evaluated, position.left, state) if text]
    return Found("; ".join(words) or UNSEEN, state, position)


def _place(wait: Wait, position: Position) -> str:
    elsewhere = " on another process group" * (wait.position.group not in ("", position.group))
    return f"{'in' if wait.has_arrived(position) else 'after'} {position.doing}{elsewhere}"


def _parsed(text: bytes | None) -> tuple[Position, float, int, str]:
    """The position, its age in seconds, the process and the host. Empty ones where there is no text, or one older than
    this process: a rank wrote it before torchrun started the ranks again."""
    if text is not None:
        position, written, process, host = json.loads(text)
        allowed = 0.0 if host == process_state.host() else SILENCE_SECONDS  # clocks differ
        if written >= process_state.start_of_this() - allowed:
            return Position(*position), time.time() - written, process, host
    return Position(), 0.0, 0, ""
