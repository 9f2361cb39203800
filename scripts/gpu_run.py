"""Run everything that one GPU can show, in parts, and print a verdict for each part.

    scripts/gpu.sh                      on a machine with a GPU
    scripts/gpu.sh --dry-run            without a GPU: tiny sizes on CPUs, in Triton's interpreter, with gloo for nccl
    scripts/gpu.sh --parts layers steps

The most informative parts come first. All parts have time limits, and --seconds limits all parts together. A
part is skipped, with a reason, if a package or a program is missing, or no time is left. After each part the script
writes gpu.json (verdicts and results) and gpu.log (the output of the programs) to --output. The exit status is 1 if a
part failed or took too long. This file imports only the standard library, so that it can report missing packages.
"""

import argparse
import contextlib
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
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from run_tests import TORCHRUN, to_paths
from run_tests import Part as Program  # A part of run_tests.py is one program. A part of this script starts several.

ROOT = Path(__file__).resolve().parent.parent
DRY_RUN_FACTOR = 40  # A dry run multiplies all limits, because Triton's interpreter is slow.
# Two ranks on one GPU communicate by nccl over the loopback interface, without InfiniBand. NVIDIA does not support this
# (nccl#418), but nccl 2.28 accepts two ranks with different NCCL_HOSTID, which voting.py and faulty_job.py set.
ONE_GPU = {"TESTS_BACKEND": "nccl", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "VERSION"}
# Regular expressions that match the errors of ranks.
DIFFERENT_LAYERS = r"rank 0: in body\.bn2 forward, call 3.*\n.*rank 1: in body\.bn3 forward, call 3"
DIFFERENT_MODELS = r"number 1 of layer '1' in Sequential\n.*rank 1: .*number 2 of layer '1'"
DIFFERENT_GRAPHS = r"rank 0: in body\.bn1 forward, in a CUDA graph.*\n.*rank 1: in body\.bn2 forward, in a CUDA graph"
DIFFERENT_DTYPES = "have inputs of different dtypes"
BAD_ARGUMENT = r"another rank failed in body\.bn2 forward, call 3\.\n.*rank 1: ValueError: expected 4 channels"
ONE_VALUE = "Expected more than 1 value per channel when training, got 1 over all ranks"
DDP_ERROR = "Expected to have finished reduction"
ANYTHING = ""
# Fault of rank 1 in tests/faulty_job.py -> regular expressions that the outputs of rank 0 and of rank 1 must match.
FAULTS = {
    "kill -9 in forward": ("rank 1: .*its process", ANYTHING),
    "sleeps": ("rank 0 has waited", ANYTHING),
    "skips a layer": (ANYTHING, f"{DIFFERENT_LAYERS}|{DDP_ERROR}"),  # DDP may raise its error first.
    "another order": (DIFFERENT_LAYERS, DIFFERENT_LAYERS),
    "autocast": (DIFFERENT_DTYPES, DIFFERENT_DTYPES),
    "two models, another order": (DIFFERENT_MODELS, DIFFERENT_MODELS),
    "bad argument": (BAD_ARGUMENT, "ValueError: body.bn2: expected 4 channels"),
    "one value": (ONE_VALUE, ONE_VALUE),
    "NaN": (ANYTHING, r"NaN or infinity in the input of body\.bn1 forward, call 3 on rank 1"),
    "replay": (DIFFERENT_GRAPHS, DIFFERENT_GRAPHS),
}
# Two jobs that take about equally long.
DISTRIBUTED_TESTS = ("wrappers", "promises"), ("recipes", "groups", "running_stats")


class Skip(Exception):  # noqa: N818  # not an error
    """A part cannot run. The text is the reason."""


