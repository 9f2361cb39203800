"""Runs all that a machine with one GPU can show in one go, part by part, and says of each part how it went.

    scripts/gpu.sh                      on a machine with a GPU
    scripts/gpu.sh --dry-run            without one: tiny sizes on CPUs, in Triton's interpreter, gloo for nccl
    scripts/gpu.sh --parts speed ncu

The most informative part comes first. Each part ends after its limit of seconds, and all after --seconds. Results,
verdicts and the ends of the logs go to gpu.json in --output ($OUT, or runs/gpu), which is written after each part. A
part that lacks a package, a program or the GPU is skipped and says so. The exit status is 1 when a part has failed.
What the parts start is in gpu_jobs.py, tests apart; this needs the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 540  # of all parts
DRY_RUN_FACTOR = 4  # of the limits: an interpreter, on cores that are shared
TAIL = 4000  # characters of a log
JOBS = Path(__file__).with_name("gpu_jobs.py")
RESULT = "RESULT "  # begins a line of a log that is a result, in json
DTYPES, FORMATS, VARIANTS = ("float32", "bfloat16", "float16", "float64"), ("first", "last"), ("plain", "all")
RANK_JOBS = "ddp", "join", "killed", "waits"
NCCL_ON_ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}  # and NCCL_HOSTID, which differs
NORMS = "nn.BatchNorm2d", "nn.SyncBatchNorm", "syncbn", "syncbn with a group"
METRICS = {
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "float64 %": "sm__inst_executed_pipe_fp64.avg.pct_of_peak_sustained_active",
    "occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "us": "gpu__time_duration.sum",
}
DISTRIBUTED_TESTS = "equality", "ddp", "communication", "groups", "running_stats", "join", "masks", "many"


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
    parents: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(file.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(parent, []).append(int(file.parent.name))
    found, open_ones = [], [process]
    while open_ones:
        children = parents.get(open_ones.pop(), [])
        found += children
        open_ones += children
    return found


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

    def job(self, *arguments: object, before: tuple[str, ...] = (), **environment: str) -> Process:
        """Start one of gpu_jobs.py, with the words `before` it."""
        more = ["--dry-run"] if self.dry_run else []
        interpreted = {"TRITON_INTERPRET": "1"} if self.dry_run else {}
        return self.start(*before, sys.executable, JOBS, *arguments, *more, **interpreted, **environment)

    def pytest(self, *arguments: str, ranks: int = 1) -> Process:
        """Start pytest, on some ranks under torchrun."""
        needs("pytest", "pytest_timeout")
        torchrun = (
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "--local-ranks-filter",
            "0",
        )
        under = (*torchrun, "-m", "pytest", "-p", "voting") if ranks > 1 else ("pytest",)
        # -v, so that the end of the log says what has passed when the part is stopped.
        return self.start(sys.executable, "-m", *under, "-v", "-p", "no:cacheprovider", *arguments)

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
    names = ["pytest", "pytest_timeout", "hypothesis", "rich", "sklearn", "numpy", "triton", "xdist"]
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    tools = {name: shutil.which(name) for name in ("nvidia-smi", "ncu", "compute-sanitizer", "gcc")}
    part.results.append({"python": platform.python_version(), "missing": missing, "programs": tools})
    if tools["nvidia-smi"]:
        part.start(tools["nvidia-smi"])
    part.wait(part.job("machine"), *part.processes)


def correctness(part: Part) -> None:
    """Every function of the kernels against the reference, at real and ragged sizes."""
    needs("triton")
    dtypes = DTYPES[:1] if part.dry_run else DTYPES
    formats = FORMATS[1:] if part.dry_run else FORMATS
    variants = VARIANTS[1:] if part.dry_run else VARIANTS
    shards = [(dtype, order, variant) for dtype in dtypes for order in formats for variant in variants]
    part.wait(*[part.job("correctness", *shard) for shard in shards])  # at once: they compile most of the time
    part.summary = f"{len(part.all_results())} comparisons"


def speed(part: Part) -> None:
    """The time of each function of the kernels, beside a copy of as many bytes."""
    needs("triton")
    part.wait(part.job("speed"))
    own = [result for result in part.all_results() if result["kernel"] in OWN_FUNCTIONS]
    if own:
        slowest = min(own, key=lambda result: result["share of copy"])
        part.summary = f"slowest {slowest['share of copy']:.2f} of copy, {slowest['kernel']} {slowest['case']}"


OWN_FUNCTIONS = "forward_sums", "forward_outputs", "backward_sums", "backward_outputs"


def ncu(part: Part) -> None:
    """What the kernels of whole tensors use of the GPU."""
    needs("triton")
    path = program("ncu")
    query = part.start(path, "--query-metrics")
    part.wait(query, seconds=20)
    known = {line.split()[0] for line in query.text().splitlines() if line.strip()}
    part.forget(query)
    metrics = {name: metric for name, metric in METRICS.items() if metric.partition(".")[0] in known} or METRICS
    options = ["--csv", "--page", "raw", "--clock-control", "none", "--metrics", ",".join(metrics.values())]
    kernels = ["--kernel-name", "regex:^(parts_of_sums|normalize|input_gradient)$"]
    job = part.job("kernels", "real", before=(path, *options, *kernels))
    part.wait(job)
    cases = [result["launch"] for result in job.results()]
    lines = [line for line in job.text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]  # the first has the units
    part.results += [
        {"case": case, **{name: row.get(metric) for name, metric in metrics.items()}}
        for case, row in zip(cases, rows, strict=False)
    ]
    part.results.append({"ok": len(rows) == len(cases) > 0, "launches": len(cases), "profiled": len(rows)})


def sanitizer(part: Part) -> None:
    """Loads and stores outside of the tensors, at 30 ragged sizes."""
    needs("triton")
    path = program("compute-sanitizer")
    before = path, "--tool", "memcheck", "--error-exitcode", "9"
    job = part.job("kernels", "ragged", before=before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    part.wait(job)
    errors = [line for line in job.text().splitlines() if "ERROR SUMMARY" in line]
    part.results.append({"ok": bool(errors) and "SUMMARY: 0 errors" in errors[-1], "said": errors})
    part.summary = f"{len(job.results())} cases"


def ranks(part: Part) -> None:
    """Two ranks on the one GPU: under nccl if it can be made to, else under gloo."""
    backend = "nccl"
    layer = start_ranks(part, "layer", backend)
    part.wait(*layer, seconds=35)
    if part.hung or any(process.popen.returncode for process in layer):
        part.results.append({"nccl with two ranks": "did not work", "said": [one.text()[-TAIL:] for one in layer]})
        part.forget(*layer)
        backend = "gloo"
        start_ranks(part, "layer", backend)
    started = {job: start_ranks(part, job, backend) for job in RANK_JOBS}
    part.wait(*part.processes)
    part.summary = f"under {backend}"
    for job, what in (("killed", "its process"), ("waits", "has waited")):
        survivor = started[job][0]
        said = [line for line in survivor.text().splitlines() if "rank 1" in line or "has waited" in line]
        ok = any(what in line for line in said) and survivor not in part.hung
        log = survivor.text()[-TAIL:]
        part.results.append({"job": job, "ok": ok, "said": said[-6:], "status": survivor.popen.returncode, "log": log})
    part.forget(*started["killed"])  # of which neither ends well


def start_ranks(part: Part, job: str, backend: str) -> list[Process]:
    """Two of them, with the variables that torchrun would set."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"PYTHONUNBUFFERED": "1"} | (NCCL_ON_ONE_GPU if backend == "nccl" else {})
    started = []
    for rank in ("0", "1"):
        environment = common | {"RANK": rank, "LOCAL_RANK": rank, "NCCL_HOSTID": f"r{rank}"}
        started.append(part.job("rank", job, backend, **environment))
    return started


