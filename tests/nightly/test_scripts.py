"""Tests that the scripts run with tiny settings. On a machine with a GPU a typing error may cost a whole run."""

import json
from pathlib import Path

import gpu_run
import pytest
import run_tests
from jobs import run_on_ranks, run_script

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.mark.parametrize(
    ("ranks", "script", "printed"),
    [
        (2, "bench.py --rounds 2 --dtypes float32 bfloat16 --shapes 4x8x6x6 2x7x12", "2x7x12 bfloat16 channels last"),
        (2, "bench.py steps --rounds 1 --scale 0.15 --channels-last --own-group --models segmentation", "own group"),
        (1, "bench.py kernels --shapes 4x8x6x6 --rounds 2", "4x8x6x6 bfloat16 channels last"),
        (1, "bench.py launches --rounds 1", "syncbn with a group"),
        (1, "accuracy.py", "mean 1e4, std 1"),
        (2, "soak.py --minutes 0.02", " rounds in "),
    ],
)
def test_script(ranks: int, script: str, printed: str, tmp_path: Path) -> None:
    name, *settings = script.split()
    if "launches" in settings:
        pytest.importorskip("triton")
    elif name == "bench.py":
        settings += ["--output", str(tmp_path)]
    command = SCRIPTS / name, *settings
    assert printed in (run_script(*command) if ranks == 1 else run_on_ranks(ranks, *command))


def test_a_dry_run_of_gpu_sh(tmp_path: Path) -> None:
    """Parts pass or are skipped, such as the sanitizer, and those of Triton if it is not installed."""
    run_script(SCRIPTS / "gpu_run.py", "--dry-run", "--output", tmp_path)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts.keys() == gpu_run.PARTS.keys()
    assert all(part["verdict"].startswith(("passed", "skipped: ")) for part in parts.values()), parts
    for name in sum(gpu_run.DISTRIBUTED_TESTS, ()):  # a dry run has no distributed tests
        assert (ROOT / f"tests/distributed/test_{name}.py").exists()


def test_a_failure_fails_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "LOGS", tmp_path)
    (tmp_path / "none.ini").touch()
    (tmp_path / "test_cases.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    pytest_here = f"{run_tests.PYTEST} -c {tmp_path / 'none.ini'}"
    for name, passes in (("good", True), ("none", True), ("bad", False)):
        assert run_tests.run([run_tests.Part(name, pytest_here, [str(tmp_path), "-k", name])]) == passes
