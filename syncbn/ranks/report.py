"""Reports where every rank of a group is, and why the ranks differ, from the values that the ranks write to the store.

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

SETTLE_SECONDS = 0.3  # how long a report waits, after a failure, for a rank that may still write why it leaves
READ_SECONDS = 5.0  # the longest time for which a report waits for the store
ANSWER_SECONDS = 5.0  # the longest time for which a rank waits for the other ranks' reports
WITH_GRAPH = "backward with create_graph or torch.func"  # pass_name of the first all_reduce of that backward

TITLE_LAYERS = "syncbn: the ranks are in different layers or calls.\n"
TITLE_LENGTHS = "syncbn: the ranks have sent sums of different sizes.\n"
TITLE_ARGUMENT = "syncbn: another rank has a bad argument.\n"
FALSE_ALARM = "If this is a false alarm, set SYNCBN_CHECKS=0 on every rank, which disables the comparison of ranks."

EXTRA_CALL = "A rank has called the model once more, for example to validate or profile it without model.eval()."
FEWER_BATCHES = (
    "A rank has fewer batches: give all ranks the same number of batches, or let that rank continue with empty "
    "batches, images[:0]."
)
EVALUATION = (
    "To evaluate on some ranks only, call ddp.module(x) after model.eval(), because a forward of "
    "DistributedDataParallel may broadcast buffers."
)
REMEDY_LAYERS = (
    "Every rank must call the same layers in the same order, all converted with the same process_group and in training "
    "mode. Before a call on one rank only, for example to profile the model, call model.eval(). If only some ranks "
    "call a layer, call it on the other ranks too, with an empty batch, and add its output to their loss: loss = loss "
    "+ layer(x[:0]).sum(). If only some ranks have a layer (a pipeline stage, or a DistributedDataParallel with a "
    "process_group), pass the group of these ranks: convert_syncbn_model(model, process_group)."
)
REMEDY_MODELS = (
    "Several models of one class have a layer of this name, numbered in the order of their first training calls: call "
    "the models in the same order on every rank."
)
REMEDY_PASSES = (
    "Possible causes:\n"
    "- A rank has left out a layer or a backward: for each missing call write loss = loss + layer(x[:0]).sum().\n"
    f"- {FEWER_BATCHES}\n"
    f"- {EXTRA_CALL}\n"
    "- A rank has called ddp.module where the other ranks call ddp."
)
REMEDY_GRAPHS = "Pass create_graph=True on every rank or on none, and use torch.func on every rank or on none."
REMEDY_SETTINGS = "Give the layer the same settings on every rank, and let schedules change them in the same step."
REMEDY_DTYPES = "Use autocast on every rank or on none, and the same dtype of model and inputs on every rank."
REMEDY_BACKWARDS = (
    "The layer is called several times, and the ranks run the backwards of these calls in different orders: on "
    "every rank run backward(), or torch.autograd.grad, of these calls in the same order."
)
REMEDY_ENDED = (
    "Read the last output of the ended process. If there is no output, memory may have run out: see dmesg. "
    "If the output ends in gloo::EnforceNotMet, the ranks have sent different sizes. Possible causes:\n"
    f"- {EXTRA_CALL}\n"
    "- A rank has left out a layer, has not converted its model, or is in evaluation mode.\n"
    "- A layer has a different number of channels on a rank."
)
REMEDY_LATE = (
    "Possible causes:\n"
    "- A rank is late, for example because it loads data or saves a checkpoint.\n"
    f"- A rank is in evaluation mode: call model.train() on every rank. {EVALUATION}\n"
    "- A rank has not called convert_syncbn_model(model), runs a compiled model, or is on a host that is cut off.\n"
    f"- {FEWER_BATCHES}\n"
    f"- {EXTRA_CALL}\n"
)
REMEDY_OUTSIDE = (
    "The ranks may wait in different collectives of the program or of DistributedDataParallel; py-spy, or the flight "
    "recorder of nccl, shows where a rank waits. Possible causes:\n"
    f"- {FEWER_BATCHES}\n"
    f"- A rank alone has evaluated the model. {EVALUATION}"
)
REMEDY_CALLS = "Build the same model on every rank, and give the layer the same process_group."
REMEDY_ONE_CALL = (
    "All ranks are in this call. A rank has a different number of channels or cannot be reached, or another thread, "
    "such as that of dcp.async_save, uses this process group: give that thread a group of its own, "
    "process_group=dist.new_group()."
)


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers or calls, or in one layer with different settings or inputs."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{FALSE_ALARM}"


class CallReport(NamedTuple):
    """A rank's description of its call of a layer, in a collective. Written as JSON."""

    description: str  # the call, such as "layer4.1.bn3 forward, call 17"
    layer: str = ""  # `Site.layer`, the root class and name that ranks compare
    instance_number: int = 0  # the number of the layer among the layers of this root class and name
    next_instance_number: int = 0  # the next free instance number on this rank
    call_number: int = 0  # the number of the call of the layer
    pass_name: str = ""
    settings: dict[str, str] = {}  # noqa: RUF012  # never changed
    dtype: str = ""  # the dtype of the input
    error: str = ""  # class and text of the error, if the rank has a bad argument
    is_type_error: bool = False


