"""Reports where every rank of a group is, and why the ranks differ, from what the ranks write to the store.

When the trailer of a total shows that the ranks differ, or that a rank has a bad argument, each rank writes its
`CallReport` to the store and reads those of the other ranks. All ranks know the key without negotiation: it consists of
the group and a digest of the total, whose bits are the same on all ranks.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from syncbn.ranks.positions import (
    FAILED_COLLECTIVE,
    HAS_ENDED,
    HAS_LEFT,
    Position,
    ThisRank,
    Wait,
    process_state,
    this_host,
)
from syncbn.texts import format_by_rank

SETTLE_SECONDS = 0.3  # in which a rank that leaves can say why
READ_SECONDS = 5.0  # the longest time for which a report waits for the store
ANSWER_SECONDS = 5.0  # in which the other ranks write their calls
WITH_GRAPH = "backward with create_graph or torch.func"  # the pass of the first all_reduce of such a backward

DIFFERENT_LAYERS = "syncbn: the ranks are in different layers or calls.\n"
DIFFERENT_LENGTHS = "syncbn: the ranks have sent the sums of different numbers of channels.\n"
BAD_ARGUMENT = "syncbn: another rank has a bad argument.\n"
REMEDY_LAYERS = (
    "Every rank must call the same layers in the same order, all converted with the same process_group and in training "
    "mode; before a call on one rank alone, as for a profile, call model.eval(). A layer in a branch that only some "
    "ranks take must be called on the others too, for their backward as well: loss = loss + layer(x[:0]).sum(). Layers "
    "of some ranks alone, as of a pipeline's stage or of a DistributedDataParallel with a process_group, need that "
    "group: convert_syncbn_model(model, process_group)."
)
REMEDY_MODELS = (
    "These layers have one name in several models of one class, numbered by their first training calls: call the "
    "models in the same order on every rank."
)
REMEDY_PASSES = (
    "A rank has left out a layer or a backward, or has called a layer fewer times: for each missing call, loss = loss "
    "+ layer(x[:0]).sum(); or it had fewer batches: give all ranks as many, or let it go on with empty batches, "
    "images[:0]; or the rank that is ahead called the model once more, as to validate or profile it without "
    "model.eval(); or it called ddp.module where the others call ddp."
)
REMEDY_GRAPHS = "Pass create_graph=True on every rank or on none, and differentiate by torch.func on all or on none."
REMEDY_SETTINGS = (
    "Give the layer the same settings on every rank, and let schedules change them on all ranks in the same step."
)
REMEDY_DTYPES = "Use autocast on every rank or on none, and give model and inputs the same dtype on all."
REMEDY_BACKWARDS = (
    "The layer is called several times, and the ranks run the backwards of these calls in different orders: let every "
    "rank call backward(), or torch.autograd.grad, for the same call first."
)
FALSE_ALARM = "If this is a false alarm, set SYNCBN_CHECKS=0 on every rank: the ranks then compare nothing."
REMEDY_ENDED = (
    "Read what the ended process wrote last. If it wrote nothing, memory may have run out: see dmesg. If it wrote "
    "gloo::EnforceNotMet, the ranks sent different sizes: one of them has other channels, has not converted its model, "
    "evaluates, or left out a layer."
)
REMEDY_LATE = (
    "A rank that has not arrived is late, as while it loads data or saves a checkpoint; or it has come to the end of "
    "its batches: give all ranks as many, or let it go on with empty batches, images[:0]; or it is in evaluation mode: "
    "call model.train() on every rank, and evaluate on some ranks by ddp.module(x), as a forward of "
    "DistributedDataParallel itself may send buffers to all ranks; or it runs a compiled model, needs "
    "convert_syncbn_model(model), or is on a host that is cut off.\n"
)
REMEDY_OUTSIDE = (
    "The ranks may wait in different collectives of the program or of DistributedDataParallel: give all ranks as many "
    "batches, or let a rank go on with empty batches, images[:0]. py-spy, or nccl's flight recorder, shows where a "
    "rank waits."
)
REMEDY_CALLS = "Build the same model everywhere, and give the layer the same process_group on every rank."
REMEDY_ONE_CALL = (
    "All ranks are in this call. One of them has other channels, or cannot be reached; or another thread, such as that "
    "of dcp.async_save, uses this process group, too: pass it one of its own, process_group=dist.new_group()."
)


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers or calls, or in different states there."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{FALSE_ALARM}"


class CallReport(NamedTuple):
    """What a rank does in a collective of a layer. The store has it as JSON."""

    description: str  # layer4.1.bn3 forward, call 17
    layer: str = ""  # root class and name, which are equal on all ranks
    instance_number: int = 0  # of the layer among those of this root class and name
    next_instance_number: int = 0  # the next free number on this rank
    call_number: int = 0  # number of the call of the layer
    pass_name: str = ""
    settings: dict[str, str] = {}  # noqa: RUF012  # never changed
    dtype: str = ""  # of the input
    error: str = ""  # class and text of the rank's bad argument
    is_type_error: bool = False


def gather_calls(rank: ThisRank, ranks: Sequence[int], key: str, call: CallReport) -> list[CallReport | None]:
    """Write the `call` of this rank under the key, and return the calls of these ranks; None for a rank that does not
    answer within 5 s."""
    answers: list[Any] = [None] * len(ranks)

    def ask() -> None:
        rank.write(key, call)
        answers[:] = rank.gather(ranks, key, ANSWER_SECONDS)

    _run_for(2 * ANSWER_SECONDS, ask)
    calls = [None if values is None else CallReport(*values) for values in answers]
    calls[ranks.index(rank.rank)] = call  # also if the store is gone
    return calls


def _run_for(seconds: float, call_store: Callable[[], None]) -> threading.Thread:
    """Run a function in a thread, and wait for it at most for these seconds: the host of the store may be stopped. At
    the end of the interpreter, which starts no threads, run it here."""
    thread = threading.Thread(target=call_store, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        call_store()
    else:
        thread.join(seconds)
    return thread


def explain(
    rank: ThisRank, ranks: Sequence[int], wait: Wait | None, calls: Sequence[CallReport | None], ranks_differ: bool,
    can_renumber: bool,
) -> Exception | None:  # fmt: skip
    """Return the error for a rank whose total shows a fault, from the calls of the `ranks` of the group. Each such rank
    raises the same error.

    `ranks_differ`: the trailer shows different signatures. Returns None if only the numbers of the layer differ, and
    the ranks `can_renumber` it: a rank is in its first forward of the layer, as it has reloaded or rebuilt its model.
    """
    answers = [call for call in calls if call is not None]
    if ranks_differ and len(answers) == len(calls):
        what = _difference(answers, can_renumber)
        if what is not None:
            title, each, remedy = what
            lines = format_by_rank(ranks, [each.format(**call._asdict()) for call in answers])
            return RanksDifferError(f"{title}{lines}\n{remedy}")
    faulty = [call for call in answers if call.error]
    if faulty:
        errors = format_by_rank(ranks, ["" if call is None else call.error for call in calls])
        error_class = TypeError if faulty[0].is_type_error else ValueError
        return error_class(f"syncbn: another rank failed in {answers[0].description}.\n{errors}")
    if len(answers) == len(calls):
        return None
    unknown = f"has not answered within {ANSWER_SECONDS:g} s"
    lines = format_by_rank(ranks, [unknown if call is None else f"in {call.description}" for call in calls])
    where = f"{lines}\nWhere the ranks are now:\n{report_positions(rank, wait)}"
    return RanksDifferError(DIFFERENT_LAYERS + where) if ranks_differ else RuntimeError(BAD_ARGUMENT + where)


def _difference(calls: Sequence[CallReport], can_renumber: bool) -> tuple[str, str, str] | None:
    """What differs between the ranks with these calls: the title of the error, the format of a rank's line, and the
    remedy. None if nothing else differs than numbers, or if a rank has a bad argument in the same pass of one layer."""

    def all_have(field: str) -> bool:
        return all(getattr(call, field) == getattr(calls[0], field) for call in calls)

    can_renumber = can_renumber and any(call.call_number == 1 and call.pass_name == "forward" for call in calls)
    if not (all_have("layer") and all_have("pass_name") and (can_renumber or all_have("instance_number"))):
        each = (
            "in {description}; number {instance_number} of {layer}" if all_have("description") else "in {description}"
        )
        remedy = REMEDY_LAYERS if all_have("pass_name") else REMEDY_PASSES
        if all_have("layer") and all_have("pass_name"):
            remedy = REMEDY_MODELS
        if {"backward", WITH_GRAPH} <= {call.pass_name for call in calls}:
            remedy = REMEDY_GRAPHS
        return DIFFERENT_LAYERS, each, remedy
    if any(call.error for call in calls):  # which may be the only difference
        return None
    if not all_have("settings"):
        names = [name for name in calls[0].settings if len({call.settings.get(name) for call in calls}) > 1]
        each = "in {description}, with " + ", ".join(f"{name}={{settings[{name}]}}" for name in names)
        return "syncbn: the ranks have different settings of a layer.\n", each, REMEDY_SETTINGS
    if not all_have("dtype"):
        title = "syncbn: the ranks have inputs of different dtypes.\n"
        return title, "in {description}, with an input of {dtype}", REMEDY_DTYPES
    if all_have("instance_number"):
        return "syncbn: the ranks differentiate different calls of a layer.\n", "in {description}", REMEDY_BACKWARDS
    return None


def is_consequence(departure: str) -> bool:
    """Whether the error that a rank has left with follows from another rank's end or absence."""
    return "syncbn: a collective failed" in departure or FAILED_COLLECTIVE.search(departure) is not None


