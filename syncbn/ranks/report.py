"""Reports where every rank of a group is, and why the ranks differ, from the values that the ranks write to the store.

When the trailer of a total shows that the ranks differ, or that a rank has a bad argument, each rank writes its
`CallReport` to the store and reads those of the other ranks. All ranks know the key without negotiation: it consists of
the group and a digest of the total, whose bits are the same on all ranks.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from syncbn.ranks import positions
from syncbn.ranks.positions import HAS_ENDED, HAS_LEFT, MAY_HAVE_LEFT, Position, ThisRank, Wait, this_host
from syncbn.texts import format_by_rank

SETTLE_SECONDS = 0.3  # how long a report waits, after a failure, for a rank that may still write why it leaves
READ_SECONDS = 5.0  # the longest time for which a report waits for the store
ANSWER_SECONDS = 5.0  # the longest time for which a rank waits for the other ranks' reports
STORE_UNKNOWN = "not known, as the process group's store does not answer"
WITH_GRAPH = "backward with create_graph or torch.func"  # pass_name of the first all_reduce of that backward

TITLE_LAYERS = "syncbn: the ranks are in different layers or calls.\n"
TITLE_UNKNOWN = "syncbn: the ranks differ in layer, call, settings or dtype, and not all ranks have reported.\n"
TITLE_LENGTHS = "syncbn: the ranks have sent sums of different sizes.\n"
TITLE_ARGUMENT = "syncbn: another rank has a bad argument.\n"
FALSE_ALARM = "If this is a false alarm, set SYNCBN_CHECKS=0 on every rank, which disables the comparison of ranks."

# Causes with their remedies. A report names at most three, the likeliest first.
LATE = "A rank is late, for example because it loads data, compiles, saves a checkpoint, or its host is cut off."
EVALUATION = "One rank alone has called model.eval(): call model.train() to train, and evaluate with ddp.module(x)."
NOT_CONVERTED = "A rank has not called convert_syncbn_model(model), or runs a compiled model, which is not reported."
EXTRA_CALL = "A rank has called the model once more, for example to validate or profile it: call model.eval() first."
FEWER_BATCHES = "A rank has fewer batches: give all ranks equally many, or let it go on with empty batches, images[:0]."
OTHER_LAYERS = (
    "A rank has left out a layer or a backward, or calls layers in another order: call the same layers in the same "
    "order on every rank, and for each missing call write loss = loss + layer(x[:0]).sum()."
)
SOME_RANKS = "Only some ranks have this layer: pass their group to convert_syncbn_model(model, process_group)."
MODELS = (
    "Several models of one class have this layer, and the ranks called them in a different order, or a rank has left "
    "out a call: train the models in the same order on every rank."
)
GRAPHS = "Pass create_graph=True on every rank or on none, and use torch.func on every rank or on none."
SETTINGS = "Give the layer the same settings on every rank, and let schedules change them in the same step."
DTYPES = "Use autocast on every rank or on none, and the same dtype of model and inputs on every rank."
BACKWARDS = "The layer is called several times: run the backwards of these calls in the same order on every rank."
ENDED = (
    "Read the last output of the ended process. If there is no output, memory may have run out: see dmesg. "
    "If the output ends in gloo::EnforceNotMet, the ranks have sent different sizes, for one of the causes below."
)
OTHER_MODEL = "A rank has not converted a layer, has left out a layer, or has a layer with other channels."
STOPPED = "A debugger or a signal has stopped a process: continue it with kill -CONT."
OUTSIDE = (
    "The ranks may wait in different collectives of the program or of DistributedDataParallel (a rank may call "
    "ddp.module where others call ddp); py-spy, or the flight recorder of nccl, shows where a rank waits."
)
CALLS = "Build the same model on every rank, and give the layer the same process_group."
ONE_CALL = (
    "All ranks are in this call. A rank has other channels or cannot be reached, or another thread, such as that of "
    "dcp.async_save, uses this process group: give that thread its own group, process_group=dist.new_group()."
)


class RanksDifferError(RuntimeError):
    """The ranks of a group are in different layers or calls, or in one layer with different settings or inputs."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{FALSE_ALARM}"


class CallReport(NamedTuple):
    """A rank's description of its call of a layer. Written as JSON."""

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

    call_store(rank, exchange, 2 * ANSWER_SECONDS)
    calls = [None if values is None else CallReport(*values) for values in answers]
    calls[ranks.index(rank.rank)] = call  # The store may not have it.
    return calls


def call_store(rank: ThisRank, call: Callable[[], None], seconds: float) -> bool:
    """Run `call`, which uses the store, in a new thread, because the store may not answer. Return whether `call` has
    ended within `seconds`. First wait, also up to `seconds`, for an earlier call. At the exit of the interpreter no
    thread can start, so `call` then runs in this thread."""
    if not rank.wait_for_report(seconds):
        return False
    # Another thread may replace `rank.report_thread` at any time, so this function waits for its own thread.
    thread = rank.report_thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
        thread.join(seconds)
    except RuntimeError:
        call()
    return not thread.is_alive()


