"""Reports where every rank of a group is, from the positions that the ranks write to the store (see positions.py)."""

import contextlib
import threading
import time

from syncbn.comm.text_exchange import by_rank
from syncbn.diagnosis import processes
from syncbn.diagnosis.positions import HAS_LEFT, IN_COLLECTIVE, WITH_GRAPH, Position, Wait, Written

SETTLE_SECONDS = 0.3  # in which a rank that leaves can say why
SILENCE_SECONDS = 5.0  # after which a silent rank of another host is reported; clocks may differ by less
READ_SECONDS = 5.0  # the longest time that reading may take

DIFFERENT_LAYERS = "syncbn: the ranks are in different layers or calls.\n"
OTHER_LAYERS = (
    "Every rank must call the same layers in the same order, all converted with the same process_group and in training "
    "mode; before a call on one rank alone, as for a profile, call model.eval(). A layer in a branch that only some "
    "ranks take must be called on the others too, for their backward as well: loss = loss + layer(x[:0]).sum(). Layers "
    "of some ranks alone, as of a pipeline's stage or of a DistributedDataParallel with a process_group, need that "
    "group: convert_syncbn_model(model, process_group)."
)
OTHER_PASSES = (
    "A rank has left out a layer or a backward, or has called a layer fewer times: for each missing call, loss = loss "
    "+ layer(x[:0]).sum(); or it had fewer batches: give all ranks as many, or let it go on with empty batches, "
    "images[:0]; or the rank that is ahead called the model once more, as to validate or profile it without "
    "model.eval(); or it called ddp.module where the others call ddp."
)
OTHER_GRAPHS = "Pass create_graph=True on every rank or on none, and differentiate by torch.func on all or on none."
OTHER_SETTINGS = (
    "Give the layer the same settings on every rank, and let schedules change them on all ranks in the same step."
)
OTHER_DTYPES = "Use autocast on every rank or on none, and give model and inputs the same dtype on all."
OTHER_BACKWARDS = (
    "The layer is called several times, and the ranks run the backwards of these calls in different orders: let every "
    "rank call backward(), or torch.autograd.grad, for the same call first."
)
FALSE_ALARM = "If this is a false alarm, set SYNCBN_CHECKS=0 on every rank: the ranks then compare nothing."
ENDED = (
    "Read what the ended process wrote last. If it wrote nothing, memory may have run out: see dmesg. If it wrote "
    "gloo::EnforceNotMet, the ranks sent different sizes: one of them has other channels, has not converted its model, "
    "evaluates, or left out a layer."
)
OTHER_COLLECTIVES = (
    "The ranks wait in different calls: one has come to the end of its batches, or has left a loop early. Give all "
    "ranks as many batches, or let it go on with empty batches, images[:0]."
)
EVALUATES = (
    "A layer in evaluation mode waits for nobody: call model.train() on every rank before the next step. To evaluate "
    "on some ranks only, call ddp.module(x): a forward of DistributedDataParallel itself may send buffers to all ranks."
)
LATE = (
    "A rank that is in no collective is late, as while it loads data or saves a checkpoint; or it has come to the end "
    "of its batches: give all ranks as many, or let it go on with empty batches, images[:0]."
)
OTHER_CALLS = "Build the same model everywhere, and give the layer the same process_group on every rank."
ONE_CALL = (
    "All ranks are in this call. One of them has other channels, or cannot be reached; or another thread, such as that "
    "of dcp.async_save, uses this process group, too: pass it one of its own, process_group=dist.new_group()."
)
UNSEEN = "A rank not seen in a layer is late, or runs a compiled model, or needs convert_syncbn_model(model).\n"


def is_consequence(left: str) -> bool:
    """Whether the error that a rank has left with follows from another rank's end or absence."""
    return "syncbn: a collective failed" in left or processes.FAILED_COLLECTIVE.search(left) is not None


def _remedy(positions: list[Position]) -> str:
    """What to do where ranks are in these positions; nothing, where the ranks' words say it."""
    left = [one.left for one in positions if not is_consequence(one.left)]
    has_own_error = any(len(why) > len(HAS_LEFT) for why in left) or any(one.left_out for one in positions)
    passes, blocked = {one.pass_name for one in positions}, {one.blocked for one in positions}
    is_silent = any(one.state for one in positions)
    num_collectives = sum(place.startswith(IN_COLLECTIVE) for place in blocked)
    rows = (
        (has_own_error, ""),
        (any(one.called for one in positions), OTHER_CALLS),
        (any(one.state.endswith(processes.HAS_ENDED) for one in positions), ENDED),
        (num_collectives > 1 and not is_silent, OTHER_COLLECTIVES),
        (any(one.evaluated for one in positions), EVALUATES),
        ({"backward", WITH_GRAPH} <= passes, OTHER_GRAPHS),
        (HAS_LEFT in left, OTHER_PASSES),
        (is_silent, ""),
        ({"forward", "backward"} <= passes, OTHER_PASSES),
        (len(blocked) > 1 and len({(one.group, one.number) for one in positions}) == 1, LATE),
        (_is_one_gone(positions), ""),
        (len({(one.group, one.number, one.doing) for one in positions}) == 1, ONE_CALL),
        (any(one.unseen or one == Position() for one in positions), UNSEEN + OTHER_LAYERS),
        (True, OTHER_LAYERS),
    )
    return next(remedy for holds, remedy in rows if holds)


