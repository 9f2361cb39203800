"""Catches a script that fails with tiny settings. On machines with a GPU a typing error may cost the whole run."""

import json
from pathlib import Path

import gpu_run
import pytest
import run_tests
from jobs import run_job, run_on_ranks, run_script

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


def test_bench_layers(tmp_path: Path) -> None:
    settings = ("--rounds", 2, "--dtypes", "float32", "bfloat16", "--shapes", "4x8x6x6", "2x7x12")
    _, results = run_job(tmp_path, SCRIPTS / "bench.py", *settings, file="bench.json")
    times = {(row["case"], row["peer"]): row for row in results["times"]}
    assert all(row["both"] > row["forward"] > 0 for row in times.values())
    cases = {case for case, _ in times}
    assert len(cases) == (2 + 1) * 2  # layouts of each shape, times dtypes
    for case in cases:
        assert [times[case, peer]["collectives"] for peer in ("syncbn", "nn.BatchNorm")] == [2, 0]


def test_bench_steps(tmp_path: Path) -> None:
    settings = ("--rounds", 1, "--scale", 0.15, "--channels-last", "--own-group", "--models", "segmentation", "block")
    _, results = run_job(tmp_path, SCRIPTS / "bench.py", "steps", *settings, file="steps.json")
    assert all(0 < one["forward"] < one["both"] for kinds in results["times"].values() for one in kinds.values())


def test_bench_kernels(tmp_path: Path) -> None:
    run_script(SCRIPTS / "bench.py", "kernels", "--shapes", "4x8x6x6", "--rounds", 2, "--output", tmp_path)
    assert len(json.loads((tmp_path / "kernels.json").read_text())["kernels"]) == 2 * 2  # dtypes, layouts


def test_bench_launches() -> None:
    pytest.importorskip("triton")
    assert "syncbn with a group" in run_script(SCRIPTS / "bench.py", "launches", "--rounds", 1)


def test_accuracy_and_soak() -> None:
    assert "mean 1e4, std 1" in run_script(SCRIPTS / "accuracy.py")
    assert " rounds in " in run_on_ranks(2, SCRIPTS / "soak.py", "--minutes", 0.02)


def test_a_dry_run_of_gpu_sh(tmp_path: Path) -> None:
    """All parts but the sanitizer, for which there is no program, and Triton's, where it is not installed."""
    run_script(SCRIPTS / "gpu_run.py", "--dry-run", "--output", tmp_path)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts.keys() == gpu_run.PARTS.keys()
    assert all(part["verdict"].startswith(("passed", "skipped: ")) for part in parts.values()), parts
    for name in sum(gpu_run.DISTRIBUTED_TESTS, ()):  # of which a dry run has none
        assert (ROOT / f"tests/distributed/test_{name}.py").exists()


CASES = """
def test_good(): pass
def test_bad(): assert 1 == 2, "the reason"
"""


def test_a_failure_fails_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_tests, "LOGS", tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "none.ini").touch()
    pytest_here = f"{run_tests.PYTEST} -c {tmp_path / 'none.ini'}"
    parts = [run_tests.Part(name, pytest_here, [str(tmp_path), "-k", name]) for name in ("good", "none", "bad")]
    assert run_tests.run(parts[:2])
    assert not run_tests.run(parts)
    assert "AssertionError: the reason" in capsys.readouterr().out
    assert parts[2].progress() == "bad 1/1 (1 failed)"
