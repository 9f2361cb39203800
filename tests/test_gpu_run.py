"""scripts/gpu.sh, whose one run on a GPU no typing error may cost: its flow with a CPU in the GPU's place."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import gpu_run
from jobs import run

HAS_TRITON = importlib.util.find_spec("triton") is not None
SCRIPTS = Path(__file__).parent.parent / "scripts"
# Plays ncu and compute-sanitizer: runs what follows their options, and says of each launch what ncu would.
STAND_IN = f"""#!{sys.executable}
import json, subprocess, sys
arguments = sys.argv[1:]
done = subprocess.run(arguments[arguments.index(sys.executable):], stdout=subprocess.PIPE, text=True)
print(done.stdout)
if "--csv" in arguments:
    launches = done.stdout.count("launched ")
    for word in ["DRAM %", "%"] + ["50"] * launches:
        print(f'"ID","{{word}}"')
else:
    print("========= ERROR SUMMARY: 0 errors")
sys.exit(done.returncode)
"""


def test_nccl_that_refuses_two_ranks_on_one_gpu_is_no_failure(tmp_path: Path) -> None:
    """NVIDIA does not support it (nccl#418); the tests of two ranks then run under gloo."""
    part = gpu_run.Part(tmp_path, 60, dry_run=False)
    refuses = "import os, sys; sys.exit(os.environ['TESTS_BACKEND'] == 'nccl')"
    part.pytest = lambda *_, ranks, **environment: part.start(sys.executable, "-c", refuses, **environment)
    gpu_run.ranks(part)
    assert part.verdict().startswith("passed: nccl took no two ranks on one GPU, which NVIDIA does not support")


def test_a_dry_run(tmp_path: Path) -> None:
    for name in ("ncu", "compute-sanitizer"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    parts = ["machine", "correctness", "tests_gpu", "speed", "resnet", "ncu", "sanitizer", "own_group"]
    command = [sys.executable, SCRIPTS / "gpu_run.py", "--dry-run", "--parts", *parts, "--output", tmp_path / "runs"]
    said = run(*command, PATH=f"{tmp_path}:{os.environ['PATH']}")
    (file,) = (tmp_path / "runs").iterdir()
    of_run = json.loads(file.read_text())
    assert of_run["dry run"]
    assert list(of_run["parts"]) == parts
    for name, part in of_run["parts"].items():
        assert set(part) == {"verdict", "seconds", "results", "logs"}
        assert f"{part['seconds']:6.1f} s  {part['verdict']}" in said
        needs_triton = name in ("correctness", "speed", "ncu", "sanitizer") and not HAS_TRITON
        if needs_triton or (name == "tests_gpu" and part["verdict"] != "passed"):
            assert part["verdict"].startswith("skipped: ")
            continue
        assert part["verdict"].startswith("passed"), part
        assert part["results"] or name == "correctness"
    if HAS_TRITON:
        profiled = [result["DRAM %"] for result in of_run["parts"]["ncu"]["results"] if "DRAM %" in result]
        assert profiled == ["50"] * (2 * 2 * 4)  # memory formats, dtypes, functions
    modes = {result["mode"] for result in of_run["parts"]["resnet"]["results"] if "ms" in result}
    assert modes == {"eager", "compiled"}
    norms = [result["norm"] for result in of_run["parts"]["own_group"]["results"] if result["mode"] == "eager"]
    assert norms == ["syncbn with a group", "syncbn with its own group"]
