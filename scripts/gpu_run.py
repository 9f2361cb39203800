"""Runs all that a machine with one GPU can show in one go, part by part, and says of each part how it went.

    scripts/gpu.sh                      on a machine with a GPU
    scripts/gpu.sh --dry-run            without one: tiny sizes on CPUs, in Triton's interpreter, gloo for nccl
    scripts/gpu.sh --parts layers steps

The most informative part comes first. Each ends after its limit of seconds, and all after --seconds; one that lacks a
package, a program or the GPU is skipped and says so. gpu.json in --output has verdicts and results, gpu.log what all
programs printed; both are written after each part. The exit status is 1 when a part has failed. This file needs the
standard library only.
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
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

SECONDS = 530.0  # of all parts
DRY_RUN_FACTOR = 40  # of the limits: an interpreter, on busy cores
TAIL = 100_000  # characters of a log are kept
SCRIPTS = Path(__file__).parent
DTYPES = "torch.float32", "torch.bfloat16", "torch.float16", "torch.float64", "not torch"
ON_ONE_GPU = {"TESTS_BACKEND": "nccl", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "VERSION"}
# What rank 1 does wrong in tests/faulty_job.py -> patterns of what rank 0 and rank 1 must say; "" is always said.
LAYERS = r"rank 0: in body\.bn2 forward, call 3.*\n.*rank 1: in body\.bn3 forward, call 3"
REPLAY = r"rank 0: in body\.bn1 forward, in a CUDA graph.*\n.*rank 1: in body\.bn2 forward, in a CUDA graph"
BAD_ARGUMENT = r"another rank failed in body\.bn2 forward, call 3\.\n.*rank 1: ValueError: expected 4 channels"
ONE_VALUE = "Expected more than 1 value per channel when training, got 1 over all ranks"
FAULTS = {
    "kill -9 in forward": ("rank 1: .*its process", ""),
    "sleeps": ("rank 0 has waited", ""),
    "skips a layer": ("", f"{LAYERS}|Expected to have finished reduction"),  # DistributedDataParallel may come first
    "another order": (LAYERS, LAYERS),
    "autocast": ("have inputs of different dtypes",) * 2,
    "two models, another order": (r"number 1 of layer '1' in Sequential\n.*rank 1: .*number 2 of layer '1'",) * 2,
    "bad argument": (BAD_ARGUMENT, "ValueError: body.bn2: expected 4 channels"),
    "one value": (ONE_VALUE, ONE_VALUE),
    "NaN": ("", r"NaN or infinity in the input of body\.bn1 forward, call 3 on rank 1"),
    "replay": (REPLAY, REPLAY),
}
# At once, so that they take as long as one another.
DISTRIBUTED_TESTS = ("equality", "ddp", "promises"), ("recipes", "groups", "running_stats")


class Skip(Exception):  # noqa: N818  # no error
    """Why a part cannot run."""


class Process(subprocess.Popen[bytes]):
    """A program whose output goes to a file; of that, lines of "RESULT " and json are results, all else is text."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            super().__init__(command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def results(self) -> list[dict[str, Any]]:
        log = self.log.read_text(errors="replace")
        return [json.loads(result) for result in re.findall(r"^RESULT (.*)\n", log, re.MULTILINE)]

    def text(self) -> str:
        return re.sub(r"^RESULT .*\n?", "", self.log.read_text(errors="replace"), flags=re.MULTILINE)

    def kill_all(self) -> None:
        """With all that it has started, if it runs: torchrun puts its ranks into sessions of their own."""
        if self.poll() is None:
            for process in reversed([self.pid, *descendants(self.pid)]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be in a call of the driver
                self.wait(5)


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
        self.notes: list[str] = []  # for the verdict, which has the last lines of each pytest
        self.is_late = False

    def python(self, *arguments: object, before: tuple[str, ...] = (), **environment: str) -> Process:
        """Start one of Python's, with the words `before` it."""
        interpreted = {"TRITON_INTERPRET": "1"} if self.dry_run else {}
        command = [*before, sys.executable, *map(str, arguments)]
        self.processes.append(Process(command, interpreted | environment, self.folder / f"{len(self.processes)}.log"))
        return self.processes[-1]

    def pytest(self, *arguments: str, ranks: int = 1, before: tuple[str, ...] = (), **environment: str) -> Process:
        """Start pytest, on some ranks under torchrun."""
        needs("pytest", "pytest_timeout")
        # -v, so that the end of the log says what has passed when the part is stopped.
        words = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
        if ranks > 1:
            torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} --local-ranks-filter 0"
            words = [*torchrun.split(), *words, "-p", "voting"]
        return self.python(*words, before=before, **environment)

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until all programs have ended, or `until` holds, or the time is over. What runs then is killed."""
        while any(process.poll() is None for process in self.processes) and not (self.is_late or until()):
            time.sleep(0.1)
            self.is_late = time.monotonic() > self.deadline
        for process in self.processes:
            process.kill_all()

    def all_results(self) -> list[dict[str, Any]]:
        """Its own and those of its programs."""
        return self.results + [result for process in self.processes for result in process.results()]

    def verdict(self) -> str:
        results = self.all_results()
        if failed := [result for result in results if not result.get("ok", True)]:
            return f"failed: {len(failed)} of {len(results)}, first {json.dumps(failed[0])[:300]}"
        ends = (re.findall(r"^=+ (.* in .*?) =+$", process.text(), re.MULTILINE)[-1:] for process in self.processes)
        found = [*itertools.chain(*ends), *self.notes]
        summary = f": {'; '.join(found)}" if found else ""
        if self.is_late:
            return f"took longer than {self.seconds:.0f} s, {len(results)} results{summary}"
        status = next((process.returncode for process in self.processes if process.returncode), 0)
        return f"failed with exit status {status}{summary}" if status else f"passed{summary}"


def needs(*packages: str) -> None:
    """Raises Skip where one of these packages is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise Skip(f"needs {', '.join(missing)}")


