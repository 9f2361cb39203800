"""Run everything that one GPU can show, part by part, and print a verdict for each part.

    scripts/gpu.sh                      on a machine with a GPU
    scripts/gpu.sh --dry-run            without one: tiny sizes on CPUs, in Triton's interpreter, with gloo for nccl
    scripts/gpu.sh --parts layers steps

The most informative part comes first. Each part has a time limit, and --seconds limits all parts together. A part is
skipped, with a reason, if a package, a program or the GPU is missing. gpu.json in --output gets verdicts and results,
gpu.log the output of all programs; both are updated after each part. The exit status is 1 if a part failed. This file
needs the standard library only.
"""

import argparse
import contextlib
import functools
import importlib.util
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
from typing import Any, TextIO

from run_tests import TORCHRUN

DRY_RUN_FACTOR = 40  # longer limits for an interpreter on busy cores
TAIL = 100_000  # characters kept of a log
SCRIPTS = Path(__file__).resolve().parent
ONE_GPU = {"TESTS_BACKEND": "nccl", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "VERSION"}
# Fault of rank 1 in tests/faulty_job.py -> patterns that the output of rank 0 and of rank 1 must match.
LAYERS = r"rank 0: in body\.bn2 forward, call 3.*\n.*rank 1: in body\.bn3 forward, call 3"
REPLAY = r"rank 0: in body\.bn1 forward, in a CUDA graph.*\n.*rank 1: in body\.bn2 forward, in a CUDA graph"
BAD_ARGUMENT = r"another rank failed in body\.bn2 forward, call 3\.\n.*rank 1: ValueError: expected 4 channels"
ONE_VALUE = "Expected more than 1 value per channel when training, got 1 over all ranks"
FAULTS = {
    "kill -9 in forward": ("rank 1: .*its process", ""),
    "sleeps": ("rank 0 has waited", ""),
    "skips a layer": ("", f"{LAYERS}|Expected to have finished reduction"),  # DDP may raise first
    "another order": (LAYERS, LAYERS),
    "autocast": ("have inputs of different dtypes",) * 2,
    "two models, another order": (r"number 1 of layer '1' in Sequential\n.*rank 1: .*number 2 of layer '1'",) * 2,
    "bad argument": (BAD_ARGUMENT, "ValueError: body.bn2: expected 4 channels"),
    "one value": (ONE_VALUE, ONE_VALUE),
    "NaN": ("", r"NaN or infinity in the input of body\.bn1 forward, call 3 on rank 1"),
    "replay": (REPLAY, REPLAY),
}
DISTRIBUTED_TESTS = ("ddp", "promises"), ("recipes", "groups", "running_stats")  # two jobs of equal length


class Skip(Exception):  # noqa: N818  # not an error
    """A part cannot run; the text is the reason."""


class Process(subprocess.Popen[bytes]):
    """A Python program whose output goes to a file."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            options = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "process_group": 0}
            super().__init__(command, env=os.environ | environment, **options)

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL:]

    def stop(self) -> None:
        """End the program, and its children or its ranks: torchrun ends the ranks when it is terminated."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if self.poll() is None:
                os.killpg(self.pid, signal_number)
                with contextlib.suppress(subprocess.TimeoutExpired):  # A call of the driver may not end.
                    self.wait(10)


class Part:
    """The time limit, the programs and the results of a part."""

    def __init__(self, folder: Path, seconds: float, dry_run: bool) -> None:
        self.folder, self.seconds, self.dry_run, self.is_late = folder, seconds, dry_run, False
        self.deadline = time.monotonic() + seconds
        self.processes: list[Process] = []
        self.results: list[dict[str, Any]] = []
        self.notes: list[str] = []  # appended to the verdict

    def python(self, *arguments: object, prefix: tuple[str, ...] = (), **environment: str) -> Process:
        """Start a Python program."""
        interpreted = {"TRITON_INTERPRET": "1"} if self.dry_run else {}
        command = [*prefix, sys.executable, *map(str, arguments)]
        self.processes.append(Process(command, interpreted | environment, self.folder / f"{len(self.processes)}.log"))
        return self.processes[-1]

    def pytest(self, *arguments: str, ranks: int = 1, prefix: tuple[str, ...] = (), **environment: str) -> Process:
        """Start pytest, under torchrun if there are several ranks."""
        needs("pytest", "pytest_timeout")
        command = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *arguments]
        if ranks > 1:
            command = ["-m", *TORCHRUN.split(), str(ranks), *command, "-p", "voting"]
        return self.python(*command, prefix=prefix, **environment)

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until all programs have ended, `until` holds, or the time is over. Then end the programs that run."""
        while any(process.poll() is None for process in self.processes) and not (self.is_late or until()):
            time.sleep(0.1)
            self.is_late = time.monotonic() > self.deadline
        for process in self.processes:
            process.stop()

    def verdict(self) -> str:
        if failed := [result for result in self.results if not result.get("ok", True)]:
            return f"failed: {len(failed)} of {len(self.results)}, first {json.dumps(failed[0])[:300]}"
        texts = "\n".join(process.text() for process in self.processes)
        notes = "; ".join([*re.findall(r"^=+ (.* in [0-9.]+s.*?) =+$", texts, re.M), *self.notes])
        summary = f": {notes}" if notes else ""
        if self.is_late:
            return f"took longer than {self.seconds:.0f} s, {len(self.results)} results{summary}"
        status = next((process.returncode for process in self.processes if process.returncode), 0)
        return f"failed with exit status {status}{summary}" if status else f"passed{summary}"


def needs(*packages: str) -> None:
    """Raise Skip if a package is missing."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise Skip(f"needs {', '.join(missing)}")


