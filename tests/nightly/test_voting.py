"""Tests the plugin `voting`: a failure on one rank fails the test on all ranks, and does not affect the next test."""

import re
import subprocess
from pathlib import Path

from jobs import ENVIRONMENT, TORCHRUN

CASES = """
import pytest, torch, torch.distributed as dist, syncbn

def test_fails_before_a_collective(ranks):
    assert ranks.rank != 1, "only here"
    dist.all_reduce(torch.ones(1))

def test_passes_between(ranks): dist.all_reduce(torch.ones(1))

def test_fails_with_a_graph_alive(ranks):
    y = syncbn.SyncBatchNorm(3)(torch.randn(2, 3, requires_grad=True))
    assert ranks.rank != 0, "only here"
    y.sum().backward()

def test_fails_after_an_error(ranks):
    layer = syncbn.SyncBatchNorm(3)
    try:
        layer(torch.randn(2, 4 if ranks.rank == 0 else 3))
    except ValueError:  # on both ranks
        assert ranks.rank != 1, "only here"
    layer(torch.randn(2, 3))

@pytest.fixture
def broken(ranks): assert ranks.rank != 0, "only here"

def test_fails_in_a_fixture(broken): dist.all_reduce(torch.ones(1))

@pytest.fixture
def fails_at_its_end(ranks):
    yield
    assert ranks.rank != 1, "only here"

def test_fails_in_the_teardown(fails_at_its_end): pass

def test_passes_after_all(ranks): dist.all_reduce(torch.ones(1))
"""
OUTCOMES = {
    "ERROR": ["fails_in_a_fixture", "fails_in_the_teardown"],
    "FAILED": ["fails_before_a_collective", "fails_with_a_graph_alive", "fails_after_an_error"],
    "PASSED": ["passes_between", "fails_in_the_teardown", "passes_after_all"],
}


def test_a_failure_on_one_rank_is_a_failure_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    options = f"--standalone --nproc-per-node 2 --redirects 3 --log-dir {tmp_path}"
    command = [*TORCHRUN, *f"{options} -m pytest -p voting -rA {tmp_path}".split()]
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment, capture_output=True).returncode != 0
    logs = [path.read_text() for path in tmp_path.rglob("stdout.log")]
    assert len(logs) == 2
    for log in logs:
        for outcome, names in OUTCOMES.items():
            assert re.findall(rf"^{outcome} \S*::test_(\w+)", log, re.MULTILINE) == names
        assert all(f"rank {rank}: AssertionError: only here" in log for rank in range(2))
        assert "Timed out" not in log, "a rank waited until the timeout of a collective"
