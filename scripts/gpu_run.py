"""Runs all that a machine with one GPU can show in one go, part by part, and says of each part how it went.

    scripts/gpu.sh                      on a machine with a GPU
    scripts/gpu.sh --dry-run            without one: tiny sizes on CPUs, in Triton's interpreter, gloo for nccl
    scripts/gpu.sh --parts speed ncu

The most informative part comes first. Most parts are tests or benchmarks that run without a GPU too. Each part ends
after its limit of seconds, and all after --seconds. Results, verdicts and the ends of the logs go to gpu.json in
--output, which is written after each part. A part that lacks a package, a program or the GPU is
skipped and says so. The exit status is 1 when a part has failed. This file needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 540  # of all parts
DRY_RUN_FACTOR = 4  # of the limits: an interpreter, on cores that are shared
TAIL = 8000  # characters of a log
SCRIPTS = Path(__file__).parent
RESULT = "RESULT "  # begins a line of a log that is a result, in json
SHAPES = "32x64x112x112 32x256x56x56 32x512x14x14 32x2048x7x7 8x64x512x512 32x144x56x56"  # 144: narrow tiles
TINY = "4x3x9x7"
DTYPES = "torch.float32", "torch.bfloat16", "torch.float16", "torch.float64", "not torch"
NCCL_ON_ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "VERSION"}
FAULTS = {"kill -9 in forward": "its process", "sleeps": "has waited"}  # and what the other rank says
NORMS = "nn.BatchNorm2d", "nn.SyncBatchNorm", "syncbn", "syncbn with a group"
NCU = "--csv --page raw --clock-control none --section SpeedOfLight --section Occupancy --section InstructionStats"
DISTRIBUTED_TESTS = "equality", "ddp", "join", "communication", "groups", "running_stats", "masks", "many"


class Skip(Exception):  # noqa: N818  # no error
    """Why a part cannot run."""


class Process:
    """A program whose output goes to a file."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            self.popen = subprocess.Popen(
                command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def results(self) -> list[dict[str, Any]]:
        """Those that it has printed so far."""
        lines = self.log.read_text(errors="replace").splitlines(keepends=True)
        return [json.loads(line[len(RESULT) :]) for line in lines if line.startswith(RESULT) and line.endswith("\n")]

    def text(self) -> str:
        """All else that it has printed."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith(RESULT))

    def kill(self) -> None:
        """With all that it has started: torchrun puts its ranks into sessions of their own."""
        for process in reversed([self.popen.pid, *descendants(self.popen.pid)]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.popen.wait()


def descendants(process: int) -> list[int]:
    """Its children, and theirs."""
    children: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, file.read_text().split())
    return children + [one for child in children for one in descendants(child)]


class Part:
    """What a part has until it ends: its limit, the programs that it starts, and results of its own."""

    def __init__(self, folder: Path, seconds: float, dry_run: bool) -> None:
        self.folder, self.seconds, self.dry_run = folder, seconds, dry_run
        self.deadline = time.monotonic() + seconds
        self.processes: list[Process] = []
        self.hung: list[Process] = []
        self.results: list[dict[str, Any]] = []
        self.summary = ""

    def start(self, *command: object, **environment: str) -> Process:
        """Start a program."""
        log = self.folder / f"{len(list(self.folder.iterdir()))}.log"
        self.processes.append(Process([str(word) for word in command], environment, log))
        return self.processes[-1]

    def python(self, *arguments: object, before: tuple[str, ...] = (), **environment: str) -> Process:
        """Start one of Python's, with the words `before` it."""
        interpreted = {"TRITON_INTERPRET": "1"} if self.dry_run else {}
        return self.start(*before, sys.executable, *arguments, **interpreted, **environment)

    def pytest(self, *arguments: str, ranks: int = 1, before: tuple[str, ...] = (), **environment: str) -> Process:
        """Start pytest, on some ranks under torchrun."""
        needs("pytest", "pytest_timeout")
        under = ["-m", "pytest"]
        if ranks > 1:
            torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --local-ranks-filter 0"
            under = [*torchrun.split(), *under, "-p", "voting"]
        # -v, so that the end of the log says what has passed when the part is stopped.
        options = "-v", "--tb=short", "-p", "no:cacheprovider"
        return self.python(*under, *options, *arguments, before=before, **environment)

    def wait(self, *processes: Process, seconds: float | None = None) -> bool:
        """Until these have ended, or the part's time or so many seconds are over: then they are killed."""
        deadline = min(self.deadline, time.monotonic() + (self.seconds if seconds is None else seconds))
        while any(process.popen.poll() is None for process in processes):
            if time.monotonic() > deadline:
                late = [process for process in processes if process.popen.poll() is None]
                self.hung += late
                for process in late:
                    process.kill()
                return False
            time.sleep(0.05)
        return True

    def wait_for(self, process: Process, key: str, deadline: float) -> None:
        """Until it has printed a result with this key, or ended, or its time is over."""
        while process.popen.poll() is None and time.monotonic() < min(deadline, self.deadline):
            if any(key in result for result in process.results()):
                return
            time.sleep(0.05)

    def forget(self, *processes: Process) -> None:
        """Those that failed, as they may."""
        self.processes = [process for process in self.processes if process not in processes]
        self.hung = [process for process in self.hung if process not in processes]

    def all_results(self) -> list[dict[str, Any]]:
        """Its own and those of its programs."""
        return self.results + [result for process in self.processes for result in process.results()]

    def verdict(self) -> str:
        """In a line."""
        results = self.all_results()
        failed = [result for result in results if not result.get("ok", True)]
        if failed:
            return f"failed: {len(failed)} of {len(results)}, first {json.dumps(failed[0])[:200]}"
        if self.hung:
            return f"took longer than {self.seconds:.0f} s; {len(results)} results"
        statuses = [process.popen.returncode for process in self.processes]
        if any(statuses):
            return f"failed: exit status {next(filter(None, statuses))}"
        return f"passed{f': {self.summary}' if self.summary else ''}"


