"""Runs the tests in parts and says when each starts and ends, and every 10 s (in a log every 30 s) how far they are.

    scripts/test.sh                     makes .venv first
    scripts/test.sh --quick             2 ranks, and no file that mostly starts programs, compiles or interprets
    scripts/test.sh --nightly           the tests of the scripts, the guides and the tests themselves
    scripts/test.sh -k mask             other arguments go to pytest

The parts on 2, 3 (with the reference kernels) and 4 ranks come last, as they use all cores. The output of each part
goes to runs/tests. At the end stand the ends of those that failed, and pytest's summary of each part.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

LOGS = Path("runs/tests")
AT_ONCE = 4  # parts run, as those that start programs wait more than they compute
LINE_SECONDS = 10.0 if sys.stdout.isatty() else 30.0
FAILED_LINES = 200  # of a log are shown
STARTS_PROGRAMS = {  # part -> its files, tests/test_NAME.py; the longest part comes first
    "programs": "lightning package readme testing",
    "crashes": "crashes faults two_hosts",
    "examples": "examples",
}
COMPILES = "test_gpu_static", "test_inductor", "distributed/test_compile", "distributed/test_compile_on_one_rank"
TORCHRUN = "torch.distributed.run --standalone --local-ranks-filter 0 --nproc-per-node"
# Each test has a line in the log, with its number, and is the last line while it runs.
PYTEST = "pytest -v -o console_output_style=count"


class Part:
    """A pytest, or one on each of several ranks."""

    def __init__(self, name: str, modules: str, arguments: list[str], **environment: str) -> None:
        self.name, self.log = name, LOGS / f"{name}.log"
        self.command = [sys.executable, "-m", *modules.split(), *arguments]
        self.environment = environment

    def start(self) -> None:
        self.start_time = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, env=os.environ | self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                process_group=0,  # which can be ended as one
            )  # fmt: skip

    def end(self) -> None:
        """End it with all that it has started, if it runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def failed(self) -> bool:
        return self.process.returncode not in (0, 5)  # 5: the arguments select no test of this part

    def progress(self) -> str:
        """How many of its tests have ended, and how many of these have failed."""
        ended = re.findall(r"\[ *(\d+/\d+)\]$", self.text(), re.MULTILINE)
        num_failed = len(re.findall(r" (?:FAILED|ERROR) .*\[ *\d+/\d+\]$", self.text(), re.MULTILINE))
        return f"{self.name} {ended[-1] if ended else 'starts'}" + f" ({num_failed} failed)" * (num_failed > 0)

    def summary(self) -> str:
        """pytest's last line, or why there is none."""
        lines = re.findall(r"^=+ .* in [0-9.]+s.*$", self.text(), re.MULTILINE)
        return lines[-1] if lines else f"exit status {self.process.returncode}, without a summary"


def parts_of(which: str, arguments: list[str]) -> list[Part]:
    """The parts of "--quick", "--nightly" or, with neither, of all tests, in the order in which they start."""
    if which == "--nightly":
        return [Part("nightly", PYTEST, ["tests/nightly", *arguments])]
    quick = which == "--quick"
    apart = [f"tests/test_{name}.py" for name in " ".join(STARTS_PROGRAMS.values()).split()]
    apart += [f"tests/{name}.py" for name in COMPILES if quick]
    ignored = [f"--ignore={file}" for file in ("tests/nightly", *apart)]
    parts = []
    if not quick:
        for name, files in STARTS_PROGRAMS.items():
            parts.append(Part(name, PYTEST, [*(f"tests/test_{file}.py" for file in files.split()), *arguments]))
        interpreted = ["tests/test_kernels.py", "-m", "triton", *arguments]
        parts.append(Part("interpreted", PYTEST, interpreted, TRITON_INTERPRET="1"))
    parts.append(Part("one process", PYTEST, ["tests", "--ignore=tests/distributed", *ignored, *arguments]))
    path = os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    for count in (2,) if quick else (2, 3, 4):
        kernels = {"SYNCBN_KERNELS": "reference"} if count == 3 else {}
        on_ranks = f"{TORCHRUN} {count} -m {PYTEST} -p voting"
        chosen = ["tests/distributed", *ignored, *arguments]
        parts.append(Part(f"{count} ranks", on_ranks, chosen, PYTHONPATH=path, **kernels))
        if count == 2 and not quick:
            played = ["tests/distributed/test_status.py", *arguments]
            parts.append(Part("2 ranks, interpreted", on_ranks, played, PYTHONPATH=path, TRITON_INTERPRET="1"))
    return parts


def run(parts: list[Part]) -> bool:
    """Run them, and print how they go. Returns whether all have passed."""
    LOGS.mkdir(parents=True, exist_ok=True)
    start = last_line = time.monotonic()
    waiting, running = [*parts], []

    def say(text: str) -> None:
        nonlocal last_line
        last_line = time.monotonic()
        print(f"[{last_line - start:4.0f} s] {text}", flush=True)

    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(waiting.pop(0))
                running[-1].start()
                say(f"{running[-1].name} has started")
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                how = "has FAILED" if part.failed() else "has ended"
                say(f"{part.name} {how} after {time.monotonic() - part.start_time:.0f} s: {part.summary().strip('= ')}")
            if running and time.monotonic() - last_line > LINE_SECONDS:
                then = "; then " + ", ".join(part.name for part in waiting) if waiting else ""
                say("running: " + ", ".join(part.progress() for part in running) + then)
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the parts are ended too
    os.chdir(Path(__file__).parent.parent)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each of some 200 processes compiles the same files
    which = sys.argv.pop(1) if sys.argv[1:2] in (["--quick"], ["--nightly"]) else ""
    try:
        passed = run(parts_of(which, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
