"""What `scripts/bench.py --guard` calls slower, by times that are made up, and which commit it takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import bench_guard
import pytest
from bench_guard import ATTEMPTS, STEPS, Ratio, Ratios, Step

STEP, OTHER_STEP = STEPS[:2]
SAME = Ratio.of([0.99, 1.0, 1.01])


@pytest.mark.parametrize(
    ("ratios", "is_slower"),
    [
        ([1.14] * 31, False),
        ([1.16] * 31, True),
        ([0.5] * 31, False),
        ([1.0] * 16 + [9.0] * 15, False),  # outliers
        ([1.0] * 15 + [1.2] * 16, True),  # more often than not
    ],
)
def test_the_median_decides(ratios: list[float], is_slower: bool) -> None:
    ratio = Ratio.of(ratios)
    assert bench_guard.slower({STEP: (ratio, SAME)}) == [STEP] * is_slower
    assert bench_guard.slower({STEP: (SAME, ratio), OTHER_STEP: (SAME, SAME)}) == [STEP] * is_slower


def test_spread() -> None:
    assert Ratio.of([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 1.0)


@pytest.mark.parametrize("slow_times", range(ATTEMPTS + 1))
def test_slower_each_time(slow_times: int) -> None:
    """A step that was fast once is not slower, and is not measured again."""
    measured: list[list[Step]] = []

    def measure(steps: list[Step]) -> Ratios:
        measured.append(steps)
        ratio = Ratio.of([1.3 if len(measured) <= slow_times else 1.0] * 3)
        return {step: (ratio if step == STEP else SAME, SAME) for step in steps}

    found = bench_guard.slower_each_time([STEP, OTHER_STEP], measure)
    assert found == ([STEP] if slow_times == ATTEMPTS else [])
    assert measured == [[STEP, OTHER_STEP], *[[STEP]] * min(slow_times, ATTEMPTS - 1)]


def test_the_last_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(bench_guard, "ROOT", tmp_path)
    git("init")
    git("commit", "--allow-empty", "--message", "first")
    with pytest.raises(SystemExit, match=r"no tag leads to this commit\. .*--guard HEAD~10"):
        bench_guard.last_release()
    git("tag", "v0.1.0")
    git("commit", "--allow-empty", "--message", "second")
    git("tag", "v0.1.1")  # which is to be compared with the one before
    assert bench_guard.last_release() == "v0.1.0"
    with pytest.raises(SystemExit, match=r"git archive v0\.2\.0 syncbn scripts: fatal: not a valid object name"):
        bench_guard.copy_commit("v0.2.0", tmp_path / "copy")