def record_at_once(rank: ThisRank, error: str) -> None:
    """Record an error of this rank and write it to the store. Use it where this rank will not join the collective of
    the other ranks, or may not survive it: then they can only read the error."""
    rank.record_error(error)
    call_store(rank, rank.write_position, READ_SECONDS)


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
    is_late = rank.store_answers and rank.wait_for_report()
    unknown = f"has not answered within {ANSWER_SECONDS:g} s" if is_late else STORE_UNKNOWN
    lines = format_by_rank(ranks, [unknown if call is None else f"in {call.description}" for call in calls])
    where = f"{lines}\nWhere the ranks are now:\n{report_positions(rank, wait)}"
    return RanksDifferError(TITLE_UNKNOWN + where) if ranks_differ else RuntimeError(TITLE_ARGUMENT + where)


def _difference(calls: Sequence[CallReport], can_renumber: bool) -> tuple[str, str, str] | None:
    """Return how the ranks' calls differ: the title of the error, the format of each rank's line, and the causes.

    Return None if only instance numbers differ, or if all ranks are in one pass of a layer and a rank has a bad
    argument.
    """

    def all_have(field: str) -> bool:
        return all(getattr(call, field) == getattr(calls[0], field) for call in calls)

    can_renumber = can_renumber and any(call.call_number == 1 and call.pass_name == "forward" for call in calls)
    in_one_pass = all_have("layer") and all_have("pass_name")
    if not (in_one_pass and (can_renumber or all_have("instance_number"))):
        shows_number = in_one_pass or all_have("description")
        line = "in {description}" + "; number {instance_number} of {layer}" * shows_number
        return TITLE_LAYERS, line, MODELS if in_one_pass else _format_causes(_causes_of_mixture(calls))
    if any(call.error for call in calls):  # The error may be the only difference.
        return None
    if not all_have("settings"):
        names = [name for name in calls[0].settings if len({call.settings.get(name) for call in calls}) > 1]
        line = "in {description}, with " + ", ".join(f"{name}={{settings[{name}]}}" for name in names)
        return "syncbn: the ranks have different settings of a layer.\n", line, SETTINGS
    if not all_have("dtype"):
        title = "syncbn: the ranks have inputs of different dtypes.\n"
        return title, "in {description}, with an input of {dtype}", DTYPES
    if all_have("instance_number"):
        return "syncbn: the ranks differentiate different calls of a layer.\n", "in {description}", BACKWARDS
    return None


def _causes_of_mixture(calls: Sequence[CallReport | Position]) -> list[str]:
    """Return the causes for ranks that are in different layers or passes of one collective, the likeliest first."""
    if {"backward", WITH_GRAPH} <= {call.pass_name for call in calls}:
        return [GRAPHS]
    forwards = [call.call_number for call in calls if call.pass_name == "forward"]
    backwards = [call.call_number for call in calls if call.pass_name == "backward"]
    if forwards and backwards and min(forwards) > max(backwards):  # Some ranks have already begun the next forward.
        return [EXTRA_CALL, OTHER_LAYERS, FEWER_BATCHES]
    return [OTHER_LAYERS, SOME_RANKS, EXTRA_CALL]


def _format_causes(causes: list[str]) -> str:
    return "\n- ".join(["Possible causes:", *causes]) if len(causes) > 1 else "".join(causes)


def is_consequence(text: str) -> bool:
    """Return whether a rank has left, or has raised an error, because of another rank's end or absence."""
    return "syncbn: a collective failed" in text or positions.FAILED_COLLECTIVE.search(text) is not None


def report_positions(rank: ThisRank, wait: Wait | None, has_failed: bool = False) -> str:
    """Return the positions of the ranks, one line for each position, and the likeliest causes.

    `wait` is the collective of syncbn in which this rank waits, or None if it is a collective of the program.
    `has_failed`: the collective has failed, so read the positions again for up to `SETTLE_SECONDS`, until a rank has
    left or ended.
    """
    ranks, reports = [*range(rank.num_ranks)] if wait is None else wait.ranks, list[str]()
    read = functools.partial(_read_report, rank, wait, ranks, has_failed, reports)
    if rank.store_answers and call_store(rank, read, READ_SECONDS) and reports:
        return reports[0]
    line = _describe(rank.position(wait), rank, wait)
    return format_by_rank(ranks, [line if other == rank.rank else STORE_UNKNOWN for other in ranks])


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
        causes = _format_causes(_causes(positions, wait))
        reports.append("\n".join(filter(None, (format_by_rank(ranks, lines), causes))))