class Part:
    """The programs and the results of a part, with its time limit."""

    def __init__(self, folder: Path, seconds: float, dry_run: bool) -> None:
        self.folder, self.seconds, self.dry_run = folder, seconds, dry_run
        self.deadline, self.is_late = time.monotonic() + seconds, False
        self.programs: list[Program] = []
        self.results: list[dict[str, Any]] = []  # The part has failed if a result has "ok": False.

    def start(self, module: str, *arguments: object, prefix: tuple[str, ...] = (), **environment: str) -> Program:
        """Start a Python module, by the command `prefix` if there is one."""
        program = Program(module, module, *map(str, arguments), **environment)
        program.command = [*prefix, *program.command]
        program.log = self.folder / f"{len(self.programs)}.log"
        program.start()
        self.programs.append(program)
        return program

    def start_pytest(self, *arguments: str, ranks: int = 1, **options: Any) -> Program:
        """Start pytest, under torchrun if there are several ranks."""
        pytest = "pytest -v --tb=short -p no:cacheprovider"
        if ranks > 1:
            pytest = f"{TORCHRUN} {ranks} -m {pytest} -p voting"
        return self.start(pytest, *arguments, **options)

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until all programs have ended, `until` returns True, or the time is over. Then end the programs."""
        while any(program.process.poll() is None for program in self.programs) and not until():
            if time.monotonic() > self.deadline:
                self.is_late = True
                break
            time.sleep(0.1)
        self.end()

    def end(self) -> None:
        for program in self.programs:
            program.end(seconds=10)

    def verdict(self) -> str:
        failed = [result for result in self.results if not result.get("ok", True)]
        statuses = [program.process.returncode for program in self.programs if program.process.returncode]
        if failed:
            return f"failed: {len(failed)} of {len(self.results)}, first {json.dumps(failed[0])[:300]}"
        verdict = f"failed with exit status {statuses[0]}" if statuses else "passed"
        if self.is_late:
            verdict = f"took longer than {self.seconds:.0f} s, {len(self.results)} results"
        summaries = [program.summary() for program in self.programs if "pytest" in program.name]
        return f"{verdict}: {'; '.join(summaries)}" if summaries else verdict


def machine(part: Part) -> None:
    """Print the versions and the GPU, and check that Triton's kernels serve the GPU."""
    info = part.start("syncbn", "info")
    part.wait()
    text = info.text()
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # nvidia-smi may be missing or hang.
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        text += subprocess.check_output(command, timeout=20, text=True)
    print(text, end="")
    part.results.append({"ok": part.dry_run or "cuda: Triton" in text, "info": text})


def correctness(part: Part) -> None:
    """Test the kernels against the reference, and run test_gpu.py: large layers, waits, CUDA graphs and streams.

    Each dtype has a process for its tests, and the tests without a dtype have one more. The processes compile kernels
    at the same time.
    """
    selections = ["torch.float32", "torch.bfloat16", "torch.float16", "torch.float64", "not torch"]
    if part.dry_run:
        selections = ["test_forward_and_backward and torch.float32"]
    for selection in selections:
        part.start_pytest("tests/test_kernels.py", "tests/test_triton.py", "-m", "triton", "-k", selection)
    part.start_pytest("tests/test_gpu.py")
    part.wait()


