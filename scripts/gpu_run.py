"""Runs all that a machine with one GPU can show in one go, part by part, and says of each part how it went.

    scripts/gpu.sh                      on a machine with a GPU
    scripts/gpu.sh --dry-run            without one: tiny sizes on CPUs, in Triton's interpreter, gloo for nccl
    scripts/gpu.sh --parts speed ncu
    scripts/gpu.sh --parts own_group    is run only if named: a process group of the layers' own beside that of DDP

The most informative part comes first, and most are tests or benchmarks that run without a GPU too. Each part ends after
its limit of seconds, and all after --seconds; one that lacks a package, a program or the GPU is skipped and says so.
Results, verdicts and the ends of the logs go to gpu.json in --output, which is written after each part. The exit status
is 1 when a part has failed. This file needs the standard library only.
"""

import argparse
import contextlib
import csv
import importlib.util
import itertools
import json
import math
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
DRY_RUN_FACTOR = 40  # of the limits: an interpreter, on busy cores
TAIL = 8000  # characters of a log
SCRIPTS = Path(__file__).parent
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


class Process(subprocess.Popen[bytes]):
    """A program whose output goes to a file."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log, self.hung = log, False
        with log.open("w") as file:
            super().__init__(command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def results(self) -> list[dict[str, Any]]:
        """Those that it has printed so far, a line of "RESULT " and json each."""
        log = self.log.read_text(errors="replace")
        return [json.loads(result) for result in re.findall(r"^RESULT (.*)\n", log, re.MULTILINE)]

    def text(self) -> str:
        """All else that it has printed."""
        return re.sub(r"^RESULT .*\n?", "", self.log.read_text(errors="replace"), flags=re.MULTILINE)

    def kill_all(self) -> None:
        """With all that it has started, if it runs: torchrun puts its ranks into sessions of their own."""
        if self.poll() is None:
            for process in reversed([self.pid, *descendants(self.pid)]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.wait()


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
        self.results: list[dict[str, Any]] = []
        self.summary = ""

    def start(self, *command: object, **environment: str) -> Process:
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
        # -v, so that the end of the log says what has passed when the part is stopped.
        words = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
        if ranks > 1:
            torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --local-ranks-filter 0"
            words = [*torchrun.split(), *words, "-p", "voting"]
        return self.python(*words, before=before, **environment)

    def wait(self, *processes: Process, seconds: float = math.inf) -> bool:
        """Until these (or all) have ended, or the part's time or so many seconds are over: then they are killed."""
        deadline = min(self.deadline, time.monotonic() + seconds)
        while running := [process for process in processes or self.processes if process.poll() is None]:
            if time.monotonic() > deadline:
                for process in running:
                    process.hung = True
                    process.kill_all()
                return False
            time.sleep(0.05)
        return True

    def all_results(self) -> list[dict[str, Any]]:
        """Its own and those of its programs."""
        return self.results + [result for process in self.processes for result in process.results()]

    def verdict(self) -> str:
        results = self.all_results()
        if failed := [result for result in results if not result.get("ok", True)]:
            return f"failed: {len(failed)} of {len(results)}, first {json.dumps(failed[0])[:200]}"
        if any(process.hung for process in self.processes):
            return f"took longer than {self.seconds:.0f} s; {len(results)} results"
        if status := next((process.returncode for process in self.processes if process.returncode), None):
            return f"failed: exit status {status}"
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


def machine(part: Part) -> None:
    """What there is: versions, packages, the GPU, and whether Triton's kernels serve it."""
    names = ["pytest", "pytest_timeout", "rich", "PIL", "sklearn", "numpy", "triton"]
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    tools = {name: shutil.which(name) for name in ("nvidia-smi", "ncu", "compute-sanitizer", "gcc")}
    part.results.append({"python": platform.python_version(), "missing": missing, "programs": tools})
    if tools["nvidia-smi"]:
        part.start(tools["nvidia-smi"])
    info = part.python("-m", "syncbn", "info")
    part.wait()
    part.results.append({"ok": part.dry_run or "cuda: Triton" in info.text(), "info": info.text()})