def report_positions(rank: ThisRank, wait: Wait | None, has_failed: bool = False, at_exit: bool = False) -> str:
    """A line for each position of the ranks that wait for one another, and the remedy.

    `wait` is the collective of syncbn in which this rank waits, or None in a collective that is not syncbn's. If it
    `has_failed`, the positions are read again for 0.3 s until a rank is gone. `at_exit` no thread may be started.
    """
    reports = list[str]()
    arguments = rank, wait, has_failed, reports
    if rank.report_thread is not None:  # of another report, or of a slow store, which may answer meanwhile
        rank.report_thread.join(READ_SECONDS)
    if rank.store_answers and not rank.is_reading():
        if at_exit:
            _read_report(*arguments)
        else:  # in a thread, as the store's host may be stopped
            rank.report_thread = threading.Thread(target=_read_report, args=arguments, daemon=True)
            rank.report_thread.start()
            rank.report_thread.join(READ_SECONDS)
    return reports[0] if reports else _without_store(rank, wait)


def _read_report(rank: ThisRank, wait: Wait | None, has_failed: bool, reports: list[str]) -> None:
    """Add the report to `reports`, unless the store has ended or another version of syncbn has written positions."""
    with contextlib.suppress(TypeError), rank.using_store():
        rank.write_position()
        ranks, deadline = _ranks(rank, wait), time.monotonic() + SETTLE_SECONDS
        positions = _read(rank, wait, ranks)
        while (
            has_failed
            and not any(one.departure or one.process_state for one in positions)
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
            positions = _read(rank, wait, ranks)
        lines = format_by_rank(ranks, _append_ages([_describe(one, rank, wait) for one in positions], positions))
        reports.append("\n".join(filter(None, (lines, _remedy(positions, wait)))))


def _ranks(rank: ThisRank, wait: Wait | None) -> list[int]:
    return [*range(rank.num_ranks)] if wait is None else wait.ranks()


def _without_store(rank: ThisRank, wait: Wait | None) -> str:
    """A line for this rank, and one for the others, whose positions it cannot read."""
    unknown = "not known, as the process group's store does not answer"
    own, ranks = _describe(rank.position(wait), rank, wait), _ranks(rank, wait)
    return format_by_rank(ranks, [own if one == rank.rank else unknown for one in ranks])


def _read(rank: ThisRank, wait: Wait | None, ranks: list[int]) -> list[Position]:
    """What the ranks have written. Their processes are looked at first: what an ended process has written is its last
    word."""

    def read_positions() -> list[Position]:
        return [Position(*value or ()) for value in rank.read(ranks, "position")]

    on_this_host = [one for one in read_positions() if one.host == this_host()]
    states = {(one.host, one.process): process_state(one.process) for one in on_this_host}
    called = [None] * len(ranks)
    if wait is not None and wait.layer_label():
        called = rank.read(ranks, f"called/{wait.position().group}/{wait.layer_label()}")
    they_differ = len({*called} - {None}) > 1
    positions = []
    for one, position, how in zip(ranks, read_positions(), called, strict=True):
        if one == rank.rank:  # it may have gone on since, and may be about to leave
            position = rank.position(wait)._replace(departure="", time=time.time() - (wait.seconds() if wait else 0))
        state = "" if position.departure or one == rank.rank else states.get((position.host, position.process), "")
        called_so = f"has called {wait.layer_label()} {how}" if wait and they_differ and how else ""
        positions.append(position._replace(process_state=state, layer_call=called_so))
    return positions


def _describe(position: Position, rank: ThisRank, wait: Wait | None) -> str:
    """The line of a position; `wait` is what this rank waits in."""
    here = rank.position() if wait is None else wait.position()
    place = ""
    if position.description:
        number = here.sequence_number + (wait is None)
        is_there = (
            position.group == here.group and position.sequence_number >= number and position.departure != HAS_LEFT
        )
        elsewhere = " on another process group" * (here.group not in ("", position.group))
        last_seen = "last seen " * bool(position.process_state)
        place = f"{last_seen}{'in' if is_there else 'after'} {position.description}{elsewhere}"
    error = position.error * (len(position.departure) <= len(HAS_LEFT))  # else the rank has left with an error
    words = place, position.layer_call, error, position.departure, position.process_state
    return "; ".join(filter(None, words)) or "has not been seen"


def _append_ages(lines: list[str], positions: list[Position]) -> list[str]:
    """The lines of these positions, each with how long ago the ranks of the same line wrote theirs."""
    ages = dict[str, list[int]]()
    for line, position in zip(lines, positions, strict=True):
        ages.setdefault(line, []).append(round(time.time() - position.time) if position.time else 0)
    spans = {line: "-".join(map(str, sorted({min(of_line), max(of_line)}))) for line, of_line in ages.items()}
    return [f"{line}; written {spans[line]} s ago" if max(ages[line]) > 0 else line for line in lines]


def _remedy(positions: list[Position], wait: Wait | None) -> str:
    """What to do where ranks are in these positions; nothing, where the ranks' words say it."""
    left = [one.departure for one in positions if not is_consequence(one.departure)]
    has_own_error = any(len(why) > len(HAS_LEFT) for why in left) or any(one.error for one in positions)
    passes = {one.pass_name for one in positions}
    rows = (
        (has_own_error, ""),
        (any(one.layer_call for one in positions), REMEDY_CALLS),
        (any(one.process_state.endswith(HAS_ENDED) for one in positions), REMEDY_ENDED),
        ({"backward", WITH_GRAPH} <= passes, REMEDY_GRAPHS),
        (HAS_LEFT in left, REMEDY_PASSES),
        (any(one.process_state for one in positions), ""),
        ({"forward", "backward"} <= passes, REMEDY_PASSES),
        (wait is None, REMEDY_OUTSIDE),
        (len({(one.group, one.sequence_number, one.description) for one in positions}) == 1, REMEDY_ONE_CALL),
        (True, REMEDY_LATE + REMEDY_LAYERS),
    )
    return next(remedy for holds, remedy in rows if holds)