def needs(*packages: str) -> None:
    """Raises Skip where one of these packages is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise Skip(f"needs {', '.join(missing)}")


def program(name: str) -> str:
    """The path of one of CUDA's programs. **Raises** Skip without it."""
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if path is None:
        raise Skip(f"{name} is not there")
    return path


# The parts.


def machine(part: Part) -> None:
    """What there is: versions, packages, the GPU, and whether Triton's kernels serve it."""
    names = ["pytest", "pytest_timeout", "hypothesis", "rich", "PIL", "sklearn", "numpy", "triton"]
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    tools = {name: shutil.which(name) for name in ("nvidia-smi", "ncu", "compute-sanitizer", "gcc")}
    part.results.append({"python": platform.python_version(), "missing": missing, "programs": tools})
    if tools["nvidia-smi"]:
        part.start(tools["nvidia-smi"])
    info = part.python("-m", "syncbn", "info")
    part.wait(*part.processes)
    part.results.append({"ok": part.dry_run or "cuda: Triton" in info.text(), "info": info.text()})


def correctness(part: Part) -> None:
    """Every function of the kernels against its definition: the tests, a process for each dtype, as they compile."""
    needs("triton")
    if part.dry_run:
        part.pytest("tests/test_kernels.py", "-m", "triton", "-k", "test_forward_sums and torch.float32")
    else:
        for dtype in DTYPES:
            part.pytest("tests/test_kernels.py", "-m", "triton", "-k", dtype)
    part.wait(*part.processes)
    part.summary = ends_of(part)


def tests_gpu(part: Part) -> None:
    """Real sizes, launches, graphs, streams."""
    part.wait(part.pytest("tests/test_gpu.py"))
    part.summary = ends_of(part)
    if " passed" not in part.summary and " failed" not in part.summary and "skipped" in part.summary:
        raise Skip(part.summary)


