"""Tests that a report names at most three causes, and the true cause first. The tables map a situation to its cause."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import voting
from jobs import wait_until
from torch import Tensor, nn
from voting import Ranks, Reports

import syncbn
from syncbn.ranks import positions, report
from syncbn.ranks.positions import Position, process_state

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="signatures are for CPUs"),
    pytest.mark.two_ranks,
]
X = torch.randn(4, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn1, self.bn2 = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, order: tuple[str, ...] = ("bn1", "bn2")) -> Tensor:
        x = self.linear(x)
        for name in order:
            x = getattr(self, name)(x)
        return x


def step(model: nn.Module) -> None:
    model(X).square().sum().backward()


@torch.no_grad()
def call_without_gradient(model: nn.Module) -> None:
    model(X)


def evaluate_then_step(model: nn.Module, wait: Callable[[], None]) -> None:
    model.eval()(X)
    wait()
    step(model.train())


def train_without_conversion(model: nn.Module, wait: Callable[[], None]) -> None:
    step(Net())
    wait()
    step(model)


def compile_slowly(model: nn.Module, wait: Callable[[], None]) -> None:
    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        wait()
        return graph

    torch.compile(model, backend=compile_graph)(X)


def leave_out_backward(model: nn.Module, wait: Callable[[], None]) -> None:
    y = model(X)
    wait()
    y.square().sum().backward()


class Situation(NamedTuple):
    cause: str
    late: Callable[[nn.Module, Callable[[], None]], object]  # The late rank calls its second argument to wait.
    waits: Callable[[nn.Module], object] = step  # what the other rank calls
    late_rank: int = 1
    is_first: bool = False  # no layer has been called in this default group


LATE_STEP = lambda model, wait: (wait(), step(model))  # noqa: E731
LATE_CALL = lambda model, wait: (wait(), model(X))  # noqa: E731
SITUATIONS = {
    "slow loader": Situation(report.LATE, LATE_STEP),
    "slow loader of rank 0": Situation(report.LATE, LATE_STEP, late_rank=0),
    "validation in training mode": Situation(report.EXTRA_CALL, LATE_CALL, call_without_gradient),
    "FLOPs counted before training": Situation(report.EXTRA_CALL, LATE_CALL, call_without_gradient, is_first=True),
    "evaluation on one rank": Situation(report.EVALUATION, evaluate_then_step),
    "model not converted": Situation(report.NOT_CONVERTED, train_without_conversion, is_first=True),
    "backward left out": Situation(report.OTHER_LAYERS, leave_out_backward),
    "compiled on one rank": Situation(report.NOT_CONVERTED, compile_slowly, lambda model: model(X), is_first=True),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", SITUATIONS)
def test_first_cause_of_a_wait(ranks: Ranks, reports: Reports, name: str) -> None:
    situation = SITUATIONS[name]
    voting.world.make_anew()
    model = syncbn.convert_syncbn_model(Net())
    for _ in range(0 if situation.is_first else 2):
        step(model)
    dist.barrier()
    if ranks.rank == situation.late_rank:
        listed = rf"Possible causes:\n- {re.escape(situation.cause)}\n(- .*\n){{1,2}}(?!- )"
        situation.late(model, lambda: reports.wait_for(listed, 1 - situation.late_rank))
    else:
        situation.waits(model)
    dist.barrier()


def leave_instead(model: nn.Module) -> None:
    voting.world.leave()
    raise RuntimeError("this rank has left")


# What ranks 0 and 1 call, and the first cause of the error on rank 0.
Call = Callable[[nn.Module], object]
MIXTURES: dict[str, tuple[Call, Call, str]] = {
    "layer left out": (step, lambda model: model(X, ("bn2",)), report.OTHER_LAYERS),
    "last layer left out": (step, lambda model: model(X, ("bn1",)).sum().backward(), report.OTHER_LAYERS),
    "another order of layers": (step, lambda model: model(X, ("bn2", "bn1")), report.OTHER_LAYERS),
    "call more on rank 0": (lambda model: (model(X), model(X)), step, report.EXTRA_CALL),
    "fewer batches": (step, leave_instead, report.FEWER_BATCHES),
    "validation after the other rank has left": (call_without_gradient, leave_instead, report.EXTRA_CALL),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_first_cause_of_an_error(ranks: Ranks, name: str) -> None:
    *calls, cause = MIXTURES[name]
    model = syncbn.convert_syncbn_model(Net())
    for _ in range(2):
        step(model)
    dist.barrier()
    with pytest.raises(RuntimeError) as raised:
        calls[ranks.rank](model)
    text = f"{raised.value}\n"
    raised = None  # type: ignore[assignment]  # It holds the group.
    voting.world.make_anew()  # also if this rank is about to fail, because the other rank makes it, too
    if ranks.rank == 0:
        assert re.search(rf"Possible causes:\n- {re.escape(cause)}\n(- .*\n){{1,2}}(?!- )", text), text


@pytest.mark.parametrize(
    ("signal_number", "state", "cause"),
    [(signal.SIGKILL, "has ended", report.ENDED), (signal.SIGSTOP, "is stopped", report.STOPPED)],
)
def test_first_cause_of_a_process(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, signal_number: int, state: str, cause: str
) -> None:
    """The position of the other rank is of a process that has ended or is stopped."""
    monkeypatch.setattr(positions, "default_store", dist.HashStore)
    reader, other = positions.ThisRank(dist.group.WORLD), 1 - ranks.rank
    process = subprocess.Popen(["sleep", "100"])
    try:
        os.kill(process.pid, signal_number)
        wait_until(lambda: state in process_state(process.pid))
        position = Position("0", 7, "forward", "bn forward, call 7", process=process.pid, host=positions.this_host())
        monkeypatch.setattr(reader, "rank", other)
        reader.write("position", position)
        monkeypatch.setattr(reader, "rank", ranks.rank)
        text = report.report_positions(reader, None)
        assert re.search(rf"{state}\n(rank 1: .*\n)?(Possible causes:\n- )?{re.escape(cause)}(\n- |$)", text), text
    finally:
        process.kill()
        process.wait()


def position(call_number: int, pass_name: str = "backward", **fields: object) -> Position:
    place = f"bn {pass_name}, call {call_number}"
    return Position("0", 4 * call_number + (pass_name == "forward"), pass_name, place, call_number)._replace(**fields)


def test_most_ranks_are_elsewhere() -> None:
    """If one rank of three waits alone, that rank has called the model once more; if two wait, the third is late."""

    class Waiting:
        position = staticmethod(lambda: position(3, "forward"))

    here, late = position(3, "forward"), position(2)
    assert report._causes([here, late, late], Waiting())[0] == report.EXTRA_CALL
    assert report._causes([here, here, late], Waiting())[0] == report.LATE


def test_an_error_that_follows_from_another_rank_explains_nothing() -> None:
    """A rank that waits in a layer raises when its group fails. The report still names causes."""
    failed = "has raised RuntimeError: syncbn: a collective failed on rank 1 after 3.0 s."
    assert report._causes([position(2), position(3, "forward", error=failed)], None)[0] == report.OUTSIDE
    assert not report._causes([position(2), position(3, "forward", error="has raised KeyError: 1")], None)