def free_ports(number: int) -> list[str]:
    """Return different ports that no program uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [str(server.getsockname()[1]) for server in sockets]


def start_ranks(part: Part, fault: str, port: str) -> list[Program]:
    """Start two ranks of tests/faulty_job.py, with the variables that torchrun would set."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONUNBUFFERED": "1", "WORLD_SIZE": "2"}
    # Collectives time out after 50 s, so that the watchdog, which reports after 30 s, reports first.
    environment |= {"LOCAL_WORLD_SIZE": "2", "COLLECTIVE_SECONDS": "50"} | ({} if part.dry_run else ONE_GPU)
    return [part.start("faulty_job", fault, **environment, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]


def faults(part: Part) -> None:
    """Check what two ranks on one GPU report if rank 1 has a fault. All jobs run at the same time."""
    selected = [fault for fault in FAULTS if not (part.dry_run and fault == "replay")]  # CPUs have no CUDA graphs.
    ports = free_ports(len(selected))
    jobs = {fault: start_ranks(part, fault, port) for fault, port in zip(selected, ports, strict=True)}

    def missing(fault: str) -> list[str]:
        """Return the expressions that the outputs of the ranks do not match yet."""
        pairs = zip(FAULTS[fault], jobs[fault], strict=True)
        return [expected for expected, rank in pairs if not re.search(expected, rank.text())]

    part.wait(until=lambda: not any(missing(fault) for fault in jobs))
    for fault, ranks in jobs.items():
        logs = [rank.text() for rank in ranks]
        part.results.append({"fault": fault, "ok": not missing(fault), "missing": missing(fault), "logs": logs})
    part.programs.clear()  # Ranks of a job with a fault may fail, so their exit statuses do not count.


def ranks(part: Part) -> None:
    """Run tests on two ranks of nccl that share the GPU."""
    # torch 2.11's nccl crashes when a group of ranks on one GPU is split, as by the mesh of a pipeline or by a DTensor.
    options = ["-m", "not compiles", "-k", "not dtensor and not schedule and not stages"]
    jobs, environment = DISTRIBUTED_TESTS, ONE_GPU
    if part.dry_run:
        jobs, options, environment = [("devices",)], [], {"TESTS_BACKEND": "gloo"}
    for names in jobs:
        part.start_pytest(*to_paths(names, "tests/distributed"), *options, ranks=2, **environment)
    part.wait()


def benchmark(command: str, dry_run_command: str, part: Part) -> None:
    """Run bench.py with the arguments `command`, print its tables and keep the times that it writes."""
    arguments = dry_run_command if part.dry_run else command
    program = part.start("bench", *arguments.split(), "--output", part.folder)
    part.wait()
    print(program.text(), end="")
    part.results += [json.loads(file.read_text()) for file in part.folder.glob("*.json")]


def sanitizer(part: Part) -> None:
    """Look for loads and stores outside of the tensors."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise Skip("compute-sanitizer is not installed")
    prefix = program, "--tool", "memcheck", "--error-exitcode", "9"
    selection = "-m", "triton", "-k", "torch.float32 and (forward or backward)"
    pytest = part.start_pytest("tests/test_kernels.py", *selection, prefix=prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    part.wait()
    part.results.append({"ok": "ERROR SUMMARY: 0 errors" in pytest.text()})


# The part "passes" runs bench.py layers, with these arguments. The part "layers" runs bench.py gpu layers.
PASSES = "layers --dtypes bfloat16 float32 --rounds 15 --shapes 32x64x112x112 32x256x56x56 32x512x14x14 32x2048x7x7"
PASSES_OF_DRY_RUN = "layers --rounds 2 --shapes 2x8x3x3"
PARTS: dict[str, tuple[Callable[[Part], None], float, str]] = {  # name -> function, limit in seconds, needed packages
    "machine": (machine, 40, ""),
    "correctness": (correctness, 110, "pytest pytest_timeout triton"),
    "faults": (faults, 120, ""),
    "layers": (partial(benchmark, "gpu layers", "gpu layers --dry-run"), 50, "rich"),
    "steps": (partial(benchmark, "gpu steps", "gpu steps --dry-run"), 100, "rich numpy PIL"),
    "passes": (partial(benchmark, PASSES, PASSES_OF_DRY_RUN), 90, "rich"),
    "ranks": (ranks, 140, "pytest pytest_timeout"),
    "sanitizer": (sanitizer, 60, "pytest pytest_timeout triton"),
}


def run_part(name: str, seconds: float, dry_run: bool, all_logs: TextIO) -> dict[str, Any]:
    """Run a part until its programs have ended, print its verdict, and return the verdict with the results."""
    print(f"== {name}", flush=True)
    start = time.monotonic()
    function, _, packages = PARTS[name]
    missing = [package for package in packages.split() if importlib.util.find_spec(package) is None]
    with tempfile.TemporaryDirectory() as folder:
        part = Part(Path(folder), seconds, dry_run)
        try:
            if seconds < 10:
                raise Skip("no time is left")
            if missing:
                raise Skip(f"needs {', '.join(missing)}")
            function(part)
            verdict = part.verdict()
        except Skip as reason:
            verdict = f"skipped: {reason}"
        except Exception as error:  # The other parts still run.
            verdict = f"failed: {type(error).__name__}: {error}"
        finally:
            part.end()
        for program in part.programs:
            print(f"==== {name}\n{program.text()}", file=all_logs, flush=True)
            if verdict.startswith(("failed", "took")):
                print(program.text()[-1500:])
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # The exit ends the programs of the part.
    factor = DRY_RUN_FACTOR if arguments.dry_run else 1
    deadline = time.monotonic() + arguments.seconds * factor
    output = arguments.output.resolve()
    os.chdir(ROOT)
    folders = [ROOT, ROOT / "tests", ROOT / "scripts", os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
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