def resnet(part: Part) -> None:
    """Steps of a ResNet-50 with each norm: all compile at once, then each measures alone."""
    norms = NORMS[::3] if part.dry_run else NORMS
    compile_seconds = part.seconds / 2
    jobs = {}
    for norm in norms:
        turn = part.folder / f"{norm}.turn"
        jobs[turn] = part.job("resnet", norm, "--turn", turn, "--compile-seconds", int(compile_seconds))
    for job in jobs.values():
        part.wait_for(job, "ready", part.deadline - part.seconds / 3)
    for turn, job in jobs.items():
        turn.touch()
        part.wait_for(job, "measured", part.deadline)
    part.wait(*jobs.values())
    times = {
        result["norm"]: result["ms"]
        for result in part.all_results()
        if (result.get("mode"), result.get("batch")) == ("eager", 32)
    }
    part.summary = ", ".join(f"{norm} {ms:.1f} ms" for norm, ms in times.items()) + (" (eager, 32)" if times else "")


def tests_gpu(part: Part) -> None:
    """tests/test_gpu.py."""
    part.wait(part.pytest("tests/test_gpu.py"))
    part.summary = end_of(part)
    if " passed" not in part.summary and " failed" not in part.summary and "skipped" in part.summary:
        raise Skip(part.summary)


def tests_distributed(part: Part) -> None:
    """The tests on several ranks, in their short form."""
    names = ["no_host_sync"] if part.dry_run else DISTRIBUTED_TESTS
    part.wait(part.pytest(*[f"tests/distributed/test_{name}.py" for name in names], ranks=2))
    part.summary = end_of(part)


def end_of(part: Part) -> str:
    """pytest's last line."""
    lines = [line for line in part.processes[-1].text().splitlines() if line.startswith("=") and " in " in line]
    return lines[-1].strip("= ") if lines else ""


class Limited(NamedTuple):
    """A part and its limit."""

    run: Callable[[Part], None]
    seconds: float


PARTS = {
    "machine": Limited(machine, 45),
    "correctness": Limited(correctness, 110),
    "speed": Limited(speed, 60),
    "ncu": Limited(ncu, 50),
    "sanitizer": Limited(sanitizer, 60),
    "ranks": Limited(ranks, 120),
    "resnet": Limited(resnet, 150),
    "tests_gpu": Limited(tests_gpu, 60),
    "tests_distributed": Limited(tests_distributed, 110),
}


def run_part(name: str, seconds: float, dry_run: bool) -> dict[str, Any]:
    """Its verdict, results and the ends of its logs; nothing that it has started is left."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        part = Part(Path(folder), seconds, dry_run)
        try:
            if seconds < 10:
                raise Skip("no time is left")
            PARTS[name].run(part)
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
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")), help="folder")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds * (DRY_RUN_FACTOR if arguments.dry_run else 1)
    root = str(JOBS.parent.parent)
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
        limit = PARTS[name].seconds * (DRY_RUN_FACTOR if arguments.dry_run else 1)
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
