"""Catches a scripts/run_tests.py that hides a failure, or from whose lines nobody sees how far the tests are."""

import re
from pathlib import Path

import pytest
import run_tests

CASES = """
import time
def test_good(): pass
def test_bad(): assert 1 == 2, "the reason"
def test_slow(): time.sleep(1)
"""


def test_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run_tests, "LOGS", tmp_path)
    monkeypatch.setattr(run_tests, "AT_ONCE", 2)
    monkeypatch.setattr(run_tests, "LINE_SECONDS", 0.01)
    (tmp_path / "test_cases.py").write_text(CASES)
    names = {"some": "good or slow", "bad": "bad or slow", "none": "absent"}
    pytest_here = f"{run_tests.PYTEST} -c {tmp_path / 'none.ini'}"
    parts = [run_tests.Part(name, pytest_here, [str(tmp_path), "-k", chosen]) for name, chosen in names.items()]
    (tmp_path / "none.ini").touch()
    assert not run_tests.run(parts)
    progress, _, end = capsys.readouterr().out.partition("== failed: bad\n")
    for expected in (
        "some has started",
        "running: some starts, bad starts; then none",
        "some 1/2",
        r"bad 1/2 \(1 failed\)",
        r"some has ended after \d+ s: 2 passed, 1 deselected",
        r"bad has FAILED after \d+ s: 1 failed, 1 passed, 1 deselected",
        r"none has ended after \d+ s: 3 deselected",
    ):
        assert re.search(expected, progress), progress
    assert "AssertionError: the reason" in end
    last = end.splitlines()[-3:]
    assert [re.sub(r"=+ | in .* =+", "", line) for line in last] == [
        "some: 2 passed, 1 deselected",
        "bad: 1 failed, 1 passed, 1 deselected",
        "none: 3 deselected",
    ]
