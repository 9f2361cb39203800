"""What `scripts/bench.py guard` calls slower, by times that are made up, and which commit it takes."""

from pathlib import Path

import pytest
from benchmarks import guard
from benchmarks.guard import ATTEMPTS, Ratios, plain_and_fused, slower_each_time
from benchmarks.measuring import Case, median_and_spread

STEP, OTHER_STEP = plain_and_fused(["32x64x56x56"], ["float32"])[:2]
SAME = median_and_spread([0.99, 1.0, 1.01])


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
    ratio = median_and_spread(ratios)
    for measured in ({STEP: [ratio, SAME]}, {STEP: [SAME, ratio], OTHER_STEP: [SAME, SAME]}):
        assert slower_each_time([*measured], lambda steps, measured=measured: measured) == [STEP] * is_slower


def test_spread() -> None:
    assert median_and_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 1.0)


@pytest.mark.parametrize("slow_times", range(ATTEMPTS + 1))
def test_slower_each_time(slow_times: int) -> None:
    """A step that was fast once is not slower, and is not measured again."""
    measured: list[list[Case]] = []

    def measure(steps: list[Case]) -> Ratios:
        measured.append(steps)
        ratio = median_and_spread([1.3 if len(measured) <= slow_times else 1.0] * 3)
        return {step: [ratio if step == STEP else SAME, SAME] for step in steps}

    found = slower_each_time([STEP, OTHER_STEP], measure)
    assert found == ([STEP] if slow_times == ATTEMPTS else [])
    assert measured == [[STEP, OTHER_STEP], *[[STEP]] * min(slow_times, ATTEMPTS - 1)]


def test_the_commit_that_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the table, which must be one of this repository."""
    table = tmp_path / "baseline.csv"
    table.write_text("commit,date\nabc,2026-01-01\ndef,2026-01-02\n")
    monkeypatch.setattr(guard, "BASELINE", table)
    assert guard.baseline() == "def"
    with pytest.raises(SystemExit, match=r"git has no v0\.2\.0 to compare with"):
        guard.copy_commit("v0.2.0", tmp_path / "copy")


def test_steps() -> None:
    """Shapes and dtypes as --shapes and --dtypes give them."""
    steps = plain_and_fused(["2x3x4x4", "8x5"], ["bfloat16"])
    names = [step.name.removeprefix("2x3x4x4 bfloat16 ") for step in steps[:4]]
    assert names == ["contiguous", "contiguous fused", "channels last", "channels last fused"]
    assert [step.shape for step in steps[4:]] == [(8, 5)] * 2
