"""Run the tests in parallel parts, and print the progress every 10 s (in a log every 30 s).

    scripts/test.sh                     makes .venv first
    scripts/test.sh --quick             2 ranks; no file that mostly starts programs, compiles or interprets
    scripts/test.sh --nightly           the tests of the scripts, the guides and the tests themselves
    scripts/test.sh -k mask             other arguments go to pytest

The parts on 2, 3 (with the reference kernels) and 4 ranks start last, because they use all cores. The output of each
part goes to runs/tests. At the end, print the logs of the failed parts and pytest's summary of every part.
(pytest-xdist cannot start ranks, and make shows no progress.)
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

LOGS = Path("runs/tests")
AT_ONCE = 4  # Parts that start programs wait more than they compute.
LINE_SECONDS = 10.0 if sys.stdout.isatty() else 30.0
FAILED_LINES = 200  # lines shown of a failed part's log
STARTS_PROGRAMS = {  # part -> its files, tests/test_NAME.py; the longest part comes first
    "programs": "lightning package readme testing",
    "crashes": "crashes faults two_hosts",
    "examples": "examples",
}
COMPILES = "test_gpu_static", "test_inductor", "distributed/test_compile"
TORCHRUN = "torch.distributed.run --standalone --local-ranks-filter 0 --nproc-per-node"
PYTEST = "pytest -v -o console_output_style=count"  # prints a line with the number of each test


class Part:
    """A pytest in one process or on several ranks."""

    def __init__(self, name: str, module: str, *arguments: str, **environment: str) -> None:
        self.name, self.log, self.environment = name, LOGS / f"{name}.log", os.environ | environment
        self.command = [sys.executable, "-m", *module.split(), *arguments]

    def start(self) -> None:
        self.start_time = time.monotonic()
        with self.log.open("w") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "process_group": 0}
            self.process = subprocess.Popen(self.command, env=self.environment, **options)

    def end(self) -> None:
        """End the part with all processes that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def failed(self) -> bool:
        return self.process.returncode not in (0, 5)  # 5: the arguments select no test of this part

    def progress(self) -> str:
        ended = re.findall(r"\[ *(\d+/\d+)\]$", self.text(), re.MULTILINE)
        num_failed = len(re.findall(r" (?:FAILED|ERROR) .*\[ *\d+/\d+\]$", self.text(), re.MULTILINE))
        return f"{self.name} {ended[-1] if ended else 'starts'}" + f" ({num_failed} failed)" * (num_failed > 0)

    def summary(self) -> str:
        """Return pytest's last line, or the exit status."""
        lines = re.findall(r"^=+ .* in [0-9.]+s.*$", self.text(), re.MULTILINE)
        return lines[-1] if lines else f"exit status {self.process.returncode}, without a summary"


def test_file(name: str) -> str:
    return f"tests/test_{name}.py"


def on_ranks(count: int) -> str:
    return f"{TORCHRUN} {count} -m {PYTEST} -p voting"


def make_parts(which: str, arguments: list[str]) -> list[Part]:
    """Return the parts of "--quick", "--nightly" or all tests (""), in the order in which they start."""
    if which == "--nightly":
        return [Part("nightly", PYTEST, "tests/nightly", *arguments)]
    quick = which == "--quick"
    apart = ["tests/nightly", *map(test_file, " ".join(STARTS_PROGRAMS.values()).split())]
    apart += [f"tests/{name}.py" for name in COMPILES if quick]
    others = [*(f"--ignore={file}" for file in apart), *arguments]
    path = os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    interpreted = {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    parts = [Part("one process", PYTEST, "tests", "--ignore=tests/distributed", *others)]
    for count in (2,) if quick else (2, 3, 4):
        environment = {"PYTHONPATH": path} | ({"SYNCBN_KERNELS": "reference"} if count == 3 else {})
        parts.append(Part(f"{count} ranks", on_ranks(count), "tests/distributed", *others, **environment))
    if not quick:
        programs = [Part(p, PYTEST, *map(test_file, n.split()), *arguments) for p, n in STARTS_PROGRAMS.items()]
        files = test_file("kernels"), test_file("triton")
        programs.append(Part("interpreted", PYTEST, *files, "-m", "triton", *arguments, **interpreted))
        status = "tests/distributed/test_status.py"
        parts.insert(2, Part("2 ranks, interpreted", on_ranks(2), status, *arguments, **interpreted))
        parts = programs + parts
    return parts


def run(parts: list[Part]) -> bool:
    """Run the parts and print their progress. Return whether all have passed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    start = last_line = time.monotonic()
    waiting, running = [*parts], []

    def log(text: str) -> None:
        nonlocal last_line
        last_line = time.monotonic()
        print(f"[{last_line - start:4.0f} s] {text}", flush=True)

    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(waiting.pop(0))
                running[-1].start()
                log(f"{running[-1].name} has started")
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                outcome = "has FAILED" if part.failed() else "has ended"
                seconds = time.monotonic() - part.start_time
                log(f"{part.name} {outcome} after {seconds:.0f} s: {part.summary().strip('= ')}")
            if running and time.monotonic() - last_line > LINE_SECONDS:
                later = "; then " + ", ".join(part.name for part in waiting) if waiting else ""
                log("running: " + ", ".join(part.progress() for part in running) + later)
            time.sleep(0.1)
    finally:
        for part in running:
            part.end()
    failed = [part for part in parts if part.failed()]
    for part in failed:
        print(f"== failed: {part.name}", *part.text().splitlines()[-FAILED_LINES:], sep="\n")
    for part in parts:
        print(f"{part.name}: {part.summary()}")
    return not failed


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # The exit ends the parts.
    os.chdir(Path(__file__).parent.parent)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Some 200 processes would compile the same files.
    which = sys.argv.pop(1) if sys.argv[1:2] in (["--quick"], ["--nightly"]) else ""
    try:
        sys.exit(not run(make_parts(which, sys.argv[1:])))
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