def gather_calls(rank: ThisRank, ranks: Sequence[int], key: str, call: CallReport) -> list[CallReport | None]:
    """Write this rank's `call` under the key, and return the calls of these ranks, with None for a rank that does not
    answer within `ANSWER_SECONDS`."""
    answers: list[Any] = [None] * len(ranks)

    def exchange() -> None:
        rank.write(key, call)
        answers[:] = rank.gather(ranks, key, ANSWER_SECONDS)

    thread = _start(exchange)
    if thread.is_alive():
        thread.join(2 * ANSWER_SECONDS)
    calls = [None if values is None else CallReport(*values) for values in answers]
    calls[ranks.index(rank.rank)] = call  # The store may not have it.
    return calls


def _start(call_store: Callable[[], None]) -> threading.Thread:
    """Call the store in a new thread, because its host may not answer. At the exit of the interpreter no thread can
    start, so call the store in this thread."""
    thread = threading.Thread(target=call_store, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        call_store()
    return thread


def explain(
    rank: ThisRank, ranks: Sequence[int], wait: Wait | None, calls: Sequence[CallReport | None], ranks_differ: bool,
    can_renumber: bool,
) -> Exception | None:  # fmt: skip
    """Return the error that each of the `ranks` raises for a total with a fault, from their `calls`.

    `ranks_differ`: the trailer shows different signatures. `can_renumber`: the ranks can agree on a new instance
    number. Return None if only the instance numbers differ, `can_renumber` is True, and some rank calls the layer for
    the first time, for example because it has reloaded its model.
    """
    answers = [call for call in calls if call is not None]
    if ranks_differ and len(answers) == len(calls):
        difference = _difference(answers, can_renumber)
        if difference is not None:
            title, line, remedy = difference
            lines = format_by_rank(ranks, [line.format(**call._asdict()) for call in answers])
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
    return RanksDifferError(TITLE_LAYERS + where) if ranks_differ else RuntimeError(TITLE_ARGUMENT + where)


def _difference(calls: Sequence[CallReport], can_renumber: bool) -> tuple[str, str, str] | None:
    """Return how the ranks' calls differ: the title of the error, the format of each rank's line, and the remedy.

    Return None if only instance numbers differ, or if all ranks are in one pass of a layer and a rank has a bad
    argument.
    """

    def all_have(field: str) -> bool:
        return all(getattr(call, field) == getattr(calls[0], field) for call in calls)

    can_renumber = can_renumber and any(call.call_number == 1 and call.pass_name == "forward" for call in calls)
    in_one_pass = all_have("layer") and all_have("pass_name")
    if not (in_one_pass and (can_renumber or all_have("instance_number"))):
        line = "in {description}" + "; number {instance_number} of {layer}" * all_have("description")
        remedy = REMEDY_LAYERS if all_have("pass_name") else REMEDY_PASSES
        if in_one_pass:
            remedy = REMEDY_MODELS
        if {"backward", WITH_GRAPH} <= {call.pass_name for call in calls}:
            remedy = REMEDY_GRAPHS
        return TITLE_LAYERS, line, remedy
    if any(call.error for call in calls):  # The error may be the only difference.
        return None
    if not all_have("settings"):
        names = [name for name in calls[0].settings if len({call.settings.get(name) for call in calls}) > 1]
        line = "in {description}, with " + ", ".join(f"{name}={{settings[{name}]}}" for name in names)
        return "syncbn: the ranks have different settings of a layer.\n", line, REMEDY_SETTINGS
    if not all_have("dtype"):
        title = "syncbn: the ranks have inputs of different dtypes.\n"
        return title, "in {description}, with an input of {dtype}", REMEDY_DTYPES
    if all_have("instance_number"):
        return "syncbn: the ranks differentiate different calls of a layer.\n", "in {description}", REMEDY_BACKWARDS
    return None


def is_consequence(departure: str) -> bool:
    """Return whether a rank has left with an error that follows from another rank's end or absence."""
    return "syncbn: a collective failed" in departure or FAILED_COLLECTIVE.search(departure) is not None


def report_positions(rank: ThisRank, wait: Wait | None, has_failed: bool = False) -> str:
    """Return the positions of the ranks, one line for each position, and the remedy.

    `wait` is the collective of syncbn in which this rank waits, or None if it is a collective of the program.
    `has_failed`: the collective has failed, so read the positions again for up to `SETTLE_SECONDS`, until a rank has
    left or ended.
    """
    ranks, reports = [*range(rank.num_ranks)] if wait is None else wait.ranks(), list[str]()
    if rank.wait_for_report(READ_SECONDS) and rank.store_answers:  # A slow store may delay the previous report.
        rank.report_thread = _start(lambda: _read_report(rank, wait, ranks, has_failed, reports))
        if rank.wait_for_report(READ_SECONDS) and reports:
            return reports[0]
    unknown = "not known, as the process group's store does not answer"
    line = _describe(rank.position(wait), rank, wait)
    return format_by_rank(ranks, [line if other == rank.rank else unknown for other in ranks])


def _read_report(rank: ThisRank, wait: Wait | None, ranks: list[int], has_failed: bool, reports: list[str]) -> None:
    """Append the report to `reports`, unless the store fails or another version of syncbn has written positions."""
    with contextlib.suppress(TypeError), rank.suppressing_store_errors():
        rank.write_position()
        deadline = time.monotonic() + SETTLE_SECONDS
        positions = _read_positions(rank, wait, ranks)
        while has_failed and not any(position.departure or position.process_state for position in positions):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
            positions = _read_positions(rank, wait, ranks)
        lines = [_describe(position, rank, wait) for position in positions]
        lines = _append_ages(lines, [position.time for position in positions])
        reports.append("\n".join(filter(None, (format_by_rank(ranks, lines), _remedy(positions, wait)))))


def _read_positions(rank: ThisRank, wait: Wait | None, ranks: list[int]) -> list[Position]:
    """Return the positions of the ranks. The states of their processes are read first, so that the position of an ended
    process is its last position."""

    def read() -> list[Position]:
        return [Position(*value or ()) for value in rank.read(ranks, "position")]

    on_this_host = [position for position in read() if position.host == this_host()]
    states = {(position.host, position.process): process_state(position.process) for position in on_this_host}
    layer_calls = [None] * len(ranks)
    if wait is not None:
        layer_calls = rank.read(ranks, f"called/{wait.position().group}/{wait.layer_label()}")
    calls_differ = len({*layer_calls} - {None}) > 1
    positions = []
    for other, position, how in zip(ranks, read(), layer_calls, strict=True):
        if other == rank.rank:  # Its written position may be old, and this rank may be about to leave.
            position = rank.position(wait)._replace(departure="", time=time.time() - (wait.seconds() if wait else 0))
        state = "" if position.departure or other == rank.rank else states.get((position.host, position.process), "")
        layer_call = f"has called {wait.layer_label()} {how}" if wait and calls_differ and how else ""
        positions.append(position._replace(process_state=state, layer_call=layer_call))
    return positions


def _describe(position: Position, rank: ThisRank, wait: Wait | None) -> str:
    """Return the line for `position` in a report of this rank, which waits in `wait`. A rank writes its position only
    once a second, so "last seen" marks the position of a rank that may be further by now."""
    here = rank.position() if wait is None else wait.position()
    place = ""
    if position.description:
        number = here.sequence_number + (wait is None)
        is_there = position.group == here.group and position.sequence_number >= number
        is_there = is_there and position.departure != HAS_LEFT
        is_own = (position.host, position.process) == (this_host(), rank.process)
        is_current = (is_there or is_own or position.departure) and not position.process_state
        elsewhere = " on another process group" * (here.group not in ("", position.group))
        place = f"{'' if is_current else 'last seen '}{'in' if is_there else 'after'} {position.description}{elsewhere}"
    error = position.error * (position.departure in ("", HAS_LEFT))  # not if the rank has left with an error
    parts = place, position.layer_call, error, position.departure, position.process_state
    return "; ".join(filter(None, parts)) or "has not been seen"


def _append_ages(lines: list[str], times: list[float]) -> list[str]:
    """Append to each line the age of its position, such as "written 3 s ago", or the range of the ages of equal lines,
    such as "written 3-5 s ago"."""
    ages = dict[str, list[int]]()
    for line, written in zip(lines, times, strict=True):
        ages.setdefault(line, []).append(round(time.time() - written) if written else 0)
    spans = {line: "-".join(map(str, sorted({min(values), max(values)}))) for line, values in ages.items()}
    return [f"{line}; written {spans[line]} s ago" if max(ages[line]) > 0 else line for line in lines]


def _remedy(positions: list[Position], wait: Wait | None) -> str:
    """Return the remedy for ranks in these positions; "" if the positions already explain the failure."""
    departures = [position.departure for position in positions if not is_consequence(position.departure)]
    passes = {position.pass_name for position in positions}
    places = {(position.group, position.sequence_number, position.description) for position in positions}
    # A late rank may also be in another pass, but then it is in an earlier collective.
    in_one_collective = len({(position.group, position.sequence_number) for position in positions}) == 1
    rows = (
        (any(len(departure) > len(HAS_LEFT) for departure in departures), ""),
        (any(position.error for position in positions), ""),
        (any(position.layer_call for position in positions), REMEDY_CALLS),
        (any(position.process_state.endswith(HAS_ENDED) for position in positions), REMEDY_ENDED),
        (in_one_collective and {"backward", WITH_GRAPH} <= passes, REMEDY_GRAPHS),
        (HAS_LEFT in departures, REMEDY_PASSES),
        (any(position.process_state for position in positions), ""),
        (in_one_collective and {"forward", "backward"} <= passes, REMEDY_PASSES),
        (wait is None, REMEDY_OUTSIDE),
        (len(places) == 1, REMEDY_ONE_CALL),
        (True, REMEDY_LATE + REMEDY_LAYERS),
    )
    return next(remedy for holds, remedy in rows if holds)