def correctness(part: Part) -> None:
    """Every function of the kernels against its definition: the tests, a process for each dtype, as they compile."""
    needs("triton")
    for which in ["test_forward_sums and torch.float32"] if part.dry_run else DTYPES:
        part.pytest("tests/test_kernels.py", "-m", "triton", "-k", which)
    part.wait()
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
    needs("triton", "rich")
    source = (SCRIPTS.parent / "syncbn/kernels/gpu_tiles.py").read_text()
    names = "|".join(re.findall(r"^def ([a-z]\w+)", source, re.MULTILINE))
    before = program("ncu"), *NCU.split(), "--kernel-name", f"regex:^({names})$"
    shapes = [TINY] if part.dry_run else SHAPES.split()[:4]
    job = part.python(SCRIPTS / "gpu_static.py", "--launch", "--shapes", *shapes, before=before)
    part.wait()
    cases = re.findall(r"^launched (.*)", job.text(), re.MULTILINE)
    rows = list(csv.DictReader(re.findall(r'^".*', job.text(), re.MULTILINE)))[1:]  # the first has the units
    part.results += [{"case": case, **row} for case, row in zip(cases, rows, strict=False)]
    part.results.append({"ok": len(rows) == len(cases) > 0, "launches": len(cases), "profiled": len(rows)})


