"""The catalogue of faults: every rank ends and says why. The table is made by faults.py."""

import re

import faults
import pytest
import torch
from jobs import ON_TWO_RANKS, run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the catalogue is of CPUs and gloo")
CASES = [(name, False) for name in faults.FAULTS]
CASES += [(name, True) for name, fault in faults.FAULTS.items() if fault.said_in_debug]


@pytest.mark.parametrize(("name", "debug"), CASES)
def test_fault(name: str, debug: bool) -> None:
    fault, outcome = faults.FAULTS[name], faults.run(name, debug=debug)
    assert re.search(fault.said_in_debug if debug else fault.said, outcome.texts[0]), outcome.texts[0]
    assert re.search(fault.said_at_fault, outcome.texts[-1]), outcome.texts[-1]
    assert [status == 0 for status in outcome.statuses] == [rank < fault.well for rank in range(fault.num_ranks)]


@pytest.mark.parametrize("fault", ["none", "none, DDP broadcasts buffers"])
def test_a_healthy_job_says_nothing(fault: str) -> None:
    outcome = faults.run(fault)
    assert outcome.statuses == [0, 0]
    assert outcome.texts == ["", ""]


def test_under_torchrun() -> None:
    """It ends the other ranks, perhaps before they could speak; what started it is always said."""
    with pytest.raises(AssertionError, match="KeyError: 'no such class: 10'"):
        run(*ON_TWO_RANKS, faults.JOB, "exception in forward", "syncbn")