def speed(part: Part) -> None:
    """The time of each function of the kernels, beside a copy of as many bytes."""
    needs("triton", "rich")
    sizes = [TINY, "--rounds", "1"] if part.dry_run else SHAPES.split()
    part.wait(part.python(SCRIPTS / "bench.py", "kernels", "--output", part.folder, "--shapes", *sizes))
    file = part.folder / "kernels.json"  # written after each case
    for case, functions in (json.loads(file.read_text())["kernels"] if file.exists() else {}).items():
        part.results += [{"case": case, "kernel": name, **times} for name, times in functions.items()]
    own = [result for result in part.results if result["kernel"].startswith(("forward_", "backward_"))]
    if own:
        slowest = min(own, key=lambda result: result["share of copy"])
        part.summary = f"slowest {slowest['share of copy']:.2f} of copy, {slowest['kernel']} {slowest['case']}"


def ncu(part: Part) -> None:
    """What the kernels of whole tensors use of the GPU."""
    needs("triton")
    source = (SCRIPTS.parent / "syncbn/kernels/gpu_tiles.py").read_text()
    names = "|".join(re.findall(r"^def ([a-z]\w+)", source, re.MULTILINE))
    before = program("ncu"), *NCU.split(), "--kernel-name", f"regex:^({names})$"
    shapes = [TINY] if part.dry_run else SHAPES.split()[:4]
    job = part.python(SCRIPTS / "gpu_static.py", "--launch", "--shapes", *shapes, before=before)
    part.wait(job)
    lines = job.text().splitlines()
    cases = [line.removeprefix("launched ") for line in lines if line.startswith("launched ")]
    rows = list(csv.DictReader(line for line in lines if line.startswith('"')))[1:]  # the first has the units
    part.results += [{"case": case, **row} for case, row in zip(cases, rows, strict=False)]
    part.results.append({"ok": len(rows) == len(cases) > 0, "launches": len(cases), "profiled": len(rows)})