def machine(part: Part) -> None:
    """Print the versions and the GPU, and check that Triton's kernels serve it."""
    info = part.python("-m", "syncbn", "info")
    part.wait()
    text = info.text()
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # nvidia-smi may be missing or hang.
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        text += subprocess.check_output(command, timeout=20, text=True)
    print(text, end="")
    part.results.append({"ok": part.dry_run or "cuda: Triton" in text, "info": text})


def correctness(part: Part) -> None:
    """Test the kernels against the reference, in one process per dtype because they compile; and sizes, launches,
    graphs and streams that only a GPU has."""
    needs("triton")
    dtypes = "torch.float32", "torch.bfloat16", "torch.float16", "torch.float64", "not torch"
    for name in ["test_forward_and_backward and torch.float32"] if part.dry_run else dtypes:
        part.pytest("tests/test_kernels.py", "tests/test_triton.py", "-m", "triton", "-k", name)
    part.pytest("tests/test_gpu.py")
    part.wait()


def start_ranks(part: Part, fault: str) -> list[Process]:
    """Start two ranks of tests/faulty_job.py, with the variables that torchrun would set."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1", "WORLD_SIZE": "2"}
    # The watchdog reports after 30 s of waiting.
    environment |= {"LOCAL_WORLD_SIZE": "2", "COLLECTIVE_SECONDS": "50"} | ({} if part.dry_run else ONE_GPU)
    job = "tests/faulty_job.py", fault
    return [part.python(*job, **environment, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]


@functools.cache
def nccl_refusal() -> str:
    """Return why nccl refuses two ranks on this GPU, which NVIDIA does not support; "" if it accepts them."""
    with tempfile.TemporaryDirectory() as folder:
        part = Part(Path(folder), 45, dry_run=False)
        first, _ = start_ranks(part, "no fault")
        part.wait()
        reason = "nccl refused two ranks on one GPU, which NVIDIA does not support (nccl#418)"
        return "" if part.verdict() == "passed" else f"{reason}: {first.text()[-1000:]}"


def faults(part: Part) -> None:
    """Check the reports of two ranks on one GPU when one does something wrong. All jobs run at once."""
    if not part.dry_run and nccl_refusal():
        raise Skip(nccl_refusal())
    jobs = {fault: start_ranks(part, fault) for fault in FAULTS if not (part.dry_run and fault == "replay")}

    def missing(fault: str) -> list[str]:
        pairs = zip(FAULTS[fault], jobs[fault], strict=True)
        return [f"rank {r}: {pattern}" for r, (pattern, job) in enumerate(pairs) if not re.search(pattern, job.text())]

    part.wait(until=lambda: not any(map(missing, jobs)))
    for fault, ranks in jobs.items():
        logs = [rank.text() for rank in ranks]
        part.results.append({"fault": fault, "ok": not missing(fault), "missing": missing(fault), "logs": logs})
    part.processes.clear()  # Their exit statuses do not count.


def ranks(part: Part) -> None:
    """Run tests of two ranks on the one GPU, under nccl if it accepts them, else under gloo."""
    refusal = "" if part.dry_run else nccl_refusal()
    # torch 2.11's nccl crashes when a group of ranks on one GPU is split, as a DeviceMesh or a DTensor does.
    chosen, environment = ["-k", "not dtensor"], ONE_GPU
    if refusal or part.dry_run:
        chosen, environment = [], {"TESTS_BACKEND": "gloo"}
    for names in [["devices"]] if part.dry_run else DISTRIBUTED_TESTS:
        part.pytest(*(f"tests/distributed/test_{name}.py" for name in names), *chosen, ranks=2, **environment)
    part.notes = [f"under {environment['TESTS_BACKEND']}", *filter(None, [refusal])]
    part.wait()


def benchmark(command: str, part: Part, dry_run_options: str = "--dry-run") -> None:
    """Run a benchmark, print its tables and keep the times that it writes."""
    needs("rich", "PIL")
    script, *options = [*command.split(), *dry_run_options.split() * part.dry_run]
    job = part.python(SCRIPTS / script, *options, "--output", part.folder)
    part.wait()
    print(job.text(), end="")
    part.results += [json.loads(file.read_text()) for file in part.folder.glob("*.json")]


def passes(part: Part) -> None:
    """Time forward and backward on the GPU, compared with torch's layers and with the limit that memory sets."""
    shapes = "32x64x112x112 32x256x56x56 32x512x14x14 32x2048x7x7"
    command = f"bench.py layers --dtypes bfloat16 float32 --rounds 15 --shapes {shapes}"
    benchmark(command, part, dry_run_options="--rounds 2 --shapes 2x8x3x3")