def sanitizer(part: Part) -> None:
    """Loads and stores outside of the tensors, at ragged sizes."""
    needs("triton")
    before = program("compute-sanitizer"), "--tool", "memcheck", "--error-exitcode", "9"
    which = "forward_sums" if part.dry_run else "forward or backward or two_steps"
    chosen = "-m", "triton", "-k", f"torch.float32 and ({which})"
    job = part.pytest("tests/test_kernels.py", *chosen, before=before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    part.wait()
    errors = [line for line in job.text().splitlines() if "ERROR SUMMARY" in line]
    part.results.append({"ok": bool(errors) and "SUMMARY: 0 errors" in errors[-1], "said": errors})
    part.summary = ends_of(part)


def ranks(part: Part) -> None:
    """The tests of two ranks on the one GPU, and two faults: under nccl if it can be made to, else tests under gloo."""
    backend = {} if part.dry_run else {"TESTS_BACKEND": "nccl", **NCCL_ON_ONE_GPU}
    refused = ""
    probe = "tests/distributed/test_equality.py", "-x", "-k", "shapes_layouts and float32"
    first = part.pytest(*probe, ranks=2, **backend)
    if not part.wait(first, seconds=45) or first.returncode or " PASSED" not in first.text():
        refused = "nccl took no two ranks on one GPU, which NVIDIA does not support (nccl#418); " * (not part.dry_run)
        part.results.append({"nccl with two ranks": refused, "ok": not part.dry_run, "said": first.text()[-TAIL:]})
        part.processes.remove(first)
        backend = {"TESTS_BACKEND": "gloo"}
    names = ["no_host_sync"] if part.dry_run else DISTRIBUTED_TESTS
    # torch 2.11's nccl crashes where it splits a group of ranks on one GPU, as a DeviceMesh does.
    chosen = ["-k", "not mesh and not own_group_was_destroyed"] if backend.get("TESTS_BACKEND") == "nccl" else []
    part.pytest(*[f"tests/distributed/test_{name}.py" for name in names], *chosen, ranks=2, **backend)
    faulty = {} if backend == {"TESTS_BACKEND": "gloo"} else {name: start_ranks(part, name, backend) for name in FAULTS}
    part.wait()
    for name, processes in faulty.items():
        survivor, _ = processes
        said = [line for line in survivor.text().splitlines() if "rank 1" in line or "has waited" in line]
        ok = any(FAULTS[name] in line for line in said) and not survivor.hung
        status, log = survivor.returncode, survivor.text()[-TAIL:]
        part.results.append({"fault": name, "ok": ok, "said": said, "status": status, "log": log})
        part.processes = [process for process in part.processes if process not in processes]  # they may fail
    part.summary = f"{refused}under {backend.get('TESTS_BACKEND', 'gloo')}: {ends_of(part)}"


def start_ranks(part: Part, fault: str, environment: dict[str, str]) -> list[Process]:
    """Two ranks of a job with this fault, with the variables that torchrun would set."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
    # Longer than the 30 s after which a rank that waits says where all are.
    environment |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "COLLECTIVE_SECONDS": "50"}
    command = "tests/faulty_job.py", fault, "syncbn"
    return [part.python(*command, **environment, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]


def resnet(part: Part) -> None:
    """Steps of a ResNet-50 with each norm: all compile at once, then each measures alone."""
    needs("PIL", "rich")
    options = "--lock", part.folder / "lock", "--compile-seconds", int(part.seconds / 2), *["--dry-run"] * part.dry_run
    for norm in NORMS[::3] if part.dry_run else NORMS:
        part.python(SCRIPTS / "gpu_resnet.py", norm, *options)
    part.wait()
    results = part.all_results()
    times = [f"{one['mode']} {one['norm']} {one['ms']:.1f} ms" for one in results if "ms" in one and one["batch"] == 32]
    part.summary = "; ".join([*times, *{one["note"] for one in results if "note" in one}])


def own_group(part: Part) -> None:
    """Steps of a ResNet-50 under DistributedDataParallel, with its group in the layers and with another."""
    needs("PIL", "rich")
    for norm in ("syncbn with a group", "syncbn with its own group"):
        dry_run = ["--dry-run"] * part.dry_run
        part.wait(part.python(SCRIPTS / "gpu_resnet.py", norm, "--ddp", "--lock", part.folder / "lock", *dry_run))
    times = [f"{one['norm']} {one['ms']:.1f} ms, batch {one['batch']}" for one in part.all_results() if "ms" in one]
    part.summary = "; ".join(times)


def ends_of(part: Part) -> str:
    """The last line of each pytest."""
    ends = (re.findall(r"^=+ (.* in .*?) =+$", process.text(), re.MULTILINE)[-1:] for process in part.processes)
    return "; ".join(itertools.chain(*ends))


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
    "own_group": (own_group, 60),  # where it is asked for
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
                process.kill_all()
        return {
            "verdict": verdict,
            "seconds": round(time.monotonic() - start, 1),
            "results": part.all_results(),
            "logs": [process.text()[-TAIL:] for process in part.processes],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on CPUs, tiny sizes")
    all_but_last = [*PARTS][:-1]
    parser.add_argument(
        "--parts", nargs="+", default=all_but_last, choices=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all parts (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu"), help="folder")
    arguments = parser.parse_args()
    factor = DRY_RUN_FACTOR if arguments.dry_run else 1
    deadline = time.monotonic() + arguments.seconds * factor
    root = SCRIPTS.resolve().parent
    os.chdir(root)
    os.environ["PYTHONPATH"] = f"{root}:{root}/tests:{root}/scripts:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments.output.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict[str, Any]] = {}
    for name in arguments.parts:
        print(f"== {name}", flush=True)
        seconds = min(PARTS[name][1] * factor, deadline - time.monotonic())
        done[name] = outcome = run_part(name, seconds, arguments.dry_run)
        if outcome["verdict"].startswith(("failed", "took")):
            for log in outcome["logs"][:2]:
                print("\n".join(log.splitlines()[-12:]))
        print(f"{outcome['verdict']} ({outcome['seconds']} s)", flush=True)
        (arguments.output / "gpu.json").write_text(json.dumps({"dry run": arguments.dry_run, "parts": done}, indent=1))
    for name, outcome in done.items():
        print(f"{name:18} {outcome['seconds']:6.1f} s  {outcome['verdict']}")
    print(f"wrote {arguments.output}/gpu.json")
    sys.exit(any(not outcome["verdict"].startswith(("passed", "skipped")) for outcome in done.values()))


if __name__ == "__main__":
    main()
