"""Catches an examples/accelerate_digits.py that fails under accelerate launch, or trains otherwise than one process."""

import json
import sys
from pathlib import Path

import pytest
from jobs import EXAMPLES, run, run_script

pytest.importorskip("accelerate", reason="accelerate is not installed (pip install syncbn[accelerate])")

OF_TWO = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
SETTINGS = ["--mixed_precision", "no", "--dynamo_backend", "no"]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", *OF_TWO, *SETTINGS]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    settings = ["--epochs", 1, "--batch", 50, "--learning-rate", 0.04, "--cpu"]  # 30 steps
    script = [EXAMPLES / "accelerate_digits.py", *settings, "--output"]
    run_script(*script, tmp_path / "one.json")
    run(*LAUNCH, *script, tmp_path / "two.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert (one["processes"], two["processes"]) == (1, 2)
    assert two["final loss"] == pytest.approx(one["final loss"], rel=1e-9)
    assert two["test accuracy"] == one["test accuracy"] > 0.5
