"""Reports where every rank of a group is, from the positions that the ranks write to the store (see this_rank.py)."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from syncbn.diagnosis import process_state
from syncbn.diagnosis.this_rank import HAS_LEFT, Position
from syncbn.diagnosis.waiting import Wait
from syncbn.distributed import reduction
from syncbn.distributed.text_exchange import by_rank, ranks_in_words

SILENCE_SECONDS = 5.0  # after which a silent rank of another host is reported; more than hosts' clocks differ
SETTLE_SECONDS = 0.3  # a rank that has gone has so long to say why
READ_SECONDS = 5.0  # the longest time that reading may take
UNSEEN, EVALUATES = "has not been seen", "has called a layer in evaluation mode"
CONSEQUENCES = "syncbn: a collective failed", "/gloo/", "caused pair closure"  # of another rank's fault
REMEDY = (
    "Every rank must call the same layers in the same order, all converted with the same process_group and in training "
    "mode. A layer in a branch that only some ranks take must be called on the others too, with an empty batch such as "
    "x[:0]. Ranks that hold different layers, as a pipeline's, need a process_group for each stage."
)
REMEDY_BY_DEBUG = " SYNCBN_DEBUG=1 makes the ranks compare before each all_reduce."
REMEDY_OF_ENDED = (
    "What ended a process, its own output may say; if it is gloo::EnforceNotMet, the ranks sent different sizes"
)
REMEDY_OF_FEWER_BATCHES = (
    "A rank that has left without an error, or waits after its step while others begin the next, had fewer batches, "
    "perhaps: give all ranks as many, or train inside syncbn.join."
)
REMEDY_OF_EVALUATION = (
    "A layer in evaluation mode waits for nobody: call model.train() on every rank before the next step. To evaluate "
    "on some ranks only, call ddp.module(x): the forward of DistributedDataParallel itself sends buffers to all ranks."
)
REMEDY_OF_UNSEEN = (
    "A rank that has not been seen in a layer is late or runs a compiled model, or has not converted the layer: call "
    "convert_syncbn_model(model) on every rank. Or it does not take the branch that holds the layer: call that with an "
    "empty batch there, such as x[:0]."
)
REMEDY_OF_PASSES = (
    "A rank has left out a backward, or called a forward more, as in a validation without model.eval(); every rank "
    "must take the same steps."
)
REMEDY_OF_DTYPES = "Use autocast on every rank or on none, and keep the model in the same dtype on all."


def remedy() -> str:
    """The remedy where nothing more is known: what every rank must do."""
    return REMEDY if in_debug_mode() else REMEDY + REMEDY_BY_DEBUG


def in_debug_mode() -> bool:
    """Whether the ranks compare what they do before each all_reduce."""
    return any(one.compares_ranks for one in reduction.guards)


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers, or about to be."""

    def __init__(self, where: str, what: str = "are in different layers or calls") -> None:
        super().__init__(f"syncbn: the ranks {what}.\n{where}")


class Found(NamedTuple):
    """The findings about a rank."""

    words: str
    gone: bool
    ended: bool = False  # its process has ended, and has not said why
    position: Position = Position()


def one_is_gone(found: list[Found]) -> bool:
    """Whether one of the ranks will not come any more, is stopped, or is not heard of."""
    return any(one.gone for one in found)


def anything(found: list[Found]) -> bool:
    """Any finding is enough."""
    return True


def where_all_are(wait: Wait, enough: Callable[[list[Found]], bool] = anything) -> str:
    """A line for each position of the ranks that wait for one another, and the remedies. The positions are read again
    for 0.3 s, until they are `enough`."""
    reader, tables = _Reader(wait, enough), list[str]()
    wait.rank.write_position()
    thread = threading.Thread(target=lambda: tables.extend(reader.table()), daemon=True)
    thread.start()
    thread.join(READ_SECONDS)  # the store's host may be stopped
    wait.rank.store_answers = bool(tables)  # else it is not called again
    return tables[0] if tables else reader.without_store()


def where_all_were(wait: Wait) -> str:
    """As where_all_are, at the program's end: no thread may be started, and some rank is perhaps gone."""
    reader = _Reader(wait, one_is_gone)
    tables = reader.table() if wait.rank.store_answers else []
    return tables[0] if tables else reader.without_store()


