"""Catches a typing error in scripts/gpu.sh, which may cost no run on a GPU: a CPU takes the GPU's place."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import gpu_run
import pytest
from jobs import run

from syncbn.ranks.positions import state_of

HAS_TRITON = importlib.util.find_spec("triton") is not None
ROOT = Path(__file__).parent.parent
# Plays compute-sanitizer: runs what follows its options.
STAND_IN = f"""#!{sys.executable}
import subprocess, sys
status = subprocess.run(sys.argv[sys.argv.index(sys.executable):]).returncode
print("========= ERROR SUMMARY: 0 errors")
sys.exit(status)
"""


def test_files_of_tests_exist() -> None:
    for name in sum(gpu_run.DISTRIBUTED_TESTS, ()):
        assert (ROOT / f"tests/distributed/test_{name}.py").exists()


def test_faults_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank must say what is expected of it."""
    monkeypatch.setitem(os.environ, "PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    faults = {"skips a layer": (gpu_run.LAYERS, gpu_run.LAYERS), "kill -9 in forward": ("what nobody says", "")}
    monkeypatch.setattr(gpu_run, "FAULTS", faults)
    part = gpu_run.Part(tmp_path, 300, dry_run=True)
    gpu_run.faults(part)
    assert [result["unsaid"] for result in part.results] == [[], ["rank 0: what nobody says"]], part.results
    assert part.verdict().startswith("failed: 1 of 2")


def test_a_part_that_hangs_ends_with_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that it has started, and what it found until then is kept."""
    child = "import os, time; print('RESULT ' + str(os.getpid()), flush=True); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"

    def hang(part: gpu_run.Part) -> None:
        process = part.python("-c", parent)
        while not process.results():
            time.sleep(0.1)
        part.results, process.results = [{"process": process.results()[0]}], list
        part.deadline = time.monotonic()
        part.wait()

    monkeypatch.setitem(gpu_run.PARTS, "machine", (hang, 10))
    outcome, _ = gpu_run.run_part("machine", 10, dry_run=False)
    assert outcome["verdict"] == "took longer than 10 s, 1 results"
    while not state_of(outcome["results"][0]["process"]).endswith("has ended"):
        time.sleep(0.1)  # until Linux has done it


def test_a_dry_run(tmp_path: Path) -> None:
    (program := tmp_path / "compute-sanitizer").write_text(STAND_IN)
    program.chmod(0o755)
    parts = ["machine", "correctness", "layers", "steps", "passes", "sanitizer"]
    assert {*parts} == gpu_run.PARTS.keys() - {"faults", "ranks"}  # one waits 30 s, the other runs tests of two ranks
    command = [sys.executable, ROOT / "scripts/gpu_run.py", "--dry-run", "--parts", *parts]
    said = run(*command, PATH=f"{tmp_path}:{os.environ['PATH']}", OUT=str(tmp_path / "runs"))
    assert {file.name for file in (tmp_path / "runs").iterdir()} == {"gpu.json", "gpu.log"}
    of_run = json.loads((tmp_path / "runs/gpu.json").read_text())
    assert of_run["dry run"]
    assert list(of_run["parts"]) == parts
    found = {}
    for name, part in of_run["parts"].items():
        assert set(part) == {"verdict", "seconds", "results"}
        assert f"{part['seconds']:6.1f} s  {part['verdict']}" in said
        if name in ("correctness", "sanitizer") and not HAS_TRITON:
            assert part["verdict"].startswith("skipped: ")
            continue
        assert part["verdict"].startswith("passed"), part
        assert part["results"] or name == "correctness"
        found[name] = [tuple(result["of"]) for result in part["results"] if "of" in result]
    norms = ("nn.BatchNorm2d", "alone", "group")
    passes = ("forward", "backward")
    assert found["layers"][:6] == [("us a layer", norm, name) for norm in norms for name in passes]
    modes = [("eager", "batch 2"), ("CUDA graph", "batch 2"), ("CUDA graph", "batch 3")]
    assert found["steps"] == [("ms a step", *mode, norm) for mode in modes for norm in norms]
    assert [kind for *_, kind in found["passes"]] == [
        "copy", "limit", "alone", "native_batch_norm", "nn.SyncBatchNorm", "group",
    ]  # fmt: skip
