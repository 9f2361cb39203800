"""Catches a scripts/run_tests.py that hides a failure, or how far the tests are."""

from pathlib import Path

import pytest
import run_tests

CASES = """
def test_good(): pass
def test_bad(): assert 1 == 2, "the reason"
"""


def test_a_failure_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run_tests, "LOGS", tmp_path)
    monkeypatch.setattr(run_tests, "AT_ONCE", 2)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "none.ini").touch()
    pytest_here = f"{run_tests.PYTEST} -c {tmp_path / 'none.ini'}"
    good, bad, none = (
        run_tests.Part(name, pytest_here, [str(tmp_path), "-k", name]) for name in ("good", "bad", "none")
    )
    assert run_tests.run([good, none])
    assert not run_tests.run([good, bad, none])
    progress, _, end = capsys.readouterr().out.partition("== failed: bad\n")
    assert "bad has FAILED" in progress
    assert "AssertionError: the reason" in end
    assert [line.partition(":")[0] for line in end.splitlines()[-3:]] == ["good", "bad", "none"]
    assert bad.progress() == "bad 1/1 (1 failed)"