@dataclass(slots=True)
class _Reader:
    """Reads where the ranks are that wait for one another."""

    wait: Wait
    enough: Callable[[list[Found]], bool]

    def table(self) -> list[str]:
        """The table of positions, in a list; an empty list where the store or the group has ended."""
        # A store or a group that has ended, or positions that another version of syncbn has written.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            return [self._table()]
        return []

    def without_store(self) -> str:
        """A line for this rank, and one for the others, of which it knows nothing."""
        rank = self.wait.rank.rank
        others = [other for other in self.wait.ranks() if other != rank]
        elsewhere = [other for other in others if not process_state.on_this_host(other)]
        hosts = f" ({ranks_in_words(elsewhere)}: on other hosts)" if elsewhere else ""
        return (
            f"rank {rank}: {self._place(self.wait.position)}\n{ranks_in_words(others)}: not known, as the process "
            f"group's store has not answered for {READ_SECONDS:.0f} s{hosts}"
        )

    def _table(self) -> str:
        deadline = time.monotonic() + SETTLE_SECONDS
        ranks = self.wait.ranks()
        while not self.enough(found := self._read(ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        table = by_rank(ranks, [one.words for one in found])
        return "\n".join((table, *self._remedies(found)))

    def _remedies(self, found: list[Found]) -> list[str]:
        """The remedies. None where a rank has said why it left, unless it left because another had."""
        positions = [one.position for one in found]
        left = [one.left for one in positions if not any(part in one.left for part in CONSEQUENCES)]
        if any(len(why) > len(HAS_LEFT) for why in left):
            return []
        ended = [REMEDY_OF_ENDED + ("." if in_debug_mode() else ": SYNCBN_DEBUG=1 tells which.")]
        known = ended * any(one.ended for one in found)
        known += [REMEDY_OF_EVALUATION] * any(one.has_evaluated for one in positions)
        if known:
            return known
        if HAS_LEFT in left or {"forward", "backward"} <= {one.pass_name for one in positions}:
            return [REMEDY_OF_FEWER_BATCHES]
        if one_is_gone(found):
            return []
        return [REMEDY_OF_UNSEEN if any(UNSEEN in one.words for one in found) else remedy()]

    def _read(self, ranks: list[int]) -> list[Found]:
        keys = [f"syncbn/{rank}/position" for rank in ranks]
        texts: list[bytes | None]
        store = self.wait.rank.store
        if store.has_extended_api() and store.check(keys):  # type: ignore[attr-defined]
            texts = [*store.multi_get(keys)]  # two round trips in all
        else:
            texts = [store.get(key) if store.check([key]) else None for key in keys]
        return [self._found(rank, text) for rank, text in zip(ranks, texts, strict=True)]

    def _found(self, rank: int, text: bytes | None) -> Found:
        position, age, process, host = _parsed(text)
        is_this = rank == self.wait.rank.rank
        if is_this:  # its last position may not be written yet, and it may be about to leave
            position = self.wait.rank.position()._replace(left="")
        words = []
        if position.doing:
            words.append(self._place(position))
        if self.wait.layer and not self._arrived(position):
            called = f"syncbn/{rank}/called/{self.wait.position.group}/{self.wait.layer}"
            if not position.doing or not self.wait.rank.store.check([called]):
                words.append(f"{UNSEEN} in {self.wait.layer}")
        words += [EVALUATES] * position.has_evaluated + [position.left] * bool(position.left)
        state = ""
        if not (position.left or is_this):
            if host == process_state.host():
                state = process_state.state_of(process)
            elif process and age > SILENCE_SECONDS and self.wait.rank.beats():
                state = f"not heard of for {age:.0f} s"
        if state:
            words.append(state)
        words_of_rank, has_ended = "; ".join(words) or UNSEEN, state.endswith(process_state.HAS_ENDED)
        return Found(words_of_rank, bool(position.left or state), has_ended, position)

    def _arrived(self, position: Position) -> bool:
        """Whether a rank of this position is in what this rank waits in."""
        return position.group == self.wait.position.group and position.number >= self.wait.number

    def _place(self, position: Position) -> str:
        elsewhere = " on another process group" * (self.wait.position.group not in ("", position.group))
        return f"{'in' if self._arrived(position) else 'after'} {position.doing}{elsewhere}"


def _parsed(text: bytes | None) -> tuple[Position, float, int, str]:
    """The position, its age in seconds, the process and the host. Empty ones where there is no text, or one older than
    this process: a rank wrote it before torchrun started the ranks again."""
    if text is not None:
        position, written, process, host = json.loads(text)
        allowed = 0.0 if host == process_state.host() else SILENCE_SECONDS  # clocks differ
        if written >= process_state.start_of_this() - allowed:
            return Position(*position), time.time() - written, process, host
    return Position(), 0.0, 0, ""