def where_all_are(wait: Wait, has_failed: bool = False, at_exit: bool = False) -> str:
    """A line for each position of the ranks that wait for one another, and the remedy. If what this rank waited in
    `has_failed`, the positions are read again for 0.3 s until a rank is gone. `at_exit` no thread may be started."""
    ranks, reports = wait.ranks(), list[str]()
    if not at_exit:
        wait.rank.write_position()
    if wait.rank.store_answers:
        if at_exit:
            _read_report(wait, ranks, has_failed, reports)
        else:  # in a thread, as the store's host may be stopped
            thread = threading.Thread(target=_read_report, args=(wait, ranks, has_failed, reports), daemon=True)
            thread.start()
            thread.join(READ_SECONDS)
        wait.rank.store_answers = bool(reports)  # else it is not called again
    return reports[0] if reports else _without_store(wait, ranks)


def _read_report(wait: Wait, ranks: list[int], has_failed: bool, reports: list[str]) -> None:
    """Add the report to `reports`."""
    # A store that has ended, or positions that another version of syncbn has written.
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        deadline = time.monotonic() + SETTLE_SECONDS
        positions = _read(wait, ranks)
        while has_failed and not _is_one_gone(positions) and time.monotonic() < deadline:
            time.sleep(0.02)
            positions = _read(wait, ranks)
        lines = by_rank(ranks, [_in_words(wait, position) for position in positions])
        reports.append("\n".join(filter(None, (lines, _remedy(positions)))))


def _is_one_gone(positions: list[Position]) -> bool:
    """Whether a rank has left, has ended, is stopped, or is not heard of."""
    return any(position.left or position.state for position in positions)


def _without_store(wait: Wait, ranks: list[int]) -> str:
    """A line for this rank, and lines for the others, whose positions it cannot read."""
    unknown = "not known, as the process group's store does not answer"
    words = [unknown if processes.on_this_host(rank) else f"on another host; {unknown}" for rank in ranks]
    words[ranks.index(wait.rank.rank)] = _in_words(wait, wait.position()._replace(blocked=wait.rank.position().blocked))
    return by_rank(ranks, words)


def _read(wait: Wait, ranks: list[int]) -> list[Position]:
    layer, key = wait.layer(), f"called/{wait.position().group}/{wait.layer()}"
    called = [written.value for written in (wait.rank.read(ranks, key) if layer else [Written()] * len(ranks))]
    they_differ = len({*called} - {None, ""}) > 1
    positions = []
    for rank, how, written in zip(ranks, called, wait.rank.read(ranks, "position"), strict=True):
        position = _position(wait, rank, written)
        if layer and not wait.has_arrived(position) and (how is None or not position.doing):
            position = position._replace(unseen=f"has not been seen in {layer}")
        positions.append(position._replace(called=f"has called {layer} {how}" if they_differ and how else ""))
    return positions


def _position(wait: Wait, rank: int, written: Written) -> Position:
    """The position that a rank has written, and what this rank adds to it."""
    values, time_written, process, host = written
    position, age = Position(*values or ()), time.time() - time_written
    if rank == wait.rank.rank:  # its last position may not be written yet, and it may be about to leave
        position = wait.rank.position(wait)._replace(left="")
    elif not position.left:
        if host == processes.host():
            state = processes.state_of(process)
            if state.endswith(processes.HAS_ENDED):  # it may have left since its position was read
                position = Position(*wait.rank.read([rank], "position")[0].value or ())
            position = position if position.left else position._replace(state=state)
        elif process and age > SILENCE_SECONDS and wait.rank.beats:
            position = position._replace(state=f"not heard of for {age:.0f} s")
    return position


def _in_words(wait: Wait, position: Position) -> str:
    place = ""
    if position.doing:
        seen = "last seen " * bool(position.state)
        arrived = "in" if wait.has_arrived(position) else "after"
        group = " on another process group" * (wait.position().group not in ("", position.group))
        place = f"{seen}{arrived} {position.doing}{group}"
    left_out = position.left_out * (len(position.left) <= len(HAS_LEFT))  # else that has an error of its own
    since = position.evaluated, left_out, position.blocked, position.left, position.state
    words = place, position.called, position.unseen, *since
    return "; ".join(filter(None, words)) or "has not been seen"