def sanitizer(part: Part) -> None:
    """Look for loads and stores outside of the tensors, at ragged sizes."""
    needs("triton")
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise Skip("compute-sanitizer is not installed")
    prefix = program, "--tool", "memcheck", "--error-exitcode", "9"
    chosen = "-m", "triton", "-k", "torch.float32 and (forward or backward)"
    job = part.pytest("tests/test_kernels.py", *chosen, prefix=prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    part.wait()
    part.results.append({"ok": "ERROR SUMMARY: 0 errors" in job.text()})


PARTS: dict[str, tuple[Callable[[Part], None], float]] = {  # name -> function, limit in seconds
    "machine": (machine, 40),
    "correctness": (correctness, 110),
    "faults": (faults, 120),
    "layers": (functools.partial(benchmark, "gpu_times.py layers"), 50),
    "steps": (functools.partial(benchmark, "gpu_times.py steps"), 100),
    "passes": (passes, 90),
    "ranks": (ranks, 140),
    "sanitizer": (sanitizer, 60),
}


def run_part(name: str, seconds: float, dry_run: bool, all_logs: TextIO) -> dict[str, Any]:
    """Run a part until all its programs have ended, print its verdict, and return the verdict with the results."""
    print(f"== {name}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        part = Part(Path(folder), seconds, dry_run)
        try:
            if seconds < 10:
                raise Skip("no time is left")
            PARTS[name][0](part)
            verdict = part.verdict()
        except Skip as reason:
            verdict = f"skipped: {reason}"
        except Exception as error:  # The other parts go on.
            verdict = f"failed: {type(error).__name__}: {error}"
        finally:
            for process in part.processes:
                process.stop()
        for process in part.processes:
            print(f"==== {name}\n{process.text()}", file=all_logs, flush=True)
            if verdict.startswith(("failed", "took")):
                print(process.text()[-1500:])
    outcome = {"verdict": verdict, "seconds": round(time.monotonic() - start, 1), "results": part.results}
    print(f"{verdict} ({outcome['seconds']} s)", flush=True)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on CPUs")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=530, help="limit of all parts (default: %(default)s)")
    default = os.environ.get("OUT", "runs/gpu")
    parser.add_argument("--output", type=Path, default=default, help="folder (default: $OUT, else runs/gpu)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # The exit kills the programs of the part.
    factor = DRY_RUN_FACTOR if arguments.dry_run else 1
    deadline = time.monotonic() + arguments.seconds * factor
    root, output = SCRIPTS.parent, arguments.output.resolve()
    os.chdir(root)
    os.environ["PYTHONPATH"] = f"{root}:{root}/tests:{root}/scripts:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    output.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, dict[str, Any]] = {}
    with (output / "gpu.log").open("w") as all_logs:
        for name in arguments.parts:
            seconds = min(PARTS[name][1] * factor, deadline - time.monotonic())
            outcomes[name] = run_part(name, seconds, arguments.dry_run, all_logs)
            (output / "gpu.json").write_text(json.dumps({"dry run": arguments.dry_run, "parts": outcomes}, indent=1))
    for name, outcome in outcomes.items():
        print(f"{name:12} {outcome['seconds']:6.1f} s  {outcome['verdict'][:400]}")
    print(f"wrote gpu.json and gpu.log in {output}")
    sys.exit(any(not outcome["verdict"].startswith(("passed", "skipped")) for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
