"""Examples and the benchmark run with tiny settings, launched as their docstrings say, and what they write is right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def run(*command: object) -> str:
    result = subprocess.run(
        [str(word) for word in command], env=ENVIRONMENT, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_digits_on_two_ranks(tmp_path: Path) -> None:
    output = run(*TORCHRUN, EXAMPLES / "digits.py", "--epochs", 1, "--steps", 30, "--output", tmp_path)
    assert "synchronised over 2 ranks" in output
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    runs = metrics["runs"]
    assert metrics["ranks"] == 2
    assert {len(one["losses"]) for one in runs.values()} == {30}
    # float64 roundings of 1e-16 grow in 30 steps of training, by far less than this.
    assert runs["syncbn"]["distance"] < 1e-11
    assert runs["syncbn"]["accuracies"] == runs["one process"]["accuracies"]
    assert runs["local"]["distance"] > 1e-2
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_digits_on_one_process(tmp_path: Path) -> None:
    run(
        sys.executable,
        EXAMPLES / "digits.py",
        "--epochs",
        1,
        "--steps",
        60,
        "--images-per-rank",
        8,
        "--output",
        tmp_path,
    )
    runs = json.loads((tmp_path / "metrics.json").read_text())["runs"]
    assert runs["syncbn"]["distance"] < 1e-11
    assert runs["local"]["distance"] == 0  # the same program as one process
    losses = runs["one process"]["losses"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), "it does not learn"


def test_wgan_gp_on_two_ranks(tmp_path: Path) -> None:
    """The penalty's second derivatives are one process's; a few steps already bring the samples nearer to digits."""
    run(*TORCHRUN, EXAMPLES / "wgan_gp.py", "--steps", 30, "--output", tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["ranks"] == 2
    assert metrics["distance of the critic's gradients from one process"] < 1e-12
    kinds = ("a real one", "a generated one", "a random image")
    real, generated, random = (metrics[f"nearest real digit, from {kind}"] for kind in kinds)
    assert real < generated < 0.8 * random
    assert (tmp_path / "samples.png").stat().st_size > 10_000


def test_bench_on_two_ranks(tmp_path: Path) -> None:
    shapes = ["4x8x6x6", "16x8", "2x4x3x4x4", "2x7x12"]
    run(*TORCHRUN, EXAMPLES.parent / "scripts" / "bench.py", "--rounds", 2, "--output", tmp_path, "--shapes", *shapes)
    results = json.loads((tmp_path / "bench.json").read_text())
    assert results["about"]["ranks"] == 2
    times = {(row["case"], row["peer"]): row for row in results["times"]}
    cases = {case for case, _ in times}
    assert len(cases) == (2 + 1 + 2 + 1) * 4  # layouts of each shape, times dtypes
    for case in cases:
        assert all(row["both"] > row["forward"] > 0 for (other, _), row in times.items() if other == case)
        assert {"syncbn fused", "nn.BatchNorm", "hand-written fused", "two all_reduces"} <= {
            peer for other, peer in times if other == case
        }
    assert (tmp_path / "bench.csv").read_text().count("\n") == 1 + len(times)
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_bench_steps_on_two_ranks(tmp_path: Path) -> None:
    script, models = EXAMPLES.parent / "scripts" / "bench_steps.py", ("resnet", "segmentation", "block")
    settings = ("--rounds", 1, "--scale", 0.15, "--channels-last")
    run(*TORCHRUN, script, "--models", *models, *settings, "--output", tmp_path)
    results = json.loads((tmp_path / "steps.json").read_text())
    assert results["about"]["ranks"] == 2
    for model in models:
        assert results["times"][model].keys() == {"nn.BatchNorm", "syncbn", "hand-written"}
        assert all(0 < one["forward"] < one["both"] for one in results["times"][model].values())


def test_digits_explains_its_options() -> None:
    text = run(sys.executable, EXAMPLES / "digits.py", "--help")
    for option in (
        "--epochs",
        "--steps",
        "--images-per-rank",
        "--learning-rate",
        "--width",
        "--dtype",
        "--seed",
        "--output",
    ):
        assert option in text


def test_interrupting_digits_leaves_no_process(tmp_path: Path) -> None:
    command = [*TORCHRUN, str(EXAMPLES / "digits.py"), "--epochs", "100", "--output", str(tmp_path)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 60
        while len(running(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(6)  # into the training loop
        assert len(running(tmp_path)) == 3, "torchrun and two ranks"
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert running(tmp_path) == []
    assert not (tmp_path / "metrics.json").exists()


def running(output: Path) -> list[int]:
    """The processes that were given `output`; torchrun puts its ranks into sessions of their own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(output) in path.read_text():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
