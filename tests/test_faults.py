"""The catalogue of faults: every rank ends within 30 s and says why. The table is made by faults.py."""

from __future__ import annotations

import re
import subprocess
import sys

import faults
import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the catalogue is of CPUs and gloo")


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault(name: str, debug: bool) -> None:
    fault = faults.FAULTS[name]
    if debug and not fault.said_in_debug:
        pytest.skip("as without")
    outcome = faults.run(fault, debug=debug)
    assert re.search(fault.said_in_debug if debug else fault.said, outcome.texts[0]), outcome.texts[0]
    assert re.search(fault.said_at_fault, outcome.texts[-1]), outcome.texts[-1]
    well = 0 if debug else fault.well
    assert [status == 0 for status in outcome.statuses] == [rank < well for rank in range(fault.num_ranks)]


@pytest.mark.parametrize("fault", ["none", "none, DDP broadcasts buffers"])
def test_a_healthy_job_says_nothing(fault: str) -> None:
    outcome = faults.run(faults.Fault(fault, ""))
    assert outcome.statuses == [0, 0]
    assert outcome.texts == ["", ""]


def test_under_torchrun() -> None:
    """It ends the other ranks, perhaps before they could speak; what started it is always said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", faults.JOB]
    command += ["exception in forward", "syncbn"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode
    assert "KeyError: 'no such class: 10'" in process.stderr
