"""Tests that the scripts run with tiny settings. On a machine with a GPU a typing error may cost a whole run."""

import json
import sys
from pathlib import Path

import gpu_run
import pytest
import run_tests
from break_places import draw
from guides import ROOT
from jobs import run, run_on_ranks, run_script

SCRIPTS = ROOT / "scripts"


@pytest.mark.parametrize(
    ("ranks", "script", "output"),
    [
        (2, "bench.py --rounds 2 --dtypes float32 bfloat16 --shapes 4x8x6x6 2x7x12", "2x7x12 bfloat16 channels last"),
        (2, "bench.py steps --rounds 1 --scale 0.15 --channels-last --models segmentation", "hand-written"),
        (1, "bench.py kernels --shapes 4x8x6x6 --rounds 2", "4x8x6x6 bfloat16 channels last"),
        (1, "accuracy.py", "mean 1e4, std 1"),
    ],
)
def test_script_prints_its_results(ranks: int, script: str, output: str, tmp_path: Path) -> None:
    name, *settings = script.split()
    if name == "bench.py":
        settings += ["--output", str(tmp_path)]
    command = SCRIPTS / name, *settings
    assert output in (run_script(*command) if ranks == 1 else run_on_ranks(ranks, *command))


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="scripts/demo.sh would make its environment first")
def test_demo_draws_the_predictions_of_three_models(tmp_path: Path) -> None:
    output = run(SCRIPTS / "demo.sh", "--steps", 5, "--width", 4, "--test-scenes", 4, "--output", tmp_path)
    assert (tmp_path / "predictions.png").exists()
    assert output.splitlines()[-1].startswith("Shown, at seed 0: ")


def test_dry_run_of_gpu_sh_passes(tmp_path: Path) -> None:
    """Parts may be skipped: compute-sanitizer is not installed, and Triton may be missing."""
    run_script(SCRIPTS / "gpu_run.py", "--dry-run", "--output", tmp_path)
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts.keys() == gpu_run.PARTS.keys()
    assert all(part["verdict"].startswith(("passed", "skipped: ")) for part in parts.values()), parts
    for name in sum(gpu_run.DISTRIBUTED_TESTS, ()):  # a dry run has no distributed tests
        assert (ROOT / f"tests/distributed/test_{name}.py").exists()


def test_run_tests_fails_if_a_test_fails(tmp_path: Path) -> None:
    """A part in which the arguments select no test does not fail."""
    (tmp_path / "none.ini").touch()
    (tmp_path / "test_cases.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    pytest_here = f"{run_tests.PYTEST} -c {tmp_path / 'none.ini'}"
    for name, passes in (("good", True), ("none", True), ("bad", False)):
        part = run_tests.Part(name, pytest_here, str(tmp_path), "-k", name)
        part.log = tmp_path / f"{name}.log"
        assert run_tests.run([part]) == passes


def test_mutations_change_one_line_and_python_still_compiles() -> None:
    """A seed draws the same mutations each time."""
    mutations = draw(40)
    assert mutations == draw(40) != draw(41)
    for mutation in mutations:
        lines = (ROOT / mutation.file).read_text().splitlines()
        assert lines[mutation.line - 1] == mutation.old != mutation.new
        lines[mutation.line - 1] = mutation.new
        if mutation.file.endswith(".py"):
            compile("\n".join(lines), mutation.file, "exec")
