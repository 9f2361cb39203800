"""Tests that scripts and a study run with tiny settings. On a GPU a typo may cost a whole run."""

import json
import sys
from pathlib import Path

import gpu_run
import pytest
import run_tests
from guides import ROOT
from jobs import EXAMPLES, run, run_on_ranks, run_script

SCRIPTS = ROOT / "scripts"


@pytest.mark.parametrize(
    ("num_ranks", "options", "expected"),
    [
        (2, "--rounds 2 --dtypes float32 bfloat16 --shapes 4x8x6x6 2x7x12", "2x7x12 bfloat16 channels last"),
        (2, "steps --rounds 1 --scale 0.15 --channels-last --models segmentation", "hand-written"),
        (1, "kernels --shapes 4x8x6x6 --rounds 2", "4x8x6x6 bfloat16 channels last"),
    ],
)
def test_benchmarks_print_their_tables(num_ranks: int, options: str, expected: str, tmp_path: Path) -> None:
    assert expected in run_on_ranks(num_ranks, SCRIPTS / "bench.py", *options.split(), "--output", tmp_path)


@pytest.mark.parametrize("settings", ["images --images 4", "shards"])
def test_each_kind_of_batch_norm_has_another_test_error(settings: str, tmp_path: Path) -> None:
    """Equal errors would mean that two kinds normalise in the same way."""
    options = *settings.split(), "--seeds", 1, "--epochs", 1, "--output", tmp_path
    run_on_ranks(2, EXAMPLES / "evidence/local_batch_norm.py", *options)
    (file,) = tmp_path.glob("*.json")
    errors = json.loads(file.read_text())["test errors in %"].values()
    assert len({str(error) for error in errors}) == len(errors)


def test_accuracy_prints_its_table() -> None:
    assert "mean 1e4, std 1" in run_script(SCRIPTS / "accuracy.py")


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="scripts/demo.sh would make its environment first")
def test_the_demo_draws_its_pictures(tmp_path: Path) -> None:
    output = run(SCRIPTS / "demo.sh", "--steps", 5, "--width", 4, "--test-scenes", 4, "--output", tmp_path)
    assert (tmp_path / "predictions.png").exists()
    assert output.splitlines()[-1].startswith("Shown, at seed 0: ")


def test_a_dry_run_of_gpu_sh_passes(tmp_path: Path) -> None:
    """A dry run skips parts whose programs or packages are not installed, such as compute-sanitizer and Triton."""
    run_script(SCRIPTS / "gpu_run.py", "--dry-run", "--output", tmp_path)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts.keys() == gpu_run.PARTS.keys()
    assert all(part["verdict"].startswith(("passed", "skipped: ")) for part in parts.values()), parts
    for names in gpu_run.DISTRIBUTED_TESTS:  # A dry run does not run these files.
        assert all((ROOT / file).exists() for file in run_tests.to_paths(names, "tests/distributed"))


@pytest.mark.parametrize(("selected", "passes"), [("good", True), ("bad", False), ("none", True)])
def test_run_tests_fails_if_a_test_fails_and_not_if_none_is_selected(
    selected: str, passes: bool, tmp_path: Path
) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_cases.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    part = run_tests.Part("cases", run_tests.PYTEST, "-c", str(tmp_path / "pytest.ini"), str(tmp_path), "-k", selected)
    part.log = tmp_path / "log"
    assert run_tests.run([part]) == passes