def machine(part: Part) -> None:
    """Versions, the GPU, and whether Triton's kernels serve it."""
    info = part.python("-m", "syncbn", "info")
    part.wait()
    text = info.text()
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # it is not there, or hangs
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        text += subprocess.check_output(command, timeout=20, text=True)
    print(text, end="")
    part.results.append({"ok": part.dry_run or "cuda: Triton" in text, "info": text})


def correctness(part: Part) -> None:
    """Every function of the kernels against its definition, a process for each dtype, as they compile; and what only a
    GPU shows: real sizes, launches, graphs, streams."""
    needs("triton")
    for which in ["test_forward_and_backward and torch.float32"] if part.dry_run else DTYPES:
        part.pytest("tests/test_kernels.py", "-m", "triton", "-k", which)
    part.pytest("tests/test_gpu.py")
    part.wait()


def start_ranks(part: Part, fault: str) -> list[Process]:
    """Two ranks of a job with this fault, with the variables that torchrun would set."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1", "WORLD_SIZE": "2"}
    # Longer than the 30 s after which a rank that waits says where all are.
    environment |= {"LOCAL_WORLD_SIZE": "2", "COLLECTIVE_SECONDS": "50"} | ({} if part.dry_run else ON_ONE_GPU)
    command = "tests/faulty_job.py", fault
    return [part.python(*command, **environment, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]


@functools.cache
def refusal() -> str:
    """Why nccl takes no two ranks on this GPU, which NVIDIA does not support; empty if it does."""
    with tempfile.TemporaryDirectory() as folder:
        part = Part(Path(folder), 45, dry_run=False)
        first, _ = start_ranks(part, "no fault")
        part.wait()
        what = "nccl took no two ranks on one GPU, which NVIDIA does not support (nccl#418)"
        return "" if part.verdict() == "passed" else f"{what}: {first.text()[-1000:]}"


def faults(part: Part) -> None:
    """What two ranks on one GPU say when one of them does something wrong: all jobs at once. (CPUs replay nothing.)"""
    if not part.dry_run and refusal():
        raise Skip(refusal())
    jobs = {fault: start_ranks(part, fault) for fault in FAULTS if not (part.dry_run and fault == "replay")}

    def unsaid(fault: str) -> list[str]:
        said = zip(FAULTS[fault], jobs[fault], strict=True)
        return [f"rank {rank}: {text}" for rank, (text, job) in enumerate(said) if not re.search(text, job.text())]

    part.wait(until=lambda: not any(map(unsaid, jobs)))
    for fault, ranks in jobs.items():
        logs = [rank.text()[-TAIL:] for rank in ranks]
        part.results.append({"fault": fault, "ok": not unsaid(fault), "unsaid": unsaid(fault), "logs": logs})
    part.processes.clear()  # they may fail


def ranks(part: Part) -> None:
    """The tests of two ranks on the one GPU: under nccl if it can be made to, else under gloo."""
    refused = "" if part.dry_run else refusal()
    # torch 2.11's nccl crashes where it splits a group of ranks on one GPU, as a DeviceMesh does, a DTensor's too.
    chosen, backend = ["-k", "not mesh and not dtensor and not own_group_was_destroyed"], ON_ONE_GPU
    if refused or part.dry_run:
        chosen, backend = [], {"TESTS_BACKEND": "gloo"}
    for names in [["devices"]] if part.dry_run else DISTRIBUTED_TESTS:
        part.pytest(*(f"tests/distributed/test_{name}.py" for name in names), *chosen, ranks=2, **backend)
    part.notes = [f"under {backend['TESTS_BACKEND']}", *[refused] * bool(refused)]
    part.wait()


def times(which: str, part: Part) -> None:
    """A part of gpu_times.py."""
    needs("rich", "PIL")
    job = part.python(SCRIPTS / "gpu_times.py", which, *["--dry-run"] * part.dry_run)
    part.wait()
    print(job.text(), end="")


def sanitizer(part: Part) -> None:
    """Loads and stores outside of the tensors, at ragged sizes."""
    needs("triton")
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        raise Skip("compute-sanitizer is not there")
    before = found, "--tool", "memcheck", "--error-exitcode", "9"
    which = "forward_sums" if part.dry_run else "forward or backward or two_steps"
    chosen = "-m", "triton", "-k", f"torch.float32 and ({which})"
    job = part.pytest("tests/test_kernels.py", *chosen, before=before, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    part.wait()
    errors = [line for line in job.text().splitlines() if "ERROR SUMMARY" in line]
    part.results.append({"ok": bool(errors) and "SUMMARY: 0 errors" in errors[-1], "said": errors})


# Name -> what runs it, and its limit in seconds.
PARTS: dict[str, tuple[Callable[[Part], None], float]] = {
    "machine": (machine, 40),
    "correctness": (correctness, 110),
    "faults": (faults, 120),
    "layers": (functools.partial(times, "layers"), 50),
    "steps": (functools.partial(times, "steps"), 100),
    "passes": (functools.partial(times, "passes"), 90),
    "ranks": (ranks, 140),
    "sanitizer": (sanitizer, 60),
}


def run_part(name: str, seconds: float, dry_run: bool) -> tuple[dict[str, Any], list[str]]:
    """Its verdict and results, and the logs of its programs; none of them is left."""
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
        outcome = {"verdict": verdict, "seconds": round(time.monotonic() - start, 1), "results": part.all_results()}
        return outcome, [process.text()[-TAIL:] for process in part.processes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = os.environ.get("OUT", "runs/gpu")
    parser.add_argument("--dry-run", action="store_true", help="on CPUs, tiny sizes")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all parts (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=output, help="folder (default: $OUT, else runs/gpu)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the part's programs are ended too
    factor = DRY_RUN_FACTOR if arguments.dry_run else 1
    deadline = time.monotonic() + arguments.seconds * factor
    root, output = SCRIPTS.resolve().parent, arguments.output.resolve()
    os.chdir(root)
    os.environ["PYTHONPATH"] = f"{root}:{root}/tests:{root}/scripts:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    output.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict[str, Any]] = {}
    with (output / "gpu.log").open("w") as all_logs:
        for name in arguments.parts:
            print(f"== {name}", flush=True)
            seconds = min(PARTS[name][1] * factor, deadline - time.monotonic())
            done[name], logs = run_part(name, seconds, arguments.dry_run)
            for log in logs:
                print(f"==== {name}\n{log}", file=all_logs, flush=True)
                if done[name]["verdict"].startswith(("failed", "took")):
                    print("\n".join(log.splitlines()[-12:])[-1500:])
            print(f"{done[name]['verdict']} ({done[name]['seconds']} s)", flush=True)
            (output / "gpu.json").write_text(json.dumps({"dry run": arguments.dry_run, "parts": done}, indent=1))
    for name, outcome in done.items():
        print(f"{name:12} {outcome['seconds']:6.1f} s  {outcome['verdict'][:400]}")
    print(f"wrote gpu.json and gpu.log in {output}")
    sys.exit(any(not outcome["verdict"].startswith(("passed", "skipped")) for outcome in done.values()))


if __name__ == "__main__":
    main()