def sanitizer(part: Part) -> None:
    """Loads and stores outside of the tensors, at ragged sizes."""
    needs("triton")
    before = program("compute-sanitizer"), "--tool", "memcheck", "--error-exitcode", "9"
    which = "forward_sums" if part.dry_run else "forward or backward or two_steps"
    chosen = "-m", "triton", "-k", f"torch.float32 and ({which})"
    job = part.pytest("tests/test_kernels.py", *chosen, before=before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    part.wait(job)
    errors = [line for line in job.text().splitlines() if "ERROR SUMMARY" in line]
    part.results.append({"ok": bool(errors) and "SUMMARY: 0 errors" in errors[-1], "said": errors})
    part.summary = ends_of(part)


def ranks(part: Part) -> None:
    """The tests of two ranks on the one GPU, and two faults: under nccl if it can be made to, else tests under gloo."""
    backend = {} if part.dry_run else {"TESTS_BACKEND": "nccl", **NCCL_ON_ONE_GPU}
    first = part.pytest("tests/distributed/test_equality.py", "-x", "-k", "dims_and_dtypes", ranks=2, **backend)
    if not part.wait(first, seconds=45) or first.popen.returncode:
        part.results.append({"nccl with two ranks": "did not work", "said": first.text()[-TAIL:]})
        part.forget(first)
        backend = {"TESTS_BACKEND": "gloo"}
    names = ["no_host_sync"] if part.dry_run else DISTRIBUTED_TESTS
    part.pytest(*[f"tests/distributed/test_{name}.py" for name in names], ranks=2, **backend)
    faulty = {} if backend == {"TESTS_BACKEND": "gloo"} else {name: start_ranks(part, name, backend) for name in FAULTS}
    part.wait(*part.processes)
    for name, (survivor, other) in faulty.items():
        said = [line for line in survivor.text().splitlines() if "rank 1" in line or "has waited" in line]
        ok = any(FAULTS[name] in line for line in said) and survivor not in part.hung
        log = survivor.text()[-TAIL:]
        part.forget(survivor, other)  # they may fail
        part.results.append({"fault": name, "ok": ok, "said": said, "status": survivor.popen.returncode, "log": log})
    part.summary = f"under {backend.get('TESTS_BACKEND', 'gloo')}: {ends_of(part)}"


def start_ranks(part: Part, fault: str, environment: dict[str, str]) -> list[Process]:
    """Two ranks of a job with this fault, with the variables that torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
    # Longer than the 30 s after which a rank that waits says where all are.
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "COLLECTIVE_SECONDS": "50"}
    command = "tests/faulty_job.py", fault, "syncbn"
    return [part.python(*command, **environment, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]


def resnet(part: Part) -> None:
    """Steps of a ResNet-50 with each norm: all compile at once, then each measures alone."""
    needs("PIL", "rich")
    norms = NORMS[::3] if part.dry_run else NORMS
    compile_seconds = part.seconds / 2
    jobs = {}
    for norm in norms:
        turn = part.folder / f"{norm}.turn"
        words = norm, "--turn", turn, "--compile-seconds", int(compile_seconds), *["--dry-run"][: part.dry_run]
        jobs[turn] = part.python(SCRIPTS / "gpu_resnet.py", *words)
    for job in jobs.values():
        part.wait_for(job, "ready", part.deadline - part.seconds / 3)
    for turn, job in jobs.items():
        turn.touch()
        part.wait_for(job, "measured", part.deadline)
    part.wait(*jobs.values())
    results = part.all_results()
    times = [f"{one['mode']} {one['norm']} {one['ms']:.1f} ms" for one in results if "ms" in one and one["batch"] == 32]
    part.summary = "; ".join([*times, *{one["note"] for one in results if "note" in one}])


def ends_of(part: Part) -> str:
    """The last line of each pytest."""
    ends = [re.findall(r"^=+ (.* in .*?) =+$", process.text(), re.MULTILINE)[-1:] for process in part.processes]
    return "; ".join(end for one in ends for end in one)


# Name -> what runs it, and its limit in seconds.
PARTS: dict[str, tuple[Callable[[Part], None], float]] = {
    "machine": (machine, 45),
    "correctness": (correctness, 150),
    "tests_gpu": (tests_gpu, 60),
    "ranks": (ranks, 140),
    "speed": (speed, 60),
    "resnet": (resnet, 150),
    "ncu": (ncu, 50),
    "sanitizer": (sanitizer, 90),
}


def run_part(name: str, seconds: float, dry_run: bool) -> dict[str, Any]:
    """Its verdict, results and the ends of its logs; nothing that it has started is left."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        part = Part(Path(folder), seconds, dry_run)
        try:
            if seconds < 10:
                raise Skip("no time is left")
            PARTS[name][0](part)
            verdict = part.verdict()
        except Skip as why:
            verdict = f"skipped: {why}"
        except Exception as error:  # the other parts go on
            verdict = f"failed: {type(error).__name__}: {error}"
        finally:
            for process in part.processes:
                if process.popen.poll() is None:
                    process.kill()
        passed = verdict.startswith(("passed", "skipped"))
        return {
            "verdict": verdict,
            "seconds": round(time.monotonic() - start, 1),
            "results": part.all_results(),
            "logs": [process.text()[-TAIL // (2 if passed else 1) :] for process in part.processes],
        }


def main() -> None:
    """All parts, the table of verdicts, the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on CPUs, tiny sizes")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all parts (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds * (DRY_RUN_FACTOR if arguments.dry_run else 1)
    root = str(SCRIPTS.resolve().parent)
    os.chdir(root)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (root, f"{root}/tests", f"{root}/scripts", os.environ.get("PYTHONPATH")))
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments.output.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict[str, Any]] = {}
    for name in arguments.parts:
        print(f"== {name}", flush=True)
        left = deadline - time.monotonic()
        limit = PARTS[name][1] * (DRY_RUN_FACTOR if arguments.dry_run else 1)
        done[name] = outcome = run_part(name, min(limit, left), arguments.dry_run)
        if outcome["verdict"].startswith(("failed", "took")):
            for log in outcome["logs"][:2]:
                print("\n".join(log.splitlines()[-12:]))
        print(f"{outcome['verdict']} ({outcome['seconds']} s)", flush=True)
        (arguments.output / "gpu.json").write_text(json.dumps({"dry run": arguments.dry_run, "parts": done}, indent=1))
    print()
    for name, outcome in done.items():
        print(f"{name:18} {outcome['seconds']:6.1f} s  {outcome['verdict']}")
    print(f"wrote {arguments.output}/gpu.json")
    sys.exit(any(not outcome["verdict"].startswith(("passed", "skipped")) for outcome in done.values()))


if __name__ == "__main__":
    main()
