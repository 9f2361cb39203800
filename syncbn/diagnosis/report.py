"""Reports where every rank of a group is, from the positions that the ranks write to the store (see positions.py)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from syncbn.diagnosis import processes
from syncbn.distributed.exchange import by_rank, in_words

if TYPE_CHECKING:
    from syncbn.diagnosis.positions import Waiting

SILENCE_SECONDS = 5.0  # after which a silent rank of another host is reported; more than hosts' clocks differ
SETTLE_SECONDS = 0.3  # that a rank which has gone is given to say why
READ_SECONDS = 5.0  # that reading may take
EVALUATES, HAS_LEFT = "is in evaluation mode", "has left"
REMEDY = (
    "Every rank must call the same layers in the same order, all converted and in training mode; ranks that hold "
    "different layers, as a pipeline's, need a process_group for each stage. SYNCBN_DEBUG=1 makes the ranks compare "
    "before each all_reduce."
)
REMEDY_OF_ENDED = (
    "What ended a process, its own output may say; if it is gloo::EnforceNotMet, the ranks sent different sizes: "
    "SYNCBN_DEBUG=1 tells which."
)


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers, or about to be."""

    def __init__(self, where: str) -> None:
        super().__init__(f"syncbn: the ranks are in different layers or calls.\n{where}")


class Position(NamedTuple):
    """Where a rank is. The store has these as lines, then the time, the process and its host."""

    group: str  # the name of the process group of its last all_reduce
    number: int  # of that among syncbn's on this group, from 1
    doing: str  # in it: layer4.1.bn3 forward, call 17
    since: str = ""  # what it has done since then: EVALUATES, HAS_LEFT and why


class Found(NamedTuple):
    """What is known of a rank."""

    words: str
    gone: bool
    ended: bool = False  # without a word


def one_is_gone(found: list[Found]) -> bool:
    """Whether one of the ranks will not come any more, is stopped, or is not heard of."""
    return any(one.gone for one in found)


def anything(found: list[Found]) -> bool:
    """Whatever has been found is enough."""
    return True


def where_all_are(waiting: Waiting, enough: Callable[[list[Found]], bool] = anything) -> str:
    """A line for each position of the ranks of the group; read again for 0.3 s until it is `enough`."""
    rank, layer = waiting.rank, "" if waiting.call is None else waiting.call.site.name
    reader = _Reader(rank.rank, rank.store, rank.beats(), waiting.group, waiting.position, layer)
    rank.write_position()
    where = reader.where_all_are(enough)
    rank.store_answers = where is not None  # else it is not called again
    return reader.without_store() if where is None else where


@dataclass(slots=True)
class _Reader:
    """A rank that waits, and reads where the others are."""

    rank: int  # global
    store: dist.Store
    beats: bool  # the ranks write every second
    group: dist.ProcessGroup
    position: Position  # of this rank
    layer: str  # in which it waits, or nothing

    def where_all_are(self, enough: Callable[[list[Found]], bool]) -> str | None:
        """A line for each position, with its ranks; read again for 0.3 s until it is `enough`. None when the store does
        not answer in 5 s: its host may be stopped."""
        tables: list[str] = []

        def read() -> None:
            with contextlib.suppress(RuntimeError, ValueError):  # a store or group that has ended
                tables.append(self._table(enough))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(READ_SECONDS)
        return tables[0] if tables else None

    def without_store(self) -> str:
        """What this rank knows by itself."""
        others = [rank for rank in dist.get_process_group_ranks(self.group) if rank != self.rank]
        elsewhere = [rank for rank in others if not processes.on_this_host(rank)]
        hosts = f" ({in_words(elsewhere)}: on other hosts)" if elsewhere else ""
        return (
            f"rank {self.rank}: in {self.position.doing}\n{in_words(others)}: not known, as the process group's store "
            f"has not answered for {READ_SECONDS:.0f} s{hosts}"
        )

    def _table(self, enough: Callable[[list[Found]], bool]) -> str:
        deadline = time.monotonic() + SETTLE_SECONDS
        ranks = dist.get_process_group_ranks(self.group)
        while not enough(found := self._read(ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)
        table = by_rank(ranks, [one.words for one in found])
        if any(one.ended for one in found):
            return f"{table}\n{REMEDY_OF_ENDED}"
        return table if one_is_gone(found) else f"{table}\n{REMEDY}"

    def _read(self, ranks: list[int]) -> list[Found]:
        keys = [f"syncbn/{rank}/position" for rank in ranks]
        texts: list[bytes | None]
        if self.store.has_extended_api() and self.store.check(keys):  # type: ignore[attr-defined]
            texts = [*self.store.multi_get(keys)]  # two round trips in all
        else:
            texts = [self.store.get(key) if self.store.check([key]) else None for key in keys]
        return [self._found(rank, text) for rank, text in zip(ranks, texts, strict=True)]

    def _found(self, rank: int, text: bytes | None) -> Found:
        position, age, process, host = _parsed(text)
        arrived = position.group == self.position.group and position.number >= self.position.number
        words = []
        if position.doing:
            elsewhere = " on another process group" * (position.group != self.position.group)
            words.append(f"{'in' if arrived else 'after'} {position.doing}{elsewhere}")
        if not arrived and self.layer:
            called = f"syncbn/{rank}/called/{self.position.group}/{self.layer}"
            if not position.doing or not self.store.check([called]):
                words.append(f"has not been seen in {self.layer}")
        if position.since:
            words.append(position.since)
        gone, state = HAS_LEFT in position.since, ""
        if not gone and rank != self.rank:
            if host == processes.host():
                state = processes.state_of(process)
            elif process and age > SILENCE_SECONDS and self.beats:
                state = f"not heard of for {age:.0f} s"
        if state:
            words.append(state)
        words_of_rank = "; ".join(words) or "has not been seen"
        return Found(words_of_rank, gone or bool(state), state.endswith(processes.HAS_ENDED))


def _parsed(text: bytes | None) -> tuple[Position, float, str, str]:
    """The position, its age in seconds, the process and the host; of nothing where there is no text, or one from before
    this process, of a rank that torchrun has started again."""
    if text is not None:
        group, number, doing, since, written, process_and_host = text.decode().split("\n")
        process, _, host = process_and_host.partition(" ")
        allowed = 0.0 if host == processes.host() else SILENCE_SECONDS  # clocks differ
        if float(written) >= processes.start_of_this() - allowed:
            return Position(group, int(number), doing, since), time.time() - float(written), process, host
    return Position("", 0, ""), 0.0, "", ""