def _read_positions(rank: ThisRank, wait: Wait | None, ranks: list[int]) -> list[Position]:
    """Return the positions of the ranks. The states of their processes are read first, so that the position of an ended
    process is its last position."""

    def read() -> list[Position]:
        return [Position(*value or ()) for value in rank.read(ranks, "position")]

    on_this_host = [position for position in read() if position.host == this_host()]
    states = {(position.host, position.process): positions.process_state(position.process) for position in on_this_host}
    label = "" if wait is None else wait.layer_label
    calls = rank.read(ranks, f"called/{label}") if label else [None] * len(ranks)
    own_call = calls[ranks.index(rank.rank)]
    read_positions = []
    for other, position, call in zip(ranks, read(), calls, strict=True):
        if other == rank.rank:  # Its written position may be old, and this rank may be about to leave.
            position = rank.position(wait)._replace(departure="", time=time.time() - (wait.seconds() if wait else 0))
        if position.departure and position.default_group < rank.default_group:
            departure = position.departure.replace(HAS_LEFT, MAY_HAVE_LEFT)
            position = position._replace(sequence_number=0, call_number=0, departure=departure)
        state = "" if position.departure or other == rank.rank else states.get((position.host, position.process), "")
        # A call of this name may be of another group or another layer, or of a default group that was left.
        is_same = call and own_call and call[:2] == own_call[:2]
        is_here = not position.departure or is_consequence(position.departure)
        layer_call = f"has called {label} {call[2]}" if is_same and is_here else ""
        read_positions.append(position._replace(process_state=state, layer_call=layer_call))
    calls_differ = len({position.layer_call for position in read_positions} - {""}) > 1
    return read_positions if calls_differ else [position._replace(layer_call="") for position in read_positions]


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
    mode = "the layer is in evaluation mode now" * position.is_evaluating
    parts = place, mode, position.layer_call, error, position.departure, position.process_state
    return "; ".join(filter(None, parts)) or "has not been seen"


def _append_ages(lines: list[str], times: list[float]) -> list[str]:
    """Append to each line the age of its position, such as "written 3 s ago", or the range of the ages of equal lines,
    such as "written 3-5 s ago"."""
    ages = dict[str, list[int]]()
    for line, written in zip(lines, times, strict=True):
        ages.setdefault(line, []).append(round(time.time() - written) if written else 0)
    spans = {line: "-".join(map(str, sorted({min(values), max(values)}))) for line, values in ages.items()}
    return [f"{line}; written {spans[line]} s ago" if max(ages[line]) > 0 else line for line in lines]


def _causes(positions: list[Position], wait: Wait | None) -> list[str]:
    """Return at most three causes for ranks in these positions, the likeliest first; none if the positions already
    explain the failure."""
    departures = [position.departure for position in positions if not is_consequence(position.departure)]
    has_error = any(position.error and not is_consequence(position.error) for position in positions)
    states = [position.process_state for position in positions]
    places = {(position.pass_name, position.description) for position in positions}
    here = Position() if wait is None else wait.position()
    late = [other for other in positions if other.group != here.group or other.sequence_number < here.sequence_number]
    # A late rank may also be in another pass, but then it is in an earlier collective.
    in_one_collective = len({(position.group, position.sequence_number) for position in positions}) == 1
    rows: tuple[tuple[object, list[str]], ...] = (
        ({*departures} - {"", HAS_LEFT, MAY_HAVE_LEFT} or has_error, []),
        (any(position.layer_call for position in positions), [CALLS]),
        (any(state.endswith(HAS_ENDED) for state in states), [ENDED, EXTRA_CALL, OTHER_MODEL]),
        (in_one_collective and len(places) > 1, _causes_of_mixture(positions)),
        (HAS_LEFT in departures and here.lacks_grad, [EXTRA_CALL, FEWER_BATCHES]),
        (HAS_LEFT in departures, [FEWER_BATCHES, EXTRA_CALL, OTHER_LAYERS]),
        (any(states), [STOPPED]),
        (wait is None, [OUTSIDE, FEWER_BATCHES, EVALUATION]),
        (not late, [ONE_CALL]),
        (any(position.is_evaluating for position in late), [EVALUATION, LATE, FEWER_BATCHES]),
        (here.lacks_grad, [EXTRA_CALL, LATE, FEWER_BATCHES]),
        (not any(position.description for position in late), [NOT_CONVERTED, LATE, EXTRA_CALL]),
        # A late rank whose last call has this number is inside the step. Between two steps its last call has a smaller
        # number.
        (any(position.call_number == here.call_number for position in late), [OTHER_LAYERS, LATE, SOME_RANKS]),
        (2 * len(late) > len(positions), [EXTRA_CALL, LATE, FEWER_BATCHES]),
        (True, [LATE, FEWER_BATCHES, EXTRA_CALL]),
    )
    return next(causes for holds, causes in rows if holds)
